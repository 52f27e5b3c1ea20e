"""``liger_model_parallel``: two processes under FSDP2 against one with the stock model."""

import lightning as L
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_liger import LigerLMMixin, LigerModelParallelStrategy
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    NUM_STEPS,
    Losses,
    Reference,
    build_model,
    launch,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
    make_uneven_batches,
    reference_training,
    regularized,
)
from tests.lightning_liger.strategies.workers.model_parallel import MAX_NORM

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """What both ranks got out of every run, with the device."""
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, launch(
        request.param, folder, worker="tests.lightning_liger.strategies.workers.model_parallel"
    )


def assert_as_in(reference: Reference, device: str, runs: list[dict], num_micro_batches: int = 1) -> None:
    for rank, run in enumerate(runs):
        found = [num_micro_batches * loss for loss in run["losses"]]
        torch.testing.assert_close(found, reference.losses[rank], rtol=TOLERANCE[device], atol=1e-7)
        assert run["whole"].keys() == reference.parameters.keys()
        for name, parameter in run["whole"].items():
            torch.testing.assert_close(parameter, reference.parameters[name], rtol=0.0, atol=10 * TOLERANCE[device])


@pytest.mark.parametrize("way", [*HEADS, "no-kernels", "recomputed", "each-linear", "by-its-user"])
def test_two_ranks_train_as_one_process_with_the_stock_model(ranks, way):
    device, results = ranks
    runs = [result[way] for result in results]
    assert_as_in(reference_training(HEADS.get(way, False), device, of_tokens=True), device, runs)
    assert runs[0]["losses"][-1] < runs[0]["losses"][0] - 0.5
    fused = way != "no-kernels"
    for run in runs:
        # 5 norms, 2 attentions, the head and 2 MLPs, but for those that are FSDP units of their user's.
        assert run["num_replaced"] == {"no-kernels": 0, "by-its-user": 8}.get(way, 10)
        assert run["logit_counts"] == (NUM_STEPS if fused else 0, 0)
        counts = (2 * NUM_STEPS if fused else 0, 0)
        assert run["counts_after_validation"] == counts


@pytest.mark.parametrize("head", HEADS)
def test_fabric_trains_as_one_process_with_the_stock_model(ranks, head):
    device, results = ranks
    runs = [result[f"fabric-{head}"] for result in results]
    assert_as_in(reference_training(HEADS[head], device, of_tokens=False), device, runs)
    assert [(run["num_replaced"], run["logit_counts"]) for run in runs] == [(10, (NUM_STEPS, 0))] * NUM_RANKS


def test_layers_are_sharded_one_by_one_and_what_is_around_them(ranks):
    run = ranks[1][0]
    assert sorted(run["untied"]["units"]) == ["FSDPLlamaDecoderLayer"] * 2 + ["FSDPLlamaForCausalLM"]
    assert "FSDPLinear" in run["each-linear"]["units"]
    assert sorted(run["by-its-user"]["units"]) == ["FSDPLlamaForCausalLM"] + ["FSDPLlamaMLP"] * 2


def test_layers_of_the_checkpointing_policy_run_again_in_backward(ranks):
    for result in ranks[1]:
        assert result["recomputed"]["num_forwards"] == 2 * NUM_STEPS


def test_tokens_count_the_same_whatever_rank_and_micro_batch_they_are_in(ranks):
    device, results = ranks
    reference = reference_training(False, device, True, make_uneven_batches, 2, regularized)
    assert_as_in(reference, device, [result["uneven"] for result in results], num_micro_batches=2)


