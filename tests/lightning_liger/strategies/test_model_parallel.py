"""``liger_model_parallel``: two processes under FSDP2 against one with the stock model."""

import lightning as L
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_liger import LigerLMMixin, LigerModelParallelStrategy
from tests.lightning_liger.strategies.test_frozen import assert_as_in, of_ranks_means, reference_of
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    Losses,
    build_model,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.frozen import NUM_BATCHES
from tests.lightning_liger.strategies.workers.model_parallel import WAYS


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one_process_with_the_stock_model(engine_runs, way):
    runs = engine_runs.of(f"fsdp2-{way}")
    assert_as_in(reference_of("whole", engine_runs.device), engine_runs.device, runs)
    num_losses = 0 if way == "no-kernels" else NUM_BATCHES
    for run in runs:
        # 5 norms, 2 attentions, the head and 2 MLPs, but for those that are FSDP units of their user's.
        assert run["num_replaced"] == {"no-kernels": 0, "by-its-user": 8}.get(way, 10)
        assert run["logit_counts"] == (num_losses, 0)
        assert run["counts_after_validation"] == (2 * num_losses, 0)
        assert run["validation"] == runs[0]["validation"]
        assert run["num_forwards"] == (2 * NUM_BATCHES if way == "recomputed" else None)


@pytest.mark.parametrize("head", HEADS)
def test_fabric_trains_as_one_process_with_the_stock_model(engine_runs, head):
    runs = engine_runs.of(f"fsdp2-fabric-{head}")
    assert_as_in(of_ranks_means({"untied": "whole"}.get(head, head), engine_runs.device), engine_runs.device, runs)
    assert [(run["num_replaced"], run["logit_counts"]) for run in runs] == [(10, (NUM_BATCHES, 0))] * NUM_RANKS


def test_layers_are_sharded_one_by_one_and_what_is_around_them(engine_runs):
    units = {way: engine_runs.of(f"fsdp2-{way}")[0]["units"] for way in WAYS}
    assert units["usual"] == ["FSDPLlamaDecoderLayer"] * 2 + ["FSDPLlamaForCausalLM"]
    assert "FSDPLinear" in units["each-linear"]
    assert units["by-its-user"] == ["FSDPLlamaForCausalLM"] + ["FSDPLlamaMLP"] * 2


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
