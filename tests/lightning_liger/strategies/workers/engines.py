"""What runs under every engine have in common, and the worker that does all of them in one start of processes.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from tests.lightning_liger.strategies.workers.clipping import whole_parameters
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, Batch, logit_counts, make_trainer

ENGINES = ("liger_ddp", "liger_fsdp", "liger_model_parallel")


class Recorder(L.Callback):
    """Keeps what a run is compared by: losses and their dtype, norms as they are logged, dtypes of gradients."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.loss_dtypes: set[torch.dtype] = set()
        self.gradient_dtypes: set[torch.dtype] = set()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradient_dtypes |= {
            parameter.grad.dtype for parameter in pl_module.parameters() if parameter.grad is not None
        }

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.loss_dtypes.add(outputs["loss"].dtype)
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self.norms.append(float(trainer.callback_metrics.get("grad_norm", math.nan)))


def fit(
    run: dict[str, Any], strategy: Any, module: L.LightningModule, batches: list[Batch], **options: Any
) -> dict[str, Any]:
    """What one rank saw of a training, and the trained parameters."""
    recorder = Recorder()
    trainer = make_trainer(
        recorder, root=run["folder"], strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS, **options
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    (optimizer,) = trainer.optimizers
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "loss_dtypes": recorder.loss_dtypes,
        "gradient_dtypes": recorder.gradient_dtypes,
        "parameter_dtypes": {parameter.dtype for parameter in module.parameters()},
        "state_dtypes": {state.dtype for state in states},
        "devices": {tensor.device.type for tensor in (*module.parameters(), *states)},
        "scale": None if scaler is None else scaler.get_scale(),
        "logit_counts": logit_counts(module),
        "whole": whole_parameters(trainer.strategy.model),
        "trainer": trainer,
    }


def _run_rank(device: str, folder: Path) -> None:
    from tests.lightning_liger.strategies.workers import frozen, lifecycle, model_parallel, precisions

    torch.set_num_threads(1)
    accelerator = {"cuda": "gpu"}.get(device, device)
    run = {"rank": int(os.environ["RANK"]), "folder": folder, "device": device, "accelerator": accelerator}
    results: dict[str, Any] = {}
    for topic in (frozen, model_parallel, precisions, lifecycle):
        for name, result in topic.results(run).items():
            result.pop("trainer", None)
            results[name] = result
    torch.save(results, folder / f"rank{run['rank']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
