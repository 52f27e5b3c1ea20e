"""Trains an LSTM and a transformer, and compares them with the syllabus and an n-gram model on the test period.

``python -m examples.next_item [--models NAMES] [--out FILE] [options of lightning-liger fit]``; the options are those
of ``next_item.yaml`` where they are not given.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import lightning_liger
from lightning_liger import LigerMonitor
from lightning_liger.cli import LigerCLI

from .baselines import Ints, NGram, contexts, syllabus_ranks
from .data import NextItemData
from .generator import KINDS
from .metrics import RankMetrics
from .models import NextItem

CONFIG = Path(__file__).parent / "next_item.yaml"
MODELS = ("baselines", "lstm", "transformer")
NGRAM_ORDER = 3
"""Of orders 2 to 4, the one with the best MRR on the small log."""


def main(arguments: list[str]) -> list[dict[str, Any]]:
    """Runs the comparison; returns its records."""
    parser = argparse.ArgumentParser(prog="python -m examples.next_item", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="file of JSON lines to write")
    parser.add_argument("--models", default=",".join(MODELS), help="names out of %(default)s, separated by commas")
    known, options = parser.parse_known_args(arguments)
    names = known.models.split(",")
    if not set(names) <= set(MODELS):
        parser.error(f"--models must be names out of {','.join(MODELS)}, got {known.models}")
    for message in (r".*isinstance\(treespec, LeafSpec\)", r"Checkpoint directory .* is not empty"):
        warnings.filterwarnings("ignore", message=message)
    first = {"environment": environment(), "command": " ".join(("python -m examples.next_item", *arguments))}
    records: list[dict[str, Any]] = []
    sys.argv = ["lightning-liger"]  # Lightning warns of arguments besides `args`
    data: NextItemData | None = None
    for name in names:
        encoder = [] if name == "baselines" else [f"--model.init_args.encoder={name}"]
        cli = LigerCLI(args=[f"--config={CONFIG}", *options, *encoder], run=False)
        data = data or cli.datamodule  # the log is generated once
        records += [{"model": name, **train(cli.trainer, cli.model, data)}] if encoder else baselines(data)
    if known.out is not None:
        known.out.write_text("".join(json.dumps(line) + "\n" for line in [first, *records]), encoding="utf-8")
    Console().print(table(records))
    return records


def baselines(data: NextItemData) -> list[dict[str, Any]]:
    """The records of the rankings without a network."""
    data.setup("fit")
    last, labels, kinds = contexts(data.splits["test"], NGRAM_ORDER - 1)
    size = {"num_items": data.course.num_items, "num_test_events": len(labels)}
    start = time.perf_counter()
    ngram = NGram(*contexts(data.splits["train"], NGRAM_ORDER - 1)[:2], num_items=data.course.num_items)
    seconds = time.perf_counter() - start
    return [
        {"model": "syllabus", **size, **scores(syllabus_ranks(last[:, -1], labels, data.course.num_items), kinds)},
        {"model": f"{NGRAM_ORDER}-gram", **size, **scores(ngram.ranks(last, labels), kinds), "train_seconds": seconds},
    ]


def scores(ranks: Ints, kinds: Ints) -> dict[str, float]:
    """The metrics of ranks."""
    metrics = RankMetrics()
    metrics.update_ranks(torch.from_numpy(np.asarray(ranks)), torch.from_numpy(kinds))
    return {name: round(float(value), 4) for name, value in metrics.compute().items()}


def train(trainer: L.Trainer, model: NextItem, data: NextItemData) -> dict[str, Any]:
    """Trains and tests a model; returns its record."""
    start = time.perf_counter()
    trainer.fit(model, datamodule=data)
    seconds = time.perf_counter() - start
    (found,) = trainer.test(model, datamodule=data, verbose=False)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    (summary,) = (each for each in callbacks if isinstance(each, LigerMonitor) and each.results)
    names = ("steps", "num_fused_losses", "logits_bytes_avoided", "peak_memory_bytes")
    return {
        "num_items": data.course.num_items,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{name.removeprefix("test_"): round(value, 4) for name, value in found.items()},
        "train_seconds": round(seconds, 1),
        **{name: int(summary.results[name]) for name in names},
    }


def table(records: list[dict[str, Any]]) -> Table:
    """A row of metrics for each model."""
    result = Table(
        title=f"Next item out of {records[0]['num_items']:,}",
        caption="The last columns are hit@10 of each kind of event.",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
        caption_justify="left",
    )
    result.add_column("Model", no_wrap=True)
    columns = {"hit@1": "hit@1", "hit@5": "hit@5", "hit@10": "hit@10", "mrr": "MRR"}
    columns |= {f"hit@10_{kind}": kind for kind in KINDS}
    for title in columns.values():
        result.add_column(title, justify="right")
    for record in records:
        result.add_row(record["model"], *(f"{record[name]:.3f}" for name in columns))
    return result


def environment() -> dict[str, Any]:
    """Device, versions and date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    packages = ("torch", "triton", "lightning", "transformers", "torchmetrics")
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions["lightning-liger"] = lightning_liger.__version__
    return {"date": datetime.date.today().isoformat(), "device": device, "threads": torch.get_num_threads(), **versions}


if __name__ == "__main__":
    main(sys.argv[1:])
