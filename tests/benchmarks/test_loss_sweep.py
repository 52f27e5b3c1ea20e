"""The sweep of the loss over heads of real models: its command line, its table and its verdicts."""

import json
from pathlib import Path

import pytest

from benchmarks import loss_sweep
from benchmarks.__main__ import main
from benchmarks.records import Record, read


def record(contender: str, shape: str, wall_ms: float, peak_mib: float | None) -> Record:
    return Record(
        op="linear_cross_entropy", suite="shapes", shape=shape, size=None, dtype="bfloat16", contender=contender,
        pass_="both", gpu_ms=None, gpu_ms_quartiles=None, wall_ms=wall_ms, wall_ms_quartiles=None, floor_ms=None,
        ratio=None, peak_mib=peak_mib,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "small", "num_tokens", "expected"),
    [
        ((10.2, 70.0), (18.0, 22.0), 4096, "ok"),
        ((10.3, 70.0), (18.0, 22.0), 4096, "time 1.030"),
        ((10.0, 80.0), (18.0, 22.0), 4096, "memory 0.800"),
        ((10.0, 80.0), (18.0, 22.0), 1024, "ok"),
        ((10.0, 70.0), (19.0, 23.0), 1024, "small: time 0.950, small: memory 1.150"),
    ],
)
def test_verdict_names_the_targets_that_are_missed(
    ours: tuple[float, float], small: tuple[float, float], num_tokens: int, expected: str
) -> None:
    times = {"ours": ours, "ours, small budget": small, "compile": (10.0, 100.0), "liger": (20.0, 20.0)}
    found = {name: record(name, "x", *values) for name, values in times.items()}
    assert loss_sweep.verdict(found, num_tokens) == expected
    del found["compile"], found["liger"]  # out of memory
    assert loss_sweep.verdict(found, num_tokens) == "ok"


def test_sweep_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["loss", "--sweep", "--quick", "--heads", "32x65", "--tokens", "64,128", "--against", "eager"]
    assert main([*arguments, "--out", str(tmp_path / "sweep")]) == 0
    environment, records = read(tmp_path / "sweep.jsonl")
    assert environment["torch"]
    assert {each.contender for each in records} == {"ours", "ours, small budget", "products", "eager"}
    assert len((tmp_path / "sweep.jsonl").read_text().splitlines()) == 1 + len(records)
    printed = capsys.readouterr().out
    assert "M32 H16 V64" in printed  # --quick replaces every shape
    assert "targets" in printed
    assert all(json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines())
