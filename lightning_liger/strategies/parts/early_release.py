"""Gradients of a finished step are freed before the next forward instead of after it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

if TYPE_CHECKING:
    _TrainerStrategy = Strategy
else:
    _TrainerStrategy = object


class EarlyRelease(_TrainerStrategy):
    """Frees the last step's gradients before a forward. A mixin for the Trainer's strategies.

    Lightning zeroes them between forward and backward, so that activations and old gradients are in memory together.
    A module or callback that has something to do when gradients are zeroed finds them as Lightning leaves them.
    """

    _used: Optimizer | None = None
    """The optimizer whose step used the gradients that are still there."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._used = optimizer
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        used, self._used = self._used, None
        assert self.lightning_module is not None
        if used is not None and not _watches_zeroing(self.lightning_module):
            used.zero_grad()
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        self._used = None
        super().teardown()


def _watches_zeroing(module: LightningModule) -> bool:
    """Whether zeroing is not Lightning's alone, in a run of automatic optimization."""
    trainer: Trainer = module.trainer
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside of Trainer.__init__
    return (
        not module.automatic_optimization
        or is_overridden("optimizer_zero_grad", module)
        or is_overridden("on_before_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks)
    )
