"""``lightning-liger bench``: arms, their settings, their processes, and the table of what they measured."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_liger.cli import bench_arm, main
from lightning_liger.commands import bench
from lightning_liger.commands.bench import _SETTINGS, Arm, Row, compare_losses, draw, merge, parse_arms, run_bench

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny.yaml"
CONFIG = {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


class UsersCallback(L.Callback):
    """One that a user wrote."""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """``fit`` of a tiny model on one CPU, with two batches a step and callbacks that write."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(200)))
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": str(tmp_path / "ckpt")}},
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}},
        {"class_path": f"{__name__}.UsersCallback"},
    ]
    return [
        *(f"--config={EXAMPLE}", f"--model.config={json.dumps(CONFIG)}", f"--data.path={text}"),
        *("--data.vocab_size=300", "--data.block_size=16", f"--data.cache_dir={tmp_path / 'cache'}"),
        *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=liger"),
        *("--trainer.accumulate_grad_batches=2", f"--trainer.callbacks={json.dumps(callbacks)}"),
        "--trainer.val_check_interval=1",
    ]


def run_arm(options: list[str], output: Path, kernels: bool, **bench_options: str) -> tuple[Any, dict[str, Any]]:
    """The command of an arm in this process, which has 1 + 2 steps; what it measured."""
    settings = _SETTINGS | {"trainer.max_steps": "3", "bench.warm_up": "1", "bench.output": str(output)}
    settings |= {"bench.kernels": str(kernels).lower()} | {f"bench.{key}": each for key, each in bench_options.items()}
    cli = bench_arm._BenchCLI(["fit", *options, *(f"--{key}={each}" for key, each in settings.items())])
    return cli, json.loads(Path(f"{output}.0.json").read_text())


