"""The worker that trains preference losses on two processes under each strategy.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_liger import (
    DPOOptions,
    LigerPreferenceMixin,
)
from tests.lightning_liger.post_training.preference_data import other_llama, padded, sequences
from tests.lightning_liger.post_training.workers.strategies import strategy_of
from tests.lightning_liger.tiny import tiny_llama

LOSS = DPOOptions(("sigmoid", "sft"), loss_weights=(1.0, 0.5), beta=0.3)
SIZES = ((1, 2), (3, 1))
"""Pairs in the micro-batches of each rank; both are one step."""
NAMES = ("ddp", "ddp_one_batch", "fsdp", "model_parallel", "context_parallel", "deepspeed")


class Module(LigerPreferenceMixin, L.LightningModule):
    preference_loss = LOSS

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module
        self.loss = float("nan")

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self._make_models()

    def _make_models(self) -> None:
        self.model, self.ref_model = tiny_llama(), other_llama()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.loss = float(self.trainer.callback_metrics.get("train_loss_step", "nan"))


class WholeAtFirst(Module):
    """Has its parameters before ZeRO-3 can partition them as they are made."""

    def __init__(self) -> None:
        super().__init__()
        self._make_models()


def batches_of(rank: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of a rank, of unequal sizes and widths."""
    return [padded(sequences(2 * size, seed=10 * rank + index), width=16) for index, size in enumerate(SIZES[rank])]


def train(name: str, folder: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    module = WholeAtFirst() if name == "deepspeed" else Module()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy_of(name), max_epochs=1,
        accumulate_grad_batches=1 if name == "ddp_one_batch" else 2,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = batches_of(0 if name == "context_parallel" else rank)
    data = data[:1] if name == "ddp_one_batch" else data
    trainer.fit(module, DataLoader(data, batch_size=None))
    path = folder / f"{name}.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    state = {}
    if path.is_file():
        state = torch.load(path, weights_only=True, mmap=True)["state_dict"]
    return {
        "loss": module.loss,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "state": dict(state),
    }


if __name__ == "__main__":
    out = Path(sys.argv[2])
    names = sys.argv[3:] or NAMES
    results = {name: train(name, out) for name in names}
    torch.save(results, out / f"rank{os.environ['RANK']}.pt")
