"""Measuring time and memory on a GPU, and wall time on a CPU."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """The median of some samples and their first and third quartiles, or a difference of two medians."""

    median: float
    quartiles: tuple[float, float] | None

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, (first, third))

    def minus(self, other: "Spread") -> "Spread":
        return Spread(self.median - other.median, None)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        milliseconds: Approximate time for each measurement.
        min_repeats, max_repeats: Bounds of the number of steps in that time.
        host_calls: Number of calls for one mean of the host's time.
    """

    milliseconds: float = 30.0
    min_repeats: int = 10
    max_repeats: int = 100
    host_calls: int = 300

    def repeats(self, milliseconds: float) -> int:
        """Number of times to run a step that takes ``milliseconds``."""
        wanted = math.ceil(self.milliseconds / max(milliseconds, 1e-3))
        return min(max(wanted, self.min_repeats), self.max_repeats)


QUICK = Effort(milliseconds=1.0, min_repeats=2, max_repeats=2, host_calls=3)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_input_sets(num_bytes: int, device: torch.device) -> int:
    """Number of input sets to alternate between, so that none is in the cache when it is used again."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(1, math.ceil(4 * cache / num_bytes)), 16)


def wall_ms(steps: Sequence[Step], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each of ``repeats`` consecutive steps, alternating ``steps``; on a GPU between CUDA events."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for turn in range(repeats):
            steps[turn % len(steps)]()
            marks.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for turn, event in enumerate(events[1:]):
        steps[turn % len(steps)]()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


_AHEAD_CYCLES = 6_000_000  # of the GPU's clock: some 3 ms, more than the host takes for a step's first kernels


def wall_ms_in_turns(steps: Sequence[Step], rounds: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of each step in ``rounds`` rounds of all ``steps``, one after the other.

    On a GPU every step finds the host ahead of the GPU, as a loss does in training, whatever ran before it: the GPU
    first waits a little. Otherwise the step after one that waits for the GPU would pay for that.
    """
    if device.type != "cuda":
        walls = wall_ms(steps, rounds * len(steps), device)
        return [walls[turn :: len(steps)] for turn in range(len(steps))]
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)] for _ in steps]
    for turn in range(rounds):
        for step, (start, end) in zip(steps, [step_events[turn] for step_events in events], strict=True):
            torch.cuda._sleep(_AHEAD_CYCLES)
            start.record()
            step()
            end.record()
    torch.cuda.synchronize(device)
    return [[start.elapsed_time(end) for start, end in step_events] for step_events in events]


def gpu_ms(steps: Sequence[Step], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of kernels and copies on the GPU in each of ``repeats`` steps, alternating ``steps``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for turn in range(repeats):
            steps[turn % len(steps)]()
        torch.cuda.synchronize(device)
    ranges = [event.time_range for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ranges.sort(key=lambda range: range.start)
    return sum_by_step([range.elapsed_us() / 1e3 for range in ranges], repeats)


class GpuTrace:
    """What a GPU does from now on, until :meth:`idle_share` is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def idle_share(self) -> float:
        """The share of the time between the first kernel's start and the last one's end in which none ran."""
        torch.cuda.synchronize(self._device)
        self._profiler.stop()
        events = self._profiler.events() or []
        ranges = [event.time_range for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        return idle_share([(range.start, range.end) for range in ranges])


def idle_share(ranges: Sequence[tuple[float, float]]) -> float:
    """The share of the time between the first start and the last end that no range covers."""
    busy, end = 0.0, -math.inf
    for start, stop in sorted(ranges):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - min(ranges)[0]) if busy else 0.0


def sum_by_step(durations: Sequence[float], num_steps: int) -> list[float]:
    """Sums the durations of each step's kernels, all given in the order of their start."""
    if not durations or len(durations) % num_steps:
        # Steps that launch different kernels cannot be separated; each counts as their mean.
        return [math.fsum(durations) / num_steps] * num_steps
    each = len(durations) // num_steps
    return [math.fsum(durations[start : start + each]) for start in range(0, len(durations), each)]


def host_us(step: Step, calls: int, device: torch.device) -> float:
    """Microseconds per call, over many calls without waiting for the GPU in between; the best of three means."""
    for _ in range(min(calls, 20)):
        step()
    means = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize(device)
        means.append((time.perf_counter() - start) / calls * 1e6)
    return min(means)


def first_call_s(step: Step, device: torch.device) -> float:
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def peak_mib(step: Step, device: torch.device) -> float:
    """Peak memory of a step in MiB, above the memory allocated before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


@dataclass(frozen=True)
class Rates:
    """Best rates of this GPU: bytes read and written per second in a copy, bfloat16 FLOPs per second."""

    copy: float
    matrix: float

    @classmethod
    def measure(cls, device: torch.device) -> "Rates":
        source = torch.empty(2**31, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        copying = _median_seconds(lambda: target.copy_(source), device)
        size = 8192
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        multiplying = _median_seconds(lambda: left @ right, device)
        return cls(2 * source.nbytes / copying, 2 * size**3 / multiplying)


def _median_seconds(step: Step, device: torch.device) -> float:
    wall_ms([step], 5, device)
    return statistics.median(wall_ms([step], 30, device)) / 1e3
