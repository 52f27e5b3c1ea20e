"""What strategies, precision plugins and the callback do to a model before an engine wraps it."""

from torch.nn import Module

from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice, apply_and_announce


class Kernels:
    """Applies the chosen kernels to models.

    Args:
        choice: As in :func:`~lightning_liger.apply_liger_kernels`.

    Raises:
        TypeError: For a choice of another type.
        ValueError: For an unknown kernel or option.
    """

    def __init__(self, choice: KernelChoice) -> None:
        check_kernels(choice)
        self.choice = choice
        self.report: PatchReport | None = None
        """Of the last model in which modules were replaced, None before the first model."""

    def apply(self, model: Module) -> None:
        """Applies the kernels to a model whose parameters have their final dtypes; again, changes nothing."""
        self.report = apply_and_announce(model, self.choice, self.report)
