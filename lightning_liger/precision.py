"""Where FSDP training gets its kernels: after the dtype conversion, before wrapping."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.fabric.plugins.precision.fsdp as fabric_fsdp
import lightning.pytorch.plugins.precision.fsdp as pytorch_fsdp
from torch.nn import Module
from typing_extensions import override

from lightning_liger.lazy_logits import lazy_logits
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice, apply_and_announce


class _KernelConversion:
    """What the Trainer's and Fabric's plugins share; placed before Lightning's class."""

    kernels: KernelChoice
    patch_report: PatchReport | None

    def __init__(self, precision: Any = "32-true", scaler: Any = None, kernels: KernelChoice = "auto") -> None:
        super().__init__(precision)  # type: ignore[call-arg]
        if scaler is not None:  # Lightning 2.6 refuses every scaler that it is given
            if precision != "16-mixed":
                raise ValueError(f"scaler is for precision '16-mixed' only, got precision={precision!r}")
            self.scaler = scaler
        check_kernels(kernels)
        self.kernels = kernels
        self.patch_report = None

    @classmethod
    def replacing(cls, plugin: Any, kernels: KernelChoice) -> Any:
        """This plugin with the settings of one that Lightning made."""
        return cls(plugin.precision, plugin.scaler, kernels=kernels)

    def convert_module(self, module: Module) -> Module:
        """Casts the module's parameters as the precision says, then applies the kernels."""
        module = super().convert_module(module)  # type: ignore[misc]
        self.patch_report = apply_and_announce(module, self.kernels, self.patch_report)
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
