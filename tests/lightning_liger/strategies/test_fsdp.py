"""``liger_fsdp`` trains as the stock model does, and what it saves is the stock model's."""

import lightning as L
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_liger import (
    LigerStrategy,
)
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    NUM_STEPS,
    Losses,
    build_model,
    launch,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
    reference_training,
    wrapped_units,
)

RELATIVE_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
"""Of losses after 20 steps in float32: AdamW multiplies rounding differences, and GPUs sum in other orders."""


# Two processes


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """What both ranks got out of every run, with the device and the folder they wrote to."""
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, folder, launch(request.param, folder)


@pytest.fixture(scope="module")
def reference(ranks):
    device = ranks[0]
    return {
        (head, of_tokens): reference_training(tied, device, of_tokens)
        for head, tied in HEADS.items()
        for of_tokens in (False, True)
    }


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", ["trainer", "no-kernels", "fabric-labels", "fabric-logits"])
def test_two_ranks_train_as_one_process_with_the_stock_model(ranks, reference, way, head):
    device, _, results = ranks
    # The mixin's steps are of tokens; with Fabric each rank takes the mean over its own tokens.
    losses, squared_norms, parameters = reference[head, not way.startswith("fabric")]
    # What wrong gradients could not pass: the model learnt, from other batches on each rank.
    assert losses[0][-1] < losses[0][0] - 0.5
    assert losses[0][0] != losses[1][0]
    # AdamW would not notice gradients that were summed instead of averaged.
    found = [sum(parts) for parts in zip(*(run[f"{way}-{head}"]["squared_norms"] for run in results), strict=True)]
    torch.testing.assert_close(found, squared_norms, rtol=10 * RELATIVE_TOLERANCE[device], atol=0.0)
    for rank in range(NUM_RANKS):
        run = results[rank][f"{way}-{head}"]
        assert len(run["losses"]) == NUM_STEPS
        torch.testing.assert_close(run["losses"], losses[rank], rtol=RELATIVE_TOLERANCE[device], atol=0.0)
        assert run["whole"].keys() == parameters.keys()
        for name, parameter in run["whole"].items():
            # Twenty steps moved them by about 0.06.
            torch.testing.assert_close(parameter, parameters[name], rtol=0.0, atol=10 * RELATIVE_TOLERANCE[device])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", ["trainer", "fabric-labels", "fabric-logits", "no-kernels"])
def test_every_loss_on_two_ranks_is_fused_unless_kernels_is_none(ranks, way, head):
    fused = way != "no-kernels"
    for run in ranks[2]:
        # 5 norms, 2 MLPs, 2 attentions and the head; no whole logits.
        assert run[f"{way}-{head}"]["num_replaced"] == (10 if fused else 0)
        assert run[f"{way}-{head}"]["logit_counts"] == (NUM_STEPS if fused else 0, 0)


@pytest.mark.parametrize("head", HEADS)
def test_ranks_hold_different_parts_of_each_unit(ranks, head):
    runs = [run[f"trainer-{head}"] for run in ranks[2]]
    assert list(runs[0]["units"].values()) == ["LM", "LlamaDecoderLayer", "LlamaDecoderLayer"]
    layers = ["model.layers.0.", "model.layers.1."]
    for shards, layer in zip(zip(*(run["shards"] for run in runs), strict=True), [None, *layers], strict=True):
        # The root unit comes first, and has what is in no layer; FSDP aligns each parameter to 16 bytes.
        wholes = [
            value.flatten()
            for name, value in runs[0]["whole"].items()
            if (name.startswith(layer) if layer else not name.startswith(tuple(layers)))
            and not (HEADS[head] and name == "lm_head.weight")
        ]
        values = torch.cat(wholes).unique()
        num_parameters = sum(whole.numel() for whole in wholes)
        assert num_parameters <= sum(shard.numel() for shard in shards) <= num_parameters + 4 * len(wholes) + NUM_RANKS
        assert len({shard.numel() for shard in shards}) == 1
        found = [torch.isin(values, shard) for shard in shards]
        assert torch.stack(found).any(dim=0).all()
        assert not any(in_one.all() for in_one in found)


