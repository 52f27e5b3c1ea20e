"""Trainings in each precision under every engine, and Lightning's own, that ``test_precision_matrix.py`` compares."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from tests.lightning_liger.strategies.workers.distributed import LM, NUM_RANKS, Batch, make_uneven_batches
from tests.lightning_liger.strategies.workers.engines import ENGINES, fit
from tests.lightning_liger.strategies.workers.model_parallel import ShardedByItsUser

NUM_BATCHES = 10
NUM_MICRO_BATCHES = 2
BROKEN_BATCH = 3
"""In the second step."""
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
SCALED_ENGINES = ("liger_ddp", "liger_fsdp")


class Scaled(LM):
    """The tiny model, whose loss is multiplied by what the batch says."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = dict(batch)
        return inputs.pop("scale") * super().training_step(inputs, batch_idx)


def make_scaled_batches(rank: int, broken: bool) -> list[Batch]:
    """The uneven batches; ``broken`` makes gradients of one not finite on rank 1."""
    batches = make_uneven_batches(rank, NUM_BATCHES)
    for index, batch in enumerate(batches):
        batch["scale"] = torch.tensor(float("inf") if broken and rank == 1 and index == BROKEN_BATCH else 1.0)
    return batches


def without_broken_step(batches: list[Batch]) -> list[Batch]:
    """The batches of all other steps."""
    start = BROKEN_BATCH - BROKEN_BATCH % NUM_MICRO_BATCHES
    return batches[:start] + batches[start + NUM_MICRO_BATCHES :]


def is_trained(engine: str, precision: str) -> bool:
    """Whether Lightning takes the combination: it knows no loss scale with FSDP2."""
    return precision != "16-mixed" or engine in SCALED_ENGINES


def _options(engine: str, precision: str, device: str) -> dict[str, Any]:
    """The precision; on a CPU Lightning takes float16 for DDP only as a plugin."""
    if (engine, precision, device) == ("liger_ddp", "16-mixed", "cpu"):
        return {"plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))]}
    return {"precision": precision}


def _lightnings_own(engine: str, device: str) -> tuple[Any, LM] | None:
    """Lightning's strategy of the same kind, with a module that it can train; its FSDP needs GPUs."""
    if engine == "liger_ddp":
        return DDPStrategy(), LM()
    if engine == "liger_fsdp":
        return (FSDPStrategy(), LM()) if device == "cuda" else None
    strategy = ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1)
    return strategy, ShardedByItsUser("whole")


def results(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a rank got out of each precision; and, where there is a scaler, out of batches one of which overflows."""
    found, accumulated = {}, {"accumulate_grad_batches": NUM_MICRO_BATCHES}
    rank, device = run["rank"], run["device"]
    for engine in ENGINES:
        for precision in PRECISIONS:
            if not is_trained(engine, precision):
                continue
            options = {**_options(engine, precision, device), **accumulated, "gradient_clip_val": 1e6}
            batches = make_uneven_batches(rank, NUM_BATCHES)
            found[f"{engine}-{precision}"] = fit(run, engine, LM(), batches, **options)
            own = _lightnings_own(engine, device)
            if own is not None:
                options = {**_options(engine, precision, device), **accumulated}
                found[f"own-{engine}-{precision}"] = fit(run, *own, batches, **options)
        if engine in SCALED_ENGINES:
            for name, broken in (("broken", True), ("without", False)):
                options = {**_options(engine, "16-mixed", device), **accumulated}
                batches = make_scaled_batches(rank, broken)
                batches = batches if broken else without_broken_step(batches)
                found[f"{engine}-{name}"] = fit(run, engine, Scaled(), batches, **options)
    return found
