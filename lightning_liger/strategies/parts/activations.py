"""``activation_checkpointing`` and ``memory_budget``: how strategies run the layers of models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from liger_ops.arguments import shown
from lightning_liger.activations.layers import ControlledLayers, Mode, control_layers, find_layers
from lightning_liger.activations.plan import Plan
from lightning_liger.activations.planner import Budget, Planner
from lightning_liger.activations.profile import CudaMemory
from lightning_liger.activations.ranks import AllRanks
from lightning_liger.strategies.parts.policies import LayerPolicy, resolve_policy, select_modules

if TYPE_CHECKING:
    _Strategy = Any
    _TrainerStrategy = Strategy
    _FabricStrategy = FabricStrategy
else:
    _Strategy = _TrainerStrategy = _FabricStrategy = object

ActivationCheckpointing = Literal["none", "full"] | int | list[str] | set[type[Module]] | type[Module]
"""The layers that are recomputed: none, all, the first ones, or those of the classes."""
MemoryBudget = Literal["auto"] | float
"""A share of the GPU's memory up to 1, or GiB above 1."""


class ActivationControl:
    """Controls the layers of models as the arguments say.

    Args:
        checkpointing: The value of ``activation_checkpointing``.
        budget: The value of ``memory_budget``.
        policy: The value of ``activation_checkpointing_policy``.
    """

    def __init__(
        self,
        checkpointing: ActivationCheckpointing | None = None,
        budget: MemoryBudget | None = None,
        policy: LayerPolicy | None = None,
    ) -> None:
        self.checkpointing = checkpointing
        self.budget = budget
        self.policy = policy
        self.controlled: WeakSet[ControlledLayers] = WeakSet()
        """The layers of each model that still exists."""
        self._memory: CudaMemory | None = None

    def __reduce__(self) -> Any:  # a copy in another process controls nothing yet
        return type(self), (self.checkpointing, self.budget, self.policy)

    def control(
        self,
        model: Module,
        device: torch.device,
        runs_layers_together: bool = False,
        announce: Callable[[str, Plan, bool], None] | None = None,
    ) -> None:
        """Sets the modes of the layers in ``model``; with a budget, makes their planner.

        Args:
            model: Before an engine wraps it, or again later.
            device: That it trains on.
            runs_layers_together: Whether ranks exchange data in the forward of a layer.
            announce: Is called with a line about each new plan, the plan, and whether it fits; by default prints it.

        Raises:
            ValueError: If the model does not have the layers that the arguments name, for a number as the budget of a
                device that is no GPU, or for one above the GPU's memory.
        """
        modules = set(model.modules())
        if self.recomputes and any(getattr(module, "gradient_checkpointing", False) is True for module in modules):
            raise ValueError(
                f"{self.recomputes} needs layers that nobody else recomputes: call the model's"
                " gradient_checkpointing_disable() before training"
            )
        controlled = next((each for each in self.controlled if modules.issuperset(each.layers)), None)
        if controlled is None:  # a model that an engine has wrapped stays as it is
            controlled = self._find(model)
        if controlled is None:
            return
        self.controlled.add(controlled)
        controlled.observer = None
        if self.budget is None:
            return
        self._memory = memory_of(device)
        if self._memory is None:
            if self.budget != "auto":
                raise ValueError(
                    f"memory_budget={shown(self.budget)} needs a GPU, whose memory is measured, got the device"
                    f" {str(device)!r}: leave it out there, set 'auto', or choose layers by activation_checkpointing"
                )
            return
        budget = Budget(self.budget)
        budget.check(self._memory)
        ranks = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            ranks = AllRanks(partial(_run_together, controlled, runs_layers_together))
        controlled.observer = Planner(controlled, budget, self._memory, ranks, announce or announce_plan)

    def _find(self, model: Module) -> ControlledLayers | None:
        """Controls the layers of a new model, each in its mode."""
        names = "activation_checkpointing" if self.policy is None else "activation_checkpointing_policy"
        layers = self.policy if self.policy is not None else self.checkpointing
        if layers is None or isinstance(layers, str | int):
            controlled = control_layers(model)
            if controlled is None:
                if layers in (None, "none", 0) and self.budget in (None, "auto"):
                    return None
                argument = f"memory_budget={shown(self.budget)}" if layers is None else f"{names}={shown(layers)}"
                raise ValueError(
                    f"{argument} needs a model with repeated layers, got {type(model).__name__} without: name their"
                    " classes, as in activation_checkpointing=['MyLayer']"
                )
            controlled.modes[:] = _modes(layers, len(controlled.layers), model)
            return controlled
        classes: Any = [layers] if isinstance(layers, type) else layers
        chosen = select_modules(resolve_policy(names, classes, model), model)
        if not chosen:
            raise ValueError(f"{names}={shown(layers)} names no layer that {type(model).__name__} has")
        usual = set(find_layers(model))
        controlled = control_layers(model, None if usual.issuperset(chosen) else {type(layer) for layer in chosen})
        assert controlled is not None  # it has the chosen ones
        controlled.modes[:] = ["recompute" if layer in chosen else "cheap" for layer in controlled.layers]
        return controlled

    @property
    def is_asked_for(self) -> bool:
        """Whether one of the arguments was given."""
        return any(value is not None for value in (self.checkpointing, self.budget, self.policy))

    @property
    def recomputes(self) -> str:
        """The argument that may have layers recomputed and its value, empty if none was given."""
        values = {
            "activation_checkpointing": None if self.checkpointing == "none" else self.checkpointing,
            "activation_checkpointing_policy": self.policy,
            "memory_budget": self.budget,
        }
        return "".join(f"{name}={shown(value)}" for name, value in values.items() if value is not None)

    @property
    def planners(self) -> list[Planner]:
        """One for each model, if there is a budget."""
        return [each.observer for each in self.controlled if isinstance(each.observer, Planner)]

    @property
    def peak_bytes(self) -> int:
        """The peak of allocated memory up to the last time that the planner reset it; 0 without a planner."""
        return 0 if self._memory is None else self._memory.highest_peak

    def step_ends(self) -> None:
        """After the step of an optimizer."""
        for planner in self.planners:
            planner.step_ends()
        if self.recomputes and self.controlled and not any(each.has_run for each in self.controlled):
            rank_zero_warn(
                f"{self.recomputes} has no effect: no layer of the model ran, or only inside of torch.compile, which"
                " decides by itself what it keeps: leave out one of the two"
            )


