"""Steps are measured, planned, and stay within the budget, in a simulated allocator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_liger.activations.planner import Budget, Planner
from tests.lightning_liger.activations.simulated import FakeMemory, Layer, SimulatedModel


class Trained:
    """A simulated model whose planner has a budget of so many bytes."""

    def __init__(self, budget: int, layers: list[Layer] | None = None, **options) -> None:
        self.model = SimulatedModel(layers or [Layer() for _ in range(6)], FakeMemory(budget), **options)
        self.lines: list[tuple[str, bool]] = []
        announce = lambda line, _, fits: self.lines.append((line, fits))  # noqa: E731
        self.planner = Planner(self.model.control, Budget(1.0), self.model.memory, None, announce)
        self.model.control.observer = self.planner
        self.modes, self.step = self.model.control.modes, self.model.step


def planned(budget: int, *batches: int, **options) -> Trained:
    """After the steps that are measured, and one that is planned."""
    trained = Trained(budget, **options)
    for _ in range(3):
        trained.step(*batches)
    return trained


@settings(derandomize=True, deadline=None)
@given(
    budget=st.integers(12_000, 30_000),
    steps=st.lists(st.lists(st.integers(1, 130), min_size=1, max_size=3), min_size=3, max_size=9),
    others=st.lists(st.integers(0, 1000), min_size=9, max_size=9),
)
def test_steps_stay_within_the_budget_whatever_batches_come_and_others_take(budget, steps, others):
    trained, largest = Trained(budget), 0
    for number, (batches, taken) in enumerate(zip(steps, others, strict=False)):
        trained.model.memory.add(taken)
        trained.model.memory.transient(10**5)  # validation, whose peak is not one of a step
        peak = trained.step(*batches)
        assert peak <= budget
        if number < 2 or max(batches) > largest:  # nothing is extrapolated upwards, but for what might not fit
            assert trained.planner.plan is None
            assert trained.modes in (["recompute"] * 6, ["offload"] * 6)
        else:
            assert trained.planner.plan.modes == tuple(trained.modes)
            assert trained.planner.plan.predicted_peak <= budget - budget // 100
        largest = max(largest, *batches) if number else 0
        trained.model.memory.add(-taken)


def test_predictions_are_peaks_and_more_memory_means_less_recomputation():
    counts = []
    for budget in range(6000, 26000, 250):
        trained = planned(budget, 100)
        trained.model.num_recomputed = 0
        peak = trained.step(100)
        # Too high by at most what a layer's recomputation keeps and its plan does not.
        assert budget < 7000 or 0 <= trained.planner.plan.predicted_peak - peak <= 10 * 100
        counts.append(trained.model.num_recomputed)
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == set(range(7))


def test_smaller_batches_follow_the_plan_for_the_smallest_measured_one_that_covers_them():
    trained = planned(16000, 100)
    small = list(trained.modes)
    for _ in range(2):
        trained.step(150)
    large = list(trained.modes)
    assert 6 >= large.count("recompute") > small.count("recompute")
    for num_tokens, modes in ((120, large), (80, small), (150, large)):
        trained.step(num_tokens)
        assert trained.modes == modes
    assert len(trained.lines) == 2


def test_memory_that_others_take_later_makes_the_plan_tighter():
    trained = planned(16000, 100)
    before = list(trained.modes)
    for taken, fewer in ((5000, True), (-5000, False)):
        trained.model.memory.add(taken)
        assert trained.step(100) <= trained.planner.plan.predicted_peak <= 16000
        assert (trained.modes.count("recompute") > before.count("recompute")) == fewer
    assert trained.modes == before


def test_step_that_took_more_than_predicted_makes_the_next_plan_tighter():
    trained = planned(16000, 100)
    before = trained.modes.count("recompute")
    trained.model.logits += 30  # the layers look the same
    assert trained.step(100) > 16000
    assert trained.step(100) <= 16000
    assert trained.modes.count("recompute") > before


def test_inputs_wait_in_host_memory_from_the_first_step_where_they_alone_might_not_fit():
    trained = Trained(budget=9000, layers=[Layer(inputs=10, parameters=10) for _ in range(12)])
    for _ in range(2):
        trained.step(50)
        assert trained.modes == ["offload"] * 12
    peak = trained.step(50)
    assert peak <= trained.planner.plan.predicted_peak <= 9000
    assert "offload" not in trained.modes


@pytest.mark.parametrize("share", [1, 1.005], ids=["nothing", "less_than_the_margin"])
def test_measured_step_stays_within_a_budget_that_the_optimizers_states_leave_too_little_of(share):
    layers = [Layer(inputs=6, stored=30, parameters=10) for _ in range(6)]
    free = Trained(10**6, layers=layers)
    peaks = [free.step(100) for _ in range(2)]
    assert peaks[0] < peaks[1]  # the first step ends by making them
    budget = int(share * peaks[1]) - 1
    trained = Trained(budget, layers=layers)
    assert trained.step(100) <= budget
    assert trained.modes == ["recompute"] * 6
    assert trained.step(100) <= budget
    assert trained.modes == ["offload"] * 6
    assert trained.step(100) <= trained.planner.plan.predicted_peak <= budget
    assert "recompute" in trained.modes  # as many as fit


def test_message_says_what_is_needed_where_no_plan_fits():
    trained = planned(3500, 100)
    assert trained.modes[:5] == ["offload"] * 5
    ((line, fits),) = trained.lines
    assert not fits
    assert "No plan fits: set a larger memory_budget" in line


def test_step_of_a_second_optimizer_changes_nothing():
    trained = Trained(budget=10**5)
    for _ in range(2):
        trained.planner.step_ends()
        assert not trained.lines
        trained.step(100)
    assert len(trained.lines) == 1


def test_layer_that_is_executed_several_times_counts_several_times():
    for in_backward in (0, 600):
        layers = [Layer(inputs=10, stored=100, cheap=0, in_backward=in_backward)]
        trained = planned(10**5, 10, layers=layers, num_rounds=4)
        assert trained.modes == ["store"]
        assert 4400 <= trained.step(10) <= trained.planner.plan.predicted_peak


def test_budget_is_a_share_or_gib_and_never_more_than_there_is():
    for value, gib, text in ((0.5, 5, "0.5"), (1, 9, "1"), (1.5, 1.5, "1.5 GiB"), (9.5, 9, "9.5 GiB")):
        assert Budget(value).limit(10 * 2**30, 9 * 2**30) == gib * 2**30
        assert str(Budget(value)) == f"memory_budget={text}"
    assert Budget("auto").limit(10 * 2**30, 9 * 2**30) == int(0.94 * 9 * 2**30)
    assert str(Budget("auto")) == "memory_budget=auto"
