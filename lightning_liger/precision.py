"""Where FSDP training gets its kernels: after the dtype conversion, before wrapping."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.fabric.plugins.precision.fsdp as fabric_fsdp
import lightning.pytorch.plugins.precision.fsdp as pytorch_fsdp
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module
from typing_extensions import override

from lightning_liger.lazy_logits import lazy_logits
from lightning_liger.patching import PatchReport, apply_liger_kernels, check_kernels
from lightning_liger.patching.apply import KernelChoice


class _KernelConversion:
    """What the Trainer's and Fabric's plugins share; placed before Lightning's class."""

    kernels: KernelChoice
    patch_report: PatchReport | None

    def __init__(self, precision: Any = "32-true", scaler: Any = None, kernels: KernelChoice = "auto") -> None:
        super().__init__(precision, scaler)  # type: ignore[call-arg]
        check_kernels(kernels)
        self.kernels = kernels
        self.patch_report = None

    @classmethod
    def replacing(cls, plugin: Any, kernels: KernelChoice) -> Any:
        """This plugin with the settings of one that Lightning made."""
        replacement = cls(plugin.precision, kernels=kernels)
        replacement.scaler = plugin.scaler
        return replacement

    def convert_module(self, module: Module) -> Module:
        """Casts the module's parameters as the precision says, then applies the kernels."""
        module = super().convert_module(module)  # type: ignore[misc]
        report = apply_liger_kernels(module, self.kernels)
        if self.patch_report is None or report.num_replaced:
            self.patch_report = report
            rank_zero_info(f"lightning-liger: fused kernels in {report.num_replaced} modules (kernels={self.kernels})")
        return module


class LigerPrecisionPlugin(_KernelConversion, pytorch_fsdp.FSDPPrecision):
    """Lightning's FSDP precision, which also applies fused kernels to the module it converts.

    Args:
        precision: ``"32-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or ``"bf16-mixed"``.
        scaler: A ``ShardedGradScaler`` for ``"16-mixed"``.
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.

    Raises:
        ValueError: For an unknown precision or kernel.
    """

    @contextmanager
    @override
    def val_step_context(self) -> Iterator[None]:
        with super().val_step_context(), lazy_logits():
            yield

    @contextmanager
    @override
    def test_step_context(self) -> Iterator[None]:
        with super().test_step_context(), lazy_logits():
            yield


class FabricLigerPrecisionPlugin(_KernelConversion, fabric_fsdp.FSDPPrecision):
    """:class:`LigerPrecisionPlugin` for Fabric."""
