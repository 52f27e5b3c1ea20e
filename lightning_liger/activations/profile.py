"""The memory of a training step, measured where the model's layers begin, end and are recomputed.

The counters of PyTorch's caching allocator change when the host allocates and frees, so they are read without waiting
for the device. The timeline of a step is cut where a layer's forward starts and where its recomputation starts, the
moments between which a tensor that the layer stores for backward lives.
"""

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lightning_liger.activations.layers import ControlledLayers, LayerSizes, Mode


class Segment(NamedTuple):
    """A part of a step in which the same layers keep something for backward."""

    live: tuple[int, ...]
    """Of each layer, how many of its forwards have run whose backward has not begun."""
    recomputed: int | None
    """The layer whose recomputation began the segment, if one did."""


class CudaMemory:
    """The counters of a GPU's allocator, in bytes, and its clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.highest_peak = 0  # of those that were reset

    def read(self) -> tuple[int, int]:
        """The bytes that are allocated now, and their peak since the last reset."""
        # Not flattened: memory_allocated() makes a dict of some 200 entries for one of them.
        counts = torch.cuda.memory_stats_as_nested_dict(self._device).get("allocated_bytes", {}).get("all", {})
        return counts.get("current", 0), counts.get("peak", 0)

    def reset_peak(self) -> None:
        self.highest_peak = max(self.highest_peak, self.read()[1])
        torch.cuda.reset_peak_memory_stats(self._device)

    def sizes(self) -> tuple[int, int]:
        """The memory of the device, and what this process could allocate of it in all, as others have some too."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        free, _ = torch.cuda.mem_get_info(self._device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        return total, min(free + torch.cuda.memory_reserved(self._device), allowed)

    def mark(self) -> torch.cuda.Event:
        """The moment at which the device will have done all work so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between two moments; waits for the second."""
        end.synchronize()
        return start.elapsed_time(end) / 1000


@dataclass
class LayerCosts(LayerSizes):
    """What the modes of a layer cost, in bytes and seconds."""

    stored: int = 0
    """What it allocates for backward if it is not recomputed, without cheap tensors and ``tiled``."""
    seconds: float = 0.0
    """The time that its recomputation takes."""

    @property
    def kept(self) -> int:
        """``stored`` and ``tiled``."""
        return self.stored + self.tiled


@dataclass(frozen=True)
class Profile:
    """What one optimizer step needs."""

    num_tokens: int
    """The most that a micro-batch had."""
    start_bytes: int
    """Allocated when the first layer's forward started."""
    peaks: dict[Segment, int]
    """Of each segment in bytes, if every layer is recomputed."""
    layers: tuple[LayerCosts, ...]

    def added_bytes(self, segment: Segment, index: int, mode: Mode) -> int:
        """What the mode of a layer adds to a segment; "recompute" adds nothing."""
        if mode == "recompute":
            return 0
        layer, num_live, is_own = self.layers[index], segment.live[index], segment.recomputed == index
        if mode == "offload":  # which drops what is cheap in backward, but makes one tensor after the other again
            return -num_live * layer.inputs - (max(0, layer.cheap - layer.remade) if is_own else 0)
        kept = layer.kept + (layer.cheap + layer.tiled_cheap if mode == "store" else 0)
        # Its own backward was measured in tiles, without these tensors and the gradient of each.
        return num_live * kept + (2 * (layer.tiled + layer.tiled_cheap) if is_own else 0)

    def added_by_all(self, segment: Segment, modes: Sequence[Mode]) -> int:
        """What the modes of all layers add to a segment."""
        return sum(self.added_bytes(segment, index, mode) for index, mode in enumerate(modes))


def merge(profiles: Sequence[Profile]) -> Profile:
    """The profile that covers each of ``profiles``, such as those of all ranks."""

    def covering(layers: Sequence[LayerCosts]) -> LayerCosts:
        freed = min(layer.inputs for layer in layers)  # by offloading, on every rank
        return replace(LayerCosts(*map(max, zip(*map(astuple, layers), strict=True))), inputs=freed)

    return Profile(
        num_tokens=max(profile.num_tokens for profile in profiles),
        start_bytes=max(profile.start_bytes for profile in profiles),
        peaks={key: max(each.peaks.get(key, 0) for each in profiles) for profile in profiles for key in profile.peaks},
        layers=tuple(map(covering, zip(*(profile.layers for profile in profiles), strict=True))),
    )


@dataclass
class _Measured:
    mode: Mode
    sizes: LayerSizes = field(default_factory=LayerSizes)
    kept: int = 0
    """Bytes that its recomputation allocates until its backward ends."""
    start: tuple[int, Any] = 0, None
    """Bytes and moment at the start of the last recomputation."""
    moments: list[tuple[Any, Any]] = field(default_factory=list)
    """The start and the end of each recomputation."""


class Recorder:
    """Measures one optimizer step, in which each layer is recomputed. The observer of the layers, or called by it.

    ``memory`` is :class:`CudaMemory` or another with these methods. Its peak is reset at the end of each segment.
    """

    def __init__(self, layers: ControlledLayers, memory: Any) -> None:
        self.segments: list[Segment] = []  # in the order of time
        self._controlled, self._memory = layers, memory
        self._peaks: dict[Segment, int] = {}
        self._live = [0] * len(layers.modes)
        self._recomputed: int | None = None
        self._layers = [_Measured(mode) for mode in layers.modes]
        memory.reset_peak()

    def _cut(self) -> int:
        """Ends a segment of the timeline; returns the bytes that are allocated."""
        allocated, peak = self._memory.read()
        segment = Segment(tuple(self._live), self._recomputed)
        self.segments.append(segment)
        self._peaks[segment] = max(peak, self._peaks.get(segment, 0))
        self._memory.reset_peak()
        return allocated

    def forward_starts(self, index: int, num_tokens: int) -> None:
        self._cut()
        self._recomputed = None
        self._live[index] += 1
        self._layers[index].mode = self._controlled.modes[index]

    def recompute_starts(self, index: int) -> bool:
        allocated = self._cut()
        self._recomputed = index
        self._live[index] = max(0, self._live[index] - 1)
        self._layers[index].start = allocated, self._memory.mark()
        return True

    def recompute_ends(self, index: int) -> None:
        layer, sizes = self._layers[index], self._controlled.sizes[index]
        allocated, start = layer.start
        layer.moments.append((start, self._memory.mark()))
        layer.kept = max(layer.kept, self._memory.read()[0] - allocated)
        layer.sizes = LayerSizes(*map(max, astuple(layer.sizes), astuple(sizes)))

    def finish(self, num_tokens: int, start_bytes: int) -> Profile:
        """The profile of the step that has ended: its largest micro-batch, and the bytes at the start of the first.

        Waits for the device.
        """
        self._cut()
        measured = Profile(num_tokens, start_bytes, self._peaks, tuple(map(self._costs, self._layers)))
        modes = [layer.mode for layer in self._layers]
        peaks = {segment: peak - measured.added_by_all(segment, modes) for segment, peak in self._peaks.items()}
        return replace(measured, peaks=peaks)

    def _costs(self, layer: _Measured) -> LayerCosts:
        cheap = 0 if layer.mode == "offload" else layer.sizes.cheap  # which are not kept there
        times = [self._memory.seconds(start, end) for start, end in layer.moments]
        seconds = statistics.median(times) if times else 0.0
        return LayerCosts(**vars(layer.sizes), stored=max(0, layer.kept - cheap), seconds=seconds)
