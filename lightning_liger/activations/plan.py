"""How each layer of a model runs, so that a step fits a budget of memory with the least recomputation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from lightning_liger.activations.layers import Mode
from lightning_liger.activations.profile import Profile

_SAME_RATE = 0.8
"""Layers whose seconds a byte differ by less count as equal: measured times of equal layers do."""


@dataclass(frozen=True)
class Plan:
    """The mode of each layer, and the peak memory in bytes that is expected of them."""

    modes: tuple[Mode, ...]
    predicted_peak: int

    def metrics(self) -> dict[str, float]:
        """For loggers: the number of layers in each mode, and the peak in GiB."""
        counts = {f"activations/{mode}": float(self.modes.count(mode)) for mode in get_args(Mode)}
        return {**counts, "activations/predicted_peak_gib": self.predicted_peak / 2**30}

    def __str__(self) -> str:
        words = {
            "store": "stored",
            "cheap": "stored but for cheap tensors",
            "recompute": "recomputed",
            "offload": "recomputed from inputs in host memory",
        }
        counts = [(self.modes.count(mode), how) for mode, how in words.items() if mode in self.modes]
        (first, how), num_layers = counts[0], len(self.modes)
        start = f"all {num_layers}" if first == num_layers else f"{first} of {num_layers}"
        return ", ".join([f"{start} layers {how}", *(f"{count} {other}" for count, other in counts[1:])])


def choose(profile: Profile, limit: float) -> Plan:
    """The plan of least recomputation whose expected peak is at most ``limit`` bytes, if there is one.

    Layers are stored in the order of the time that this saves for each byte, the last layers first: what they store
    lives shortest, so for equal layers no other choice stores more. Once all are, their cheap tensors are stored too.
    If not even the recomputation of all layers fits, inputs of the first layers that matter wait in host memory.
    Without a plan that fits, the result is one with the smallest peak.
    """
    load = _Load(profile)
    while load.peak > limit and (index := load.relieving()) is not None:
        load.change(index, "offload")
    limit = max(limit, load.peak)
    for index in _by_rate(profile):
        if load.modes[index] == "recompute":
            load.change(index, "cheap", limit)
    if all(mode == "cheap" for mode in load.modes):
        for index in reversed(range(len(load.modes))):
            load.change(index, "store", limit)
    return load.plan()


def _by_rate(profile: Profile) -> Iterator[int]:
    """The layers by the seconds that storing a byte saves, largest first; of equal layers the last first."""

    def rate(index: int) -> float:
        return profile.layers[index].seconds / max(1, profile.layers[index].kept)

    group: list[int] = []
    for index in sorted(range(len(profile.layers)), key=rate, reverse=True):
        if group and rate(index) < _SAME_RATE * rate(group[0]):
            yield from sorted(group, reverse=True)
            group = []
        group.append(index)
    yield from sorted(group, reverse=True)


class _Load:
    """The expected peaks of a step while the modes of its layers are chosen; at first all are recomputed."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._peaks = dict(profile.peaks)
        self.modes: list[Mode] = ["recompute"] * len(profile.layers)

    @property
    def peak(self) -> int:
        return max(self._peaks.values(), default=0)

    def relieving(self) -> int | None:
        """The first recomputed layer whose offloading lowers the largest peak, None if there is none."""
        worst = max(self._peaks, key=self._peaks.__getitem__)
        added = self._profile.added_bytes
        layers = (index for index, mode in enumerate(self.modes) if mode == "recompute")
        return next((index for index in layers if added(worst, index, "offload") < 0), None)

    def change(self, index: int, mode: Mode, limit: float = float("inf")) -> None:
        """Changes the mode of a layer if the step then stays within ``limit``."""
        added, before = self._profile.added_bytes, self.modes[index]
        peaks = {
            segment: peak + added(segment, index, mode) - added(segment, index, before)
            for segment, peak in self._peaks.items()
        }
        if max(peaks.values(), default=0) <= limit:
            self._peaks = peaks
            self.modes[index] = mode

    def plan(self) -> Plan:
        return Plan(tuple(self.modes), self.peak)
