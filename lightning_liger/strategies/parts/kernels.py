"""What strategies do that apply fused kernels themselves, whatever the precision plugin is."""

from typing import Any

from torch.nn import Module

from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice, apply_and_announce
from lightning_liger.strategies.parts.fault_tolerance import FabricFaultTolerance, TrainerFaultTolerance
from lightning_liger.weights.materialize import materialize


class _Kernels:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    def __init__(self, kernels: KernelChoice = "auto", **kwargs: Any) -> None:
        check_kernels(kernels)
        self.kernels = kernels
        self._patch_report: PatchReport | None = None
        super().__init__(**kwargs)

    @property
    def patch_report(self) -> PatchReport | None:
        """What was replaced in the model, None before it was set up."""
        return self._patch_report

    def _apply_kernels(self, model: Module) -> None:
        self._patch_report = apply_and_announce(model, self.kernels, self._patch_report)


class TrainerKernels(TrainerFaultTolerance, _Kernels):
    """Placed before a strategy of the Trainer's, lets it apply kernels and skip the logits in steps with a loss."""

    model: Any

    def model_to_device(self) -> None:
        """Then applies the kernels: parameters have their dtype and device, and nothing was wrapped yet."""
        materialize(self.model, self.root_device)  # type: ignore[attr-defined]
        super().model_to_device()  # type: ignore[misc]
        self._apply_kernels(self.model)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with lazy_logits():
            return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with lazy_logits():
            return super().test_step(*args, **kwargs)  # type: ignore[misc]


class FabricKernels(FabricFaultTolerance, _Kernels):
    """Placed before a strategy of Fabric's, lets it apply kernels before it wraps a module."""

    def module_to_device(self, module: Module) -> None:
        materialize(module, self.root_device)  # type: ignore[attr-defined]
        super().module_to_device(module)  # type: ignore[misc]

    def setup_module(self, module: Module) -> Module:
        self._apply_kernels(module)
        return super().setup_module(module)  # type: ignore[misc]
