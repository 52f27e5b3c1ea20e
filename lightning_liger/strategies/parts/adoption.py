"""Strategies extend the precision plugin that Lightning gives them: it then applies kernels and clips gradients."""

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy

from liger_ops.arguments import wrong_value
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.parts.arguments import FABRIC_REFUSES, check_overridden, refuse
from lightning_liger.strategies.precision import (
    ClippedPrecision,
    KernelConversion,
    OnNonfiniteGrad,
    adopt,
    check_on_nonfinite_grad,
)
from lightning_liger.training.protocol import EngineDefaults

if TYPE_CHECKING:
    _TrainerStrategy = Strategy
    _FabricStrategy = FabricStrategy
else:
    _TrainerStrategy = _FabricStrategy = object


class TrainerKernels(EngineDefaults, _TrainerStrategy):
    """Applies kernels, and logs and checks the norm of gradients. A mixin for the Trainer's strategies.

    Args:
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.
        on_nonfinite_grad: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        **kwargs: For the next class.

    Raises:
        ValueError: For an unknown kernel or ``on_nonfinite_grad``.
    """

    _precision_mixin: type[KernelConversion] = ClippedPrecision
    """The mixin that extends the precision plugin under this engine."""
    _overridden: tuple[str, ...] = ()
    """Lightning's private methods that the strategy overrides."""

    def __init__(
        self, kernels: KernelChoice = "auto", on_nonfinite_grad: OnNonfiniteGrad = "ignore", **kwargs: Any
    ) -> None:
        check_overridden(self, self._overridden)
        check_kernels(kernels)
        check_on_nonfinite_grad(on_nonfinite_grad)
        self.kernels = kernels
        self.on_nonfinite_grad = on_nonfinite_grad
        super().__init__(**kwargs)

    def _precision_settings(self) -> dict[str, Any]:
        return {"kernels": self.kernels, "on_nonfinite_grad": self.on_nonfinite_grad}

    @property
    def precision_plugin(self) -> Any:
        plugin = super().precision_plugin
        if self._precision_plugin is None:  # Lightning makes a new one each time
            adopt(plugin, self._precision_mixin, **self._precision_settings())
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        # Lightning's setter comes first: it checks the type. The class that defines it differs between engines.
        super(TrainerKernels, type(self)).precision_plugin.fset(self, precision_plugin)  # type: ignore[attr-defined]
        if precision_plugin is not None:
            adopt(precision_plugin, self._precision_mixin, **self._precision_settings())

    def connect(self, model: L.LightningModule) -> None:
        clip_val = model.trainer.gradient_clip_val
        if clip_val is not None and not clip_val >= 0:
            raise wrong_value("gradient_clip_val", "at least 0, or None", clip_val)
        # The first call of each run: another strategy may have adopted the plugin since.
        if self._precision_plugin is not None:
            adopt(self._precision_plugin, self._precision_mixin, **self._precision_settings())
        super().connect(model)

    @property
    def patch_report(self) -> PatchReport | None:
        """The report of replaced modules, None before the model was set up."""
        return getattr(self._precision_plugin, "patch_report", None)


class FabricKernels(_FabricStrategy):
    """Applies kernels. A mixin for Fabric's strategies.

    Args:
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.
        on_nonfinite_grad: Only ``"ignore"``; strategies of the Trainer can do more.
        context_parallel_size: Only 1; strategies of the Trainer can do more.
        **kwargs: For the next class.

    Raises:
        ValueError: For an unknown kernel, and for the arguments above with other values.
    """

    _precision_mixin: type[KernelConversion] = KernelConversion
    _overridden: tuple[str, ...] = ()

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        on_nonfinite_grad: OnNonfiniteGrad = "ignore",
        context_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        check_overridden(self, self._overridden)
        check_kernels(kernels)
        refuse(
            type(self).__name__,
            FABRIC_REFUSES,
            on_nonfinite_grad=on_nonfinite_grad,
            context_parallel_size=context_parallel_size,
        )
        self.kernels = kernels
        super().__init__(**kwargs)

    def _precision_settings(self) -> dict[str, Any]:
        return {"kernels": self.kernels}

    @property
    def precision(self) -> Any:
        plugin = super().precision
        if self._precision is None:
            adopt(plugin, self._precision_mixin, **self._precision_settings())
        return plugin

    @precision.setter
    def precision(self, precision: Any) -> None:
        super(FabricKernels, type(self)).precision.fset(self, precision)  # type: ignore[attr-defined]  # as above
        if precision is not None:
            adopt(precision, self._precision_mixin, **self._precision_settings())

    @property
    def patch_report(self) -> PatchReport | None:
        """The report of replaced modules, None before the model was set up."""
        return getattr(self._precision, "patch_report", None)
