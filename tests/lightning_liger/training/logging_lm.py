"""A module that notes the loss that it logs in each training step."""

from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_liger import LigerLMMixin
from tests.lightning_liger.tiny import tiny_llama


class LoggingLM(LigerLMMixin, L.LightningModule):
    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = tiny_llama() if model is None else model
        self.logged: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics.get("train_loss_step", "nan")))
