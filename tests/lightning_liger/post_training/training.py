"""Training of tiny modules by a Trainer that prints nothing."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_liger import LigerLMMixin
from tests.lightning_liger.tiny import quiet_trainer, tiny_llama


class Recorded(L.LightningModule):
    """Plain SGD, so that one step shows the gradients; notes what is logged after each batch in ``steps``.

    Arguments are attributes.
    """

    learning_rate = 0.1

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=self.learning_rate)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(metrics_of(self.trainer))


class LM(LigerLMMixin, Recorded):
    """Around a tiny Llama, or another model."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = tiny_llama() if model is None else model


def metrics_of(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def loader(batches: Any) -> Any:
    return DataLoader(batches, batch_size=None)


def fit(
    module: L.LightningModule, data: Any, validation: Any = None, ckpt_path: Path | None = None, **options: Any
) -> L.Trainer:
    trainer = quiet_trainer(**({"max_epochs": 1, "strategy": "liger"} | options))
    trainer.fit(module, *(each if each is None else loader(each) for each in (data, validation)), ckpt_path=ckpt_path)
    return trainer


def assert_same_parameters(module: nn.Module, model: nn.Module, rtol: float = 2e-4, atol: float = 3e-6) -> None:
    for (name, want), got in zip(model.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
