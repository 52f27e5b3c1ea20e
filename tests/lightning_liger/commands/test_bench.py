"""``lightning-liger bench``: arms, their settings, their processes, and the table of what they measured."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import pytest

from lightning_liger import LigerCallback, LigerModelParallelStrategy, LigerPrecisionPlugin
from lightning_liger.cli import main
from lightning_liger.commands import bench
from lightning_liger.commands.bench import compare_losses, measure, run_bench
from tests.lightning_liger.tiny import TINY_CONFIG

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny.yaml"
CONFIG = TINY_CONFIG | {"vocab_size": 300, "num_hidden_layers": 1}
OFF, ON = {"name": "kernels off", "kernels": False}, {"name": "kernels on", "kernels": True}
HALF = {**ON, "memory_budget": 0.5}


class UsersCallback(L.Callback):
    """One that a user wrote."""


@pytest.fixture
def options(tmp_path):
    """``fit`` of a tiny model on one CPU, with two batches a step and callbacks that write."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(200)))
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": str(tmp_path / "ckpt")}},
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}},
        {"class_path": "lightning_liger.LigerMonitor"},
        {"class_path": f"{__name__}.UsersCallback"},
    ]
    return [
        *(f"--config={EXAMPLE}", f"--model.config={json.dumps(CONFIG)}", f"--data.path={text}"),
        *("--data.vocab_size=300", "--data.block_size=16", f"--data.cache_dir={tmp_path / 'cache'}"),
        *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=liger"),
        *("--trainer.accumulate_grad_batches=2", f"--trainer.callbacks={json.dumps(callbacks)}"),
        "--trainer.val_check_interval=1",
    ]


