"""The plan for a budget, against all plans that there are."""

import itertools
import random

import pytest

from lightning_liger.activations.plan import Plan, choose
from lightning_liger.activations.profile import LayerCosts, Profile, Segment, merge


def make_profile(layers: list[tuple[int, float]], seed: int = 0) -> Profile:
    """A step of layers with these stored bytes and seconds, executed in order, with random peaks."""
    generator = random.Random(seed)
    num_layers = len(layers)
    peaks = {}
    for length in range(num_layers + 1):
        live = tuple(int(index < length) for index in range(num_layers))
        peaks[Segment(live, None)] = generator.randint(20, 60)
        if length < num_layers:
            peaks[Segment(live, length)] = generator.randint(20, 60)
    costs = (LayerCosts(stored=stored, cheap=3, remade=3, inputs=2 + seed % 2, seconds=each) for stored, each in layers)
    return Profile(100, 10, peaks, tuple(costs))


def peak_of(profile: Profile, modes: tuple[str, ...]) -> int:
    """The expected peak, written out anew."""
    peaks = []
    for (live, _), peak in profile.peaks.items():
        for num_live, mode, layer in zip(live, modes, profile.layers, strict=True):
            kept = {"store": layer.stored + layer.cheap, "recompute": 0, "cheap": layer.stored}
            peak += num_live * (kept | {"offload": -layer.inputs})[mode]
        peaks.append(peak)
    return max(peaks)


@pytest.mark.parametrize("are_equal", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_plan_fits_and_saves_nearly_as_much_time_as_any_choice(seed, are_equal):
    generator = random.Random(seed)
    layers = [(generator.randint(1, 9), generator.uniform(1, 9)) for _ in range(generator.randint(1, 8))]
    if are_equal:  # with times as measured: equal but for noise
        layers = [(layers[0][0], 1 + seconds / 90) for _, seconds in layers]
    profile, limit = make_profile(layers, seed), generator.randint(30, 160)
    plan = choose(profile, limit)

    def saved(modes):
        """The time that is not spent on recomputation, and the number of layers that need none."""
        kept = [layer.seconds for mode, layer in zip(modes, profile.layers, strict=True) if mode in ("cheap", "store")]
        return sum(kept), len(kept)

    choices = itertools.product(("cheap", "recompute"), repeat=len(layers))
    fitting = [saved(modes) for modes in choices if peak_of(profile, modes) <= limit]
    assert plan.predicted_peak == peak_of(profile, plan.modes)
    if not fitting:
        assert plan.predicted_peak <= max(limit, peak_of(profile, ("offload",) * len(layers)))
        return
    assert plan.predicted_peak <= limit
    seconds, num_kept = saved(plan.modes)
    assert seconds >= max(fitting)[0] / 2
    assert not are_equal or num_kept == max(number for _, number in fitting)


@pytest.mark.parametrize(
    ("limit", "modes"),
    [
        (1000, ["store"] * 4),
        (100 + 4 * 10 + 2 * 5, ["cheap", "cheap", "store", "store"]),
        (100 + 4 * 10, ["cheap"] * 4),
        (100 + 2 * 10 + 9, ["recompute", "recompute", "cheap", "cheap"]),
        (100, ["recompute"] * 4),
        (99, ["offload"] + ["recompute"] * 3),
        (100 - 5, ["offload"] * 3 + ["recompute"]),
        (100 - 9, ["offload"] * 4),
    ],
)
def test_modes_follow_the_budget(limit, modes):
    costs = {"stored": 10, "cheap": 5, "remade": 5, "inputs": 2}
    layers = tuple(LayerCosts(**costs, seconds=seconds) for seconds in (1.0, 1.1, 0.9, 1.0))
    profile = Profile(7, 0, {Segment((1, 1, 1, 1), None): 100}, layers)
    plan = choose(profile, limit)
    assert list(plan.modes) == modes
    assert (plan.predicted_peak <= limit) == (limit > 91)


def test_only_layers_that_stand_in_the_way_are_offloaded_and_others_still_stored():
    segments = {Segment((1, 1, 1), None): 60, Segment((1, 0, 0), 1): 100, Segment((0, 0, 0), 0): 70}
    profile = Profile(7, 0, segments, 3 * (LayerCosts(stored=10, cheap=5, remade=5, inputs=2, seconds=1.0),))
    plan = choose(profile, 98)
    assert plan == Plan(("offload", "cheap", "cheap"), 98)
    assert choose(profile, 90) == plan  # nothing lowers the peak any more


def test_layers_that_save_more_time_for_their_bytes_are_stored_first_the_last_of_equal_ones_before_others():
    for seconds, first in (((5.0, 1.0, 1.0), 0), ((5.0, 5.0, 1.0), 1)):
        profile = make_profile([(10, each) for each in seconds])
        limit = peak_of(profile, ("cheap", "recompute", "recompute"))
        assert choose(profile, limit).modes[first] == "cheap"


def test_profile_of_all_ranks_covers_each():
    first, second = make_profile([(3, 1.0), (5, 2.0)], 1), make_profile([(4, 2.0), (1, 1.0)], 2)
    both = merge([first, second])
    for modes in itertools.product(("store", "cheap", "recompute", "offload"), repeat=2):
        assert peak_of(both, modes) >= max(peak_of(first, modes), peak_of(second, modes))
    assert both == merge([second, first])
    assert both.layers[0].inputs == 2


def test_plan_is_told_in_words():
    assert str(Plan(("store",) * 3, 5)) == "all 3 layers stored"
    words = "1 of 3 layers stored but for cheap tensors, 1 recomputed, 1 recomputed from inputs in host memory"
    assert str(Plan(("offload", "recompute", "cheap"), 5)) == words


def test_layers_that_are_not_recomputed_keep_what_tiles_do_not() -> None:
    live, before = (1, 1), (1, 0)
    segments = {Segment(live, None): 100, Segment(before, 1): 100}
    layers = (
        LayerCosts(stored=10, cheap=5, remade=2, tiled=40, tiled_cheap=20, inputs=2, seconds=1.0),
        LayerCosts(stored=10, cheap=5, inputs=2),
    )
    added = Profile(7, 0, segments, layers).added_bytes
    for mode, kept in (("recompute", 0), ("offload", -2), ("cheap", 50), ("store", 75)):
        assert added(Segment(live, None), 0, mode) == kept
    # Its backward computes the gradients of these tensors next to them, where tiles did of a few tokens at a time.
    # Offloaded layers hold the largest cheap tensor alone.
    for mode, kept in (("recompute", 0), ("offload", -3), ("cheap", 120), ("store", 120)):
        assert added(Segment((0, 0), 0), 0, mode) == kept
