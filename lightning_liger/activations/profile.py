"""The memory of a training step, measured where the model's layers begin, end and are recomputed.

The counters of PyTorch's caching allocator change when the host allocates and frees, so they are read without waiting
for the device. The timeline of a step is cut where a layer's forward starts and where its recomputation starts, the
moments between which a tensor that the layer stores for backward lives.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from lightning_liger.activations.layers import ControlledLayers, Mode


class Segment(NamedTuple):
    """A part of a step in which the same layers keep something for backward."""

    live: tuple[int, ...]
    """Of each layer, how many of its forwards have run whose backward has not begun."""
    recomputed: int | None
    """The layer whose recomputation began the segment, if one did."""


class Memory(Protocol):
    """The counters of a device's allocator, in bytes, and its clock."""

    def read(self) -> tuple[int, int]:
        """The bytes that are allocated now, and their peak since the last reset."""

    def reset_peak(self) -> None:
        """Starts a new peak."""

    def total(self) -> int:
        """The memory of the device."""

    def available(self) -> int:
        """What this process could allocate in all: the device's memory without that of other processes."""

    def mark(self) -> Any:
        """The moment at which the device will have done all work so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two moments; waits for the second."""


class CudaMemory:
    """:class:`Memory` of a GPU. A peak before a reset is kept as ``highest_peak``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.highest_peak = 0

    def read(self) -> tuple[int, int]:
        # Not flattened: memory_allocated() makes a dict of some 200 entries for one of them.
        counts = torch.cuda.memory_stats_as_nested_dict(self._device).get("allocated_bytes", {}).get("all", {})
        return counts.get("current", 0), counts.get("peak", 0)

    def reset_peak(self) -> None:
        self.highest_peak = max(self.highest_peak, self.read()[1])
        torch.cuda.reset_peak_memory_stats(self._device)

    def total(self) -> int:
        return torch.cuda.get_device_properties(self._device).total_memory

    def available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * self.total())
        return min(free + torch.cuda.memory_reserved(self._device), allowed)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


@dataclass(frozen=True)
class Profile:
    """What one optimizer step needs.

    Args:
        num_tokens: The most that a micro-batch had.
        start_bytes: Allocated when the first layer's forward started.
        peaks: The peak of each segment in bytes, if every layer is recomputed.
        stored_bytes: What each layer allocates for backward if it is not recomputed, without cheap tensors.
        cheap_bytes: What each layer's cheap tensors take.
        tiled_bytes: What each layer allocates besides if it is not recomputed, because no part of it runs in tiles
            then; without cheap tensors.
        tiled_cheap_bytes: The same of cheap tensors.
        input_bytes: What each layer's inputs take.
        seconds: The time that each layer's recomputation takes.
        remade_bytes: What each layer's largest cheap tensor takes, which is there again where its backward peaks.
    """

    num_tokens: int
    start_bytes: int
    peaks: dict[Segment, int]
    stored_bytes: tuple[int, ...]
    cheap_bytes: tuple[int, ...]
    tiled_bytes: tuple[int, ...]
    tiled_cheap_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    remade_bytes: tuple[int, ...]

    def kept_bytes(self, index: int) -> int:
        """What a layer allocates for backward if it is not recomputed, without cheap tensors."""
        return self.stored_bytes[index] + self.tiled_bytes[index]

    def added_bytes(self, segment: Segment, index: int, mode: Mode) -> int:
        """What the mode of a layer adds to a segment; "recompute" adds nothing."""
        if mode == "recompute":
            return 0
        num_live, cheap = segment.live[index], self.cheap_bytes[index]
        if mode == "offload":  # which drops what is cheap in backward, but makes one tensor after the other again
            spared = max(0, cheap - self.remade_bytes[index]) if segment.recomputed == index else 0
            return -num_live * self.input_bytes[index] - spared
        tiled, tiled_cheap = self.tiled_bytes[index], self.tiled_cheap_bytes[index]
        kept = self.kept_bytes(index) + (cheap + tiled_cheap if mode == "store" else 0)
        # Its own backward was measured in tiles, without these tensors and the gradient of each.
        return num_live * kept + (2 * (tiled + tiled_cheap) if segment.recomputed == index else 0)

    def raised(self, num_bytes: int) -> "Profile":
        """The profile of a step that needs ``num_bytes`` more all the time."""
        return replace(self, peaks={segment: peak + num_bytes for segment, peak in self.peaks.items()})


def merge(profiles: Sequence[Profile]) -> Profile:
    """The profile that covers each of ``profiles``, such as those of all ranks."""
    peaks: dict[Segment, int] = {}
    for profile in profiles:
        for segment, peak in profile.peaks.items():
            peaks[segment] = max(peak, peaks.get(segment, 0))

    def largest(name: str) -> tuple[Any, ...]:
        return tuple(map(max, zip(*(getattr(profile, name) for profile in profiles), strict=True)))

    return Profile(
        num_tokens=max(profile.num_tokens for profile in profiles),
        start_bytes=max(profile.start_bytes for profile in profiles),
        peaks=peaks,
        stored_bytes=largest("stored_bytes"),
        cheap_bytes=largest("cheap_bytes"),
        tiled_bytes=largest("tiled_bytes"),
        tiled_cheap_bytes=largest("tiled_cheap_bytes"),
        # What offloading frees on every rank.
        input_bytes=tuple(map(min, zip(*(profile.input_bytes for profile in profiles), strict=True))),
        seconds=largest("seconds"),
        remade_bytes=largest("remade_bytes"),
    )


@dataclass
class _Layer:
    """Measurements of a layer so far."""

    kept_bytes: int = 0
    """By its recomputation, until its backward ends."""
    tiled_bytes: int = 0
    """What its recomputations would have kept besides, had no part of it run in tiles; without cheap tensors."""
    tiled_cheap_bytes: int = 0
    starts: list[tuple[int, Any]] = field(default_factory=list)
    """Bytes and moment at the start of each recomputation."""
    ends: list[Any] = field(default_factory=list)


class Recorder:
    """Measures one optimizer step, in which each layer is recomputed.

    Args:
        layers: The layers of the model.
        memory: Of their device. Its peak is reset.
    """

    def __init__(self, layers: ControlledLayers, memory: Memory) -> None:
        num_layers = len(layers.modes)
        self._controlled = layers
        self._memory = memory
        self._peaks: dict[Segment, int] = {}
        self._live = [0] * num_layers
        self._recomputed: int | None = None
        self._modes: list[Mode] = list(layers.modes)
        self._layers = [_Layer() for _ in range(num_layers)]
        memory.reset_peak()

    def _cut(self) -> int:
        """Ends a segment of the timeline; returns the bytes that are allocated."""
        allocated, peak = self._memory.read()
        segment = Segment(tuple(self._live), self._recomputed)
        self._peaks[segment] = max(peak, self._peaks.get(segment, 0))
        self._memory.reset_peak()
        return allocated

    def forward_starts(self, index: int) -> None:
        self._cut()
        self._recomputed = None
        self._live[index] += 1
        self._modes[index] = self._controlled.modes[index]

    def recompute_starts(self, index: int) -> None:
        allocated = self._cut()
        self._recomputed = index
        self._live[index] = max(0, self._live[index] - 1)
        self._layers[index].starts.append((allocated, self._memory.mark()))
        self._note_tiles(index)

    def _note_tiles(self, index: int) -> None:
        layer, control = self._layers[index], self._controlled
        layer.tiled_bytes = max(layer.tiled_bytes, control.tiled_bytes[index])
        layer.tiled_cheap_bytes = max(layer.tiled_cheap_bytes, control.tiled_cheap_bytes[index])

    def recompute_ends(self, index: int) -> None:
        layer, (allocated, _) = self._layers[index], self._memory.read()
        layer.ends.append(self._memory.mark())
        layer.kept_bytes = max(layer.kept_bytes, allocated - layer.starts[-1][0])

    def finish(self, num_tokens: int, start_bytes: int) -> Profile:
        """The profile of the step that has ended. Waits for the device.

        Args:
            num_tokens: Of its largest micro-batch.
            start_bytes: Allocated when its first layer's forward started.
        """
        self._cut()
        for index in range(len(self._layers)):
            self._note_tiles(index)
        modes, inputs, cheap = self._modes, self._controlled.input_bytes, self._controlled.dropped_bytes
        measured = Profile(
            num_tokens=num_tokens,
            start_bytes=start_bytes,
            peaks=self._peaks,
            stored_bytes=tuple(
                max(0, layer.kept_bytes - (0 if mode == "offload" else num_cheap))
                for layer, mode, num_cheap in zip(self._layers, modes, cheap, strict=True)
            ),
            cheap_bytes=tuple(cheap),
            tiled_bytes=tuple(layer.tiled_bytes for layer in self._layers),
            tiled_cheap_bytes=tuple(layer.tiled_cheap_bytes for layer in self._layers),
            input_bytes=tuple(inputs),
            seconds=tuple(map(self._seconds, self._layers)),
            remade_bytes=tuple(self._controlled.remade_bytes),
        )
        peaks = {
            segment: peak - sum(measured.added_bytes(segment, index, mode) for index, mode in enumerate(modes))
            for segment, peak in self._peaks.items()
        }
        return replace(measured, peaks=peaks)

    def _seconds(self, layer: _Layer) -> float:
        pairs = zip(layer.starts, layer.ends, strict=False)  # backward may have ended a recomputation by an error
        times = [self._memory.seconds(start, end) for (_, start), end in pairs]
        return statistics.median(times) if times else 0.0
