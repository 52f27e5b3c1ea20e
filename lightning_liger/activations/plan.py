"""How each layer of a model runs, so that a step fits a budget of memory with the least recomputation."""

from dataclasses import dataclass
from typing import get_args

from lightning_liger.activations.layers import Mode
from lightning_liger.activations.profile import Profile

_SAME_RATE = 0.8
"""Layers whose seconds per byte differ by less count as equal: measured times of equal layers do."""


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
        first, *others = [(self.modes.count(mode), how) for mode, how in words.items() if mode in self.modes]
        start = f"{first[0]} of {len(self.modes)}" if others else f"all {first[0]}"
        return ", ".join([f"{start} layers {first[1]}", *(f"{count} {how}" for count, how in others)])


def choose(profile: Profile, limit: float) -> Plan:
    """The plan of least recomputation whose expected peak is at most ``limit`` bytes, if there is one.

    Layers are stored in the order of the time that this saves for each byte, the last layers first: what they store
    lives shortest, so for equal layers no other choice stores more. Once all are, their cheap tensors are stored too.
    If not even the recomputation of all layers fits, inputs of the first layers that matter wait in host memory.
    Without a plan that fits, the result is one with the smallest peak.
    """
    modes: list[Mode] = ["recompute"] * len(profile.layers)
    peaks = dict(profile.peaks)
    added = profile.added_bytes

    def change(index: int, mode: Mode, limit: float = float("inf")) -> None:
        """Changes the mode of a layer if the step then stays within ``limit``."""
        changed = {each: peaks[each] + added(each, index, mode) - added(each, index, modes[index]) for each in peaks}
        if max(changed.values()) <= limit:
            peaks.update(changed)
            modes[index] = mode

    while max(peaks.values()) > limit:
        worst = max(peaks, key=peaks.__getitem__)
        recomputed = (index for index, mode in enumerate(modes) if mode == "recompute")
        relieving = next((index for index in recomputed if added(worst, index, "offload") < 0), None)
        if relieving is None:
            break
        change(relieving, "offload")
    limit = max(limit, *peaks.values())
    for index in _by_rate(profile):
        if modes[index] == "recompute":
            change(index, "cheap", limit)
    if all(mode == "cheap" for mode in modes):
        for index in reversed(range(len(modes))):
            change(index, "store", limit)
    return Plan(tuple(modes), max(peaks.values()))


def _by_rate(profile: Profile) -> list[int]:
    """The layers by the seconds that storing a byte saves, largest first; of equal layers the last first."""

    def rate(index: int) -> float:
        return profile.layers[index].seconds / max(1, profile.layers[index].kept)

    groups: list[list[int]] = []
    for index in sorted(range(len(profile.layers)), key=rate, reverse=True):
        if not groups or rate(index) < _SAME_RATE * rate(groups[-1][0]):
            groups.append([])
        groups[-1].append(index)
    return [index for group in groups for index in sorted(group, reverse=True)]
