"""``python -m benchmarks``, in this process, on tiny sizes."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.cases import AGAINST
from benchmarks.ops import OPS

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    environment, *found = map(json.loads, path.read_text().splitlines())
    return environment["environment"], found


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_ops_write_records_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--only",
        "rms_norm,cross_entropy",
        "--against",
        "eager,torch",
        "--out",
        str(tmp_path / "new" / "mine"),
    ]
    assert main(["ops", "--quick", *arguments]) == 0
    printed = capsys.readouterr().out
    environment, found = read(tmp_path / "new" / "mine.jsonl")
    assert {"date", "device", "torch", "triton", "copy_tb_s", "matrix_tflop_s"} <= set(environment)
    assert environment["rms_norm_host_us"] > 0
    for op, num_contenders in (("rms_norm", 3), ("cross_entropy", 4)):
        assert f"{op}, bfloat16" in printed
        mine = [record for record in found if record["op"] == op]
        cases = {(record["suite"], record["shape"], record["contender"], record["pass"]) for record in mine}
        assert len(cases) == len(mine) == (1 + 2) * num_contenders * 3  # shape and sizes, contenders, directions
        for record in mine:
            assert record["wall_ms"] is not None
            assert (record["size"] is None) == (record["suite"] == "shapes")
            for name in ("host_us", "gradient_error", "first_call_s"):
                assert (record[name] is not None) == (record["pass"] == "both")
    assert "The paper's claims" in printed
    figures = {path.name for path in tmp_path.rglob("*.png")}
    assert figures == (
        {f"mine_{name}.png" for name in ("rms_norm", "cross_entropy", "overview")} if HAS_MATPLOTLIB else set()
    )


def test_loss_writes_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loss", "--quick", "--against", "eager", "--out", f"{tmp_path}/results/"]) == 0
    _, found = read(tmp_path / "results" / "loss.jsonl")
    assert [record["contender"] for record in found] == ["ours", "ours, small budget", "products", "eager"]
    assert {record["pass"] for record in found} == {"both"}
    assert [record["gradient_error"] is None for record in found] == [False, False, True, False]
    assert "linear_cross_entropy, bfloat16" in capsys.readouterr().out


def test_without_sweeps_there_are_no_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ops", "--quick", "--only", "silu_mul", "--against", "", "--no-sweeps", "--out", str(tmp_path)]
    assert main(arguments) == 0
    _, found = read(tmp_path / "ops.jsonl")
    assert {(record["suite"], record["contender"]) for record in found} == {("shapes", "ours")}
    assert "claims" not in capsys.readouterr().out


@without_gpu
def test_contender_that_is_not_there_is_skipped_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "silu_mul", "--against", "torch,liger", "--no-sweeps", "--out", str(tmp_path)]
    assert main(["ops", "--quick", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "silu_mul: torch is skipped: there is no function for this op other than eager's\n" in printed
    assert "silu_mul: liger is skipped: it needs a GPU\n" in printed


def test_unknown_names_are_rejected_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    message = rejected(capsys, "ops", "--only", "rms_norm,softmax", "--out", "x")
    assert f"no op 'softmax'; known: {', '.join(OPS)}" in message
    for command in ("ops", "loss"):
        message = rejected(capsys, command, "--against", "quack", "--out", "x")
        assert f"no contender 'quack'; known: {', '.join(AGAINST)}" in message


def test_out_with_a_suffix_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'mine.json' has a suffix" in rejected(capsys, "ops", "--quick", "--out", "mine.json")


@without_gpu
def test_full_sizes_need_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "with --quick it runs on a CPU" in rejected(capsys, "ops", "--out", str(tmp_path))


@pytest.mark.parametrize("command", ["ops", "loss"])
def test_help_lists_what_can_be_chosen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert ", ".join(AGAINST) in printed
    assert "path without suffix" in printed
    assert (", ".join(OPS) in printed) == (command == "ops")


@needs_matplotlib
def test_plot_draws_again_from_records(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    assert main(["ops", "--quick", "--only", "rope", "--against", "eager", "--out", str(out)]) == 0
    drawn = tmp_path / "mine_rope.png"
    drawn.unlink()
    assert main(["plot", f"{out}.jsonl"]) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert main(["plot", f"{out}.jsonl", "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again_rope.png").exists()


@needs_matplotlib
@pytest.mark.parametrize("text", [None, "", '{"environment": {}}\n{"op": "rope"}\n', "no json"])
def test_plot_rejects_what_is_no_record(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.jsonl"
    if text is not None:
        path.write_text(text)
    assert "foreign.jsonl" in rejected(capsys, "plot", str(path))


@pytest.mark.gpu
def test_on_a_gpu_kernels_memory_and_floors_are_measured(tmp_path: Path) -> None:
    assert main(["ops", "--quick", "--only", "rms_norm", "--against", "eager", "--out", str(tmp_path)]) == 0
    environment, found = read(tmp_path / "ops.jsonl")
    assert environment["copy_tb_s"] > 0.1
    assert environment["matrix_tflop_s"] > 1
    for record in found:
        assert record["gpu_ms"] is not None
        assert record["ratio"] == pytest.approx(record["gpu_ms"] / record["floor_ms"])
        if record["pass"] == "both":
            assert record["gpu_ms"] > 0
            assert record["peak_mib"] > 0


def test_ends_its_processes_when_it_is_terminated(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "train", "--quick", "--devices=2", f"--out={tmp_path}/train"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        parent = psutil.Process(process.pid)
        while not (workers := parent.children()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert process.returncode == 128 + signal.SIGTERM
