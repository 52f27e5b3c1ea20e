"""``activation_checkpointing``, ``memory_budget``, ``cuda_graphs`` and ``compile``: how strategies run layers."""

import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module

from liger_ops.arguments import check_bool, shown, wrong_type, wrong_value
from lightning_liger.activations.graphs import CudaBackend, LayerGraphs
from lightning_liger.activations.layers import ControlledLayers, control_layers, find_layers
from lightning_liger.activations.pace import pace_of
from lightning_liger.activations.plan import Plan
from lightning_liger.activations.planner import AllRanks, Budget, Planner
from lightning_liger.activations.profile import CudaMemory
from lightning_liger.strategies.parts.compilation import Compilation, Compile
from lightning_liger.strategies.parts.policies import LayerPolicy, check_policy, resolve_policy, select_modules

ActivationCheckpointing = Literal["none", "full"] | int | list[str] | set[type[Module]] | type[Module]
"""The layers that are recomputed: none, all, the first ones, or those of the classes."""
MemoryBudget = Literal["auto"] | float
"""A share of the GPU's memory up to 1, or GiB above 1."""


def announce_plan(line: str, plan: Plan, fits: bool) -> None:
    """Prints a line about a new plan, once for all ranks."""
    (rank_zero_info if fits else rank_zero_warn)(line)


