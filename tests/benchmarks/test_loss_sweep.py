"""The sweep of the loss over heads of real models: its command line, its table and its verdicts."""

from pathlib import Path

import pytest

from benchmarks import loss_sweep
from benchmarks.__main__ import main
from benchmarks.records import read
from tests.benchmarks.test_measuring import record


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
    found = {
        name: record(contender=name, gpu_ms=None, wall_ms=wall_ms, peak_mib=peak_mib)
        for name, (wall_ms, peak_mib) in times.items()
    }
    assert loss_sweep.verdict(found, num_tokens) == expected
    del found["compile"], found["liger"]  # out of memory
    assert loss_sweep.verdict(found, num_tokens) == "ok"


def test_sweep_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["loss", "--sweep", "--quick", "--heads", "32x65", "--tokens", "64,128", "--against", "eager"]
    assert main([*arguments, "--out", str(tmp_path / "sweep")]) == 0
    environment, records = read(tmp_path / "sweep.jsonl")
    assert environment["torch"]
    assert {each.contender for each in records} == {"ours", "ours, small budget", "products", "eager"}
    printed = capsys.readouterr().out
    assert "M32 H16 V64" in printed  # --quick replaces every shape
    assert "targets" in printed
