"""Two ranks follow one plan, whatever each has measured, and train as without one."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_liger import LigerDDPStrategy, LigerFSDPStrategy, LigerModelParallelStrategy
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.strategies.workers.distributed import LM, launch, make_batches
from tests.lightning_liger.strategies.workers.trainings import fit, rank_main

STORED = 1000
"""Bytes that each layer is said to keep for backward."""
SIZES = (2200, 4000)
"""Of the memory of each rank: for one stored layer, for two."""
NUM_STEPS = 6
LARGER = 4
"""The step in which the second rank has a larger batch."""
ENGINES = {
    "ddp": LigerDDPStrategy,
    "fsdp": LigerFSDPStrategy,
    "fsdp-nested": partial(LigerFSDPStrategy, auto_wrap_policy=["LlamaDecoderLayer", "LlamaMLP"]),
    "model_parallel": LigerModelParallelStrategy,
}


class CountedLM(LM):
    """Counts what its layers keep in a simulated memory, and keeps their modes in each step."""

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__()
        self.memory = memory
        self.modes: list[list[str]] = []

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
        if self.current_modes()[index] in ("recompute", "offload"):
            self.memory.add(-STORED)

    def current_modes(self) -> list[str]:
        (controlled,) = self.trainer.strategy._activations.controlled
        return list(controlled.modes)

    def on_train_batch_end(self, *_: Any) -> None:
        self.modes.append(self.current_modes())


def results(run: dict[str, Any]) -> dict[str, Any]:
    batches = make_batches(run["rank"], NUM_STEPS)
    if run["rank"] == 1:
        batches[LARGER] = {name: tensor.repeat(2, 1) for name, tensor in batches[LARGER].items()}
    found: dict[str, Any] = {}
    for name, make in ENGINES.items():
        for kind, options in (("", {"memory_budget": 1.0}), ("-stored", {"activation_checkpointing": "none"})):
            module = CountedLM(FakeMemory(SIZES[run["rank"]]))
            activations.memory_of = lambda device, memory=module.memory: memory  # type: ignore[assignment]
            strategy = make(kernels="none", **options)
            found[name + kind] = fit(run, strategy, module, batches)
            found[name + kind] |= {"modes": module.modes, "plan": strategy.activation_plan}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("cpu", tmp_path_factory.mktemp("activations"), worker=__name__, num_ranks=2)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_follow_the_plan_that_fits_the_one_with_the_least_memory(ranks, engine):
    modes = [rank[engine]["modes"] for rank in ranks]
    recomputed, planned = ["recompute"] * 2, ["recompute", "cheap"]
    steps = [recomputed] * 2 + [planned] * (NUM_STEPS - 2)
    larger = [recomputed if step == LARGER else modes for step, modes in enumerate(steps)]
    # Ranks whose layers exchange data all recompute when one of them has a larger batch.
    assert modes == [larger if engine == "fsdp-nested" else steps, larger]
    assert all("1 of 2 layers stored but for cheap tensors, 1 recomputed" in rank[engine]["plan"] for rank in ranks)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_train_as_with_all_layers_stored(ranks, engine):
    for rank in ranks:
        assert rank[f"{engine}-stored"]["modes"] == [["cheap"] * 2] * NUM_STEPS
        torch.testing.assert_close(rank[engine]["losses"], rank[f"{engine}-stored"]["losses"], rtol=1e-6, atol=0.0)


if __name__ == "__main__":
    rank_main(results)
