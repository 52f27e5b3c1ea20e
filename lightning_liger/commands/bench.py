"""``lightning-liger bench``: a yaml file, trained for some steps with and without kernels on this machine.

An arm is ``python -m lightning_liger.commands.bench ARM fit --config user.yaml ...`` with the arm as JSON.
"""

import contextlib
import json as json_module
import os
import re
import signal
import statistics
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Column, Table
from typing_extensions import override

from liger_ops.arguments import check_integer, check_number, check_path, wrong_value
from lightning_liger.callbacks import LigerCallback
from lightning_liger.cli.messages import PROGRAM, end, message_of
from lightning_liger.cli.training import LigerCLI
from lightning_liger.commands.writing import make_folder
from lightning_liger.monitor import LigerMonitor
from lightning_liger.strategies.parts.activations import ActivationControl
from lightning_liger.strategies.parts.kernels import Kernels

_WORKER = (sys.executable, "-m", "lightning_liger.commands.bench")
_OF_TRAINER = """
logger=false enable_checkpointing=false enable_progress_bar=false enable_model_summary=false fast_dev_run=false
profiler=null limit_val_batches=0 num_sanity_val_steps=0 val_check_interval=null max_epochs=-1 max_time=null
"""
_SETTINGS = ("--ckpt_path=null", *(f"--trainer.{setting}" for setting in _OF_TRAINER.split()))
"""Options of ``fit`` that every arm has in place of the user's."""
_KEPT_CALLBACKS = ("GradientAccumulationScheduler", "LigerCallback", *(
    "EMAWeightAveraging", "StochasticWeightAveraging", "WeightAveraging"))  # fmt: skip
