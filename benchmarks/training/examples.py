"""``examples``: the yaml files of post-training through the command line, with the dimensions of Llama 3.2 1B.

Each example trains a few steps on the small files in ``examples/data``, in a separate process, which shows that it runs
at a real size, and how fast and in how much memory. Its sequences are short, so the speed is not that of a real run.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import names
from benchmarks.environment import environment
from benchmarks.records import Line, Writer
from benchmarks.training.dims import DIMS
from benchmarks.training.train import number

ROOT = Path(__file__).parents[2]
EXAMPLES = ("sft", "dpo", "kto", "grpo_offline", "distill", "distill_topk", "medusa")
_WITH_TEACHER = ("distill",)


class Meter(L.Callback):
    """Seconds, tokens and loss of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._synchronize(trainer)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._synchronize(trainer)
        self.seconds.append(time.perf_counter() - self._start)
        self.tokens.append(num_tokens(batch))
        self.losses.append(outputs["loss"].detach())

    def _synchronize(self, trainer: L.Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()


def num_tokens(batch: dict[str, Tensor]) -> int:
    """Tokens that the model sees, padding left out."""
    masks = [mask for key, mask in batch.items() if key.endswith("attention_mask")]
    if not masks and "prompt_mask" in batch:
        masks = [batch["prompt_mask"], batch["completion_mask"]]
    return sum(int(mask.sum()) for mask in masks) if masks else batch["input_ids"].numel()


def measure(name: str, quick: bool, steps: int, batch_size: int) -> dict[str, Any]:
    """The record of one example, trained in this process."""
    from lightning_liger.cli import LigerCLI  # it imports much

    os.chdir(ROOT)  # where the command at the top of the yaml is run
    sys.argv = ["lightning-liger"]
    cuda = torch.cuda.is_available()
    sizes = {} if quick else DIMS["llama3_1b"].config().to_dict()
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("head_dim", "vocab_size", "tie_word_embeddings")
    settings = [(key, sizes[key]) for key in kept if key in sizes]
    groups = ("config", "teacher_config") if name in _WITH_TEACHER else ("config",)
    with tempfile.TemporaryDirectory() as folder:
        cli = LigerCLI(
            args=[
                "fit",
                f"--config=examples/{name}.yaml",
                *(f"--model.{group}.{key}={json.dumps(value)}" for group in groups for key, value in settings),
                f"--model.learning_rate={1e-3 if quick else 1e-5}",
                f"--data.batch_size={batch_size}",
                f"--trainer.accelerator={'gpu' if cuda else 'cpu'}",
                f"--trainer.precision={'bf16-true' if cuda else '32-true'}",
                f"--trainer.max_steps={steps}",
                "--trainer.max_epochs=1000",
                "--trainer.check_val_every_n_epoch=1000",
                f"--trainer.default_root_dir={folder}",
                f'--trainer.callbacks=[{{"class_path": "{__name__}.Meter"}}]',
                "--trainer.enable_checkpointing=false",
                "--trainer.enable_progress_bar=false",
            ]
        )
    (meter,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, Meter))
    warm = len(meter.seconds) // 2  # compilation of kernels is in the steps before
    losses = torch.stack(meter.losses).tolist()
    return {
        "example": name,
        "module": type(cli.model).__name__,
        "parameters": sum(parameter.numel() for parameter in cli.model.parameters()),
        "steps": len(meter.seconds),
        "tokens_per_step": statistics.mean(meter.tokens[warm:]),
        "tokens_per_second": sum(meter.tokens[warm:]) / sum(meter.seconds[warm:]),
        "step_ms": 1e3 * statistics.median(meter.seconds[warm:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        type=names("example", EXAMPLES),
        default=EXAMPLES,
        metavar="EXAMPLE,...",
        help=f"which examples (default: all): {', '.join(EXAMPLES)}",
    )
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="half of them are measured (default: 12)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="records in a batch (default: 16)")


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all examples ran."""
    records: list[dict[str, Any]] = []
    with Writer(Path(f"{stem}.jsonl"), environment(), "examples") as writer:
        for name in options.only:
            arguments = (name, options.quick, max(2, options.steps), options.batch_size)
            # In a separate process, whose peak of memory is its own.
            with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
                try:
                    records.append(process.submit(measure, *arguments).result())
                except Exception as error:  # a row of the results: the others go on
                    records.append({"example": name, "error": f"{type(error).__name__}: {error}"[:500]})
            writer.write(Line(records[-1]))
    console.print(table(records))
    return not any("error" in record for record in records)


def table(records: Sequence[dict[str, Any]]) -> Table:
    """A row for each example."""
    grid = Table(title="Examples of post-training", title_justify="left")
    for column in ("example", "module"):
        grid.add_column(column)
    for column in ("parameters", "tokens/step", "step ms", "tokens/s", "peak GiB", "first loss", "last loss"):
        grid.add_column(column, justify="right", no_wrap=True)
    for record in records:
        if "error" in record:
            grid.add_row(record["example"], record["error"], *["-"] * 7)
            continue
        grid.add_row(
            record["example"],
            record["module"],
            f"{record['parameters'] / 1e6:,.1f}M",
            f"{record['tokens_per_step']:,.0f}",
            f"{record['step_ms']:,.1f}",
            f"{record['tokens_per_second']:,.0f}",
            number(record["peak_gib"], ".1f"),
            f"{record['first_loss']:.4f}",
            f"{record['last_loss']:.4f}",
        )
    return grid
