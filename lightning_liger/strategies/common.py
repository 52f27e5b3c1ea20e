"""What the strategies of Trainer and Fabric have in common."""

import difflib
import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from torch.nn import Module

from lightning_liger.patching import PatchReport
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.patching.float8 import Float8Choice
from lightning_liger.resuming.atomic_io import atomic_by_default
from lightning_liger.strategies.parts.activations import (
    ActivationCheckpointing,
    ActivationControl,
    MemoryBudget,
    announce_plan,
    check_engine,
)
from lightning_liger.strategies.parts.checkpoints import Checkpoints
from lightning_liger.strategies.parts.compilation import Compile
from lightning_liger.strategies.parts.kernels import Kernels
from lightning_liger.strategies.parts.policies import LayerPolicy

_GIVEN_BY_LIGHTNING = {"self", "module", "device_id", "device_ids"}


class CommonStrategy:
    """Kernels, activations and checkpoints. A mixin, which comes before Lightning's strategies."""

    _wrapper: Callable[..., Any] | None = None
    """What the engine wraps models in, with the arguments that neither the strategy nor Lightning's knows."""
    _holds_frozen = False
    """Whether the engine leaves frozen parameters alone, so that they may be held in float8."""
    _gathers_float8 = False
    """Whether the engine can gather weights in float8."""
    _keeps_parameters = False
    """Whether parameters stay where they are, so that layers may be captured in CUDA graphs."""
    _announce_plan = staticmethod(announce_plan)
    context_parallel_size = 1
    """The number of ranks that share each sequence."""

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
        self.kernels, self.fp8, self.fault_tolerance = kernels, fp8, fault_tolerance
        self._activations = ActivationControl(
            activation_checkpointing, memory_budget, activation_checkpointing_policy, cuda_graphs, compile
        )
        self._kernels = Kernels(kernels, fp8, gathers_float8=self._gathers_float8)
        shared = self.context_parallel_size if self.context_parallel_size > 1 else None
        check_engine(self, self._activations, fp8=fp8, context_parallel_size=shared)
        self._checkpoints = Checkpoints(self, fault_tolerance, kwargs.get("checkpoint_io"))
        self._refuse_unknown(kwargs)
        super().__init__(**kwargs)

    def _refuse_unknown(self, arguments: Collection[str]) -> None:
        """Raises TypeError for arguments that neither a class of the strategy nor the engine has, with similar names.

        Lightning passes whatever a strategy does not know on to the engine, which sees it when the model is wrapped.
        """
        if self._wrapper is None:  # Lightning's strategy refuses them
            return
        takers: list[Any] = [vars(cls)["__init__"] for cls in type(self).__mro__ if "__init__" in vars(cls)]
        known = {name for taker in (*takers, self._wrapper) for name in inspect.signature(taker).parameters}
        for name in arguments:
            if name not in known - _GIVEN_BY_LIGHTNING:
                similar = difflib.get_close_matches(name, known - _GIVEN_BY_LIGHTNING)
                hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
                raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}{hint}")

    @property
    def _plugin(self) -> Any:
        strategy: Any = self
        return getattr(strategy, "precision_plugin", None) or strategy.precision

    @property
    def _patching(self) -> Kernels:
        """A precision plugin of ours has kernels of its own, which its user chose."""
        return getattr(self._plugin, "patching", self._kernels)

    def _final_parameters(self, model: Module) -> AbstractContextManager[None]:
        """A context in which the model's parameters look as the engine will have them."""
        return nullcontext()

    def _prepare(self, model: Module) -> Module:
        """``model`` as the engine gets it: with kernels, and layers in their modes."""
        strategy: Any = self
        if self._kernels.recipe is not None and self._patching.recipe is None:
            plugin = type(self._plugin).__name__
            raise ValueError(
                f"fp8={self._kernels.recipe} of {type(self).__name__} has no effect with a {plugin} without fp8, whose"
                " settings replace the strategy's: give it fp8, or use precision= in its place"
            )
        with self._final_parameters(model):
            self._patching.apply(
                model, self._plugin.precision, holds_frozen=self._holds_frozen, device=strategy.root_device
            )
        if self.kernels != "none" or self._activations.is_asked_for:
            self._activations.control(model, strategy.root_device, self._announce_plan)
        return model

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, by default one that writes atomically."""
        if self.fault_tolerance:
            return self._checkpoints.io
        return super().checkpoint_io  # type: ignore[misc]  # of the next class

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.fault_tolerance:
            self._checkpoints.io = atomic_by_default(io)
        else:  # Fabric's FSDP and FSDP2 refuse plugins
            super(CommonStrategy, type(self)).checkpoint_io.fset(self, io)  # type: ignore[misc]

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
        return 0 if self._activations.memory is None else self._activations.memory.highest_peak