"""Callbacks of Lightning and of this package that change how a step trains. Those of users are all kept."""
_TOLERANCES = {"bf16": 4 * 2**-8, "16": 4 * 2**-11}
"""Relative, of losses: four roundings in the dtype of the precision, since errors grow from step to step."""
_COLUMNS = {
    "ms/step": ("seconds_per_step", 1e3, ",.1f"), "speed-up": ("speed_up", 1, ".2f"),
    "tokens/s": ("tokens_per_second", 1, ",.0f"), "peak GiB": ("peak_bytes", 2**-30, ".2f"),
    "reserved": ("reserved_bytes", 2**-30, ".2f"), "loss": ("loss", 1, ".4f"),
}  # fmt: skip
"""By heading, the key of a number, a factor and its form."""


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
    runs out of memory is a row of the table. Writes bench.json, and the log and monitor page of each arm. The exit
    status is 0, or 1 if an arm failed for another reason or the losses differ.

    Args:
        arms: Kernels "off" (no kernel, whole logits), "on" (the settings as they are), or "off,on".
        memory_budget: Additional arms with kernels on, one per budget: "auto", a share of the GPU's memory up to 1,
            or GiB above 1, such as "auto,0.5,60".
        steps: Optimizer steps that are measured.
        warm_up: Optimizer steps before them; kernels compile and memory budgets are planned in the first ones.
        output: The folder to write to.
        time_limit: Seconds after which an arm is stopped.
        json: Print one JSON object instead of the table.
    """
    chosen = _parse_arms(arms, memory_budget)
    check_integer("steps", steps, at_least=1)
    check_integer("warm_up", warm_up, at_least=0)
    check_number("time_limit", time_limit, above=0)
    check_path("output", output)
    if not any(option.partition("=")[0] in ("--config", "-c", "--model") for option in fit_options):
        raise ValueError(f"config is required: {PROGRAM} bench --config user.yaml")
    folder = make_folder(output)
    options = (*fit_options, f"--trainer.max_steps={warm_up + steps}", f"--trainer.default_root_dir={folder}")
    rows = []
    for arm in chosen:
        print(f"{arm['name']}: {warm_up} + {steps} steps ...", file=sys.stderr, flush=True)
        rows.append({"arm": arm["name"], **measure({**arm, "warm_up": warm_up}, options, folder, time_limit)})
    agreement, agrees = compare_losses(rows)
    report = {"command": fit_options, "steps": steps, "warm_up": warm_up, "losses_agree": agrees, "arms": rows}
    text = json_module.dumps(report, indent=2)
    (folder / "bench.json").write_text(text + "\n", encoding="utf-8")
    if json:
        print(text)
    else:
        _print(rows, f"{agreement}\nLogs and results: {folder}/".strip())
    return int(not agrees or any(row["status"] == "failed" for row in rows))


def _parse_arms(arms: str, memory_budget: str) -> list[dict[str, Any]]:
    words, budgets = (list(filter(None, map(str.strip, text.split(",")))) for text in (arms, memory_budget))
    if not set(words) <= {"off", "on"} or not (words or budgets):
        raise wrong_value("arms", "'off', 'on' or 'off,on'", arms)
    found: list[dict[str, Any]] = [{"name": f"kernels {word}", "kernels": word == "on"} for word in words]
    for word in budgets:
        budget: Any = word
        with contextlib.suppress(ValueError):
            budget = float(word)
        ActivationControl(budget=budget)  # raises for others
        found.append({"name": f"budget {word}", "kernels": True, "memory_budget": budget})
    return found


def measure(arm: dict[str, Any], fit_options: Sequence[str], folder: Path, time_limit: float) -> dict[str, Any]:
    """Trains an arm in a new process, which starts those of further devices; the processes end before this returns."""
    result, log = (folder / f"{arm['name'].replace(' ', '_')}.{suffix}" for suffix in ("json", "log"))
    result.unlink(missing_ok=True)
    command = [*_WORKER, json_module.dumps({**arm, "output": str(result)}), "fit", *fit_options, *_SETTINGS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # of users' modules
    failure = ""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            failure = f"not finished within {time_limit:g} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and those that it started have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    if process.returncode == 2 and (refusal := said.rpartition(f"{PROGRAM}: error: "))[1]:
        raise ValueError(refusal[2].partition("\nOptions: ")[0])
    if result.exists() and not failure:
        return {"status": "ok", **json_module.loads(result.read_text(encoding="utf-8"))}
    memory_error = re.search(r"^(.*out of memory|MemoryError).*", said, flags=re.IGNORECASE | re.MULTILINE)
    if memory_error and not failure:
        return {"status": "out of memory", "error": memory_error[0][:300]}
    return {"status": "failed", "error": failure or said.rpartition("\n")[2][:300]}


def compare_losses(rows: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """A sentence on the losses of the arms, and whether they agree: those of the first arm's best step."""
    measured = [row for row in rows if row.get("losses")]
    if len(measured) < 2:
        return "", True
    losses = torch.tensor([row["losses"] for row in measured], dtype=torch.float64)
    tolerance, step = _TOLERANCES.get(measured[0]["precision"].partition("-")[0], 1e-3), int(losses[0].argmin())
    differs = float((losses - losses[0])[:, step].abs().max() / losses[0, step].abs().clamp(min=1e-12))
    agrees = differs <= tolerance and bool(losses.isfinite().all())
    words = f"{'agree' if agrees else 'DIFFER'}: {differs:.2g} relative, {tolerance:.2g} allowed"
    return f"The losses of step {step + 1} {words}.", agrees


def _print(rows: Sequence[dict[str, Any]], more: str) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, 80)  # narrower tables would lose digits
    measured = [row for row in rows if row["status"] == "ok"]
    title = "{processes} x {device}, {precision}, medians".format_map(measured[0]) if measured else "No arm ran"
    table = Table("arm", *(Column(name, justify="right") for name in _COLUMNS), title=title, title_justify="left")
    for row in rows:
        cells = [f"[red]{row['status']}[/red]"]
        if row in measured:
            row["speed_up"] = measured[0]["seconds_per_step"] / row["seconds_per_step"]
            cells = [f"{row[key] * factor:{form}}" if row[key] else "-" for key, factor, form in _COLUMNS.values()]
        table.add_row(row["arm"], *cells)
    console.print(table)
    texts = [f"{row['arm']}: {text}" for row in rows if (text := row.get("error") or row.get("plan"))]
    console.print("\n".join([*texts, more]), markup=False)


