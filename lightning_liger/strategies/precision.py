"""Precision plugins: those that apply kernels under other strategies, and what strategies add to plugins of others.

A strategy applies kernels itself. The Trainer clips gradients through its precision plugin, and the loss is
differentiated there: for these two alone :func:`control_gradients` extends the class of the plugin that Lightning, or
its user, made.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

import lightning as L
import lightning.fabric.plugins.precision.fsdp as fabric_fsdp
import lightning.pytorch.plugins.precision.fsdp as pytorch_fsdp
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Module
from torch.optim import Optimizer

from liger_ops.arguments import check_choice, wrong_type
from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.lazy.steps import settle
from lightning_liger.patching import PatchReport
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.patching.float8 import Float8Choice
from lightning_liger.sequences.context_parallel import outermost_models
from lightning_liger.strategies.parts.buffers import buffers_as_pretrained
from lightning_liger.strategies.parts.gradient_norm import clip_gradient_norm
from lightning_liger.strategies.parts.kernels import Kernels
from lightning_liger.subclasses import made_subclass

OnNonfiniteGrad = Literal["raise", "skip", "ignore"]


def _check_scaler(on_nonfinite_grad: OnNonfiniteGrad, scaler: Any) -> None:
    if on_nonfinite_grad == "raise" and scaler is not None:
        raise ValueError(
            "on_nonfinite_grad='raise' would end training with precision='16-mixed', whose scaler finds its scale"
            " through gradients that overflow and skips those steps; expected 'skip' or 'ignore'"
        )


class GradientClipping(Precision):
    """Clips by the norm over all ranks, and acts on gradients that are not finite. A mixin for the Trainer's plugins.

    The norm before clipping is logged as ``grad_norm``.
    """

    on_nonfinite_grad: OnNonfiniteGrad = "ignore"
    scaler: Any = None

    def connect(self, model: Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Keeps the wrapped model: FSDP takes the norm of sharded gradients at its root."""
        self._model = model
        is_sharded = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        self._units = model if is_sharded else Module()  # of FSDP, not looked for in each step
        return super().connect(model, optimizers, lr_schedulers)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        if clip_val > 0 and self.scaler is not None and is_fused:
            raise RuntimeError(
                f"gradient_clip_val={clip_val} with precision='16-mixed' needs an optimizer whose gradients are"
                f" unscaled before its step, got {type(optimizer).__name__} with fused=True"
            )
        by_norm = clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.NORM
        if self.on_nonfinite_grad != "ignore" and self.scaler is None and not by_norm:
            self.clip_grad_by_norm(optimizer, math.inf)  # only looks at the norm
        # Mixed precision's own method refuses fused optimizers even without a scaler, when gradients are not scaled.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        # PyTorch fails without any gradient: in a skipped step, or on a rank whose shards are empty.
        if any(parameter.grad is not None for parameter in self.main_params(optimizer)):
            super().clip_grad_by_value(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self.main_params(optimizer))
        norm = clip_gradient_norm(self._units, parameters, clip_val)
        module = self._model if isinstance(self._model, L.LightningModule) else self._model.module
        assert isinstance(module, L.LightningModule)
        module.log("grad_norm", norm, on_step=True, on_epoch=False)
        if self.on_nonfinite_grad == "ignore" or norm.isfinite():
            return
        if self.on_nonfinite_grad == "raise":
            raise RuntimeError(f"on_nonfinite_grad='raise': the norm of the gradients is {norm.item()}, not finite")
        rank_zero_warn(f"on_nonfinite_grad='skip': the norm of the gradients is {norm.item()}, this step is skipped")
        for parameter in parameters:
            parameter.grad = None  # optimizers leave it alone then: no decay, no moments, no step count


class BackwardInContext(Precision):
    """Runs backward in a context, before any hook of a callback or module. A mixin for the Trainer's plugins."""

    backward_context: Callable[[], AbstractContextManager[None]]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self.backward_context():
            super().backward(*args, **kwargs)


def has_buffer_dtypes(precision: str, module: Module) -> bool:
    """Whether buffers have their dtypes already, and FSDP must not cast them.

    They do in true half precision, and in Hugging Face models, which other engines give frequencies in float32 too.
    """
    return precision in ("16-true", "bf16-true") or any(True for _ in outermost_models(module))


class AppliesKernels(FabricPrecision):
    """Applies kernels to the module that it converts. A mixin for FSDP's plugins."""

    scaler: Any

    def __init__(
        self, precision: Any = "32-true", scaler: Any = None, kernels: KernelChoice = "auto", fp8: Float8Choice = None
    ) -> None:
        super().__init__(precision)  # type: ignore[call-arg]  # FSDP's; Lightning 2.6 refuses every scaler
        if scaler is not None and precision != "16-mixed":
            raise ValueError(f"scaler is for precision '16-mixed' only, got precision={precision!r}")
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):  # others do not agree with other ranks
            raise wrong_type("scaler", "a torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler or None", scaler)
        self.scaler = scaler or self.scaler
        self.kernels, self.fp8 = kernels, fp8
        self.patching = Kernels(kernels, fp8)
        self._has_buffer_dtypes = has_buffer_dtypes(precision, Module())

    @property
    def patch_report(self) -> PatchReport | None:
        """The report of replaced modules, None before a module was converted."""
        return self.patching.report

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        config: MixedPrecision = super().mixed_precision_config  # type: ignore[misc]  # of FSDP's
        return replace(config, buffer_dtype=None) if self._has_buffer_dtypes else config

    def convert_module(self, module: Module) -> Module:
        """Casts the module as the precision says, but not all buffers of Hugging Face models; applies the kernels."""
        with buffers_as_pretrained(module):
            module = super().convert_module(module)
        self._has_buffer_dtypes = has_buffer_dtypes(self.precision, module)
        self.patching.apply(module, self.precision)
        return module


