"""Precision plugins that apply kernels, make the logits of evaluation lazy and clip gradients.

Lightning calls ``convert_module`` of the precision plugin in every engine's set-up, for Trainer and Fabric alike, after
``configure_model`` and before the engine wraps the model. Strategies therefore adopt the plugin that Lightning (or its
user) made: :func:`adopt` extends its class by the mixins of this file.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import lightning as L
import lightning.fabric.plugins.precision.fsdp as fabric_fsdp
import lightning.pytorch.plugins.precision.fsdp as pytorch_fsdp
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from liger_ops.arguments import check_choice, wrong_type
from lightning_liger.lazy.lineage import settle
from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice, apply_and_announce
from lightning_liger.strategies.parts.buffers import buffers_as_pretrained
from lightning_liger.strategies.parts.gradient_norm import clip_gradient_norm, clip_whole_norm

if TYPE_CHECKING:
    _AnyPrecision = FabricPrecision
    _TrainerPrecision = Precision
else:
    _AnyPrecision = _TrainerPrecision = object

OnNonfiniteGrad = Literal["raise", "skip", "ignore"]


def check_on_nonfinite_grad(on_nonfinite_grad: str) -> None:
    """Raises ValueError for a value that is none of the three."""
    check_choice("on_nonfinite_grad", on_nonfinite_grad, get_args(OnNonfiniteGrad))


def _check_scaler(on_nonfinite_grad: OnNonfiniteGrad, scaler: Any) -> None:
    if on_nonfinite_grad == "raise" and scaler is not None:
        raise ValueError(
            "on_nonfinite_grad='raise' would end training with precision='16-mixed', whose scaler finds its scale"
            " through gradients that overflow and skips those steps; expected 'skip' or 'ignore'"
        )


class KernelConversion(_AnyPrecision):
    """Applies kernels to the module that it converts. A mixin for precision plugins of Trainer and Fabric."""

    kernels: KernelChoice = "auto"
    patch_report: PatchReport | None = None
    is_adopted = False
    """Whether a strategy, not the user, set this plugin up."""
    control_activations: Callable[[Module], None] | None = None
    """Sets the modes of the module's layers, before the engine wraps it."""
    shown_parameters: Callable[[Module], AbstractContextManager[Any]] = nullcontext
    """Returns a context in which the module's parameters look as the engine will have them."""

    def convert_module(self, module: Module) -> Module:
        """Casts the module as the precision says, but not all buffers of Hugging Face models; applies the kernels."""
        with buffers_as_pretrained(module):
            module = super().convert_module(module)
        with self.shown_parameters(module):
            self.patch_report = apply_and_announce(module, self.kernels, self.patch_report)
        if self.control_activations is not None:
            self.control_activations(module)
        return module