@pytest.mark.filterwarnings("ignore")
def test_arms_train_the_same_steps_with_and_without_kernels(options, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    monkeypatch.chdir(tmp_path)
    losses = []
    for arm in (OFF, ON):
        output = tmp_path / "arm.json"
        arm = {**arm, "output": str(output), "warm_up": 1}
        cli = bench._ArmCLI(arm, ["fit", *options, *bench._SETTINGS, "--trainer.max_steps=3"])
        result = json.loads(output.read_text())
        assert (cli.trainer.global_step, len(result["step_seconds"]), len(result["losses"])) == (3, 2, 3)
        assert cli.trainer.strategy.kernels == ("auto" if arm["kernels"] else "none")
        assert (cli.trainer.strategy.patch_report.num_replaced > 0) == arm["kernels"]
        kinds = {type(callback).__name__ for callback in cli.trainer.callbacks}
        assert {"UsersCallback", "_Meter"} <= kinds
        assert kinds.isdisjoint({"ModelCheckpoint", "EarlyStopping", "LigerMonitor", "SaveConfigCallback"})
        assert result["tokens_per_second"] * result["seconds_per_step"] == pytest.approx(2 * 2 * 16)
        assert (result["processes"], result["precision"], min(result["step_seconds"]) > 0) == (1, "32-true", True)
        losses.append(result["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(
    ("arm", "expected"),
    [(OFF, ("none", "none", None, None)), (ON, ("auto", "auto", 0.9, None)), (HALF, ("auto", "auto", 0.5, None))],
    ids=["off", "on", "budget"],
)
@pytest.mark.parametrize("owner", [LigerModelParallelStrategy, LigerCallback, None])
def test_settings_of_a_strategy(owner, arm, expected):
    """Those of another strategy than ours are the callback's, which is added where there is none."""
    is_strategy = owner is LigerModelParallelStrategy
    made = None if owner is None else owner(memory_budget=0.9)
    callbacks = [made] if owner is LigerCallback else []
    trainer = SimpleNamespace(strategy=made if is_strategy else object(), callbacks=callbacks)
    trainer.precision_plugin = LigerPrecisionPlugin()
    cli = object.__new__(bench._ArmCLI)
    cli.arm, cli.trainer = arm, trainer
    cli.before_fit()
    owner = trainer.strategy if is_strategy else trainer.callbacks[0]
    control = owner._activations
    kernels, choice, budget, policy = expected
    assert (owner.kernels, owner._kernels.choice, control.policy) == (kernels, choice, policy)
    assert control.budget == (budget if made is not None or budget != 0.9 else None)
    assert control.layers_communicate == (not is_strategy)
    assert trainer.precision_plugin.patching.choice == kernels


def test_recomputed_layers_stay_without_kernels_and_go_within_a_budget():
    for arm, expected in ((OFF, ["Layer"]), (HALF, None)):
        strategy = LigerModelParallelStrategy(activation_checkpointing_policy=["Layer"], tensor_parallel_size=2)
        cli = object.__new__(bench._ArmCLI)
        cli.arm, cli.trainer = arm, SimpleNamespace(strategy=strategy, callbacks=[], precision_plugin=None)
        cli.before_fit()
        assert (strategy._activations.policy, strategy._activations.layers_communicate) == (expected, True)


def test_command_runs_an_arm_in_another_process(options, tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("import time; time.sleep(60)", "failed", "not finished within 0.5 seconds"),
        ("raise SystemError('no such GPU')", "failed", "SystemError: no such GPU"),
        ("print('OutOfMemoryError: CUDA out of memory.'); exit('closed')", "out of memory", "OutOfMemoryError: CUDA"),
    ],
)  # fmt: skip
def test_processes_that_end_without_a_result_are_rows(program, status, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_WORKER", (sys.executable, "-c", program))
    row = measure(ON, [], tmp_path, 0.5 if "time" in program else 60)
    assert (row["status"], row["error"].startswith(reason)) == (status, True)
    program = "import sys; print('lightning-liger: error: data.path must exist'); sys.exit(2)"
    monkeypatch.setattr(bench, "_WORKER", (sys.executable, "-c", program))
    with pytest.raises(ValueError, match=r"^data\.path must exist$"):  # which fit refuses
        run_bench("--config=x.yaml", output=str(tmp_path))


def measured(*losses, **changes):
    given = {"status": "ok", "processes": 2, "device": "CPU", "precision": "32-true", "step_seconds": [2.0], "plan": ""}
    given |= {"seconds_per_step": 2.0, "tokens_per_second": 32.0, "peak_bytes": 2**30, "reserved_bytes": 2**31}
    return {**given, "losses": list(losses), "loss": losses[-1], **changes}


@pytest.mark.parametrize(
    ("first", "second", "precision", "agrees", "step"),
    [
        ([2.0, 1.0], [2.0, 1.0005], "32-true", True, 2),
        ([2.0, 1.0], [2.0, 1.01], "32-true", False, 2),
        ([2.0, 1.0], [2.0, 1.01], "bf16-true", True, 2),
        # Of a training that diverges those of the best step count, and none may be infinite.
        ([0.5, 1.0], [0.5, 1.5], "32-true", True, 1),
        ([0.5, 1.0], [0.5, math.nan], "32-true", False, 1),
    ],
)
def test_losses_agree_within_the_precision(first, second, precision, agrees, step):
    rows = [measured(*losses, precision=precision) for losses in (first, second)]
    sentence, found = compare_losses([rows[0], {"status": "out of memory"}, rows[1]])
    assert found == agrees
    assert sentence.startswith(f"The losses of step {step} {'agree' if agrees else 'DIFFER'}: ")
    assert compare_losses(rows[:1]) == ("", True)


def test_table_at_two_widths(tmp_path, monkeypatch, capsys):
    rows = [{"status": "out of memory", "error": "OutOfMemoryError: 15.66 GiB"}, measured(9.8765)]
    rows.append(measured(9.8765, plan="12 of 32 layers", seconds_per_step=1.0))
    for columns in ("80", "160"):
        monkeypatch.setattr(bench, "measure", Mock(side_effect=[dict(row) for row in rows]))
        monkeypatch.setenv("COLUMNS", columns)
        assert run_bench("--config=x", memory_budget="auto", output=str(tmp_path)) == 0
        table = capsys.readouterr().out
        assert max(map(len, table.splitlines())) <= int(columns)
        for part in ("2,000.0", "9.8765", "2.00", "15.66 GiB", "12 of 32 layers", "2 x CPU, 32-true", "budget auto"):
            assert part in table