class _ArmCLI(LigerCLI):
    """``fit`` with the kernels and the memory budget of an arm, and without callbacks that write."""

    def __init__(self, arm: dict[str, Any], args: list[str]) -> None:
        page = f"{Path(arm['output']).stem}.html"  # a monitor with a page measures, whichever others there are
        self.arm, self.monitor = arm, _Meter(1, arm["warm_up"], gradient_norm=False, page=page)
        super().__init__(args, save_config_callback=None, trainer_defaults={"callbacks": [self.monitor]})

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        trainer = self.config["fit"].trainer
        given = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
        trainer.callbacks = [each for each in given if each is not None and _changes_training(each)]

    def before_fit(self) -> None:
        trainer: Any = self.trainer
        owners = [each for each in (trainer.strategy, *trainer.callbacks) if hasattr(each, "_activations")]
        if not owners:  # a strategy of others, whose kernels come with a callback
            trainer.callbacks += (owners := [LigerCallback()])
        for owner in owners:
            before, budget = owner._activations, self.arm.get("memory_budget")
            if budget is not None:
                owner._activations = ActivationControl(budget=budget)
            elif not self.arm["kernels"]:
                owner.kernels, owner._kernels = "none", Kernels("none")
                owner._activations = ActivationControl(before.checkpointing, None, before.policy)
            owner._activations.layers_communicate = before.layers_communicate
        if not self.arm["kernels"] and hasattr(trainer.precision_plugin, "patching"):
            trainer.precision_plugin.patching = Kernels("none")

    def after_fit(self) -> None:
        trainer, points, results = self.trainer, self.monitor.points, self.monitor.results
        seconds = [point["step_seconds"] for point in points if "step_seconds" in point]
        if not seconds:
            raise ValueError(f"steps must be fewer: training ended after {trainer.global_step} optimizer steps")
        device, median = trainer.strategy.root_device, statistics.median(seconds)
        memory = [results.get(name, 0.0) * 2**30 for name in ("memory_peak_gib", "memory_reserved_gib")]
        peak, reserved = trainer.strategy.reduce(torch.tensor(memory, device=device), reduce_op="max").tolist()
        tokens = results.get("tokens_per_second", 0.0) * results["seconds"] / len(seconds)
        losses = [point["loss"] for point in points if "loss" in point]
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        result = {
            "seconds_per_step": median, "tokens_per_second": tokens / median, "peak_bytes": peak,
            "reserved_bytes": reserved, "loss": losses[-1] if losses else None, "losses": losses,
            "processes": trainer.world_size, "device": name, "step_seconds": seconds,
            "precision": str(trainer.precision), "plan": getattr(trainer.strategy, "activation_plan", ""),
        }  # fmt: skip
        if trainer.is_global_zero:
            Path(self.arm["output"]).write_text(json_module.dumps(result), encoding="utf-8")


def _changes_training(callback: Namespace) -> bool:
    package, *_, name = callback.class_path.split(".")
    return package not in ("lightning", "pytorch_lightning", "lightning_liger") or name in _KEPT_CALLBACKS


class _Meter(LigerMonitor):
    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        traceback.print_exception(exception)
        os._exit(1)  # other processes may wait for this one, and this one would for them


if __name__ == "__main__":
    try:
        _ArmCLI(json_module.loads(sys.argv[1]), sys.argv[2:])
    except Exception as error:
        if (message := message_of(error)) is None:
            raise
        end(message)
