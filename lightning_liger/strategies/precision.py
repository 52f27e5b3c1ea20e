"""Where gradients are clipped, and where FSDP training gets its kernels: between dtype conversion and wrapping."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import lightning as L
import lightning.fabric.plugins.precision.fsdp as fabric_fsdp
import lightning.pytorch.plugins.precision.fsdp as pytorch_fsdp
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice, apply_and_announce
from lightning_liger.strategies.parts.gradient_norm import clip_gradient_norm, clip_whole_norm

OnNonfiniteGrad = Literal["raise", "skip", "ignore"]


def check_on_nonfinite_grad(on_nonfinite_grad: str) -> None:
    """Raises ValueError for a value that is none of the three."""
    if on_nonfinite_grad not in get_args(OnNonfiniteGrad):
        raise ValueError(f"on_nonfinite_grad must be one of {get_args(OnNonfiniteGrad)}, got {on_nonfinite_grad!r}")


class GradientClipping:
    """Placed before a precision plugin of the Trainer's, logs the norm of gradients and acts on one that is not finite.

    The norm of the gradients before they are clipped, over all ranks, is logged as ``grad_norm``.
    """

    on_nonfinite_grad: OnNonfiniteGrad
    scaler: Any = None

    def connect(self, model: Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Keeps the model, wrapped as it is: FSDP takes the norm of sharded gradients at its root."""
        self._model = model
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

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
        # Mixed precision's own refuses fused optimizers without a scaler too, where gradients are as they are.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)  # type: ignore[arg-type]

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        # PyTorch fails without any gradient: in a skipped step, or on a rank whose shards are empty.
        if any(parameter.grad is not None for parameter in self.main_params(optimizer)):  # type: ignore[attr-defined]
            super().clip_grad_by_value(optimizer, clip_val)  # type: ignore[misc]

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self.main_params(optimizer))  # type: ignore[attr-defined]
        norm = self._clip_norm(parameters, clip_val)
        module = self._model if isinstance(self._model, L.LightningModule) else self._model.module
        assert isinstance(module, L.LightningModule)
        module.log("grad_norm", norm, on_step=True, on_epoch=False)
        if self.on_nonfinite_grad == "ignore" or norm.isfinite():
            return
        if self.on_nonfinite_grad == "raise":
            raise RuntimeError(f"on_nonfinite_grad='raise': the norm of the gradients is {norm.item()}, not finite")
        rank_zero_warn(f"on_nonfinite_grad='skip': the norm of the gradients is {norm.item()}, this step is skipped")
        for parameter in parameters:
            parameter.grad = None  # optimizers leave alone what has no gradient: no decay, no moments, no step count

    def _clip_norm(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        return clip_whole_norm(parameters, max_norm)


def clip_with(plugin: Precision, on_nonfinite_grad: OnNonfiniteGrad) -> None:
    """Makes ``plugin`` clip as :class:`GradientClipping` does, unless it has a way or a choice of its own.

    Raises:
        ValueError: If its own way would not heed ``on_nonfinite_grad``, and for ``"raise"`` with a scaler.
    """
    if isinstance(plugin, LigerPrecisionPlugin):
        return
    if isinstance(plugin, GradientClipping) or type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
        _check_scaler(on_nonfinite_grad, getattr(plugin, "scaler", None))
        plugin.__class__ = _clipping_class(type(plugin))
        plugin.on_nonfinite_grad = on_nonfinite_grad
    elif on_nonfinite_grad != "ignore":
        raise ValueError(
            f"on_nonfinite_grad={on_nonfinite_grad!r} needs a precision plugin that clips by norm as Lightning's do,"
            f" got {type(plugin).__name__} with a clip_grad_by_norm of its own"
        )


@functools.cache
def _clipping_class(plugin_class: type[Any]) -> type[Any]:
    if issubclass(plugin_class, GradientClipping):
        return plugin_class
    return type(plugin_class.__name__, (GradientClipping, plugin_class), {"__module__": plugin_class.__module__})


def _check_scaler(on_nonfinite_grad: OnNonfiniteGrad, scaler: Any) -> None:
    if on_nonfinite_grad == "raise" and scaler is not None:
        raise ValueError(
            "on_nonfinite_grad='raise' would end training with precision='16-mixed', whose scaler finds its scale"
            " through gradients that overflow and skips those steps; expected 'skip' or 'ignore'"
        )


class _KernelConversion:
    """What the Trainer's and Fabric's plugins share; placed before Lightning's class."""

    kernels: KernelChoice
    patch_report: PatchReport | None
    _with_gradients: set[Parameter] | None = None
    """If gradients come to the CPU, parameters that had one before every forward since the last backward."""

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

    def add_up_offloaded(self, model: Module) -> None:
        """Tells that FSDP brings the gradients of ``model``, which it wraps, to the CPU: each over the last."""
        model.register_forward_pre_hook(self._note_gradients)

    def _note_gradients(self, model: Module, args: Any) -> None:
        # Before forward, which shows gradients of earlier steps again that were set to None.
        found = {p for p in model.parameters() if p.grad is not None and p.grad.device.type == "cpu"}
        self._with_gradients = found if self._with_gradients is None else self._with_gradients & found

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Adds up the gradients of several micro-batches that FSDP brings to the CPU."""
        gradients = {p: p.grad for p in self._with_gradients or () if p.grad is not None}
        self._with_gradients = None
        earlier = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient.zero_()  # of units that this backward does not reach
        super().backward(*args, **kwargs)  # type: ignore[misc]
        for parameter, gradient in earlier.items():
            parameter.grad.add_(gradient)


class LigerPrecisionPlugin(GradientClipping, _KernelConversion, pytorch_fsdp.FSDPPrecision):
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
        _check_scaler(on_nonfinite_grad, self.scaler)
        self.on_nonfinite_grad = on_nonfinite_grad

    @override
    def _clip_norm(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        return clip_gradient_norm(self._model, parameters, max_norm)

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
