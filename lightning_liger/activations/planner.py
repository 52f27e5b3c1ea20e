"""Plans for a budget of memory: the first steps are measured, and so is each batch larger than all before.

=================  ==================================================================================================
step               how layers run
=================  ==================================================================================================
first              all are recomputed: the optimizer makes its states at the end of this step
second             all are recomputed, and the step is measured
third and later    by the plan for the smallest measured number of tokens that covers the batch
with a larger one  all are recomputed, and the step is measured: nothing is extrapolated upwards
=================  ==================================================================================================

Where the inputs of all layers might not fit, they wait in host memory in the steps in which all are recomputed: if they
alone take half of what is left, or if what a step before it needed does not fit beside what is allocated now.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist

from liger_ops.arguments import check_number, shown
from lightning_liger.activations.layers import ControlledLayers, Mode
from lightning_liger.activations.plan import Plan, choose
from lightning_liger.activations.profile import CudaMemory, Profile, Recorder, merge

_GIB = 2**30
_FRAGMENTATION = 0.06
"""Of the memory that is available, left free by "auto": what the allocator has reserved for sizes that nobody wants."""
MARGIN = 0.01
"""Of the budget: for what a prediction does not see, such as the order in which tensors are freed."""


@dataclass(frozen=True)
class Budget:
    """The peak of allocated memory that steps may have.

    Args:
        value: ``"auto"``, a share of the device's memory up to 1, or GiB above 1.
    """

    value: float | str

    def __post_init__(self) -> None:
        try:
            if self.value != "auto":
                check_number("memory_budget", self.value, above=0)
        except (TypeError, ValueError) as error:
            expected = "'auto', a share of the GPU's memory up to 1, or a number of GiB above 1"
            raise type(error)(f"memory_budget must be {expected}, got {shown(self.value)}") from error

    def limit(self, total: int, available: int) -> int:
        """The bytes, of the device's memory and what of it the process can have. Raises ValueError if it is above."""
        value = self.value
        if isinstance(value, str):
            return int((1 - _FRAGMENTATION) * available)
        if value > max(1, total / _GIB):
            raise ValueError(
                f"memory_budget must be at most {total / _GIB:.1f} GiB, the memory of the GPU, got {shown(value)}:"
                " numbers up to 1 are shares of it, such as 0.9"
            )
        return min(available, int(value * (total if value <= 1 else _GIB)))

    def __str__(self) -> str:
        value = self.value
        return "memory_budget=" + (value if isinstance(value, str) else f"{value:g}{' GiB' if value > 1 else ''}")


class AllRanks:
    """All processes of ``torch.distributed``, which agree on plans on the CPU: no rank waits for its GPU.

    Args:
        run_layers_together: Whether a layer's forward exchanges data with other ranks, so that all must recompute the
            same layers. Is called once, in the first step, when engines have wrapped the layers.
    """

    def __init__(self, run_layers_together: Callable[[], bool]) -> None:
        self.run_layers_together = cache(run_layers_together)

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        # Made by the first collective, which all ranks reach in the same step.
        return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def merge(self, profile: Profile) -> Profile:
        """The profile that covers those of all ranks. A collective."""
        profiles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(profiles, profile, group=self._group)
        return merge(profiles)

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number over the ranks. A collective."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tuple(tensor.tolist())


