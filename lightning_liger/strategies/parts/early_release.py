"""Gradients of a finished step are freed before the next forward instead of after it."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer


class EarlyRelease:
    """Frees the last step's gradients before a forward.

    Lightning zeroes them between forward and backward, so that activations and old gradients are in memory together.
    A module or callback that has something to do when gradients are zeroed finds them as Lightning leaves them.
    """

    used: Optimizer | None = None
    """The optimizer whose step used the gradients that are still there."""

    def before_forward(self, module: Any) -> None:
        used, self.used = self.used, None
        if used is not None and not _watches_zeroing(module):
            used.zero_grad()


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
