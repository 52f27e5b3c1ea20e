"""``python -m benchmarks.training.monitor``: what ``LigerMonitor`` adds to a step, in one run.

Fits with and without it follow each other, of one model on the same batches, several times. The host time is that of
its hooks; the time of a step is taken by a callback that waits for the device at both ends.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import SimpleProfiler
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.environment import environment
from benchmarks.training.dims import DIMS, make_model
from lightning_liger import LigerLMMixin, LigerMonitor

_ROUNDS = 3
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


def _fit(module: L.LightningModule, batches: list[Any], every: int, with_monitor: bool, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step, and those of the host in the monitor's hooks."""
    monitor, timer, profiler = _Quiet(every, page=None), _Timer(len(batches)), _Profiler()
    on_gpu = torch.cuda.is_available()
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu", devices=1, strategy="liger",
        precision="bf16-true" if on_gpu else "32-true", max_steps=len(batches), max_epochs=1,
        callbacks=[timer, monitor] if with_monitor else [timer], profiler=profiler, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    steps = len(batches)
    hooks = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
    host = sum(
        sum(durations)
        for action, durations in profiler.recorded_durations.items()
        if action.startswith(f"[Callback]{monitor.state_key}") and action.endswith(hooks)
    )
    return {
        "step_ms": timer.seconds / (steps - _SKIPPED) * 1e3,
        "host_ms": host / steps * 1e3,
        "mfu": monitor.results.get("model_flops_utilization"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.monitor", description=__doc__)
    parser.add_argument("--model", choices=tuple(DIMS), default="llama3_1b", help="dimensions (default: llama3_1b)")
    parser.add_argument("--layers", type=int, default=4, help="layers (default: 4)")
    parser.add_argument("--lengths", default="512,4096", help="tokens per batch (default: 512,4096)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a fit (default: 200)")
    parser.add_argument("--every", type=int, default=10, help="the monitor's every_n_steps (default: 10)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which also run on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lengths = [16, 64] if options.quick else [int(length) for length in options.lengths.split(",")]
    steps = 8 if options.quick else options.steps
    table = Table(title="LigerMonitor: milliseconds of a step", title_justify="left")
    for column in ("tokens", "without", "with", "added", "host", "host / step", "MFU"):
        table.add_column(column, justify="right")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"environment": environment()}]
    for length in lengths:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = DIMS[options.model].config(options.layers, tiny=options.quick)
        module = _Module(make_model(config, device, dtype))
        ids = torch.randint(config.vocab_size, (1, length))
        batches = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}] * steps
        runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for _ in range(1 if options.quick else _ROUNDS):
            for with_monitor in (False, True):
                runs[with_monitor].append(_fit(module, batches, options.every, with_monitor, options.out.parent))
        without, with_it = (statistics.median(run["step_ms"] for run in runs[key]) for key in (False, True))
        host, mfu = statistics.median(run["host_ms"] for run in runs[True]), runs[True][-1]["mfu"]
        lines.append({"tokens": length, "without_ms": without, "with_ms": with_it, "host_ms": host, "mfu": mfu})
        table.add_row(
            f"{length:,}", f"{without:.3f}", f"{with_it:.3f}", f"{with_it / without - 1:+.2%}", f"{host:.4f}",
            f"{host / without:.2%}", f"{mfu:.1%}",
        )  # fmt: skip
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"wrote {options.out}")
    return 0 if all(line["host_ms"] < _MAX_SHARE * line["without_ms"] for line in lines[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
