"""What the benchmarks compute from what they measure, and that every contender computes the same thing."""

import dataclasses

import pytest
import torch
from rich.console import Console

from benchmarks import records, tables, timing
from benchmarks.cases import DTYPE, Contender, Maker, Op, Unavailable
from benchmarks.loss import LOSS, MIB, small_budget
from benchmarks.ops import OPS
from benchmarks.run import Runner, Settings, gradient_error

CPU = torch.device("cpu")
EVERY_OP = {**OPS, LOSS.name: LOSS}
WITH_GRADIENT = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in EVERY_OP.values()
    for name, contender in op.contenders.items()
    if contender.has_gradient and name != "liger"
]


def settings(**changes: object) -> Settings:
    return dataclasses.replace(
        Settings(device=CPU, against=("eager",), effort=timing.QUICK, rates=None, tiny=True, sweeps=False), **changes
    )


def record(**changes: object) -> records.Record:
    times = {"gpu_ms": 2.0, "gpu_ms_quartiles": (1.9, 2.1), "wall_ms": 2.5, "wall_ms_quartiles": (2.4, 2.6)}
    memory = {"floor_ms": 1.0, "ratio": 2.0, "peak_mib": 1024.0, "inputs_mib": 1024.0}
    where = {"op": "rms_norm", "suite": "sweep", "shape": "8192x16384", "size": 16384, "dtype": "bfloat16"}
    return records.Record(**{**where, **times, **memory, "contender": "ours", "pass_": "both", **changes})


@pytest.mark.parametrize(("op", "name"), WITH_GRADIENT)
def test_contender_has_the_gradients_of_the_op(op: Op, name: str) -> None:
    try:
        function = op.load(name, CPU)
    except Unavailable:
        if name != "torch":
            raise
        pytest.skip("not in this version of PyTorch")
    error = gradient_error(op, function, lambda: op.inputs(Maker(CPU), *op.tiny))
    # Intermediate results and the gradient are each rounded to half an eps: eight roundings, all in one direction.
    assert error < 4 * torch.finfo(DTYPE).eps


def test_gradient_error_sees_a_wrong_gradient_of_the_smaller_input() -> None:
    op = OPS["layer_norm"]
    eager = op.load("eager", CPU)
    error = gradient_error(
        op, lambda x, weight, bias: eager(x, weight, 2 * bias), lambda: op.inputs(Maker(CPU), *op.tiny)
    )
    assert error == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("name", "shape", "amount"),
    [
        ("rms_norm", (16, 64), 5 * 16 * 64 * 2),
        ("add_rms_norm", (16, 64), 8 * 16 * 64 * 2),
        ("rope", (1, 16, 2, 1, 32), 4 * 16 * 3 * 32 * 2),
        ("silu_mul", (16, 64), 8 * 16 * 64 * 2),
        ("cross_entropy", (16, 64), 2 * 16 * 64 * 2),
        ("linear_cross_entropy", (30, 16, 64, 60), 6 * 12 * 16 * 64),
    ],
)
def test_floor_counts_the_least_work(name: str, shape: tuple[int, ...], amount: int) -> None:
    op = EVERY_OP[name]
    assert op.passes["both"] * op.amount(*op.inputs(Maker(CPU), *shape).arguments) == amount


def test_small_budget_leaves_the_peak_close_to_liger_kernels() -> None:
    def budget(num_tokens: int, hidden_size: int, vocab_size: int) -> int:
        shapes = (num_tokens, hidden_size), (vocab_size, hidden_size)
        return small_budget(*(torch.empty(shape, dtype=DTYPE, device="meta") for shape in shapes))

    # Peaks of liger-kernel that benchmarks/results/loss_h200.jsonl has.
    for shape, liger_mib in zip(LOSS.shapes, (1129, 1225, 276, 1509, 1129), strict=True):
        num_tokens, hidden_size, vocab_size, _ = shape
        rows = budget(*shape[:3]) / (vocab_size * 2)
        peak = ((num_tokens + vocab_size + rows) * hidden_size + rows * vocab_size) * 2
        assert 1.085 * liger_mib <= peak / MIB <= 1.1 * liger_mib


def test_samples_are_summarized() -> None:
    assert timing.Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == timing.Spread(3.0, (2.0, 4.0))
    assert timing.sum_by_step([1.0, 2.0, 3.0, 4.0], 2) == [3.0, 7.0]
    assert timing.sum_by_step([1.0, 2.0, 3.0], 2) == [3.0, 3.0]  # steps are not alike
    assert timing.sum_by_step([], 2) == [0.0, 0.0]
    assert timing.idle_share([]) == timing.idle_share([(5.0, 15.0)]) == 0
    overlapping_then_gap = [(12.0, 14.0), (10.0, 16.0), (18.0, 20.0), (15.0, 17.0)]
    assert timing.idle_share(overlapping_then_gap) == pytest.approx(0.1)
    effort = timing.Effort(milliseconds=30.0, min_repeats=10, max_repeats=100)
    assert [effort.repeats(milliseconds) for milliseconds in (200.0, 1.0, 0.01, 0.0)] == [10, 30, 100, 100]


def test_backward_is_the_difference_small_problem_is_on_the_whole_and_ratio_to_the_floor() -> None:
    op, said = OPS["silu_mul"], []
    runner = Runner(settings(rates=timing.Rates(copy=1e9, matrix=1e12)), said.append)
    forward, backward, both = sorted(
        (found for found in runner.measure(op, runner.measure_small(op)) if found.contender == "ours"),
        key=lambda found: ["forward", "backward", "both"].index(found.pass_),
    )
    assert backward.wall_ms == pytest.approx(both.wall_ms - forward.wall_ms)
    assert backward.wall_ms_quartiles is None
    assert both.host_us > 0
    assert forward.host_us is None
    assert both.floor_ms == pytest.approx(8 * 16 * 64 * 2 / 1e9 * 1e3)
    assert not said


def test_contender_that_fails_is_told_and_the_others_go_on() -> None:
    def broken(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    op = dataclasses.replace(
        OPS["silu_mul"], contenders={"ours": Contender(broken), "eager": OPS["silu_mul"].contenders["eager"]}
    )
    said: list[str] = []
    runner = Runner(settings(), said.append)
    found = list(runner.measure(op, runner.measure_small(op)))
    assert {one.contender for one in found} == {"eager"}
    assert runner.failed == {"ours"}
    assert said == ["silu_mul: ours failed at 256x1024: RuntimeError: no such kernel"]


def test_claims_are_eagers_quantities_over_the_others() -> None:
    found = [
        record(),
        record(contender="eager", gpu_ms=8.0, peak_mib=4096.0),
        record(contender="eager", gpu_ms=80.0, size=4096),
        record(contender="eager", gpu_ms=80.0, pass_="forward"),
    ]
    console = Console(width=170)
    with console.capture() as capture:
        console.print(tables.claims_table(found))
    (row,) = (line for line in capture.get().splitlines() if "RMSNorm" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    # 8 / 2 in time; (4096 + 1024) / (1024 + 1024) in memory
    assert cells[1:] == ["7.0x", "-", "4.0x", "-", "3.0x", "-", "2.5x", "-"]
