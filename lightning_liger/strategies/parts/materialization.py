"""Engines that keep models whole give tensors on the meta device memory and values when they move the model."""

from typing import TYPE_CHECKING

from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy
from torch.nn import Module

from lightning_liger.weights.materialize import materialize

if TYPE_CHECKING:
    _TrainerStrategy = Strategy
    _FabricStrategy = FabricStrategy
else:
    _TrainerStrategy = _FabricStrategy = object


class TrainerMaterialization(_TrainerStrategy):
    """Materializes a model on its device. A mixin for the Trainer's strategies."""

    def model_to_device(self) -> None:
        if self.model is not None:
            materialize(self.model, self.root_device)
        super().model_to_device()  # type: ignore[safe-super]  # abstract in Lightning's base, not in its engines


class FabricMaterialization(_FabricStrategy):
    """Materializes a module on its device. A mixin for Fabric's strategies."""

    def module_to_device(self, module: Module) -> None:
        materialize(module, self.root_device)
        super().module_to_device(module)  # type: ignore[safe-super]  # as above
