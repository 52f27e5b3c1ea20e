"""Gradients that are clipped, not finite, or of lower precision, as ``test_gradients.py`` compares them."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_liger import (
    FabricLigerFSDPStrategy,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
)
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Batch,
    build_model,
    make_batches,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.trainings import fit, fit_with_fabric, rank_main

ENGINES = {
    "liger_ddp": LigerDDPStrategy,
    "liger_fsdp": LigerFSDPStrategy,
    "liger_model_parallel": LigerModelParallelStrategy,
}
NUM_BATCHES = 4
BROKEN_BATCH = 1
MAX_NORM = 0.2
"""Below the norm in every step of the tests."""
MAX_VALUE = 0.01
POLICIES = ("raise", "skip", "ignore")
CLIPPING: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": MAX_NORM},
    "value": {"gradient_clip_val": MAX_VALUE, "gradient_clip_algorithm": "value"},
}

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
SCALED_ENGINES = ("liger_ddp", "liger_fsdp")
NUM_PRECISE_BATCHES = 10
NUM_MICRO_BATCHES = 2
OVERFLOWING_BATCH = 3
"""In the second step."""


class Scaled(LM):
    """The tiny model, whose loss is multiplied by what the batch says."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = dict(batch)
        return inputs.pop("scale") * super().training_step(inputs, batch_idx)


class PartlySharded(Scaled):
    """The head is in no FSDP unit."""

    def configure_model(self) -> None:
        super().configure_model()
        wrap_inside(self.model, self.trainer.strategy.root_device, "model")


def wrap_inside(model: nn.Module, device: torch.device, *names: str) -> nn.Module:
    """Makes FSDP roots of the named children."""
    model.to(device)
    for name in names:
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), use_orig_params=True, device_id=device))
    return model


def scaled(batches: list[Batch], rank: int, broken: int | None = None) -> list[Batch]:
    """``batches``; gradients of the one with the index ``broken`` are not finite on rank 1."""
    scales = [float("inf") if rank == 1 and index == broken else 1.0 for index in range(len(batches))]
    return [batch | {"scale": torch.tensor(scale)} for batch, scale in zip(batches, scales, strict=True)]


def is_trained(engine: str, precision: str) -> bool:
    """Whether Lightning takes the combination: it knows no loss scale with FSDP2."""
    return precision != "16-mixed" or engine in SCALED_ENGINES


def without_overflow(batches: list[Batch]) -> list[Batch]:
    """The batches of all steps but that which overflows."""
    start = OVERFLOWING_BATCH - OVERFLOWING_BATCH % NUM_MICRO_BATCHES
    return batches[:start] + batches[start + NUM_MICRO_BATCHES :]


def _clipped(run: dict[str, Any]) -> dict[str, Any]:
    found = {}
    batches = make_batches(run["rank"], NUM_BATCHES)
    for name, make in ENGINES.items():
        found[f"{name}-value"] = fit(run, make(), Scaled(), scaled(batches, run["rank"]), **CLIPPING["value"])
        for policy in POLICIES:
            for clipping, options in CLIPPING.items():
                if clipping != "value" or name == "liger_fsdp":
                    strategy = make(on_nonfinite_grad=policy)
                    broken = scaled(batches, run["rank"], BROKEN_BATCH)
                    found[f"{name}-{policy}-{clipping}"] = fit(
                        run, strategy, Scaled(), broken, may_fail=True, **options
                    )
    plain = LigerFSDPStrategy(kernels="none")
    options = {"may_fail": True, **CLIPPING["norm"]}
    found["outside"] = fit(run, plain, PartlySharded(), scaled(batches, run["rank"]), **options)
    return found


def _clipped_with_fabric(run: dict[str, Any]) -> dict[str, Any]:
    def train(model: nn.Module, broken: int | None = None, clipping: Any = None, **options: Any) -> dict[str, Any]:
        return fit_with_fabric(
            run,
            FabricLigerFSDPStrategy(**options),
            model,
            scaled(make_batches(run["rank"], NUM_BATCHES), run["rank"], broken),
            lambda model, batch: batch.pop("scale") * model(**batch).loss,
            lambda fabric, model, optimizer: fabric.clip_gradients(
                model, optimizer, **(clipping or {"max_norm": MAX_NORM})
            ),
        )

    device = torch.device("cuda", run["rank"]) if run["device"] == "cuda" else torch.device("cpu")
    return {
        "fabric-flat": train(build_model(), use_orig_params=False),
        "fabric-roots": train(wrap_inside(build_model(), device, "model", "lm_head"), kernels="none"),
        "fabric-value": train(build_model(), clipping={"clip_val": MAX_VALUE}),
        "fabric-raise": train(build_model(), BROKEN_BATCH),
        "fabric-ignore": train(build_model(), BROKEN_BATCH, {"max_norm": MAX_NORM, "error_if_nonfinite": False}),
    }


def _precision(engine: str, precision: str, device: str) -> dict[str, Any]:
    """The precision; on a CPU Lightning takes float16 for DDP only as a plugin."""
    if (engine, precision, device) == ("liger_ddp", "16-mixed", "cpu"):
        return {"plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))]}
    return {"precision": precision}


def _precise(run: dict[str, Any]) -> dict[str, Any]:
    """What a rank got out of each precision; and, where there is a scaler, out of batches one of which overflows."""
    found, rank = {}, run["rank"]
    train = partial(fit, run, accumulate_grad_batches=NUM_MICRO_BATCHES)
    batches = make_uneven_batches(rank, NUM_PRECISE_BATCHES)
    for engine in ENGINES:
        for precision in (each for each in PRECISIONS if is_trained(engine, each)):
            options = partial(_precision, engine, precision, run["device"])
            found[f"{engine}-{precision}"] = train(engine, LM(), batches, gradient_clip_val=1e6, **options())
        if engine in SCALED_ENGINES:
            options = partial(_precision, engine, "16-mixed", run["device"])
            broken = scaled(batches, rank, OVERFLOWING_BATCH)
            found[f"{engine}-broken"] = train(engine, Scaled(), broken, **options())
            found[f"{engine}-without"] = train(engine, Scaled(), without_overflow(scaled(batches, rank)), **options())
    return found


def results(run: dict[str, Any]) -> dict[str, Any]:
    return _clipped(run) | _clipped_with_fabric(run) | _precise(run)


if __name__ == "__main__":
    rank_main(results)
