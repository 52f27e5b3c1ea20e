"""Strategies, precision plugins and the callback apply kernels to a model before an engine wraps it."""

from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_liger.patching import PatchReport, apply_liger_kernels, check_kernels
from lightning_liger.patching.apply import KernelChoice


class Kernels:
    """Applies the chosen kernels to models; raises for a wrong choice."""

    def __init__(self, choice: KernelChoice) -> None:
        check_kernels(choice)
        self.choice = choice
        self.report: PatchReport | None = None
        """Of the last model in which modules were replaced, None before the first model."""

    def apply(self, model: Module) -> None:
        """Applies the kernels to a model whose parameters have their final dtypes; again, changes nothing."""
        report = apply_liger_kernels(model, self.choice)
        if self.report is None or report.num_replaced:
            self.report = report
            rank_zero_info(f"lightning-liger: fused kernels in {report.num_replaced} modules (kernels={self.choice})")
