"""``lightning-liger bench``: a yaml file, trained for some steps with and without kernels on this machine."""

import contextlib
import json as json_module
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from liger_ops.arguments import check_integer, check_number, check_path, wrong_value
from lightning_liger.cli.messages import PROGRAM
from lightning_liger.cli.mistakes import check_yaml_files

_WORKER = (sys.executable, "-m", "lightning_liger.cli.bench_arm", "fit")
_SETTINGS = {
    "ckpt_path": "null",
    "trainer.logger": "false",
    "trainer.enable_checkpointing": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.profiler": "null",
    "trainer.fast_dev_run": "false",
    "trainer.limit_val_batches": "0",
    "trainer.num_sanity_val_steps": "0",
    "trainer.val_check_interval": "null",
    "trainer.max_epochs": "-1",
    "trainer.max_time": "null",
}
"""Options of ``fit`` that every arm has in place of the user's."""
_TOLERANCES = {"bf16": 4 * 2**-8, "16": 4 * 2**-11}
"""Relative, of losses: four roundings in the dtype of the precision, since errors grow from step to step."""
_TOLERANCE = 1e-3
_RISE = 0.1
"""Of its first value, by which the loss of a training that diverges has risen at least."""
_REFUSED = f"{PROGRAM}: error: "
_GIB = 2**30
_WIDTH = 80
"""Of tables at least: narrower ones would lose digits."""


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: In tables and file names.
        kernels: Whether kernels are applied.
        memory_budget: In place of that of the settings; None leaves it.
    """

    name: str
    kernels: bool
    memory_budget: str | None = None


@dataclass(frozen=True)
class Row:
    """What an arm measured.

    Attributes:
        arm: Its name.
        status: ``"ok"``, ``"out of memory"`` or ``"failed"``.
        error: Why it failed.
        seconds_per_step: Median of the measured optimizer steps.
        tokens_per_second: Of all processes; 0 if batches have no tokens that are known.
        peak_bytes: Of the measured steps, of the process with the highest; on CPUs of the whole process.
        reserved_bytes: What PyTorch's allocator reserved, with the warm-up; None on CPUs.
        first_loss: Of the first step, if there is a warm-up.
        loss: Of the last step.
        processes: How many trained together.
        device: Name of the first process's device.
        precision: That of the Trainer.
        plan: For a memory budget: the layers that are recomputed.
        step_seconds: Of each measured step.
    """

    arm: str
    status: str
    error: str = ""
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    first_loss: float | None = None
    loss: float | None = None
    processes: int | None = None
    device: str = ""
    precision: str = ""
    plan: str = ""
    step_seconds: tuple[float, ...] = ()


def run_bench(
    *fit_options: str,
    arms: str = "off,on",
    memory_budget: str = "",
    steps: int = 20,
    warm_up: int = 5,
    output: str = "bench",
    time_limit: float = 1800.0,
    json: bool = False,
) -> int:
    """Measure time and memory of training with kernels off and on: lightning-liger bench --config user.yaml.

    Takes all options of lightning-liger fit, such as --config (also several) and --trainer.devices=2. Each arm trains
    in fresh processes on the same data, without logger, checkpoints, validation and callbacks that write. An arm that
    runs out of memory is a row of the table. Writes bench.json, bench.png (with matplotlib) and the log of each arm to
    the output folder. The exit status is 0, or 1 if an arm failed for another reason or the losses differ.

    Args:
        arms: Kernels "off" (no kernel, whole logits), "on" (the settings as they are), or "off,on".
        memory_budget: Further arms with kernels on, one for each budget: "auto", a share of the GPU's memory up to 1,
            or GiB above 1, such as "auto,0.5,60".
        steps: Optimizer steps that are measured.
        warm_up: Optimizer steps before them; kernels compile and memory budgets are planned in the first ones.
        output: The folder to write to.
        time_limit: Seconds after which an arm is ended.
        json: Print one JSON object instead of the table.
    """
    chosen = parse_arms(arms, memory_budget)
    check_integer("steps", steps, at_least=1)
    check_integer("warm_up", warm_up, at_least=0)
    check_number("time_limit", time_limit, above=0)
    check_path("output", output)
    if not any(option.partition("=")[0] in ("--config", "-c", "--model") for option in fit_options):
        raise ValueError(f"config is required: {PROGRAM} bench --config user.yaml")
    check_yaml_files(fit_options)
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"output must be a folder, or a new one, got {output!r}: {error.strerror}") from error
    rows = []
    for arm in chosen:
        print(f"{arm.name}: {warm_up} + {steps} steps ...", file=sys.stderr, flush=True)
        rows.append(measure(arm, fit_options, folder, steps=steps, warm_up=warm_up, time_limit=time_limit))
    agreement, agrees = compare_losses(rows)
    status = int(not agrees or any(row.status == "failed" for row in rows))
    report = {
        "command": list(fit_options),
        "steps": steps,
        "warm_up": warm_up,
        "losses_agree": agrees,
        "arms": [asdict(row) for row in rows],
    }
    text = json_module.dumps(report, indent=2)
    (folder / "bench.json").write_text(text + "\n", encoding="utf-8")
    drawn = draw(rows, folder / "bench.png")
    if json:
        print(text)
    else:
        _print(rows, agreement, f"{drawn}\nLogs and numbers: {folder}/")
    return status


def parse_arms(arms: str, memory_budget: str) -> list[Arm]:
    """The arms of two options; ValueError for words that are none."""
    chosen = []
    for word in filter(None, map(str.strip, arms.split(","))):
        if word not in ("off", "on"):
            raise wrong_value("arms", "'off', 'on' or 'off,on'", arms)
        chosen.append(Arm(f"kernels {word}", word == "on"))
    for word in filter(None, map(str.strip, memory_budget.split(","))):
        if word != "auto" and not _is_positive(word):
            raise wrong_value("memory_budget", "'auto' or positive numbers, separated by commas", memory_budget)
        chosen.append(Arm(f"budget {word}", True, word))
    if not chosen:
        raise wrong_value("arms", "'off', 'on' or 'off,on'", arms)
    return list(dict.fromkeys(chosen))


def _is_positive(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False


def measure(arm: Arm, fit_options: Sequence[str], folder: Path, *, steps: int, warm_up: int, time_limit: float) -> Row:
    """Trains an arm in a new process, which starts those of further devices; the processes end before this returns.

    Raises:
        ValueError: If ``fit`` refuses its options, with what it said.
    """
    output = folder / arm.name.replace(" ", "_")
    for old in folder.glob(f"{output.name}.*"):
        old.unlink()
    settings = {
        **_SETTINGS,
        "trainer.max_steps": str(warm_up + steps),
        "trainer.default_root_dir": str(folder),
        "bench.output": str(output),
        "bench.warm_up": str(warm_up),
        "bench.kernels": str(arm.kernels).lower(),
        **({} if arm.memory_budget is None else {"bench.memory_budget": arm.memory_budget}),
    }
    command = [*_WORKER, *fit_options, *(f"--{name}={value}" for name, value in settings.items())]
    log = folder / f"{output.name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(time_limit)
            failure = ""
        except subprocess.TimeoutExpired:
            failure = f"not done within {time_limit:g} seconds"
        finally:
            _end(process)
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    if process.returncode == 2 and _REFUSED in said:
        raise ValueError(said.rpartition(_REFUSED)[2].partition("\nOptions: ")[0])
    last = said.rpartition("\n")[2][:300]
    written = sorted(folder.glob(f"{output.name}.*.json"))
    return merge(arm.name, [json_module.loads(path.read_text(encoding="utf-8")) for path in written], failure or last)


def _environment() -> dict[str, str]:
    """With the folders that this process imports from, so that users' modules are found too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and those that it started."""
    with contextlib.suppress(ProcessLookupError):  # they have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def merge(name: str, results: Sequence[dict[str, Any]], failure: str) -> Row:
    """The row of an arm from the results of its processes; ``failure`` says why there may be none."""
    wrong = [result for result in results if result["status"] != "ok"]
    if wrong:
        ran_out = [result for result in wrong if result["status"] == "out of memory"]
        first = (ran_out or wrong)[0]
        return Row(name, first["status"], first["error"])
    if not results or len(results) < results[0]["processes"]:
        return Row(name, "failed", failure or "a process ended without a result")
    first = results[0]
    seconds = statistics.median(result["seconds_per_step"] for result in results)
    reserved = [result["reserved_bytes"] for result in results if "reserved_bytes" in result]
    return Row(
        name,
        "ok",
        seconds_per_step=seconds,
        tokens_per_second=first["tokens_per_step"] / seconds,
        peak_bytes=max(result["peak_bytes"] for result in results),
        reserved_bytes=max(reserved, default=None),
        first_loss=first["first_loss"],
        loss=first["loss"],
        processes=first["processes"],
        device=first["device"],
        precision=first["precision"],
        plan=first["plan"],
        step_seconds=tuple(first["step_seconds"]),
    )


