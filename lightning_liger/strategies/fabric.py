"""What Fabric's strategies have in common."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import Strategy
from torch.nn import Module

from liger_ops.arguments import check_bool, check_path
from lightning_liger.patching import PatchReport
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.resuming.atomic_io import atomic_by_default, fail_together, replace
from lightning_liger.resuming.safe_loading import check_checkpoint, sharded_errors_explained
from lightning_liger.strategies.parts.activations import ActivationCheckpointing, ActivationControl, MemoryBudget
from lightning_liger.strategies.parts.arguments import refuse_unknown
from lightning_liger.strategies.parts.buffers import convert_as_pretrained
from lightning_liger.strategies.parts.kernels import Kernels
from lightning_liger.strategies.parts.optimizer_states import load_in_fabric
from lightning_liger.strategies.parts.policies import LayerPolicy
from lightning_liger.weights.materialize import materialize


class FabricStrategy(Strategy):
    """Kernels, activations and checkpoints. A mixin for strategies of Fabric.

    Checkpoints are atomic, and an error on one rank while saving is an error on all.
    """

    writes_itself = False
    """Whether the strategy writes and reads files and folders without its ``checkpoint_io``."""
    _wrapper: Callable[..., Any] | None = None
    """What the engine wraps models in, with the arguments that neither the strategy nor Lightning's knows."""
    _shards_parameters = False
    """Whether Lightning's strategy reads them into sharded models."""
    _runs_layers_together = False
    """Whether ranks exchange data in the forward of a layer, other than for the parameters of whole layers."""

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        *,
        activation_checkpointing: ActivationCheckpointing | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        memory_budget: MemoryBudget | None = None,
        fault_tolerance: bool = True,
        **kwargs: Any,
    ) -> None:
        check_bool("fault_tolerance", fault_tolerance)
        self.kernels = kernels
        self.fault_tolerance = fault_tolerance
        self._kernels = Kernels(kernels)
        self._activations = ActivationControl(activation_checkpointing, memory_budget, activation_checkpointing_policy)
        refuse_unknown(self, kwargs, self._wrapper)
        self._io = atomic_by_default(kwargs.get("checkpoint_io"))
        super().__init__(**kwargs)

    # Set-up

    @property
    def precision(self) -> Any:
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        # Lightning's setter comes first: it checks the type. The class that defines it differs between engines.
        super(FabricStrategy, type(self)).precision.fset(self, precision)  # type: ignore[attr-defined]
        if precision is not None:  # Fabric calls this right before it moves a module and calls setup_module
            precision.convert_module = partial(convert_as_pretrained, precision)

    def module_to_device(self, module: Module) -> None:
        materialize(module, self.root_device)
        super().module_to_device(module)  # type: ignore[safe-super]  # abstract in Lightning's base, not in its engines

    def setup_module(self, module: Module) -> Module:
        return super().setup_module(self._prepare(module))

    def _prepare(self, module: Module) -> Module:
        """``module`` as the engine gets it: with kernels, and layers in their modes."""
        with self._final_parameters(module):
            self._patching.apply(module)
        if self.kernels != "none" or self._activations.is_asked_for:
            self._activations.control(module, self.root_device, self._runs_layers_together)
        return module

    @property
    def _patching(self) -> Kernels:
        """A ``FabricLigerPrecisionPlugin`` has kernels of its own, which its user chose."""
        return getattr(self.precision, "patching", self._kernels)

    def _final_parameters(self, module: Module) -> AbstractContextManager[None]:
        """A context in which the module's parameters look as the engine will have them."""
        return nullcontext()

    # Steps

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        # DeepSpeed's engine accumulates by itself.
        is_step = getattr(optimizer, "is_gradient_accumulation_boundary", lambda: True)()
        result = super().optimizer_step(optimizer, **kwargs)
        if is_step:
            self._activations.step_ends()
        return result

    # Checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, by default one that writes atomically."""
        return self._io if self.fault_tolerance else super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.fault_tolerance:
            self._io = atomic_by_default(io)
        else:  # FSDP and FSDP2 refuse plugins
            super(FabricStrategy, type(self)).checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        def save(to: Any) -> None:
            super(FabricStrategy, self).save_checkpoint(to, *args, **kwargs)

        if not self.fault_tolerance:
            save(path)
            return
        path = self.broadcast(path)
        if self.writes_itself:
            replace(Path(path), save, on_all_ranks=True)
        else:
            fail_together(path, lambda: save(path))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint; :mod:`~lightning_liger.resuming.safe_loading` says what is refused."""
        check_path("path", path)
        path = self.broadcast(path)
        with sharded_errors_explained(path):
            return self._read(path, state, strict, weights_only)

    def _read(self, path: Any, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        read = partial(super().load_checkpoint, path, strict=strict, weights_only=weights_only)
        if not self._shards_parameters:
            return read(state)
        check_checkpoint(Path(path), weights_only)
        return load_in_fabric(path, state, read)

    # What callbacks read

    @property
    def patch_report(self) -> PatchReport | None:
        """The report of replaced modules, None before a model was set up."""
        return self._patching.report

    @property
    def activation_plan(self) -> str:
        """The plan for ``memory_budget`` in words, empty without one."""
        return self._activations.plan

    @property
    def peak_before_resets(self) -> int:
        """The highest of the peaks of allocated memory, in bytes, that measurements have reset."""
        return self._activations.peak_bytes
