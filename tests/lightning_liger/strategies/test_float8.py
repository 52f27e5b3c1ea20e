"""``fp8=`` under every engine: ranks compute what one process does, plans change nothing, wrong settings are told."""

import functools
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from liger_ops.fp8.weights import Float8Weight
from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerFSDPStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerPrecisionPlugin,
    FabricLigerSingleDeviceStrategy,
    Float8Recipe,
    LigerCallback,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerPrecisionPlugin,
    LigerSingleDeviceStrategy,
    apply_liger_kernels,
)
from lightning_liger.patching import float8
from lightning_liger.patching.float8 import fp8_share
from lightning_liger.strategies.registration import REGISTRATIONS
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    Losses,
    make_batches,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.trainings import (
    fit,
    fit_with_fabric,
    freeze,
    loss_of_labels,
    rank_main,
    reference_training,
    with_adapters,
)
from tests.lightning_liger.tiny import quiet_trainer, tiny_llama

EVERY = Float8Recipe(filter=["*"], min_tokens=1)
GATHERED = Float8Recipe(filter=["*"], min_tokens=1, all_gather=True)
NUM_BATCHES = 4


def build(change: str = "whole") -> nn.Module:
    """A model whose linear layers all have float8 products, also those of half the size; with adapters, or frozen."""
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96} if change == "wide" else {}
    with torch.device("cpu"):  # GPUs draw other numbers
        model = tiny_llama(use_cache=False, **sizes).train()
    if change == "lora":
        return with_adapters("q_proj", "v_proj", "down_proj", model=model)
    return freeze(model, "mlp", "k_proj") if change == "mixed" else model