def compare_losses(rows: Sequence[Row]) -> tuple[str, bool]:
    """A sentence on the losses of the last step, and whether they agree within the tolerance of the precision.

    Rounding errors grow in a training that diverges: where the loss of the first arm has clearly risen, and the last
    losses differ, it is those of the first step that must agree.
    """
    measured = [row for row in rows if row.loss is not None]
    if len(measured) < 2:
        return "", True
    first = measured[0]
    tolerance = _TOLERANCES.get(first.precision.partition("-")[0], _TOLERANCE)
    allowed = f"{tolerance:.2g} allowed ({first.precision})"
    difference = _difference([row.loss for row in measured])
    if difference > tolerance and _rises(first):
        before = _difference([row.first_loss for row in measured])
        return (
            f"The losses of the last step cannot be compared: that of {first.arm!r} rises, from {first.first_loss:.4g}"
            f" to {first.loss:.4g}, and rounding errors grow in a training that diverges. Those of the first step"
            f" {_word(before <= tolerance)}: {before:.2g} relative, {allowed}. Try a lower learning rate.",
            before <= tolerance and difference < math.inf,
        )
    agrees = difference <= tolerance
    return f"The losses of the last step {_word(agrees)}: {difference:.2g} relative, {allowed}.", agrees


def _rises(row: Row) -> bool:
    first, last = row.first_loss, row.loss
    return first is not None and last is not None and last - first > _RISE * abs(first)