class LigerPrecisionPlugin(GradientClipping, AppliesKernels, pytorch_fsdp.FSDPPrecision):
    """Lightning's FSDP precision that also applies fused kernels to the module it converts and clips by norm.

    The norm of the gradients over all ranks, before clipping, is logged as ``grad_norm``. Under a strategy of this
    package its settings replace the strategy's.

    Args:
        precision: ``"32-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or ``"bf16-mixed"``.
        scaler: A ``ShardedGradScaler`` for ``"16-mixed"``.
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.
        on_nonfinite_grad: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        fp8: As there.

    Raises:
        TypeError: For ``kernels`` or a ``scaler`` of another type.
        ValueError: For an unknown precision, kernel or ``on_nonfinite_grad``, and for ``"raise"`` with ``"16-mixed"``.
    """

    def __init__(
        self,
        precision: Any = "32-true",
        scaler: Any = None,
        kernels: KernelChoice = "auto",
        on_nonfinite_grad: OnNonfiniteGrad = "ignore",
        fp8: Float8Choice = None,
    ) -> None:
        super().__init__(precision, scaler, kernels, fp8)
        check_choice("on_nonfinite_grad", on_nonfinite_grad, get_args(OnNonfiniteGrad))
        _check_scaler(on_nonfinite_grad, self.scaler)
        self.on_nonfinite_grad = on_nonfinite_grad

    def optimizer_step(  # type: ignore[override]  # of the Trainer's, which has more arguments than Fabric's
        self, optimizer: Any, model: L.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        return super().optimizer_step(optimizer, model=model, closure=settled(closure, model), **kwargs)

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        with lazy_until_the_end_of("a validation step"), super().val_step_context():
            yield

    @contextmanager
    def test_step_context(self) -> Iterator[None]:
        with lazy_until_the_end_of("a test step"), super().test_step_context():
            yield


@contextmanager
def lazy_until_the_end_of(step: str) -> Iterator[None]:
    """Logits are lazy in a step without gradients; what somebody keeps of them is real after it."""
    with lazy_logits():
        yield
    settle(f"the end of {step}")


def settled(closure: Callable[[], Any], module: L.LightningModule) -> Callable[[], Any]:
    """``closure`` of a training step, after which logits that somebody keeps are real: the optimizer steps next."""

    def closed() -> Any:
        result = closure()
        if module.automatic_optimization:  # or else the variables of the training step exist
            settle("optimizer.step()")
        return result

    return closed


class FabricLigerPrecisionPlugin(AppliesKernels, fabric_fsdp.FSDPPrecision):
    """:class:`LigerPrecisionPlugin` for Fabric, which clips gradients elsewhere."""


def control_gradients(
    plugin: Any,
    on_nonfinite_grad: OnNonfiniteGrad,
    backward_context: Callable[[], AbstractContextManager[None]] | None = None,
) -> None:
    """Lets a plugin of the Trainer clip as a strategy says, and run backward in a context.

    A ``LigerPrecisionPlugin`` keeps its own settings, and a plugin with another ``clip_grad_by_norm`` than Lightning's
    keeps that: ValueError if it cannot follow ``on_nonfinite_grad``.
    """
    mixins: tuple[type[Precision], ...] = ()
    if backward_context is not None:
        mixins += (BackwardInContext,)
        plugin.backward_context = backward_context
    if not isinstance(plugin, LigerPrecisionPlugin):
        lightnings = (Precision.clip_grad_by_norm, pytorch_fsdp.FSDPPrecision.clip_grad_by_norm)
        if isinstance(plugin, GradientClipping) or type(plugin).clip_grad_by_norm in lightnings:
            mixins += (GradientClipping,)
            _check_scaler(on_nonfinite_grad, getattr(plugin, "scaler", None))
            plugin.on_nonfinite_grad = on_nonfinite_grad
        elif on_nonfinite_grad != "ignore":
            raise ValueError(
                f"on_nonfinite_grad={on_nonfinite_grad!r} needs a precision plugin with Lightning's"
                f" clip_grad_by_norm, got {type(plugin).__name__}, which overrides it: use"
                " on_nonfinite_grad='ignore' or Lightning's plugin"
            )
    if missing := tuple(mixin for mixin in mixins if not isinstance(plugin, mixin)):
        plugin.__class__ = _with_mixins(type(plugin), *missing)


@made_subclass
def _with_mixins(plugin_class: type[Precision], *mixins: type[Precision]) -> type:
    return type(plugin_class.__name__, (*mixins, plugin_class), {"__module__": plugin_class.__module__})