def memory_of(device: torch.device) -> CudaMemory | None:
    """The counters of a device's allocator, None for devices without."""
    return CudaMemory(device) if device.type == "cuda" else None


def _modes(layers: str | int | None, num_layers: int, model: Module) -> Iterator[Mode]:
    """The mode of each layer: the first are recomputed, as their backward comes last, when others are freed."""
    named = {None: 0, "none": 0, "full": num_layers}
    num_recomputed = named[layers] if layers is None or isinstance(layers, str) else layers
    if num_recomputed > num_layers:
        raise ValueError(
            f"activation_checkpointing must be at most {num_layers}, the number of layers of {type(model).__name__},"
            f" got {layers}"
        )
    return ("recompute" if index < num_recomputed else "cheap" for index in range(num_layers))


def _run_together(controlled: ControlledLayers, always: bool) -> bool:
    """Whether ranks exchange data in the forward of a layer, as engines that shard parts of it do."""
    parts = (part for layer in controlled.layers for part in layer.modules() if part is not layer)
    return always or any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in parts)


def announce_plan(line: str, plan: Plan, fits: bool) -> None:
    """Prints a line about a plan, once for all ranks."""
    (rank_zero_info if fits else rank_zero_warn)(line)


class _Activations(_Strategy):
    """Controls the layers of models. A mixin for strategies of Trainer and Fabric, to list before their kernels.

    Args:
        activation_checkpointing: The layers to recompute in backward: ``"none"`` (the default), ``"full"``, the number
            of the first ones, or a list or set of layer classes or their names; see docs/training.md.
        memory_budget: A share of the GPU's memory up to 1, GiB above 1, or ``"auto"``: as many layers are recomputed as
            needed to stay within it.
    """

    _layers_to_checkpoint: Any = None
    """The value of ``activation_checkpointing_policy``, in strategies that have it."""

    def __init__(
        self,
        *args: Any,
        activation_checkpointing: ActivationCheckpointing | None = None,
        memory_budget: MemoryBudget | None = None,
        **kwargs: Any,
    ) -> None:
        self._activations = ActivationControl(activation_checkpointing, memory_budget, self._layers_to_checkpoint)
        super().__init__(*args, **kwargs)

    def _precision_settings(self) -> dict[str, Any]:
        return {**super()._precision_settings(), "control_activations": self._control_activations}

    def _control_activations(self, model: Module) -> None:
        if self.kernels == "none" and not self._activations.is_asked_for:
            return  # the model stays as it is
        # Without a budget the device does not matter, and may not be known yet.
        device = torch.device("cpu") if self._activations.budget is None else self.root_device
        self._activations.control(model, device, self._runs_layers_together, self._announce_plan)

    @property
    def _runs_layers_together(self) -> bool:
        """Whether ranks exchange data in the forward of a layer, other than for the parameters of whole layers."""
        return getattr(self, "_tensor_parallel_size", 1) != 1 or getattr(self, "context_parallel_size", 1) != 1

    def _announce_plan(self, line: str, plan: Plan, fits: bool) -> None:
        announce_plan(line, plan, fits)

    @property
    def activation_plan(self) -> str:
        """The plan for ``memory_budget`` in words, empty without one."""
        return "; ".join(planner.line for planner in self._activations.planners if planner.line)

    @property
    def peak_before_resets(self) -> int:
        """The highest of the peaks of allocated memory, in bytes, that measurements have reset."""
        return self._activations.peak_bytes


