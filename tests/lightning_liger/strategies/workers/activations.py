"""Trainings on two ranks under plans that they make from different measurements."""

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_liger import LigerDDPStrategy, LigerFSDPStrategy, LigerModelParallelStrategy
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.strategies.workers.distributed import LM, make_batches
from tests.lightning_liger.strategies.workers.trainings import fit, rank_main

STORED = 1000
"""Bytes that each layer is said to keep for backward."""
SIZES = (2200, 4000)
"""Of the memory of each rank: for one stored layer, for two."""
NUM_STEPS = 6
LARGER = 4
"""The step in which the second rank has a larger batch."""


class CountedLM(LM):
    """Counts what its layers keep in a simulated memory."""

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__()
        self.memory = memory

    def configure_model(self) -> None:
        is_new = getattr(self, "model", None) is None
        super().configure_model()
        for index, layer in enumerate(self.model.model.layers if is_new else ()):
            layer.register_forward_pre_hook(self._before)
            layer.mlp.gate_proj.register_forward_pre_hook(self._keep)
            layer.register_forward_hook(partial(self._after, index))

    def _before(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: self.memory.add(-STORED))

    def _keep(self, *_: Any) -> None:
        self.memory.add(STORED if torch.is_grad_enabled() else 0)

    def _after(self, index: int, *_: Any) -> None:
        (controlled,) = self.trainer.strategy._activations.controlled
        if controlled.modes[index] in ("recompute", "offload"):
            self.memory.add(-STORED)


class Modes(L.Callback):
    """Keeps the modes of the layers in each step."""

    def __init__(self) -> None:
        self.modes: list[list[str]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        (controlled,) = trainer.strategy._activations.controlled
        self.modes.append(list(controlled.modes))


def batches_of(rank: int) -> list[dict[str, Tensor]]:
    batches = make_batches(rank, NUM_STEPS)
    if rank == 1:
        batches[LARGER] = {name: tensor.repeat(2, 1) for name, tensor in batches[LARGER].items()}
    return batches


def _fit(run: dict[str, Any], strategy: Any) -> dict[str, Any]:
    memory, modes = FakeMemory(SIZES[run["rank"]]), Modes()
    activations.memory_of = lambda device: memory  # type: ignore[assignment]
    result = fit(run, strategy, CountedLM(memory), batches_of(run["rank"]), modes)
    return result | {"modes": modes.modes, "plan": strategy.activation_plan}


def results(run: dict[str, Any]) -> dict[str, Any]:
    nested = {"auto_wrap_policy": ["LlamaDecoderLayer", "LlamaMLP"]}
    makers = {
        "ddp": LigerDDPStrategy,
        "fsdp": LigerFSDPStrategy,
        "fsdp-nested": partial(LigerFSDPStrategy, **nested),
        "model_parallel": LigerModelParallelStrategy,
    }
    found: dict[str, Any] = {}
    for name, make in makers.items():
        found[name] = _fit(run, make(kernels="none", memory_budget=1.0))
        found[f"{name}-stored"] = _fit(run, make(kernels="none", activation_checkpointing="none"))
    return found


if __name__ == "__main__":
    rank_main(results)