def _difference(losses: Sequence[float | None]) -> float:
    """The largest relative difference from the first loss; infinite where one is None or not finite."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if len(known) < len(losses):
        return math.inf
    return max(abs(loss - known[0]) for loss in known) / max(abs(known[0]), 1e-12)


def _word(agrees: bool) -> str:
    return "agree" if agrees else "DIFFER"


def _print(rows: Sequence[Row], agreement: str, more: str) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    measured = [row for row in rows if row.status == "ok"]
    table = Table(title=_title(measured), title_justify="left", title_style="bold")
    table.add_column("arm", no_wrap=True)
    for name in ("ms/step", "speed-up", "tokens/s", "peak GiB", "reserved", "loss"):
        table.add_column(name, justify="right")
    base = measured[0].seconds_per_step if measured else None
    for row in rows:
        if row.status != "ok" or row.seconds_per_step is None or base is None:
            table.add_row(row.arm, f"[red]{row.status}[/red]")
            continue
        table.add_row(
            row.arm,
            f"{1e3 * row.seconds_per_step:,.1f}",
            f"{base / row.seconds_per_step:.2f}x",
            f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
            _gib(row.peak_bytes),
            _gib(row.reserved_bytes),
            "-" if row.loss is None else f"{row.loss:.4f}",
        )
    console.print(table)
    for row in rows:
        if row.error or row.plan:
            console.print(f"{row.arm}: {escape(row.error or row.plan)}")
    console.print("\n".join(filter(None, (agreement, more))), markup=False)


def _title(measured: Sequence[Row]) -> str:
    if not measured:
        return "No arm was measured"
    first = measured[0]
    return f"{first.processes} x {first.device}, {first.precision}, median of {len(first.step_seconds)} steps"


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / _GIB:.2f}"


def draw(rows: Sequence[Row], path: Path) -> str:
    """Draws time and memory of the arms that were measured; returns a sentence that says where, or why not."""
    measured = [row for row in rows if row.status == "ok"]
    if not measured:
        return "No plot: no arm was measured."
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No plot: matplotlib is missing, pip install 'lightning-liger[plots]'"
    figure = Figure(figsize=(8, 1.6 + 0.4 * len(measured)), layout="constrained")
    names = [row.arm for row in measured]
    values = {
        "ms per step": [1e3 * (row.seconds_per_step or 0) for row in measured],
        "peak memory, GiB": [(row.peak_bytes or 0) / _GIB for row in measured],
    }
    for axes, (label, numbers) in zip(figure.subplots(1, 2, sharey=True), values.items(), strict=True):
        colors = ["0.75" if row.arm == "kernels off" else "0.35" for row in measured]  # gray levels, for print
        bars = axes.barh(names, numbers, color=colors, edgecolor="black", linewidth=0.6)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set_xlim(0, 1.2 * max(numbers))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()  # shared: the first arm on top
    figure.suptitle(_title(measured), fontsize=10)
    figure.savefig(path, dpi=150)
    return f"Plot: {path}"
