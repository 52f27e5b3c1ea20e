"""``python -m benchmarks.training.monitor``: what ``LigerMonitor`` adds to a step, in one run.

Fits with and without it follow each other, of one model on the same batches, several times. The host time is that of
its hooks; the time of a step is taken by a callback that waits for the device at both ends. The first steps are left
out of both. The exit status is 1 where the host takes 0.5% or more of a step of the largest size.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import SimpleProfiler
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.environment import environment
from benchmarks.training.dims import DIMS, make_model
from lightning_liger import LigerLMMixin, LigerMonitor

_SKIPPED = 5
_MAX_SHARE = 0.005


class _Module(LigerLMMixin, L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


class _Quiet(LigerMonitor):
    """Prints no table after each fit."""

    def teardown(self, *_: Any, **__: Any) -> None:
        pass


class _Profiler(SimpleProfiler):
    """Prints no report after each fit."""

    def describe(self) -> None:
        pass


class _Timer(L.Callback):
    """Seconds of all steps after the first ones."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (_SKIPPED, self.num_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds = now - self._start if trainer.global_step == self.num_steps else 0.0
            self._start = now


def _fit(module: L.LightningModule, batches: list[Any], every: int | None, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step and, with ``every``, those of the host in the hooks of a monitor."""
    monitor, timer, profiler = _Quiet(every, page=None), _Timer(len(batches)), _Profiler()
    on_gpu = torch.cuda.is_available()
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu", devices=1, strategy="liger",
        precision="bf16-true" if on_gpu else "32-true", max_steps=len(batches), max_epochs=1,
        callbacks=[timer] if every is None else [timer, monitor], profiler=profiler, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    hooks = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
    host = sum(
        sum(durations[_SKIPPED:])
        for action, durations in profiler.recorded_durations.items()
        if action.startswith(f"[Callback]{monitor.state_key}") and action.endswith(hooks)
    )
    steps = len(batches) - _SKIPPED
    return {
        "step_ms": timer.seconds / steps * 1e3,
        "host_ms": host / steps * 1e3,
        "mfu": monitor.results.get("model_flops_utilization"),
    }


def _measure(options: argparse.Namespace, layers: int, num_tokens: int) -> Iterator[dict[str, Any]]:
    """One line for each ``every_n_steps``, of rounds in which fits with and without the monitor alternate."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = DIMS[options.model].config(layers, tiny=options.quick)
    module = _Module(make_model(config, device, dtype))
    ids = torch.randint(config.vocab_size, (1, num_tokens))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    runs: dict[int | None, list[dict[str, Any]]] = {every: [] for every in (None, *options.every)}
    for _ in range(options.rounds):
        for every, arm_times in runs.items():
            arm_times.append(_fit(module, [batch] * (options.steps + _SKIPPED), every, options.out.parent))
    for every in options.every:
        yield {
            "layers": layers,
            "tokens": num_tokens,
            "every": every,
            "without_ms": [run["step_ms"] for run in runs[None]],
            "with_ms": [run["step_ms"] for run in runs[every]],
            "host_ms": statistics.median(run["host_ms"] for run in runs[every]),
            "mfu": runs[every][-1]["mfu"],
        }


def _shown(times: list[float]) -> str:
    """The median, and half of the distance between the least and the most in percent of it."""
    median = statistics.median(times)
    return f"{median:.2f} \N{PLUS-MINUS SIGN}{(max(times) - min(times)) / 2 / median:.1%}"


def _table(lines: list[dict[str, Any]]) -> Table:
    table = Table(title="LigerMonitor: milliseconds of a step", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("size", "every", "without", "with", "added", "host", "of step", "MFU"):
        table.add_column(column, justify="right")
    for line in lines:
        without, with_it = (statistics.median(line[f"{name}_ms"]) for name in ("without", "with"))
        table.add_row(
            f"{line['layers']} x {line['tokens']}", str(line["every"]), _shown(line["without_ms"]),
            _shown(line["with_ms"]), f"{with_it / without - 1:+.1%}", f"{line['host_ms']:.3f}",
            f"{line['host_ms'] / without:.2%}", f"{line['mfu']:.1%}",
        )  # fmt: skip
    return table


def sizes(text: str) -> list[tuple[int, int]]:
    """The type of ``--sizes``."""
    found = []
    for size in text.split(","):
        layers, num_tokens = size.split("x")
        found.append((int(layers), int(num_tokens)))
    return found


def numbers(text: str) -> list[int]:
    """The type of ``--every``."""
    return [int(number) for number in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.monitor", description=__doc__)
    parser.add_argument("--model", choices=tuple(DIMS), default="llama3_1b", help="dimensions (default: llama3_1b)")
    parser.add_argument(
        "--sizes",
        type=sizes,
        default="4x4096,16x8192",
        help="layers x tokens of a batch (default: 4x4096,16x8192; the second is the published depth of llama3_1b)",
    )
    parser.add_argument(
        "--every",
        type=numbers,
        default="50",
        help="the monitor's every_n_steps, one or several (default: 50, as Lightning's log_every_n_steps)",
    )
    parser.add_argument("--steps", type=int, default=50, help="measured steps of a fit (default: 50)")
    parser.add_argument("--rounds", type=int, default=3, help="fits of each kind (default: 3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which also run on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.every, options.steps, options.rounds = [(2, 16)], [2, 4], 4, 1
    if any(options.steps % every for every in options.every):
        parser.error(f"--steps must be a multiple of each of --every, got {options.steps}")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for size in options.sizes for line in _measure(options, *size)]
    text = "".join(json.dumps(line) + "\n" for line in [{"environment": environment()}, *lines])
    options.out.write_text(text, encoding="utf-8")
    console = Console(highlight=False)
    console.print(_table(lines))
    console.print(
        "size: layers x tokens. \N{PLUS-MINUS SIGN}: half of the distance between the fastest and the slowest fit"
    )
    console.print(f"wrote {options.out}")
    return status(lines)


def status(lines: list[dict[str, Any]]) -> int:
    """1 if the host takes too much of a step of the largest size."""
    largest = max(line["layers"] * line["tokens"] for line in lines)
    largest_lines = [line for line in lines if line["layers"] * line["tokens"] == largest]
    return int(any(line["host_ms"] >= _MAX_SHARE * statistics.median(line["without_ms"]) for line in largest_lines))


if __name__ == "__main__":
    sys.exit(main())
