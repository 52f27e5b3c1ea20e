"""The time of training steps, without warm-up and validation, and of waiting for data; peak memory."""

import resource
import time
from typing import Any

import lightning as L
import torch

_FETCH = "train_dataloader_next"
"""How the name ends under which Lightning profiles the wait for a batch."""


class Moment:
    """Now, on a device: on a GPU, when it has done all that it was given so far. The host does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._event, self._seconds = None, time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def has_arrived(self) -> bool:
        """Whether :meth:`seconds_since` would return at once."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: "Moment") -> float:
        """The seconds between an earlier moment of the same device and this one, for which the host waits."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


Spans = list[tuple[Moment, Moment]]
"""Starts and ends of times."""


class TrainingClock:
    """Takes the time of training batches, without the first steps and without validation.

    Args:
        device: The device that trains.
        skip_batches: At the start (compilation, allocation), which are left out.
    """

    def __init__(self, device: torch.device, skip_batches: int) -> None:
        self._device, self._skip_batches = device, skip_batches
        self._num_batches = 0
        self._start: Moment | None = None
        self._spans: Spans = []

    @property
    def is_running(self) -> bool:
        """Whether time is taken now."""
        return self._start is not None

    @property
    def ends_warm_up(self) -> bool:
        """Whether the next batch is the first that is timed."""
        return self._num_batches == self._skip_batches

    def batch_starts(self) -> None:
        """A training batch starts; its time begins now unless it has begun or is left out."""
        self._num_batches += 1
        if self._start is None and self._num_batches > self._skip_batches:
            self._start = Moment(self._device)

    def pause(self) -> None:
        """Stops the time until the next batch starts, for a validation or at the end."""
        if self._start is not None:
            self._spans.append((self._start, Moment(self._device)))
            self._start = None

    def lap(self) -> Spans:
        """The time since the last call. It goes on if it was running."""
        if self._start is not None:
            self.pause()
            self._start = self._spans[-1][1]
        spans, self._spans = self._spans, []
        return spans


class FetchTimer:
    """Takes the time for which the host waits for training batches, as the Trainer's profiler is told it.

    Args:
        profiler: Its methods ``start`` and ``stop`` take the time, until :meth:`remove`.
    """

    def __init__(self, profiler: Any) -> None:
        self.seconds = self._last = self._begin = 0.0
        self._profiler, start, stop = profiler, profiler.start, profiler.stop

        def starts(action_name: str) -> None:
            start(action_name)
            self._begin = time.perf_counter() if action_name.endswith(_FETCH) else self._begin

        def stops(action_name: str) -> None:
            if action_name.endswith(_FETCH):
                self._last = time.perf_counter() - self._begin
                self.seconds += self._last
            stop(action_name)

        profiler.start, profiler.stop = starts, stops

    def leave_out_last(self) -> None:
        """Leaves out the last wait."""
        self.seconds -= self._last

    def remove(self) -> None:
        """Leaves the profiler as it was."""
        for name in ("start", "stop"):
            vars(self._profiler).pop(name, None)


def share_of_each(trainer: L.Trainer) -> float:
    """What a sum over all processes is multiplied with: tensor- and context-parallel ranks count the same batches."""
    sampler = trainer.distributed_sampler_kwargs
    return float(sampler["num_replicas"] / trainer.world_size) if sampler is not None else 1.0


def peak_memory(strategy: Any) -> tuple[int, int]:
    """The most bytes that were allocated on the GPU of this process, and reserved; without one resident, and 0."""
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
