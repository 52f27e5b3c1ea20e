"""Old gradients are gone before the next forward, and training is the same."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.lightning_liger.strategies.workers.distributed import LM, Batch, Losses, make_loader, make_trainer

NUM_BATCHES = 7


class Module(LM):
    """Notes before each forward whether parameters have gradients."""

    def __init__(self) -> None:
        super().__init__(build=lambda module: nn.Linear(13, 4))
        self.had_gradients: list[bool] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.had_gradients.append(self.model.weight.grad is not None)
        return self.model(batch["input_ids"].float()).square().mean()


class LooksAtGradients(Module):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.model.weight.grad
        self.norms = [*getattr(self, "norms", []), None if gradient is None else gradient.norm().item()]


class NeverZeroes(Module):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


def fit(module: Module, strategy: str, *callbacks: L.Callback, accumulate: int = 1) -> list[float]:
    """The losses of two epochs, whose last step may have fewer micro-batches."""
    torch.manual_seed(0)
    recorder, options = Losses(), {"root": None, "max_epochs": 2, "accumulate_grad_batches": accumulate}
    make_trainer(recorder, *callbacks, strategy=strategy, **options).fit(module, make_loader(0, NUM_BATCHES))
    return recorder.losses


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", ["liger", "liger_ddp"])
def test_gradients_are_freed_before_the_first_forward_of_a_step(strategy: str, accumulate: int) -> None:
    plain, ours = Module(), Module()
    assert fit(ours, strategy, accumulate=accumulate) == fit(plain, "auto", accumulate=accumulate)
    assert ours.had_gradients == [index % accumulate > 0 for index in range(NUM_BATCHES)] * 2
    assert sum(plain.had_gradients) == 13  # all but the very first forward


@pytest.mark.parametrize("module_class", [LooksAtGradients, NeverZeroes])
def test_modules_that_zero_gradients_themselves_or_look_at_them_find_them(module_class: type[Module]) -> None:
    plain, ours = module_class(), module_class()
    assert fit(ours, "liger") == fit(plain, "auto")
    assert ours.had_gradients == plain.had_gradients
    assert getattr(ours, "norms", None) == getattr(plain, "norms", None)


def test_callbacks_that_look_at_gradients_find_them() -> None:
    class Watcher(L.Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            pass

    watched = Module()
    fit(watched, "liger", Watcher())
    assert sum(watched.had_gradients) == 13
