"""What Fabric's strategies have in common."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import Strategy
from torch.nn import Module

from lightning_liger.patching import PatchReport
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.patching.float8 import Float8Choice
from lightning_liger.resuming.atomic_io import atomic_by_default
from lightning_liger.strategies.parts.activations import (
    ActivationCheckpointing,
    ActivationControl,
    MemoryBudget,
    check_engine,
    prepare,
)
from lightning_liger.strategies.parts.arguments import refuse_unknown
from lightning_liger.strategies.parts.buffers import convert_as_pretrained
from lightning_liger.strategies.parts.checkpoints import Checkpoints
from lightning_liger.strategies.parts.compilation import Compile
from lightning_liger.strategies.parts.kernels import Kernels
from lightning_liger.strategies.parts.optimizer_states import load_in_fabric
from lightning_liger.strategies.parts.policies import LayerPolicy
from lightning_liger.weights.meta_device import initialize


class FabricStrategy(Strategy):
    """Kernels, activations and checkpoints. A mixin for strategies of Fabric."""

    _wrapper: Callable[..., Any] | None = None
    """What the engine wraps models in, with the arguments that neither the strategy nor Lightning's knows."""
    _holds_frozen = False
    """Whether the engine leaves frozen parameters alone, so that they may be held in float8."""
    _gathers_float8 = False
    """Whether the engine can gather weights in float8."""
    _keeps_parameters = False
    """Whether parameters stay where they are, so that layers may be captured in CUDA graphs."""

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        *,
        activation_checkpointing: ActivationCheckpointing | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        memory_budget: MemoryBudget | None = None,
        fault_tolerance: bool = True,
        fp8: Float8Choice = None,
        cuda_graphs: bool = False,
        compile: Compile = False,
        **kwargs: Any,
    ) -> None:
        self.kernels = kernels
        self.fp8 = fp8
        self.fault_tolerance = fault_tolerance
        self._kernels = Kernels(kernels, fp8, gathers_float8=self._gathers_float8)
        self._activations = ActivationControl(
            activation_checkpointing, memory_budget, activation_checkpointing_policy, cuda_graphs, compile
        )
        check_engine(self, self._activations, fp8=fp8)
        self._checkpoints = Checkpoints(self, fault_tolerance, kwargs.get("checkpoint_io"))
        refuse_unknown(self, kwargs, self._wrapper)
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
        initialize(module, self.root_device)
        super().module_to_device(module)  # type: ignore[safe-super]  # abstract in Lightning's base, not in its engines

    def setup_module(self, module: Module) -> Module:
        return super().setup_module(self._prepare(module))

    def _prepare(self, model: Module) -> Module:
        return prepare(self, model)

    @property
    def _patching(self) -> Kernels:
        """A ``FabricLigerPrecisionPlugin`` has kernels of its own, which its user chose."""
        return getattr(self.precision, "patching", self._kernels)

    def _final_parameters(self, model: Module) -> AbstractContextManager[None]:
        """A context in which the model's parameters look as the engine will have them."""
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
        return self._checkpoints.io if self.fault_tolerance else super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.fault_tolerance:
            self._checkpoints.io = atomic_by_default(io)
        else:  # Fabric's FSDP and FSDP2 refuse plugins
            super(FabricStrategy, type(self)).checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

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

    # What callbacks read

    @property
    def patch_report(self) -> PatchReport | None:
        """The report of replaced modules, None before a model was set up."""
        return self._patching.report

    @property
    def activation_plan(self) -> str:
        """The plan for ``memory_budget``, what was captured and compiled, in words, empty without any."""
        return self._activations.plan

    @property
    def peak_before_resets(self) -> int:
        """The highest of the peaks of allocated memory, in bytes, that measurements have reset."""
        return self._activations.peak_bytes
