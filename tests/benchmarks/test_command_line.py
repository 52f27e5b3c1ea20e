"""``python -m benchmarks``, in this process, on tiny sizes."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import experts
from benchmarks.__main__ import main
from benchmarks.cases import AGAINST
from benchmarks.ops import OPS

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def rejected(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return call


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    environment, *found = map(json.loads, path.read_text().splitlines())
    return environment["environment"], found


def test_ops_write_records_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--only", "rms_norm,cross_entropy", "--against", "eager,torch", "--out", str(tmp_path / "new" / "mine")]
    assert main(["ops", "--quick", *chosen]) == 0
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
    figures = {f"mine_{name}.png" for name in ("rms_norm", "cross_entropy", "overview")}
    assert {path.name for path in tmp_path.rglob("*.png")} == (figures if HAS_MATPLOTLIB else set())


def test_loss_writes_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loss", "--quick", "--against", "eager", "--out", f"{tmp_path}/results/"]) == 0
    _, found = read(tmp_path / "results" / "loss.jsonl")
    assert [record["contender"] for record in found] == ["ours", "ours, small budget", "products", "eager"]
    assert {record["pass"] for record in found} == {"both"}
    assert [record["gradient_error"] is None for record in found] == [False, False, True, False]
    assert "linear_cross_entropy, bfloat16" in capsys.readouterr().out


@without_gpu
def test_contenders_that_are_not_there_are_skipped_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "silu_mul", "--against", "torch,liger", "--no-sweeps", "--out", str(tmp_path)]
    assert main(["ops", "--quick", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "silu_mul: torch is skipped: there is no function for this op other than eager's\n" in printed
    assert "silu_mul: liger is skipped: it needs a GPU\n" in printed
    assert {(record["suite"], record["contender"]) for record in read(tmp_path / "ops.jsonl")[1]} == {
        ("shapes", "ours")
    }
    assert "claims" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ops", "--only", "rms_norm,sigmoid"), f"no op 'sigmoid'; known: {', '.join(OPS)}"),
        (("loss", "--against", "quack"), f"no contender 'quack'; known: {', '.join(AGAINST)}"),
        (("loss", "--sweep", "--heads", "4096"), "is no list like 4096x49155"),
        (("loss", "--sweep", "--tokens", "many"), "is no list of numbers like 1024"),
        (("ops", "--quick", "--out", "mine.json"), "'mine.json' has a suffix"),
        (("train", "--quick", "--arms", "hf:61GiB"), "hf has no plan '61GiB'"),
        (("train", "--quick", "--arms", "quack"), "no implementation 'quack'; known: hf, liger_kernel, ours"),
        (("train", "--quick", "--model", "llama9"), "no model 'llama9'; known: llama3_8b"),
        (("train", "--quick", "--batches", "4,x"), "expected positive integers such as 4,8 or 4k,16k, got '4,x'"),
        (("optimizer", "--quick", "--layers", "-3"), "expected positive integers"),
        pytest.param(("ops",), "with --quick it runs on a CPU", marks=without_gpu),
    ],
)
def test_wrong_arguments_are_rejected(arguments: tuple[str, ...], message: str, rejected: Callable[..., str]) -> None:
    assert message in rejected(*arguments, *(() if "--out" in arguments else ("--out", "x")))


@needs_matplotlib
@pytest.mark.parametrize(
    "name",
    [
        *("train_llama3_8b_4xh200", "scaling_llama3_8b_h200", "batches_2xh200", "context_h200", "activations_h200"),
        *("convergence_h200", "convergence_text_h200", "ops_h200"),
    ],
)
def test_plot_draws_each_command(name: str, tmp_path: Path) -> None:
    assert main(["plot", str(RESULTS / f"{name}.jsonl"), "--out", str(tmp_path / name)]) == 0
    figures = list(tmp_path.glob("*.png"))
    assert figures
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)


@needs_matplotlib
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "foreign.jsonl"),
        ("", "foreign.jsonl"),
        ('{"environment": {}}\n{"op": "rope"}\n', "foreign.jsonl"),
        ('{"environment": {}, "command": "train"}\n{"arm": "hf"}\n', "no results of 'train'"),
        ('{"environment": {}, "command": "bake"}\n', "results of 'bake' have no figures"),
    ],
)
def test_plot_rejects_what_is_no_record(
    text: str | None, message: str, tmp_path: Path, rejected: Callable[..., str]
) -> None:
    path = tmp_path / "foreign.jsonl"
    if text is not None:
        path.write_text(text)
    assert message in rejected("plot", str(path))


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


@without_gpu
def test_experts_are_measured_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["experts", "--quick", "--model", "olmoe,gpt_oss_20b", "--tokens", "9", "--routing", "0.05"]
    assert main([*command, "--out", str(tmp_path / "mine")]) == 0
    _, found = read(tmp_path / "mine.jsonl")
    names = [(line["model"], line["name"]) for line in found]
    assert names == [
        (model, name) for model in ("olmoe", "gpt_oss_20b") for name in ("transformers", "lightning-liger")
    ]
    assert all(line["flops"] == 18 * 9 * 2 * 32 * 16 and line["error"] < 0.02 for line in found)
    for arm in ("transformers", "lightning-liger", "lightning-liger, strategy"):
        found = experts.measure_model(arm, True, torch.device("cpu"))
        assert found is not None
        assert found.ms > 0


@without_gpu
def test_fp8_measures_products_movements_and_the_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fp8", "--quick", "--model", "llama3_8b", "--tokens", "33", "--out", str(tmp_path / "mine")]) == 0
    environment, found = read(tmp_path / "mine.jsonl")
    assert environment["num_tokens"] == 33
    products = {(line["name"], line["contender"]): line for line in found if line["kind"] == "product"}
    assert len(products) == 4 * 3 * 3  # linear layers, products, contenders
    assert products["gate_up dgrad", "float8"]["flops"] == 2 * 33 * 64 * 2 * 96
    movements = {line["name"]: line["num_bytes"] for line in found if line["kind"] == "movement"}
    assert movements["o: rows of x"] == 33 * (2 * 64 + 64 + 4)  # read, written, scales
    assert movements["gated unit: backward"] == 33 * 96 * (3 * 2 + 3) + 33 * 2 * 4 + 2 * 96 * 2
    layers = [line for line in found if line["kind"] == "layer"]
    assert [line["contender"] for line in layers] == ["bfloat16", "float8", "float8, fast accumulation"]
    assert all(0.01 < line["error"] < 0.1 for line in layers[1:])
    assert "one layer, 33 tokens: movements" in capsys.readouterr().out