RUNS: dict[str, tuple[Any, str]] = {
    "ddp": (partial(LigerDDPStrategy, fp8=EVERY), "whole"),
    "ddp-lora": (partial(LigerDDPStrategy, fp8=EVERY), "lora"),
    "fsdp": (partial(LigerFSDPStrategy, fp8=EVERY), "whole"),
    "fsdp-recomputed": (partial(LigerFSDPStrategy, fp8=EVERY, activation_checkpointing="full"), "whole"),
    "fsdp-mixed": (partial(LigerFSDPStrategy, fp8=EVERY), "mixed"),
    "fsdp2": (partial(LigerModelParallelStrategy, fp8=EVERY), "whole"),
    "fsdp2-gathered": (partial(LigerModelParallelStrategy, fp8=GATHERED), "whole"),
    "fsdp2-gathered-recomputed": (
        partial(LigerModelParallelStrategy, fp8=GATHERED, activation_checkpointing="full"),
        "mixed",
    ),
    "tensor-parallel": (
        partial(LigerModelParallelStrategy, fp8=EVERY, data_parallel_size=NUM_RANKS // 2, tensor_parallel_size=2),
        "wide",
    ),
    # Layers of a group are not gathered together.
    "fsdp2-each-linear": (partial(LigerModelParallelStrategy, fp8=EVERY, auto_wrap_policy=["Linear"]), "whole"),
}
FABRIC_RUNS = {
    "fabric-ddp": partial(FabricLigerDDPStrategy, fp8=EVERY),
    "fabric-fsdp": partial(FabricLigerFSDPStrategy, fp8=EVERY),
    "fabric-fsdp2": partial(FabricLigerModelParallelStrategy, fp8=GATHERED),
}


class Model(LM):
    def __init__(self, change: str = "whole") -> None:
        super().__init__(build=lambda module: build(change))


def results(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (strategy, change) in RUNS.items():
        batches = make_batches(run["rank"] // (1 + (change == "wide")), NUM_BATCHES)
        module = Model(change)
        found[name] = fit(run, strategy, module, batches, gradient_clip_val=1e6)
        found[name]["share"] = fp8_share(module)  # of what a rank computed itself
        local = [each.to_local() if isinstance(each, DTensor) else each for each in module.state_dict().values()]
        found[name]["classes"] = {type(each) for each in local}
    batches = make_batches(run["rank"], NUM_BATCHES)
    for name, strategy in FABRIC_RUNS.items():
        model = build()
        found[name] = fit_with_fabric(run, strategy, model, batches, loss_of_labels)
        found[name]["share"] = fp8_share(model)
    return found


@functools.cache
def reference_of(change: str, device: str, per_token: bool) -> Any:
    model = build(change).to(device)
    # Frozen weights that are held in float8 have the values that products round them to.
    apply_liger_kernels(model, fp8=EVERY)
    num_replicas = NUM_RANKS // (1 + (change == "wide"))
    batches = [make_batches(rank, NUM_BATCHES) for rank in range(num_replicas)]
    return reference_training(model, batches, device, per_token=per_token)


@pytest.mark.parametrize("name", [*RUNS, *FABRIC_RUNS])
def test_ranks_train_as_one_process(ranks: Any, name: str) -> None:
    """Scales belong to tokens and channels, so the first loss is the same; later a rounding may fall the other way."""
    reference = reference_of(RUNS.get(name, ("", "whole"))[1], ranks.device, name in RUNS)
    is_parallel = name == "tensor-parallel"  # each rank has scales of its part of the rows
    later = 3e-2 if is_parallel and ranks.device != "cpu" else 1e-2
    for rank, run in enumerate(ranks.of(name)):
        rank, rtol = (rank // 2, 1e-2) if is_parallel else (rank, 1e-5)
        torch.testing.assert_close(run["losses"][0], reference.losses[rank][0], rtol=rtol, atol=0.0)
        torch.testing.assert_close(run["losses"], reference.losses[rank], rtol=later, atol=0.0)
        assert run["share"] == 1.0
        if name in RUNS:
            assert run["classes"] == {Tensor}  # in checkpoints
            torch.testing.assert_close(run["norms"][0], reference.norms[0], rtol=1e-2, atol=0.0)


def run_single(
    tmp_path: Path, strategy: Any, *callbacks: L.Callback, ckpt_path: Path | None = None, **options: Any
) -> list[float]:
    recorder = Losses()
    trainer = make_trainer(recorder, *callbacks, root=tmp_path, strategy=strategy, **options)
    trainer.fit(Model(), DataLoader(make_batches(0, NUM_BATCHES), batch_size=None), ckpt_path=ckpt_path)
    return recorder.losses


@pytest.mark.parametrize("save", ["auto", "fp8"])
def test_plans_change_no_bit(tmp_path: Path, save: Any) -> None:
    recipe = Float8Recipe(filter=["*"], min_tokens=1, save=save)
    expected = run_single(tmp_path, LigerSingleDeviceStrategy(fp8=recipe))
    for plan in ("none", "full", 1):
        strategy = LigerSingleDeviceStrategy(fp8=recipe, activation_checkpointing=plan)
        assert run_single(tmp_path, strategy) == expected
    assert run_single(tmp_path, LigerSingleDeviceStrategy()) != expected


def test_one_rank_which_gathers_nothing_trains_as_without_all_gather(tmp_path: Path) -> None:
    losses = [
        run_single(tmp_path, LigerModelParallelStrategy(fp8=each), accelerator="cpu", devices=1)
        for each in (GATHERED, EVERY)
    ]
    assert losses[0] == losses[1]


def test_ways_to_ask_for_it_are_the_same(tmp_path: Path) -> None:
    expected = run_single(tmp_path, LigerSingleDeviceStrategy(fp8=EVERY))
    assert run_single(tmp_path, "auto", LigerCallback(fp8=EVERY)) == expected
    for strategy, plugin in (("liger", LigerPrecisionPlugin(fp8=EVERY)), ("auto", LigerPrecisionPlugin(fp8=EVERY))):
        assert run_single(tmp_path, strategy, plugins=plugin) == expected


def test_a_resumed_run_repeats_the_rest_bit_for_bit_and_checkpoints_are_the_stock_models(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    expected = run_single(tmp_path, LigerSingleDeviceStrategy(fp8=EVERY), saving, enable_checkpointing=True)
    path = tmp_path / "step=2.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"]
    Model().build(None).load_state_dict({name.removeprefix("model."): each for name, each in saved.items()})
    assert run_single(tmp_path, LigerSingleDeviceStrategy(fp8=EVERY), ckpt_path=path) == expected[2:]
    without = run_single(tmp_path, "liger", ckpt_path=path)
    torch.testing.assert_close(without, expected[2:], rtol=0.02, atol=0.0)


def holds_frozen(model: nn.Module) -> bool:
    return any(isinstance(each, Float8Weight) for each in model.parameters() if not each.requires_grad)


def test_engines_hold_frozen_weights_in_float8_where_they_do_not_shard_them(tmp_path: Path) -> None:
    ways = [
        (LigerSingleDeviceStrategy(fp8=EVERY), [], True),
        (LigerSingleDeviceStrategy(), [LigerPrecisionPlugin(fp8=EVERY)], True),
        (LigerFSDPStrategy(fp8=EVERY), [], False),
        (LigerFSDPStrategy(), [LigerPrecisionPlugin(fp8=EVERY)], False),
    ]
    for strategy, plugins, is_held in ways:
        module = Model("lora")
        trainer = make_trainer(root=tmp_path, strategy=strategy, plugins=plugins, accelerator="cpu", devices=1)
        trainer.fit(module, DataLoader(make_batches(0, 1), batch_size=None))
        assert holds_frozen(module.model) == is_held
    strategy, plugin = FabricLigerSingleDeviceStrategy(), FabricLigerPrecisionPlugin(fp8=EVERY)
    fabric = L.Fabric(strategy=strategy, plugins=plugin, accelerator="cpu", devices=1)
    assert holds_frozen(fabric.setup_module(build("lora")))
    own = Float8Recipe(filter=["*"], min_tokens=1, hold_frozen=False)
    module = Model("lora")
    make_trainer(root=tmp_path, strategy=LigerSingleDeviceStrategy(fp8=own), max_steps=1).fit(
        module, DataLoader(make_batches(0, 1), batch_size=None)
    )
    assert not holds_frozen(module.model)


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
@pytest.mark.parametrize("strategy", [LigerSingleDeviceStrategy, FabricLigerSingleDeviceStrategy])
def test_precisions_without_float8_are_refused_before_training(precision: Any, strategy: Any) -> None:
    error = f"fp8 needs precision 'bf16-true', 'bf16-mixed' or '32-true', got '{precision}'"
    with pytest.raises(ValueError, match=error):
        if strategy is FabricLigerSingleDeviceStrategy:
            fabric = L.Fabric(strategy=strategy(fp8=True), accelerator="cpu", devices=1, precision=precision)
            fabric.setup_module(build())
        else:
            trainer = quiet_trainer(strategy=strategy(fp8=True), precision=precision, max_steps=1)
            trainer.fit(Model(), DataLoader(make_batches(0, 1), batch_size=None))


def test_plugin_that_would_replace_it_is_refused() -> None:
    trainer = quiet_trainer(strategy="liger_fp8", plugins=[LigerPrecisionPlugin("bf16-true")], max_steps=1)
    with pytest.raises(ValueError, match=r"fp8=.* of LigerSingleDeviceStrategy .* LigerPrecisionPlugin without fp8"):
        trainer.fit(Model(), DataLoader(make_batches(0, 1), batch_size=None))


@pytest.mark.parametrize("way", ["trainer", "callback", "fabric"])
def test_devices_without_float8_are_refused_before_the_model_is_there(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own device is another one until the engine moves it."""
    device = torch.device("cpu", 0)
    monkeypatch.setattr(float8, "unsupported", lambda each: "it is too old" if each == device else None)
    for each in (LigerSingleDeviceStrategy, FabricLigerSingleDeviceStrategy, SingleDeviceStrategy):
        monkeypatch.setattr(each, "root_device", device)
    with pytest.raises(ValueError, match="fp8=fp8 rowwise is not supported on cpu:0: it is too old"):
        if way == "fabric":
            FabricLigerSingleDeviceStrategy(fp8=EVERY).setup_module(build())
        elif way == "callback":
            run_single(tmp_path, "auto", LigerCallback(fp8=EVERY))
        else:
            run_single(tmp_path, LigerSingleDeviceStrategy(fp8=EVERY))


def test_mixed_precision_trains_in_float8(tmp_path: Path) -> None:
    losses = run_single(tmp_path, LigerSingleDeviceStrategy(fp8=EVERY), precision="bf16-mixed")
    assert losses != run_single(tmp_path, LigerSingleDeviceStrategy(), precision="bf16-mixed")
    torch.testing.assert_close(losses, run_single(tmp_path, "liger"), rtol=0.03, atol=0.0)


def test_names_and_yaml(made_by_yaml: Any) -> None:
    registered = {each.name: each for each in REGISTRATIONS}
    for name in ("liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"):
        with_float8 = registered[f"{name}_fp8"]
        assert (with_float8.trainer, with_float8.options) == (registered[name].trainer, {"fp8": "auto"})
    recipe = {"class_path": "lightning_liger.Float8Recipe", "init_args": {"min_tokens": 5, "skip_layers": [1, 1]}}
    for given, expected in (("rowwise_with_gw_hp", "rowwise_with_gw_hp"), (True, True)):
        strategy = {"class_path": "lightning_liger.LigerFSDPStrategy", "init_args": {"fp8": given}}
        assert made_by_yaml(strategy).fp8 == expected
    strategy = {"class_path": "lightning_liger.LigerFSDPStrategy", "init_args": {"fp8": recipe}}
    assert made_by_yaml(strategy).fp8 == Float8Recipe(min_tokens=5, skip_layers=(1, 1))


if __name__ == "__main__":
    rank_main(results)