def test_gradients_are_clipped_by_their_norm_over_all_ranks(ranks):
    device, results = ranks
    model = build_model().to(device)
    optimizer = make_optimizer(model.parameters())
    for parts in zip(*(make_batches(rank) for rank in range(NUM_RANKS)), strict=True):
        optimizer.zero_grad()
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in parts]
        for batch, count in zip(parts, counts, strict=True):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            (loss * (count / sum(counts))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        optimizer.step()
    for result in results:
        for name, parameter in model.state_dict().items():
            torch.testing.assert_close(
                result["clipped"]["whole"][name], parameter.cpu(), rtol=0.0, atol=10 * TOLERANCE[device]
            )


def test_ranks_agree_on_the_validation_loss(ranks):
    first, *others = (result["untied"]["validation"] for result in ranks[1])
    assert others == [first] * (NUM_RANKS - 1)
    assert first["val_loss"] == pytest.approx(ranks[1][0]["no-kernels"]["validation"]["val_loss"], rel=1e-5)


@pytest.mark.parametrize("layer", ["Linear", "Embedding"])
def test_policy_that_splits_a_tied_pair_is_refused(tmp_path, layer):
    strategy = LigerModelParallelStrategy(auto_wrap_policy=[layer])
    trainer = make_trainer(root=tmp_path, strategy=strategy, devices=1)
    with pytest.raises(ValueError, match=r"puts 'model.model.embed_tokens' and 'model.lm_head', which share"):
        trainer.fit(LM(tied=True), [make_batches(0, 1)[0]])
    torch.distributed.destroy_process_group()


def test_names_of_no_layers_are_refused_at_set_up(tmp_path):
    for argument in ("auto_wrap_policy", "activation_checkpointing_policy"):
        strategy = LigerModelParallelStrategy(**{argument: ["NoSuchLayer"]})
        trainer = make_trainer(root=tmp_path, strategy=strategy, devices=1)
        with pytest.raises(ValueError, match=f"{argument} names the layer class 'NoSuchLayer'"):
            trainer.fit(LM(), [make_batches(0, 1)[0]])
    torch.distributed.destroy_process_group()


class MadeInInit(LigerLMMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def configure_optimizers(self):
        return make_optimizer(self.parameters())


class OfLists(L.LightningModule):
    """A language model whose layers are in lists of the module itself, which FSDP2 refuses as units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(2))
        self.parts = torch.nn.ModuleDict({"last": torch.nn.ModuleList([torch.nn.Linear(16, 32)])})
        self.again = torch.nn.ModuleList([self.layers[0][0], self.layers[1]])  # other names of what has units

    def training_step(self, ids, batch_idx):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        logits = self.parts["last"][0](hidden)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_module_with_lists_of_modules_trains_as_on_one_device(tmp_path):
    batches = list(torch.randint(32, (4, 2, 8), generator=torch.Generator().manual_seed(0)))
    found, expected = Losses(), Losses()
    for recorder, strategy in ((found, "liger_model_parallel"), (expected, "liger")):
        module = OfLists()
        make_trainer(recorder, root=tmp_path, strategy=strategy).fit(module, DataLoader(batches, batch_size=None))
        if recorder is found:
            sharded = {name for name, child in module.named_modules() if isinstance(child, FSDPModule)}
    assert sharded == {"embedding", "layers.0", "layers.1", "parts.last.0"}
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-6, atol=0)
    assert len(found.losses) == 4 != found.losses[0]


def test_module_without_configure_model_trains_as_one_with_it(tmp_path):
    found, expected = Losses(), Losses()
    for recorder, module in ((found, MadeInInit()), (expected, LM())):
        make_trainer(recorder, root=tmp_path, strategy="liger_model_parallel").fit(module, make_loader(0, 3))
        assert "configure_model" not in vars(module)
    assert found.losses == expected.losses


@pytest.mark.parametrize("is_together", [True, False], ids=["together", "optimizer-made-before"])
def test_fabric_refuses_an_optimizer_of_parameters_that_sharding_replaces(is_together):
    fabric = L.Fabric(strategy="liger_model_parallel", accelerator="cpu", devices=1)
    fabric.launch()
    model = build_model()
    optimizer = make_optimizer(model.parameters())
    with pytest.raises(RuntimeError, match="then make the optimizer of model"):
        fabric.setup(model, optimizer) if is_together else (
            fabric.setup_module(model),
            fabric.setup_optimizers(optimizer),
        )


def test_fabric_trains_in_the_order_that_the_error_names():
    fabric = L.Fabric(strategy="liger_model_parallel", accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    fabric.backward(model(**make_batches(0, 1)[0]).loss)
    optimizer.step()
    assert not any(old.equal(new.full_tensor()) for old, new in zip(before, model.parameters(), strict=True))
