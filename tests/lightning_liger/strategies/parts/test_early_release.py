"""Old gradients are gone before the next forward, and training is the same."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.lightning_liger.tiny import quiet_trainer


class Module(L.LightningModule):
    """Notes before each forward whether parameters have gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.had_gradients: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.had_gradients.append(self.linear.weight.grad is not None)
        return self.linear(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LooksAtGradients(Module):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.linear.weight.grad
        self.norms = [*getattr(self, "norms", []), None if gradient is None else gradient.norm().item()]


class NeverZeroes(Module):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


def fit(module: L.LightningModule, strategy: str, accumulate: int = 1, callbacks: Any = None) -> Tensor:
    rows = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy=strategy, callbacks=callbacks, **options)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=1))
    return module.linear.weight.detach().clone()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", ["liger", "liger_ddp"])
def test_gradients_are_freed_before_the_first_forward_of_a_step(strategy: str, accumulate: int) -> None:
    plain, ours = Module(), Module()
    expected = fit(plain, "auto", accumulate)
    assert torch.equal(fit(ours, strategy, accumulate), expected)
    # The last step of an epoch may have fewer micro-batches.
    assert ours.had_gradients == [index % accumulate > 0 for index in range(7)] * 2
    assert sum(plain.had_gradients) == 13  # all but the very first forward


@pytest.mark.parametrize("module_class", [LooksAtGradients, NeverZeroes])
def test_modules_that_zero_gradients_themselves_or_look_at_them_find_them(module_class: type[Module]) -> None:
    plain, ours = module_class(), module_class()
    assert torch.equal(fit(ours, "liger"), fit(plain, "auto"))
    assert ours.had_gradients == plain.had_gradients
    assert getattr(ours, "norms", None) == getattr(plain, "norms", None)


def test_callbacks_that_look_at_gradients_find_them() -> None:
    class Watcher(L.Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            pass

    watched = Module()
    fit(watched, "liger", callbacks=[Watcher()])
    assert sum(watched.had_gradients) == 13
