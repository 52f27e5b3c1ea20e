"""``cuda_graphs=True``: training with captured layers is that without, on one device and on several ranks.

Without GPUs a backend takes the place of CUDA graphs which runs captured functions again.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerFSDPStrategy,
    FabricLigerSingleDeviceStrategy,
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
)
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.fake_graphs import FakeBackend
from tests.lightning_liger.strategies.workers.distributed import LM, Batch, build_model, make_batches, make_optimizer
from tests.lightning_liger.strategies.workers.trainings import fit, fit_with_fabric, rank_main

NUM_STEPS = 20
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def backend_for(device: str) -> Any:
    """A context in which strategies capture on ``device``."""
    return patch.object(activations, "CudaBackend", FakeBackend if device == "cpu" else activations.CudaBackend)


class ScheduledLM(LM):
    """With a dropout in the embeddings, a schedule of the learning rate and a metric of hidden states."""

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.log("rows", float(len(batch["labels"])))
        return super().training_step(batch, batch_idx)


def varied(rank: int) -> list[Batch]:
    """Batches of two lengths in an irregular order."""
    batches = make_batches(rank, NUM_STEPS)
    lengths = [9 if step % 3 == 1 or step > 16 else 13 for step in range(NUM_STEPS)]
    return [
        {name: tensor[:, :length] for name, tensor in batch.items()}
        for batch, length in zip(batches, lengths, strict=True)
    ]


def train(run: dict[str, Any], strategy_class: Any, captures: bool, **options: Any) -> dict[str, Any]:
    """What one rank saw of a training, with validation in between, and the plan that it ended with."""
    strategy, plans = strategy_class(cuda_graphs=captures), []
    module = ScheduledLM()
    module.on_train_end = lambda: plans.append(strategy.activation_plan)
    module.val_dataloader = lambda: DataLoader(make_batches(7, 2), batch_size=None)
    defaults = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 5}
    found = fit(run, strategy, module, varied(run["rank"]), **(defaults | options))
    return found | {"plan": plans[0], "left": [each.graphs for each in strategy._activations.controlled]}


def results(run: dict[str, Any]) -> dict[str, Any]:
    """What a rank of DDP saw."""
    found: dict[str, Any] = {}
    with backend_for(run["device"]):
        for captures in (False, True):
            found[f"trainer-{captures}"] = train(run, LigerDDPStrategy, captures)
            strategy = FabricLigerDDPStrategy(cuda_graphs=captures)
            found[f"fabric-{captures}"] = fit_with_fabric(run, strategy, build_model(), varied(run["rank"]))
            found[f"fabric-{captures}"]["plan"] = strategy.activation_plan
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], device: str, half: bool = False) -> None:
    tolerance = 0.0 if device == "cpu" else 2e-2 if half else 1e-3
    for name in ("losses", "norms", "whole"):
        options = {"rtol": tolerance, "atol": tolerance, "equal_nan": True, "check_device": False}
        torch.testing.assert_close(found[name], expected[name], **options)


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_ranks_train_as_without_graphs(ranks: Any, engine: str) -> None:
    for found, expected in zip(ranks.of(f"{engine}-True"), ranks.of(f"{engine}-False"), strict=True):
        assert_same(found, expected, ranks.device)
        # On GPUs it may say what cheap tensors cost.
        assert expected["plan"] == "" if ranks.device == "cpu" else "captured" not in expected["plan"]
        assert found["plan"].startswith("2 of 2 layers captured for 2 shapes")


@on_each_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_device_trains_as_without_graphs_and_frees_them(one_process: Any, device: str, precision: str) -> None:
    with backend_for(device):
        expected, found = (
            train(one_process, LigerSingleDeviceStrategy, each, precision=precision) for each in (False, True)
        )
    assert_same(found, expected, device, precision != "32-true")
    assert found["plan"].startswith("2 of 2 layers captured for 2 shapes")
    assert found["left"] == [None]


@on_each_device
def test_module_fits_again_and_fabric_trains_as_without_graphs(one_process: Any, device: str) -> None:
    outcomes = []
    for captures in (False, True):
        with backend_for(device):
            module = ScheduledLM()
            fits = [
                fit(one_process, LigerSingleDeviceStrategy(cuda_graphs=captures), module, varied(0)) for _ in range(2)
            ]
            strategy = FabricLigerSingleDeviceStrategy(cuda_graphs=captures)
            outcomes.append(
                (fits, fit_with_fabric(one_process, strategy, build_model(), varied(0)), strategy.activation_plan)
            )
    (plain, with_fabric, no_plan), (again, captured_with_fabric, plan) = outcomes
    for found, expected in zip([*again, captured_with_fabric], [*plain, with_fabric], strict=True):
        assert_same(found, expected, device)
    assert (no_plan, plan.startswith("2 of 2 layers captured for 2 shapes")) == ("", True)


class WithoutLayers(LM):
    def configure_model(self) -> None:
        self.model = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("strategy_class", "options", "message"),
    [
        (LigerFSDPStrategy, {}, "cuda_graphs=True is for 'liger' and 'liger_ddp', got LigerFSDPStrategy"),
        (FabricLigerFSDPStrategy, {}, "is for 'liger' and 'liger_ddp', got FabricLigerFSDPStrategy"),
        (LigerModelParallelStrategy, {}, "is for 'liger' and 'liger_ddp'"),
        (LigerDeepSpeedStrategy, {}, "is for 'liger' and 'liger_ddp'"),
        (LigerDDPStrategy, {"context_parallel_size": 2}, "context_parallel_size=2 cannot be combined with cuda_graphs"),
        (LigerSingleDeviceStrategy, {"fp8": "auto"}, "fp8='auto' cannot be combined with cuda_graphs=True"),
        (FabricLigerDDPStrategy, {"memory_budget": 0.5}, "memory_budget=0.5 must be None if cuda_graphs is given"),
        (LigerDDPStrategy, {"activation_checkpointing": "full"}, "activation_checkpointing='full' must be None if"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_rules_graphs_out_is_refused_when_the_strategy_is_made(
    strategy_class: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_class(cuda_graphs=True, **options)
    with pytest.raises(TypeError, match="cuda_graphs must be"):
        strategy_class(cuda_graphs="yes", **options)
    assert strategy_class(cuda_graphs=False, **options).activation_plan == ""


def test_models_and_devices_that_cannot_are_refused_at_set_up(one_process: Any, made_by_yaml: Any) -> None:
    strategy = LigerSingleDeviceStrategy(cuda_graphs=True, activation_checkpointing="none")
    with pytest.raises(ValueError, match="cuda_graphs=True needs a CUDA GPU, got the device 'cpu': leave it out there"):
        fit(one_process, strategy, LM(), make_batches(0, 1))
    with pytest.raises(ValueError, match="cuda_graphs=True needs a model with repeated layers, got WithoutLayers"):
        fit(one_process, LigerSingleDeviceStrategy(cuda_graphs=True), WithoutLayers(), make_batches(0, 1))

    def recomputing(module: Any) -> nn.Module:
        model = build_model()
        model.gradient_checkpointing_enable()
        return model

    with pytest.raises(ValueError, match=r"cuda_graphs=True needs layers that are not recomputed otherwise"):
        fit(one_process, LigerSingleDeviceStrategy(cuda_graphs=True), LM(build=recomputing), make_batches(0, 1))
    options = {"class_path": "lightning_liger.LigerSingleDeviceStrategy", "init_args": {"cuda_graphs": True}}
    assert made_by_yaml(options)._activations.captures


if __name__ == "__main__":
    rank_main(results)
