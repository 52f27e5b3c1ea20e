"""Gradients of a finished step are freed before the next forward instead of after it."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer


def release_gradients(optimizer: Optimizer, module: Any) -> None:
    """Frees the gradients that the last step of ``optimizer`` used, before a forward of ``module``.

    Lightning zeroes them between forward and backward, so that activations and old gradients are in memory together.
    A module or callback that has something to do when gradients are zeroed finds them as Lightning leaves them.
    """
    if (
        module.automatic_optimization
        and not is_overridden("optimizer_zero_grad", module)
        and not is_overridden("on_before_zero_grad", module)
        and not any(is_overridden("on_before_zero_grad", each, parent=Callback) for each in module.trainer.callbacks)
    ):
        optimizer.zero_grad()