class LazyEvaluation(_TrainerPrecision):
    """Makes logits lazy in validation and test steps, which have no gradients, and real those that a step returned.

    A mixin for the Trainer's plugins.
    """

    def optimizer_step(  # type: ignore[override]  # of the Trainer's, which has more arguments than Fabric's
        self, optimizer: Any, model: L.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        def settled() -> Any:
            result = closure()
            if model.automatic_optimization:  # or else the variables of the training step exist
                settle("optimizer.step()")
            return result

        return super().optimizer_step(optimizer, model=model, closure=settled, **kwargs)

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        with super().val_step_context(), lazy_logits():
            yield
        settle("the end of a validation step")

    @contextmanager
    def test_step_context(self) -> Iterator[None]:
        with super().test_step_context(), lazy_logits():
            yield
        settle("the end of a test step")


class GradientClipping(_TrainerPrecision):
    """Logs the norm of gradients and acts on one that is not finite. A mixin for the Trainer's precision plugins.

    The norm over all ranks, before clipping, is logged as ``grad_norm``.
    """

    on_nonfinite_grad: OnNonfiniteGrad = "ignore"
    scaler: Any = None

    def connect(self, model: Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Keeps the wrapped model: FSDP takes the norm of sharded gradients at its root."""
        self._model = model
        return super().connect(model, optimizers, lr_schedulers)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # PyTorch's fused optimizers say so by this attribute, which its GradScaler looks for.
        if clip_val > 0 and self.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
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
            parameter.grad = None  # optimizers leave it alone then: no decay, no moments, no step count

    def _clip_norm(self, parameters: list[Parameter], max_norm: float) -> Tensor:
        return clip_whole_norm(parameters, max_norm)


class UnderFSDP(_AnyPrecision):
    """Keeps dtypes of converted buffers, accumulates offloaded gradients, and shows frozen parameters after backward.

    FSDP would cast buffers again in the first forward, overwrite gradients that it offloads to the CPU, and leave
    frozen units that are not sharded without parameters. A mixin for FSDP's precision plugins.
    """

    _with_gradients: set[Parameter] | None = None
    """Parameters that had a gradient on the CPU before every forward since the last backward."""
    _whole_units: tuple[FullyShardedDataParallel, ...] = ()

    @property
    def mixed_precision_config(self) -> Any:
        """As Lightning's, without a dtype for buffers in true half precision: ``convert_module`` has cast them."""
        config = super().mixed_precision_config  # type: ignore[misc]  # of Lightning's FSDPPrecision
        return replace(config, buffer_dtype=None) if self.precision in ("16-true", "bf16-true") else config

    def accumulate_offloaded(self, model: Module) -> None:
        """Accumulates gradients of ``model``, which FSDP wraps and offloads."""
        model.register_forward_pre_hook(self._note_gradients)

    def show_frozen(self, units: Iterable[FullyShardedDataParallel]) -> None:
        """Restores the parameters of ``units``, which are not sharded, after each backward if all of them are frozen.

        FSDP takes parameters that are not sharded for restored ones: state dicts and ``parameters()`` lack them.
        """
        self._whole_units = tuple(units)

    def _note_gradients(self, model: Module, args: Any) -> None:
        # Before forward, in which FSDP shows the gradients of earlier steps again, although they were set to None.
        found = {p for p in model.parameters() if p.grad is not None and p.grad.device.type == "cpu"}
        self._with_gradients = found if self._with_gradients is None else self._with_gradients & found

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Adds the gradients of earlier micro-batches to those of this one."""
        gradients = {p: p.grad for p in self._with_gradients or () if p.grad is not None}
        self._with_gradients = None
        earlier = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient.zero_()  # of units that this backward does not reach
        super().backward(*args, **kwargs)
        for parameter, gradient in earlier.items():
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
        for unit in self._whole_units:
            if unit._handle is not None and not unit._handle.flat_param.requires_grad:
                unit._handle.reshard(False)


class EvaluatedPrecision(KernelConversion, LazyEvaluation):
    """For the Trainer's plugins if something else clips: DeepSpeed, or the user's own plugin."""


class ShardedEvaluatedPrecision(UnderFSDP, EvaluatedPrecision):
    """The Trainer's under FSDP, where the plugin has a way of clipping of its own."""


class ClippedPrecision(EvaluatedPrecision, GradientClipping):
    """For the Trainer's plugins; the default."""


class ShardedClippedPrecision(UnderFSDP, ClippedPrecision):
    """For the Trainer's plugins under FSDP."""

    def _clip_norm(self, parameters: list[Parameter], max_norm: float) -> Tensor:
        return clip_gradient_norm(self._model, parameters, max_norm)


class ShardedPrecision(UnderFSDP, KernelConversion):
    """For Fabric's plugins under FSDP."""


def _check_users_scaler(precision: str, scaler: Any) -> None:
    if scaler is not None and precision != "16-mixed":
        raise ValueError(f"scaler is for precision '16-mixed' only, got precision={precision!r}")
    if scaler is not None and not isinstance(scaler, ShardedGradScaler):  # others do not agree with other ranks
        raise wrong_type("scaler", "a torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler or None", scaler)


class LigerPrecisionPlugin(ShardedClippedPrecision, pytorch_fsdp.FSDPPrecision):
    """Lightning's FSDP precision that also applies fused kernels to the module it converts and clips by norm.

    The norm of the gradients over all ranks, before clipping, is logged as ``grad_norm``.

    Args:
        precision: ``"32-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or ``"bf16-mixed"``.
        scaler: A ``ShardedGradScaler`` for ``"16-mixed"``.
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.
        on_nonfinite_grad: As in :class:`~lightning_liger.LigerFSDPStrategy`.

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
    ) -> None:
        super().__init__(precision)
        _check_users_scaler(precision, scaler)
        check_kernels(kernels)
        check_on_nonfinite_grad(on_nonfinite_grad)
        self.scaler = scaler or self.scaler  # Lightning 2.6 refuses every scaler that it is given
        _check_scaler(on_nonfinite_grad, self.scaler)
        self.kernels = kernels
        self.on_nonfinite_grad = on_nonfinite_grad


class FabricLigerPrecisionPlugin(ShardedPrecision, fabric_fsdp.FSDPPrecision):
    """:class:`LigerPrecisionPlugin` for Fabric, which clips gradients elsewhere."""

    def __init__(self, precision: Any = "32-true", scaler: Any = None, kernels: KernelChoice = "auto") -> None:
        super().__init__(precision)
        _check_users_scaler(precision, scaler)
        check_kernels(kernels)
        self.scaler = scaler or self.scaler
        self.kernels = kernels


def adopt(plugin: Any, mixin: type[KernelConversion], **settings: Any) -> None:
    """Extends a precision plugin by the mixin that a strategy needs.

    Args:
        plugin: The plugin, whose class is changed. A plugin that its user made with settings for kernels is not.
        mixin: The class to list before the plugin's own. A plugin with another ``clip_grad_by_norm`` than Lightning's
            keeps that method.
        settings: Attributes of ``mixin``.

    Raises:
        ValueError: If the plugin cannot follow ``on_nonfinite_grad``.
    """
    if isinstance(plugin, KernelConversion) and not plugin.is_adopted:
        plugin.control_activations = settings.get("control_activations")
        return
    on_nonfinite_grad = settings.get("on_nonfinite_grad", "ignore")
    if issubclass(mixin, GradientClipping) and not _clips_as_lightning(type(plugin)):
        if on_nonfinite_grad != "ignore":
            raise ValueError(
                f"on_nonfinite_grad={on_nonfinite_grad!r} needs a precision plugin with Lightning's"
                f" clip_grad_by_norm, got {type(plugin).__name__}, which overrides it: use"
                " on_nonfinite_grad='ignore' or Lightning's plugin"
            )
        mixin = ShardedEvaluatedPrecision if issubclass(mixin, UnderFSDP) else EvaluatedPrecision
    _check_scaler(on_nonfinite_grad, getattr(plugin, "scaler", None))
    plugin_class: Any = type(plugin)
    plugin.__class__ = _with_mixin(plugin_class, cast(Any, mixin))
    vars(plugin).update(settings, is_adopted=True)


def _clips_as_lightning(plugin_class: type[Any]) -> bool:
    lightnings = (Precision.clip_grad_by_norm, pytorch_fsdp.FSDPPrecision.clip_grad_by_norm)
    return issubclass(plugin_class, GradientClipping) or plugin_class.clip_grad_by_norm in lightnings


@functools.cache
def _with_mixin(plugin_class: Any, mixin: Any) -> type[Any]:
    if issubclass(plugin_class, mixin):
        return plugin_class
    for named in (LigerPrecisionPlugin, FabricLigerPrecisionPlugin):
        if named.__bases__ == (mixin, plugin_class):
            return named
    namespace = {"__module__": plugin_class.__module__, "__reduce_ex__": _reduce_adopted}
    return type(plugin_class.__name__, (mixin, plugin_class), namespace)


def _reduce_adopted(plugin: Any, protocol: Any) -> Any:
    """Pickles a plugin, as launchers that spawn processes do, by the bases of its class, which no module has."""
    reduced = super(type(plugin), plugin).__reduce_ex__(protocol)
    return _new_adopted, type(plugin).__bases__, *reduced[2:]


def _new_adopted(mixin: Any, plugin_class: Any) -> Any:
    adopted: Any = _with_mixin(plugin_class, mixin)
    return adopted.__new__(adopted)