class Planner:
    """Measures steps, chooses plans and sets the modes of layers. The observer of a model's layers.

    Args:
        layers: The layers of the model.
        budget: What steps may allocate at most.
        memory: Of the layers' device.
        ranks: The ranks that train together, None for one process.
        announce: Is called with a line about each new plan, the plan, and whether it stays within the budget.
    """

    def __init__(
        self,
        layers: ControlledLayers,
        budget: Budget,
        memory: CudaMemory,
        ranks: AllRanks | None,
        announce: Callable[[str, Plan, bool], None],
    ) -> None:
        self._layers, self._budget, self._memory, self._ranks, self._announce = layers, budget, memory, ranks, announce
        self._limit = budget.limit(*memory.sizes())
        self._base: Mode = "recompute"
        self._is_first_step = self._is_between_steps = True
        self._profiles: dict[int, Profile] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._recorder: Recorder | None = None
        self._needed = 0, 0  # bytes in a step in which all layers are recomputed, for so many tokens
        self._correction = self._first_layer = self._num_tokens = self._start_bytes = self._start_peak = 0
        self.plan: Plan | None = None  # of the last batch, unless layers are measured
        self.line = ""  # about the last plan
        self._set_base(self._base)

    def forward_starts(self, index: int, num_tokens: int) -> None:
        if self._is_between_steps or index == self._first_layer:
            self._first_layer = index
            self._batch_starts(num_tokens)
            inputs = self._layers.sizes[index].inputs * len(self._layers.modes)
            if self.plan is None and inputs > (self._limit - self._memory.read()[0]) / 2:
                self._set_base("offload")
        if self._recorder is not None:
            self._recorder.forward_starts(index, num_tokens)

    def recompute_starts(self, index: int) -> bool:
        return self._recorder is not None and self._recorder.recompute_starts(index)

    def recompute_ends(self, index: int) -> None:
        if self._recorder is not None:
            self._recorder.recompute_ends(index)
        elif self.plan is None:  # in the first step, before the optimizer makes its states
            self._needed = max(self._needed, (self._memory.read()[1] - self._start_bytes, self._num_tokens))

    def step_ends(self) -> None:
        """After the optimizer's step."""
        if self._is_between_steps:  # the step of another optimizer
            return
        if self._recorder is not None:
            self._add(self._recorder.finish(self._num_tokens, self._start_bytes))
            self._recorder = None
        elif self.plan is not None:
            _, peak = self._memory.read()
            if peak > max(self._limit, self._start_peak):  # within this step, not before it
                self._correction += peak - self.plan.predicted_peak
                self._memory.reset_peak()
        self._is_first_step, self._is_between_steps = False, True

    @property
    def _margin(self) -> int:
        return max(1, int(MARGIN * self._limit))

    def _set_base(self, base: Mode) -> None:
        self._base = base
        self._layers.modes[:] = [base] * len(self._layers.modes)

    def _batch_starts(self, num_tokens: int) -> None:
        starts, self._is_between_steps = self._is_between_steps, False
        if starts:
            self._num_tokens = 0
            self._start_bytes, self._start_peak = self._memory.read()
        if self._ranks is not None and self._ranks.run_layers_together():
            numbers = num_tokens, self._start_bytes, self._correction
            num_tokens, self._start_bytes, self._correction = self._ranks.largest(*numbers)
        self._num_tokens = max(self._num_tokens, num_tokens)
        covering = [measured for measured in self._profiles if measured >= num_tokens]
        if covering and self._recorder is None:
            self.plan = self._plan_for(self._profiles[min(covering)])
            self._layers.modes[:] = self.plan.modes
            return
        if starts or self.plan is not None:
            self.plan = None
            # Whether all layers recomputed might leave less than the margin, as a step before tells.
            needed, for_tokens = self._needed
            exceeds = needed * num_tokens > for_tokens * (self._limit - self._margin - self._start_bytes)
            self._set_base("offload" if exceeds else self._base)
        if not self._is_first_step and self._recorder is None:
            self._recorder = Recorder(self._layers, self._memory)
        elif starts and self._is_first_step:
            self._memory.reset_peak()  # what was allocated before says nothing about steps

    def _add(self, profile: Profile) -> None:
        if not self._profiles:
            self._limit = self._budget.limit(*self._memory.sizes())  # libraries have taken what they need by now
        if self._ranks is not None and (not self._profiles or self._ranks.run_layers_together()):
            # Later profiles need not be merged otherwise: recomputation within a rank concerns no other rank.
            profile = self._ranks.merge(profile)
            self._limit = -self._ranks.largest(-self._limit)[0]
        self._profiles[profile.num_tokens] = profile
        self._needed = max(self._needed, (max(profile.peaks.values()) - profile.start_bytes, profile.num_tokens))
        self._plan_for(profile)

    def _plan_for(self, profile: Profile) -> Plan:
        """The plan for a batch that ``profile`` covers, with what else was allocated before this step."""
        margin = self._margin
        grown = self._start_bytes - profile.start_bytes
        extra = self._correction + (math.ceil(grown / margin) * margin if grown > margin else 0)
        key = profile.num_tokens, extra
        if key in self._plans:
            return self._plans[key]
        before = [plan for (num_tokens, _), plan in self._plans.items() if num_tokens == profile.num_tokens]
        plan = choose(profile, self._limit - margin - extra)
        self._plans[key] = plan = replace(plan, predicted_peak=plan.predicted_peak + extra)
        if before and before[-1].modes == plan.modes:
            return plan
        fits = plan.predicted_peak <= self._limit
        limit, peak = (f"{num_bytes / _GIB:.1f} GiB" for num_bytes in (self._limit, plan.predicted_peak))
        self.line = f"{plan}; predicted peak {peak} of {limit} ({profile.num_tokens:,} tokens)"
        if not fits:
            self.line += (
                ". No plan fits: set a larger memory_budget, use fewer or shorter rows in a batch, or shard over more"
                " devices"
            )
        self._announce(f"lightning-liger: {self._budget}: {self.line}", plan, fits)
        return plan