@pytest.mark.parametrize("head", HEADS)
def test_full_checkpoint_of_two_ranks_is_the_gathered_model_and_loads_into_stock(ranks, head):
    _, folder, results = ranks
    saved = torch.load(folder / f"{head}.ckpt", weights_only=False, map_location="cpu")["state_dict"]
    saved = {name.removeprefix("model."): value for name, value in saved.items()}
    for run in results:
        whole, after = (run[f"trainer-{head}"][key] for key in ("whole", "whole_after_saving"))
        torch.testing.assert_close(after, whole, rtol=0.0, atol=0.0)
        torch.testing.assert_close(saved, whole, rtol=0.0, atol=0.0)
    stock = build_model(HEADS[head])
    assert saved.keys() == stock.state_dict().keys()
    stock.load_state_dict(saved)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_two_ranks_resume_from_a_checkpoint_saved_before_the_first_step(ranks, kind):
    for run in ranks[2]:
        assert run[f"started-{kind}"]["losses"] == run["first-epoch"]["losses"]


def test_two_ranks_generate_with_fabric_once_the_method_is_marked(ranks):
    for run in ranks[2]:
        assert 'model.mark_forward_method("generate")' in run["generated"]["error"]
        assert run["generated"]["tokens"].equal(run["generated"]["stock"])


def test_sharded_checkpoint_of_two_ranks_is_a_folder_that_training_resumes_from(ranks):
    device, folder, results = ranks
    assert len(list((folder / "sharded.ckpt").glob("*.distcp"))) == NUM_RANKS
    for run in results:
        assert run["first-epoch"]["losses"] == pytest.approx(run["two-epochs"]["losses"][:2])
        rtol = RELATIVE_TOLERANCE[device]
        torch.testing.assert_close(run["second-epoch"]["losses"], run["two-epochs"]["losses"][2:], rtol=rtol, atol=0.0)


# One process


@pytest.mark.parametrize(
    ("tied", "policy", "kernels", "message"),
    [
        (False, ["Linear"], "auto", "LM head 'model.lm_head' is in a separate FSDP unit"),
        (True, ["Embedding"], "auto", "'model.model.embed_tokens' and 'model.lm_head', which share their weight"),
        (True, ["LlamaModel"], "none", "'model.model.embed_tokens' and 'model.lm_head', which share their weight"),
    ],
)
def test_policy_that_takes_the_heads_weight_away_is_refused(tmp_path, tied, policy, kernels, message):
    strategy = LigerStrategy(auto_wrap_policy=policy, kernels=kernels)
    trainer = make_trainer(root=tmp_path, strategy=strategy)
    with pytest.raises(ValueError, match=message):
        trainer.fit(LM(tied), make_loader(0, 1))


@pytest.mark.parametrize(("kernels", "tied", "policy"), [("none", False, ["Linear"]), ("auto", True, ["LlamaMLP"])])
def test_policy_that_leaves_the_head_its_weight_trains(tmp_path, kernels, tied, policy):
    recorder = Losses()
    strategy = LigerStrategy(auto_wrap_policy=policy, kernels=kernels)
    make_trainer(recorder, root=tmp_path, strategy=strategy).fit(LM(tied), make_loader(0, 2))
    reference = reference_training(tied, "cpu", True, lambda rank: make_batches(0, 2))
    torch.testing.assert_close(recorder.losses, reference.losses[0], rtol=1e-5, atol=0.0)


def test_module_that_the_user_wrapped_is_not_wrapped_again():
    fabric = L.Fabric(strategy="liger_fsdp", accelerator="cpu", devices=1)
    fabric.launch()
    model = build_model()
    model.model.layers[0] = FullyShardedDataParallel(model.model.layers[0], device_id=torch.device("cpu"))
    model = fabric.setup_module(model)
    assert list(wrapped_units(model).values()).count("LlamaDecoderLayer") == 1
    assert sum(isinstance(module, FullyShardedDataParallel) for module in model.modules()) == 1
    (batch,) = make_batches(0, 1)
    torch.testing.assert_close(model(**batch).loss, build_model()(**batch).loss, rtol=1e-6, atol=0.0)


class Manual(LM):
    def __init__(self, by_user: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.by_user = by_user
        self.losses: list[float] = []

    def configure_model(self):
        super().configure_model()
        if self.by_user:
            self.model = FullyShardedDataParallel(self.model, device_id=torch.device("cpu"), use_orig_params=True)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.model(**batch).loss
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


def test_manual_optimization_is_refused_where_fsdp_is_around_the_module(tmp_path):
    trainer = make_trainer(root=tmp_path, strategy=LigerStrategy())
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*'liger_model_parallel'"):
        trainer.fit(Manual(), make_loader(0, 1))


def test_manual_optimization_trains_where_fsdp_is_inside_the_module(tmp_path):
    module = Manual(by_user=True)
    make_trainer(root=tmp_path, strategy=LigerStrategy()).fit(module, make_loader(0, 3))
    stock = build_model()
    optimizer = make_optimizer(stock.parameters())
    for batch, loss in zip(make_batches(0, 3), module.losses, strict=True):
        expected = stock(**batch).loss
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