class TrainerActivations(_Activations, _TrainerStrategy):
    """Controls the layers of models. A mixin for the Trainer's strategies, to list before their kernels.

    Args:
        activation_checkpointing: The layers that are recomputed in backward; see docs/training.md.
        memory_budget: The memory that a plan for the layers may take.
        **kwargs: For the next class.
    """

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._advice_on_memory():
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        is_step = not (self.handles_gradient_accumulation and self.should_accumulate())
        with self._advice_on_memory():
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if is_step:
            self._activations.step_ends()
        return result

    @contextmanager
    def _advice_on_memory(self) -> Iterator[None]:
        """Says in the error of a step that runs out of memory under a budget what its plan was."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if not self._activations.planners or "memory_budget=" in str(error):
                raise
            plan = self.activation_plan or "no plan yet, all layers are recomputed"
            raise torch.OutOfMemoryError(
                f"with memory_budget={self._activations.budget} and this plan: {plan}. Set a smaller memory_budget,"
                " which leaves more to fragmentation and to what else is on the GPU, or use fewer or shorter rows in a"
                f" batch. {error}"
            ) from error

    def _announce_plan(self, line: str, plan: Plan, fits: bool) -> None:
        super()._announce_plan(line, plan, fits)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for logger in trainer.loggers:
            logger.log_metrics(plan.metrics(), step=trainer.global_step)


class FabricActivations(_Activations, _FabricStrategy):
    """Controls the layers of models. A mixin for Fabric's strategies, to list before their kernels.

    Args:
        activation_checkpointing: The layers that are recomputed in backward; see docs/training.md.
        memory_budget: The memory that a plan for the layers may take.
        **kwargs: For the next class.
    """

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        # DeepSpeed's engine accumulates by itself.
        is_step = getattr(optimizer, "is_gradient_accumulation_boundary", lambda: True)()
        result = super().optimizer_step(optimizer, **kwargs)
        if is_step:
            self._activations.step_ends()
        return result
