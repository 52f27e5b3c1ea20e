"""Measures ops: each contender at every shape, and once on a small problem."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.cases import DTYPE, Function, Inputs, Maker, Op, Shape, Unavailable
from benchmarks.records import Record
from benchmarks.timing import Effort, Rates, Spread


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        device: Device to measure on.
        against: Contenders to compare ours with.
        effort: How long to measure.
        rates: The rates that floors are computed from; None on a CPU, which has no floors.
        tiny: Whether to measure small shapes only.
        sweeps: Whether to also measure a range of sizes, from which figures are drawn.
        in_turns: Whether contenders take turns, step by step, so that each finds the GPU's clocks as the others do.
    """

    device: torch.device
    against: tuple[str, ...]
    effort: Effort
    rates: Rates | None
    tiny: bool = False
    sweeps: bool = True
    in_turns: bool = False


@dataclass(frozen=True)
class SmallProblem:
    """Results of a contender on a small problem; fields as in :class:`Record`."""

    first_call_s: float | None
    host_us: float | None
    gradient_error: float | None


Times = tuple[Spread | None, Spread]
"""GPU time (None without a GPU) and wall time."""


class _Contender(NamedTuple):
    """A contender that is ready to run at one shape: a step for each set of inputs, forward alone and both passes."""

    name: str
    inputs: Inputs
    forward: list[timing.Step]
    both: list[timing.Step]


