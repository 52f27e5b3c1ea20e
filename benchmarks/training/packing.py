"""``packing``: the same examples in padded, padding-free and packed batches: tokens per second and memory of training.

Lengths are log-normal with a median of 245 tokens, at most 2,048.
"""

import argparse
import dataclasses
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.environment import environment
from benchmarks.records import Writer
from benchmarks.timing import synchronize
from benchmarks.training.dims import DIMS
from benchmarks.training.train import number
from lightning_liger import LigerCausalLM
from lightning_liger.data import Layout, SupervisedCollator
from lightning_liger.data.packing import LengthSampler, PackedExamples

MAX_LENGTH = 2048


def draw_lengths(num: int, max_length: int = MAX_LENGTH) -> np.ndarray:
    """The tokens of so many examples."""
    return np.random.default_rng(0).lognormal(np.log(0.12 * max_length), 1, num).astype(int).clip(2, max_length)


@dataclass(frozen=True)
class Arm:
    """How examples become batches: ``sampler`` has options of ``LengthSampler``."""

    title: str
    padding_free: bool
    sampler: dict[str, Any]


ARMS = (
    Arm("padded", False, {"batch_size": 16}),
    Arm("padded, `train_sampling_strategy: group_by_length`", False, {"batch_size": 16, "group_by_length": True}),
    Arm("`padding_free`", True, {"batch_size": 16}),
    Arm("`packing`", True, {"batch_size": 3, "capacity": MAX_LENGTH}),
)
"""With about equally many tokens in a batch, padding not counted."""


@dataclass(frozen=True)
class Speed:
    """Training in one arm.

    Attributes:
        arm: Its title.
        steps: That were measured.
        tokens: In these steps, without padding.
        places: In these steps, with padding.
        seconds: Of these steps.
        peak_mib: Peak memory of all, None on a CPU.
    """

    arm: str
    steps: int
    tokens: int
    places: int
    seconds: float
    peak_mib: float | None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class _Clock(L.Callback):
    """Counts time and tokens of the steps after the first ones."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.tokens = self.places = 0
        self.start = self.seconds = 0.0

    @override
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            synchronize(module.device)
            self.start = time.perf_counter()
        if batch_idx >= self.warm_up:
            self.places += batch["input_ids"].numel()
            self.tokens += batch["input_ids"].numel() if "seq_idx" in batch else int(batch["attention_mask"].sum())

    @override
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        synchronize(module.device)
        self.seconds = time.perf_counter() - self.start


def measure(arm: Arm, steps: int, warm_up: int, tiny: bool) -> Speed:
    """Trains a model of 1B parameters, of which as many steps are measured."""
    config = DIMS["llama3_1b"].config(2 if tiny else None, tiny)
    settings = config.to_dict()
    model_type = settings.pop("model_type")
    max_length = 32 if tiny else MAX_LENGTH
    lengths = draw_lengths(64 * (warm_up + steps), max_length)
    ids = np.random.default_rng(1).integers(3, config.vocab_size, max_length)
    examples = [{"input_ids": ids[:length], "loss_mask": np.ones(length)} for length in lengths]
    options = arm.sampler | ({"capacity": max_length} if "capacity" in arm.sampler else {})
    sampler = LengthSampler(lengths, lengths, **options, num_replicas=1, rank=0)
    loader: DataLoader[Any] = DataLoader(
        PackedExamples(examples) if "capacity" in options else examples,  # type: ignore[arg-type]
        batch_size=options["batch_size"],
        sampler=sampler,
        collate_fn=SupervisedCollator(Layout(max_length=max_length, padding_free=arm.padding_free)),
    )
    clock = _Clock(warm_up)
    trainer = L.Trainer(
        strategy="liger", devices=1, precision="bf16-true", max_steps=warm_up + steps, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = LigerCausalLM(model_type=model_type, config=settings, num_training_steps=warm_up + steps)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(module, loader)
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    return Speed(arm.title, steps, clock.tokens, clock.places, clock.seconds, peak)


def table(found: list[Speed]) -> Table:
    grid = Table(title="Training on examples of different lengths", title_justify="left")
    for column in ("batches", "tokens/s", "speed", "padding", "peak GiB"):
        grid.add_column(column, justify="left" if column == "batches" else "right")
    for row in cells(found):
        grid.add_row(*row)
    return grid


def cells(found: list[Speed]) -> list[list[str]]:
    """The cells of a row for each arm; speed is relative to the first one's."""
    rates = [one.tokens / one.seconds for one in found]
    return [
        [
            one.arm,
            f"{rate:,.0f}",
            f"{rate / rates[0]:.2f}x",
            f"{1 - one.tokens / one.places:.1%}",
            number(one.peak_mib and one.peak_mib / 1024, ".1f"),
        ]
        for one, rate in zip(found, rates, strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="that are measured (default: 30)")


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes."""
    found = []
    with Writer(Path(f"{stem}.jsonl"), environment(), "packing") as writer:
        for arm in ARMS:
            found.append(measure(arm, 2 if options.quick else options.steps, 1 if options.quick else 5, options.quick))
            writer.write(found[-1])
            gc.collect()
    console.print(table(found))
    return True
