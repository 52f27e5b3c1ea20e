"""The time of training steps, without warm-up and validation; peak memory."""

import resource
import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import Profiler

_FETCH = "train_dataloader_next"
"""How the name ends under which Lightning profiles the wait for a batch."""


class Moment:
    """Now, on a device: on a GPU, when it has done all that it was given so far. The host does not wait for it.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._seconds = time.perf_counter()

    def has_arrived(self) -> bool:
        """Whether :meth:`seconds_since` would return at once."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: "Moment") -> float:
        """The seconds between an earlier moment of the same device and this one, for which the host waits."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


@dataclass
class Lap:
    """The time since the lap before."""

    spans: list[tuple[Moment, Moment]] = field(default_factory=list)
    """Starts and ends of the time without validation."""

    def has_arrived(self) -> bool:
        """Whether :meth:`seconds` would return at once."""
        return not self.spans or self.spans[-1][1].has_arrived()

    def seconds(self) -> float:
        """The time of the lap, for whose end the host waits."""
        return sum(end.seconds_since(start) for start, end in self.spans)


class TrainingClock:
    """Takes the time of training batches, without the first steps and without validation.

    Args:
        skip_steps: Steps at the start of each fit (compilation, allocation) that are left out.
    """

    def __init__(self, skip_steps: int) -> None:
        self.skip_steps = skip_steps
        self._num_batches = 0
        self._start: Moment | None = None
        self._lap = Lap()

    def fit_starts(self) -> None:
        """Begins to leave out the first steps."""
        self._num_batches, self._start, self._lap = 0, None, Lap()

    @property
    def is_running(self) -> bool:
        """Whether time is taken now."""
        return self._start is not None

    def ends_warm_up(self, trainer: L.Trainer) -> bool:
        """Whether the next batch is the first that is timed."""
        return self._num_batches == self.skip_steps * trainer.accumulate_grad_batches

    def batch_starts(self, trainer: L.Trainer) -> bool:
        """Whether a training batch is timed; its time begins now unless it has begun."""
        self._num_batches += 1
        if self._start is None and self._num_batches > self.skip_steps * trainer.accumulate_grad_batches:
            self._start = Moment(trainer.strategy.root_device)
        return self._start is not None

    def pause(self, trainer: L.Trainer) -> None:
        """Stops the time until the next batch starts, for a validation or at the end."""
        if self._start is not None:
            self._lap.spans.append((self._start, Moment(trainer.strategy.root_device)))
            self._start = None

    def lap(self, trainer: L.Trainer) -> Lap:
        """The time since the last call. It goes on if it was running."""
        if self._start is not None:
            self.pause(trainer)
            self._start = self._lap.spans[-1][1]
        lap, self._lap = self._lap, Lap()
        return lap


def share_of_each(trainer: L.Trainer) -> float:
    """What a sum over all processes is multiplied with: tensor- and context-parallel ranks count the same batches."""
    sampler = trainer.distributed_sampler_kwargs
    return float(sampler["num_replicas"] / trainer.world_size) if sampler is not None else 1.0


def peak_memory(strategy: Any) -> int:
    """The largest memory of this process in bytes: allocated on its GPU, or resident without one."""
    return peak_and_reserved_memory(strategy)[0]


def peak_and_reserved_memory(strategy: Any) -> tuple[int, int]:
    """:func:`peak_memory`, and the most that was reserved on the GPU, 0 without one."""
    if strategy.root_device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
    # One call, as each makes a dictionary of all statistics; those by name take several times as long.
    found = torch.cuda.memory_stats_as_nested_dict(strategy.root_device)
    peak, reserved = (
        found.get(name, {}).get("all", {}).get("peak", 0) for name in ("allocated_bytes", "reserved_bytes")
    )
    # A memory_budget resets the peak while it measures.
    return max(getattr(strategy, "peak_before_resets", 0), peak), reserved


def readable_bytes(num_bytes: float) -> str:
    """``num_bytes`` in GiB, MiB or KiB."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


class FetchTimer(Profiler):
    """A profiler that passes everything on to the Trainer's own, and takes the time of waiting for training batches.

    Args:
        profiler: The Trainer's own.
    """

    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler
        self.seconds = 0.0
        self._last = self._begin = 0.0

    def start(self, action_name: str) -> None:
        self.profiler.start(action_name)
        if action_name.endswith(_FETCH):
            self._begin = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self._last = time.perf_counter() - self._begin
            self.seconds += self._last
        self.profiler.stop(action_name)

    def leave_out_last(self) -> None:
        """Leaves out the last wait."""
        self.seconds -= self._last

    def summary(self) -> str:
        return self.profiler.summary()

    def describe(self) -> None:
        self.profiler.describe()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.profiler.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        self.profiler.teardown(stage)

    def __del__(self) -> None:
        """Leaves the Trainer's own open."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["profiler"], name)
