"""Where FSDP training gets its kernels, after the dtype conversion and before wrapping, and clips its gradients."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import lightning as L
import lightning.fabric.plugins.precision.fsdp as fabric_fsdp
import lightning.pytorch.plugins.precision.fsdp as pytorch_fsdp
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_liger.clipping import clip_gradient_norm
from lightning_liger.lazy_logits import lazy_logits
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice, apply_and_announce

OnNonfiniteGrad = Literal["raise", "skip", "ignore"]


def check_on_nonfinite_grad(on_nonfinite_grad: str) -> None:
    """Raises ValueError for a value that is none of the three."""
    if on_nonfinite_grad not in get_args(OnNonfiniteGrad):
        raise ValueError(f"on_nonfinite_grad must be one of {get_args(OnNonfiniteGrad)}, got {on_nonfinite_grad!r}")


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
    def replacing(cls, plugin: Any, kernels: KernelChoice, **options: Any) -> Any:
        """This plugin with the settings of one that Lightning made."""
        return cls(plugin.precision, plugin.scaler, kernels=kernels, **options)

    def convert_module(self, module: Module) -> Module:
        """Casts the module's parameters as the precision says, then applies the kernels."""
        module = super().convert_module(module)  # type: ignore[misc]
        self.patch_report = apply_and_announce(module, self.kernels, self.patch_report)
        return module


class LigerPrecisionPlugin(_KernelConversion, pytorch_fsdp.FSDPPrecision):
    """Lightning's FSDP precision, which also applies fused kernels to the module it converts and clips by norm.

    The norm of the gradients before they are clipped, over all ranks, is logged as ``grad_norm``.

    Args:
        precision: ``"32-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or ``"bf16-mixed"``.
        scaler: A ``ShardedGradScaler`` for ``"16-mixed"``.
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.
        on_nonfinite_grad: As in :class:`~lightning_liger.LigerStrategy`.

    Raises:
        ValueError: For an unknown precision, kernel or ``on_nonfinite_grad``, and for ``"raise"`` with ``"16-mixed"``.
    """

    def __init__(
        self,
        precision: Any = "32-true",
        scaler: Any = None,
        kernels: KernelChoice = "auto",
        on_nonfinite_grad: OnNonfiniteGrad = "ignore",
    ) -> None:
        super().__init__(precision, scaler, kernels)
        check_on_nonfinite_grad(on_nonfinite_grad)
        if on_nonfinite_grad == "raise" and self.scaler is not None:
            raise ValueError(
                "on_nonfinite_grad='raise' would end training with precision='16-mixed', whose scaler finds its scale"
                " through gradients that overflow and skips those steps; expected 'skip' or 'ignore'"
            )
        self.on_nonfinite_grad = on_nonfinite_grad

    @override
    def connect(self, model: Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Keeps the wrapped model: the norm of sharded gradients is taken at its FSDP root."""
        self._model = model
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0 and self.scaler is not None and _optimizer_handles_unscaling(optimizer):
            raise RuntimeError(
                f"gradient_clip_val={clip_val} with precision='16-mixed' needs an optimizer whose gradients are"
                f" unscaled before its step, got {type(optimizer).__name__} with fused=True"
            )
        by_norm = clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.NORM
        if self.on_nonfinite_grad != "ignore" and self.scaler is None and not by_norm:
            self.clip_grad_by_norm(optimizer, math.inf)  # looks at the norm only
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        # PyTorch fails without any gradient: in a skipped step, or on a rank whose shards are empty.
        if any(parameter.grad is not None for parameter in self.main_params(optimizer)):
            super().clip_grad_by_value(optimizer, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        norm = clip_gradient_norm(self._model, self.main_params(optimizer), clip_val)
        module = self._model.module if isinstance(self._model, FullyShardedDataParallel) else self._model
        assert isinstance(module, L.LightningModule)
        module.log("grad_norm", norm, on_step=True, on_epoch=False)
        if self.on_nonfinite_grad == "ignore" or norm.isfinite():
            return
        if self.on_nonfinite_grad == "raise":
            raise RuntimeError(f"on_nonfinite_grad='raise': the norm of the gradients is {norm.item()}, not finite")
        rank_zero_warn(f"on_nonfinite_grad='skip': the norm of the gradients is {norm.item()}, this step is skipped")
        for parameter in self.main_params(optimizer):
            parameter.grad = None  # optimizers leave alone what has no gradient: no decay, no moments, no step count

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