class ActivationControl:
    """Controls the layers of models as arguments of strategies say; raises for wrong ones, and those that conflict."""

    def __init__(
        self,
        checkpointing: ActivationCheckpointing | None = None,
        budget: MemoryBudget | None = None,
        policy: LayerPolicy | None = None,
        cuda_graphs: bool = False,
        compile: Compile = False,
    ) -> None:
        check_bool("cuda_graphs", cuda_graphs)
        _check_checkpointing(checkpointing)
        if budget is not None:
            Budget(budget)  # raises for what is none
        check_policy("activation_checkpointing_policy", policy)
        self.checkpointing, self.budget, self.policy, self.captures = checkpointing, budget, policy, cuda_graphs
        names = ("activation_checkpointing", "activation_checkpointing_policy", "memory_budget", "cuda_graphs")
        kept = None if cuda_graphs and checkpointing == "none" else checkpointing  # the two go together
        arguments = zip(names, (kept, policy, budget, cuda_graphs or None), strict=True)
        self._given = {name: value for name, value in arguments if value is not None}
        if len(self._given) > 1:
            (name, value), (other, _) = list(self._given.items())[:2]
            raise ValueError(f"{name}={shown(value)} must be None if {other} is given: both choose layers")
        self.compilation = Compilation(compile)
        if self.compilation.scope == "model" and self.recomputes:
            raise ValueError(
                f"{self.recomputes} cannot be combined with {self.compilation.name}, which decides by itself what to"
                " keep: compile the layers, or leave out one of them"
            )
        self.controlled: WeakSet[ControlledLayers] = WeakSet()
        """The layers of each model that still exists."""
        self.layers_communicate = False
        """Whether ranks exchange data in the forward of a layer, other than for the parameters of whole layers."""
        self.memory: CudaMemory | None = None
        """That the planner measures, None without one."""

    def __reduce__(self) -> Any:  # a copy in another process controls nothing yet
        state = {"layers_communicate": self.layers_communicate}
        arguments = self.checkpointing, self.budget, self.policy, self.captures, self.compilation.choice
        return type(self), arguments, state

    def control(
        self, model: Module, device: torch.device, announce: Callable[[str, Plan, bool], None] = announce_plan
    ) -> None:
        """Sets the modes of the layers in ``model``, before an engine wraps it or again later; makes their planner."""
        modules = set(model.modules())
        if self.recomputes and any(getattr(module, "gradient_checkpointing", False) is True for module in modules):
            raise ValueError(
                f"{self.recomputes} needs layers that are not recomputed otherwise: call the model's"
                " gradient_checkpointing_disable() before training"
            )
        controlled = next((each for each in self.controlled if modules.issuperset(each.layers)), None)
        if controlled is None:  # a model that an engine has wrapped stays as it is
            controlled = self._find(model)
            self.compilation.apply(model, controlled)
        if controlled is None:
            return
        self.controlled.add(controlled)
        controlled.observer = None
        controlled.pace = pace_of(device)
        if self.captures:
            controlled.graphs = LayerGraphs(CudaBackend(device), len(controlled.layers))
        if self.budget is None:
            return
        self.memory = memory_of(device)
        if self.memory is None:
            if self.budget != "auto":
                raise ValueError(
                    f"memory_budget={shown(self.budget)} needs a GPU, whose memory is measured, got the device"
                    f" {str(device)!r}: leave it out there, set 'auto', or choose layers by activation_checkpointing"
                )
            return
        ranks = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = AllRanks(partial(_run_together, controlled, self.layers_communicate))
        controlled.observer = Planner(controlled, Budget(self.budget), self.memory, ranks, announce)

    def _find(self, model: Module) -> ControlledLayers | None:
        """Controls the layers of a new model, each in its mode."""
        name = "activation_checkpointing" if self.policy is None else "activation_checkpointing_policy"
        layers = self.policy if self.policy is not None else self.checkpointing
        if layers is None or isinstance(layers, str | int):
            controlled = control_layers(model)
            if controlled is None:
                needs_layers = self.captures or self.compilation.scope == "layers"
                if layers in (None, "none", 0) and self.budget in (None, "auto") and not needs_layers:
                    return None
                asked = self.recomputes or self.compilation.name
                raise ValueError(
                    f"{asked} needs a model with repeated layers, got {type(model).__name__} without: name their"
                    " classes, as in activation_checkpointing=['MyLayer']"
                )
            # The first are recomputed: their backward comes last, when others are freed.
            num_layers = len(controlled.layers)
            named: dict[Any, int] = {None: 0, "none": 0, "full": num_layers}
            num_recomputed: Any = named.get(layers, layers)
            if num_recomputed > num_layers:
                raise ValueError(
                    f"activation_checkpointing must be at most {num_layers}, the number of layers of"
                    f" {type(model).__name__}, got {layers}"
                )
            controlled.modes[:num_recomputed] = ["recompute"] * num_recomputed
            return controlled
        classes: Any = [layers] if isinstance(layers, type) else layers
        chosen = select_modules(resolve_policy(name, classes, model), model)
        if not chosen:
            raise ValueError(f"{name}={shown(layers)} names no layer that {type(model).__name__} has")
        usual = set(find_layers(model))
        controlled = control_layers(model, None if usual.issuperset(chosen) else {type(layer) for layer in chosen})
        assert controlled is not None  # it has the chosen ones
        controlled.modes[:] = ["recompute" if layer in chosen else "cheap" for layer in controlled.layers]
        return controlled

    @property
    def is_asked_for(self) -> bool:
        """Whether one of the arguments was given."""
        return bool(self._given or self.compilation.scope)

    @property
    def recomputes(self) -> str:
        """The argument that may have layers recomputed or captured and its value, empty if none was given."""
        return "".join(f"{name}={shown(value)}" for name, value in self._given.items() if value != "none")

    @property
    def plan(self) -> str:
        """The plan for the budget, what is captured, kept and compiled, in words, empty without any."""
        captured = [each.graphs.summary for each in self.controlled if each.graphs]
        captured += [each.pace.summary for each in self.controlled if each.pace]
        return "; ".join(
            filter(None, [*(planner.line for planner in self.planners), *captured, self.compilation.summary])
        )

    @property
    def planners(self) -> list[Planner]:
        """One for each model, if there is a budget."""
        return [each.observer for each in self.controlled if isinstance(each.observer, Planner)]

    def step_ends(self) -> None:
        """After the step of an optimizer."""
        self.compilation.step_ends()
        for planner in self.planners:
            planner.step_ends()
        if self.recomputes and self.controlled and not any(each.has_run for each in self.controlled):
            rank_zero_warn(
                f"{self.recomputes} has no effect: no layer of the model ran, or only inside torch.compile, which"
                " decides itself what to keep: remove one of the two"
            )

    @contextmanager
    def advice_on_memory(self) -> Iterator[None]:
        """Says in the error of a step that runs out of memory under a budget what its plan was."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if not self.planners or "memory_budget=" in str(error):
                raise
            raise torch.OutOfMemoryError(
                f"with memory_budget={self.budget} and this plan:"
                f" {self.plan or 'no plan yet, all layers are recomputed'}. Set a smaller memory_budget, which leaves"
                " more memory for fragmentation and other allocations, or use fewer or shorter rows per batch."
                f" {error}"
            ) from error


def check_engine(strategy: Any, activations: ActivationControl, **others: Any) -> None:
    """Raises ValueError if the engine, or arguments that are not None, rule out captures or a compiled model."""
    cuda_graphs, compilation = activations.captures, activations.compilation
    if not strategy._keeps_parameters and (cuda_graphs or compilation.scope == "model"):
        name = "cuda_graphs=True" if cuda_graphs else compilation.name
        kind = type(strategy).__name__
        raise ValueError(f"{name} is for 'liger' and 'liger_ddp', got {kind}, which moves parameters between layers")
    others["compile"] = compilation.choice or None
    for name, value in others.items():
        if cuda_graphs and value is not None:
            raise ValueError(f"{name}={shown(value)} cannot be combined with cuda_graphs=True: leave out one of them")


def _check_checkpointing(layers: Any) -> None:
    name = "activation_checkpointing"
    expected = "'none', 'full', a number of layers, or a list or set of layer classes or their names, or None"
    if layers is None or (isinstance(layers, type) and issubclass(layers, Module)):
        return
    if isinstance(layers, list | tuple | set | frozenset):
        check_policy(name, layers, takes_functions=False)
    elif isinstance(layers, bool) or not isinstance(layers, str | numbers.Integral):
        raise wrong_type(name, expected, layers)
    elif layers not in ("none", "full") if isinstance(layers, str) else layers < 0:
        raise wrong_value(name, expected, layers)


def memory_of(device: torch.device) -> CudaMemory | None:
    """The counters of a device's allocator, None for devices without."""
    return CudaMemory(device) if device.type == "cuda" else None


def _run_together(controlled: ControlledLayers, always: bool) -> bool:
    """Whether ranks exchange data in the forward of a layer, as engines that shard parts of it do."""
    parts = (part for layer in controlled.layers for part in layer.modules() if part is not layer)
    return always or any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in parts)