@pytest.mark.filterwarnings("ignore")
def test_arms_train_the_same_steps_with_and_without_kernels(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    losses = []
    for kernels in (False, True):
        cli, result = run_arm(options, tmp_path / "arm", kernels)
        assert (cli.trainer.global_step, len(result["step_seconds"]), result["status"]) == (3, 2, "ok")
        assert cli.trainer.strategy.kernels == ("auto" if kernels else "none")
        assert (cli.trainer.strategy.patch_report.num_replaced > 0) == kernels
        kinds = {type(callback).__name__ for callback in cli.trainer.callbacks}
        assert {"UsersCallback", "Meter"} <= kinds
        assert kinds.isdisjoint({"ModelCheckpoint", "EarlyStopping", "TrainingSummary", "SaveConfigCallback"})
        assert result["tokens_per_step"] == 2 * 2 * 16
        assert min(result["step_seconds"]) > 0
        losses.append(result["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(
    ("strategy", "kernels", "budget", "expected"),
    [
        ("liger_fsdp_cpu_offload", False, None, {"cpu_offload": True, "kernels": "none", "memory_budget": None}),
        ("liger_fsdp_cpu_offload", True, None, {"cpu_offload": True}),
        (
            {"memory_budget": 0.9, "activation_checkpointing": None, "stage": 3},
            False,
            None,
            {"memory_budget": None, "kernels": "none", "stage": 3},
        ),
        ({"memory_budget": 0.9, "kernels": ["rope"]}, True, 0.5, {"memory_budget": 0.5, "kernels": ["rope"]}),
        (
            {"activation_checkpointing_policy": ["Layer"]},
            True,
            "auto",
            {"memory_budget": "auto", "activation_checkpointing_policy": None},
        ),
    ],
)
def test_settings_of_a_strategy(strategy: Any, kernels: bool, budget: Any, expected: dict[str, Any]) -> None:
    if isinstance(strategy, dict):
        path = "lightning_liger.LigerFSDPStrategy"
        strategy = bench_arm.Namespace(class_path=path, init_args=bench_arm.Namespace(**strategy))
    changed = bench_arm.choose(strategy, kernels, budget)
    assert changed.class_path.endswith("LigerFSDPStrategy")
    given = vars(changed.init_args)
    assert {name: given.get(name) for name in expected} == expected
    assert given.get("activation_checkpointing") is None


@pytest.mark.parametrize("kernels", [False, True])
def test_kernels_of_another_strategy_are_those_of_the_callback(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bench_arm.Namespace(
        fit=bench_arm.Namespace(
            trainer=bench_arm.Namespace(strategy="ddp", callbacks=None),
            bench=bench_arm.Namespace(kernels=kernels, memory_budget="0.5" if kernels else None),
        )
    )
    monkeypatch.setattr(bench_arm.LigerCLI, "before_instantiate_classes", lambda self: None)
    cli = object.__new__(bench_arm._BenchCLI)
    cli.config = config
    cli.before_instantiate_classes()
    callbacks = config.fit.trainer.callbacks
    assert config.fit.trainer.strategy == "ddp"
    assert [each.class_path.rpartition(".")[2] for each in callbacks] == ["LigerCallback"] * kernels
    assert not kernels or callbacks[0].init_args.memory_budget == 0.5


def test_tokens_of_batches() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert bench_arm.count_tokens({"input_ids": ids, "labels": ids, "prompt_ids": ids}) == 6
    assert bench_arm.count_tokens({"prompt_ids": ids, "completion_ids": ids}) == 12
    assert bench_arm.count_tokens(ids) == bench_arm.count_tokens({"x": ids}) == 0


# The command.


def test_command_runs_an_arm_in_another_process(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An arm that fails: memory budgets need a GPU."""
    out = tmp_path / "out"
    options = [each for each in options if "callbacks" not in each] + ["--trainer.callbacks=null"]
    status = main(["bench", *options, "--arms=", "--memory_budget", "0.5", f"--output={out}", "--steps=1", "--json"])
    assert status == 1
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "bench.json").read_text())
    (row,) = report["arms"]
    assert (row["arm"], row["status"]) == ("budget 0.5", "failed")
    assert "memory_budget=0.5 needs a GPU" in row["error"]
    assert "memory_budget=0.5 needs a GPU" in (out / "budget_0.5.log").read_text()


def test_what_fit_refuses_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('lightning-liger: error: data.path must exist'); sys.exit(2)"
    monkeypatch.setattr(bench, "_WORKER", (sys.executable, "-c", program))
    with pytest.raises(ValueError, match=r"data\.path must exist"):
        run_bench("--config=x.yaml", output=str(tmp_path))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(60)", "not done within 0.5 seconds"),
        ("raise SystemError('no such GPU')", "SystemError: no such GPU"),
    ],
)
def test_processes_that_end_without_a_result_are_rows(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_WORKER", (sys.executable, "-c", program))
    row = bench.measure(Arm("on", True), [], tmp_path, steps=1, warm_up=0, time_limit=0.5 if "time" in program else 60)
    assert (row.status, row.error) == ("failed", reason)


# Rows.


def test_arms_of_options() -> None:
    off, on = Arm("kernels off", False), Arm("kernels on", True)
    assert parse_arms("off,on", "") == [off, on]
    assert parse_arms("on", "auto, 0.5") == [on, Arm("budget auto", True, "auto"), Arm("budget 0.5", True, "0.5")]


def measured(loss: float, peak: int = 100, **changes: Any) -> dict[str, Any]:
    given = {"status": "ok", "processes": 2, "device": "CPU", "precision": "32-true", "step_seconds": [2.0]}
    return {
        **given,
        **{
            "seconds_per_step": 2.0,
            "tokens_per_step": 64,
            "first_loss": 2.0,
            "loss": loss,
            "plan": "",
            "peak_bytes": peak,
        },
        **changes,
    }


def test_processes_are_merged() -> None:
    row = merge("on", [measured(1.0), measured(1.0, 300)], "")
    assert (row.status, row.tokens_per_second, row.peak_bytes, row.reserved_bytes) == ("ok", 32.0, 300, None)
    assert merge("on", [measured(1.0)], "killed") == Row("on", "failed", "killed")
    failed = {"status": "failed", "error": "ConnectionError: closed"}
    ran_out = {"status": "out of memory", "error": "OutOfMemoryError: 8 GiB"}
    assert merge("on", [failed, ran_out], "") == Row("on", "out of memory", "OutOfMemoryError: 8 GiB")


@pytest.mark.parametrize(
    ("loss", "precision", "agrees"),
    [(1.0005, "32-true", True), (1.01, "32-true", False), (1.01, "bf16-true", True), (math.nan, "bf16-true", False)],
)
def test_losses_agree_within_the_precision(loss: float, precision: str, agrees: bool) -> None:
    rows = [merge("off", 2 * [measured(1.0, precision=precision)], ""), Row("auto", "out of memory", "8 GiB")]
    rows.append(merge("on", 2 * [measured(loss, precision=precision)], ""))
    sentence, found = compare_losses(rows)
    assert found == agrees
    assert ("agree" if agrees else "DIFFER") in sentence


def test_training_that_diverges_is_judged_by_its_first_losses() -> None:
    def row(first_loss: float, loss: float) -> Row:
        return merge("off", 2 * [measured(loss, first_loss=first_loss)], "")

    sentence, found = compare_losses([row(0.5, 1.0), row(0.5, 1.5)])
    assert found
    assert "that of 'off' rises, from 0.5 to 1, and" in sentence
    assert "Those of the first step agree: 0 relative" in sentence
    sentence, found = compare_losses([row(0.5, 1.0), row(0.6, 1.5)])
    assert not found
    assert "Those of the first step DIFFER: 0.2 relative" in sentence
    for first, second in (
        ((0.5, 1.0), (0.5, math.nan)),
        ((0.5, 0.54), (0.5, 0.6)),  # noise of a short training
        ((-1.0, -0.95), (-1.0, -0.5)),
    ):
        assert not compare_losses([row(*first), row(*second)])[1]


def test_table_at_two_widths_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = iter(
        [
            Row("kernels off", "out of memory", "OutOfMemoryError: 15.66 GiB"),
            merge("kernels on", 2 * [measured(9.8765, reserved_bytes=2**31)], ""),
            merge("budget auto", 2 * [measured(9.8765, reserved_bytes=2**31, plan="12 of 32 layers")], ""),
        ]
        * 2
    )
    monkeypatch.setattr(bench, "measure", lambda *args, **options: next(rows))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for columns in ("80", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run_bench("--config=x", memory_budget="auto", output=str(tmp_path)) == 0
        table = capsys.readouterr().out
        assert max(map(len, table.splitlines())) <= int(columns)
        for part in ("2,000.0", "9.8765", "2.00", "15.66 GiB", "12 of 32 layers", "lightning-liger[plots]"):
            assert part in table


def test_plot_has_the_arms_that_were_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [Row("kernels off", "failed", "x"), merge("kernels on", 2 * [measured(1.0)], "")]
    assert draw(rows, tmp_path / "bench.png") == f"Plot: {tmp_path / 'bench.png'}"
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "no arm was measured" in draw(rows[:1], tmp_path / "none.png")
