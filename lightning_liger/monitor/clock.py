"""The time of training steps, without warm-up and validation, and of waiting for data; peak memory."""

import resource
import time
from typing import Any

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

    def seconds_since(self, earlier: "Moment") -> float:
        """The seconds since an earlier moment of the same device, which has reached both."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1000


Spans = list[tuple[Moment, Moment]]
"""Starts and ends of times."""


class TrainingClock:
    """Takes the time of training batches on a device, without the first ones and without validation."""

    def __init__(self, device: torch.device, skip_batches: int) -> None:
        self._device, self.skip_batches = device, skip_batches
        self.start: Moment | None = None
        """Since when time is taken, None while it is not."""
        self._spans: Spans = []

    def batch_starts(self) -> None:
        """Starts the time of a training batch, unless it goes on or is left out."""
        self.skip_batches -= 1
        if self.start is None and self.skip_batches < 0:
            self.start = Moment(self._device)

    def pause(self) -> None:
        """Stops the time until the next batch starts, for a validation or at the end."""
        if self.start is not None:
            self._spans.append((self.start, Moment(self._device)))
            self.start = None

    def lap(self) -> Spans:
        """The time since the last call. It goes on if it was running."""
        is_running = self.start is not None
        self.pause()
        spans, self._spans = self._spans, []
        self.start = spans[-1][1] if is_running else None
        return spans


class FetchTimer:
    """Takes the time for which the host waits for training batches, as a profiler is told it until :meth:`remove`."""

    def __init__(self, profiler: Any) -> None:
        self.seconds = self.last = self._begin = 0.0
        self._profiler, start, stop = profiler, profiler.start, profiler.stop

        def starts(action_name: str) -> None:
            start(action_name)
            self._begin = time.perf_counter() if action_name.endswith(_FETCH) else self._begin

        def stops(action_name: str) -> None:
            if action_name.endswith(_FETCH):
                self.last = time.perf_counter() - self._begin
                self.seconds += self.last
            stop(action_name)

        profiler.start, profiler.stop = starts, stops

    def remove(self) -> None:
        """Leaves the profiler as it was."""
        for name in ("start", "stop"):
            vars(self._profiler).pop(name, None)


def peak_memory(strategy: Any) -> tuple[int, int]:
    """The most bytes that were allocated on the GPU of this process, and reserved; without one resident, and 0."""
    if strategy.root_device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
    # One call, as each makes a dictionary of all statistics; those by name take several times as long.
    found = torch.cuda.memory_stats_as_nested_dict(strategy.root_device)
    peak, reserved = (found[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes"))
    # A memory_budget resets the peak while it measures.
    return max(getattr(strategy, "peak_before_resets", 0), peak), reserved


def readable_bytes(num_bytes: float) -> str:
    """``num_bytes`` in GiB, MiB or KiB."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