class Runner:
    """Runs contenders and keeps going when one of them fails.

    Attributes:
        failed: Contenders that raised at some shape. Unavailable ones do not count.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.failed: set[str] = set()
        self._say = say

    def measure_small(self, op: Op) -> dict[str, SmallProblem]:
        """Results of each contender that works on a small problem; prints which do not."""
        found = {}
        for name in op.chosen(self.settings.against):
            try:
                found[name] = self._measure_small(op, name)
            except Unavailable as reason:
                self._say(f"{op.name}: {name} is skipped: {reason}")
            except Exception as error:
                self._fail(op, name, op.small, error)
        return found

    def _measure_small(self, op: Op, name: str) -> SmallProblem:
        device = self.settings.device
        function = op.load(name, device)
        has_gradient = _has_gradient(op, name)
        inputs = op.inputs(Maker(device), *(op.tiny if self.settings.tiny else op.small))
        step = _both(function, inputs) if has_gradient else _forward(function, inputs)
        first_call_s = timing.first_call_s(step, device)
        error = None
        if has_gradient:
            error_shape = op.tiny if self.settings.tiny else op.error_shape or op.small
            error = gradient_error(op, function, lambda: op.inputs(Maker(device, seed=1), *error_shape))
        host_us = timing.host_us(step, self.settings.effort.host_calls, device)
        return SmallProblem(first_call_s, host_us, error)

    def measure(self, op: Op, small: dict[str, SmallProblem]) -> Iterator[Record]:
        """Records of every shape, and of every size of the sweep, for the contenders in ``small``."""
        suites: list[tuple[str, int | None, Shape]] = [
            ("shapes", None, shape) for shape in ((op.tiny,) if self.settings.tiny else op.shapes)
        ]
        if self.settings.sweeps and op.sweep:
            suites += [("sweep", size, shape) for size, shape in op.sweep.shapes(self.settings.tiny)]
        for suite, size, shape in suites:
            where = {"suite": suite, "size": size}
            if self.settings.in_turns:
                yield from self._measure_in_turns(op, shape, small, **where)
                continue
            for name, known in small.items():
                try:
                    contender = self._prepare(op, name, shape)
                    yield from self._records(op, contender, shape, known, self._times_of_passes(op, contender), **where)
                except Exception as error:
                    self._fail(op, name, shape, error)
                self._empty_cache()

    def _measure_in_turns(self, op: Op, shape: Shape, small: dict[str, SmallProblem], **where: Any) -> Iterator[Record]:
        device = self.settings.device
        ready: list[_Contender] = []
        slowest = 0.0
        for name in small:
            try:
                contender = self._prepare(op, name, shape, num_sets=1)
                slowest = max(slowest, timing.wall_ms(contender.both, 2, device)[-1])
                ready.append(contender)
            except Exception as error:
                self._fail(op, name, shape, error)
            self._empty_cache()
        steps = [contender.both[0] for contender in ready]
        repeats = self.settings.effort.repeats(slowest)
        walls = timing.wall_ms_in_turns(steps, repeats, device) if steps else []
        for contender, wall in zip(ready, walls, strict=True):
            gpu = timing.gpu_ms(contender.both, repeats, device) if device.type == "cuda" else None
            times = {"both": (gpu and Spread.of(gpu), Spread.of(wall))}
            yield from self._records(op, contender, shape, small[contender.name], times, **where)

    def _empty_cache(self) -> None:
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self, op: Op, name: str, shape: Shape, num_sets: int | None = None) -> _Contender:
        device = self.settings.device
        function = op.load(name, device)
        # Separate inputs for each contender: liger-kernel's functions write into theirs. They are not restored before
        # each step, because that time would count for the contender; the values drift, the work stays the same.
        make = Maker(device)
        first = op.inputs(make, *shape)
        count = num_sets or timing.num_input_sets(first.num_bytes, device)
        sets = [first, *(op.inputs(make, *shape) for _ in range(count - 1))]
        forward = [_forward(function, inputs) for inputs in sets]
        both = [_both(function, inputs) for inputs in sets] if _has_gradient(op, name) else forward
        return _Contender(name, first, forward, both)

    def _times_of_passes(self, op: Op, contender: _Contender) -> dict[str, Times]:
        times: dict[str, Times] = {"both": self._times(contender.both)}
        if op.split and contender.both is not contender.forward:
            times["forward"] = self._times(contender.forward)
            (gpu, wall), (forward_gpu, forward_wall) = times["both"], times["forward"]
            times["backward"] = (gpu and forward_gpu and gpu.minus(forward_gpu), wall.minus(forward_wall))
        return times

    def _records(
        self,
        op: Op,
        contender: _Contender,
        shape: Shape,
        known: SmallProblem,
        times: dict[str, Times],
        **where: Any,
    ) -> list[Record]:
        settings, first = self.settings, contender.inputs
        peak = timing.peak_mib(contender.both[0], settings.device) if settings.device.type == "cuda" else None
        memory = {"peak_mib": peak, "inputs_mib": first.num_bytes / 2**20}
        amount = op.amount(*first.arguments)
        records = []
        for direction, (gpu, wall) in times.items():
            floor = None
            if settings.rates and direction in op.passes:
                floor = op.passes[direction] * amount / getattr(settings.rates, op.rate) * 1e3
            records.append(
                Record(
                    op=op.name,
                    shape=op.label(*shape),
                    dtype=str(DTYPE).removeprefix("torch."),
                    contender=contender.name,
                    pass_=direction,
                    gpu_ms=gpu and gpu.median,
                    gpu_ms_quartiles=gpu and gpu.quartiles,
                    wall_ms=wall.median,
                    wall_ms_quartiles=wall.quartiles,
                    floor_ms=floor,
                    ratio=gpu.median / floor if gpu and floor else None,
                    **(memory | vars(known) if direction == "both" else {}),
                    **where,
                )
            )
        return records

    def _times(self, steps: list[timing.Step]) -> Times:
        """GPU time (None without a GPU) and wall time."""
        device, effort = self.settings.device, self.settings.effort
        warm_up = timing.wall_ms(steps, max(len(steps), 2), device)
        repeats = effort.repeats(warm_up[-1])
        wall = Spread.of(timing.wall_ms(steps, repeats, device))
        if device.type != "cuda":
            return None, wall
        return Spread.of(timing.gpu_ms(steps, repeats, device)), wall

    def _fail(self, op: Op, name: str, shape: Shape, error: Exception) -> None:
        self.failed.add(name)
        self._say(f"{op.name}: {name} failed at {op.label(*shape)}: {type(error).__name__}: {error}")


def _has_gradient(op: Op, name: str) -> bool:
    return name not in op.contenders or op.contenders[name].has_gradient


def _forward(function: Function, inputs: Inputs) -> timing.Step:
    return lambda: function(*inputs.arguments)


def _both(function: Function, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A step of forward and backward into new gradients, the same way for every contender."""
    arguments, leaves, grad_outputs = inputs.arguments, inputs.leaves, inputs.grad_outputs
    return lambda: torch.autograd.grad(function(*arguments), leaves, grad_outputs)


def gradient_error(op: Op, function: Function, make_inputs: Callable[[], Inputs]) -> float:
    """The largest relative L2 distance of a gradient from the one that float64 gives for the same inputs."""
    truths = _both(op.exact, make_inputs().double())()
    gradients = _both(function, make_inputs())()
    return max(
        ((gradient.double() - truth).norm() / truth.norm()).item()
        for gradient, truth in zip(gradients, truths, strict=True)
    )


def rms_norm_host_us(settings: Settings, op: Op) -> float:
    """Microseconds of the host for ``F.rms_norm``, forward and backward: the cost of a cheap op of PyTorch."""
    inputs = op.inputs(Maker(settings.device), *(op.tiny if settings.tiny else op.small))
    step = _both(op.load("torch", settings.device), inputs)
    return timing.host_us(step, settings.effort.host_calls, settings.device)
