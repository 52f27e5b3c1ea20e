"""What Fabric's strategies have in common."""

from functools import partial
from typing import Any

from lightning.fabric.strategies import Strategy
from torch.nn import Module

from lightning_liger.strategies.common import CommonStrategy
from lightning_liger.strategies.parts.buffers import convert_as_pretrained
from lightning_liger.strategies.parts.optimizer_states import load_in_fabric
from lightning_liger.weights.meta_device import initialize


class FabricStrategy(CommonStrategy, Strategy):
    """A mixin for strategies of Fabric."""

    # Set-up

    @property
    def precision(self) -> Any:
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        # Lightning's setter comes first: it checks the type. The class that defines it differs between engines.
        super(FabricStrategy, type(self)).precision.fset(self, precision)  # type: ignore[attr-defined]
        if precision is not None:  # Fabric calls this right before it moves a module and calls setup_module
            precision.convert_module = partial(self._convert, precision)

    def _convert(self, plugin: Any, module: Module) -> Module:
        with self._patching.left_to_the_strategy():
            return convert_as_pretrained(plugin, module)

    def module_to_device(self, module: Module) -> None:
        initialize(module, self.root_device)
        super().module_to_device(module)  # type: ignore[safe-super]  # abstract in Lightning's base, not in its engines

    def setup_module(self, module: Module) -> Module:
        return super().setup_module(self._prepare(module))

    # Steps

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        # DeepSpeed's engine accumulates by itself.
        is_step = getattr(optimizer, "is_gradient_accumulation_boundary", lambda: True)()
        result = super().optimizer_step(optimizer, **kwargs)
        if is_step:
            self._activations.step_ends()
        return result

    # Checkpoints

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        save = super().save_checkpoint
        self._checkpoints.save(path, lambda path: save(path, *args, **kwargs))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint; :mod:`~lightning_liger.resuming.safe_loading` says what is refused."""
        load = partial(super().load_checkpoint, strict=strict, weights_only=weights_only)

        def read(path: Any) -> dict[str, Any]:
            own = partial(load, path)
            return load_in_fabric(path, state, own) if self._checkpoints.are_sharded else own(state)

        return self._checkpoints.load("path", path, weights_only, read)
