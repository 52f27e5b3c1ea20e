"""Trains the models of the ablation and compares them on the last day.

``python -m examples.ranking [--out FILE] [options of lightning-liger fit]``; the options are those of
``ranking.yaml`` where they are not given. Each arm adds one part to the arm before it.
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
import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

import lightning_liger
from lightning_liger import LigerMonitor
from lightning_liger.cli import LigerCLI

from .data import ClickData
from .models import NUM_BINS, Ranker

CONFIG = Path(__file__).parent / "ranking.yaml"
ARMS: dict[str, dict[str, Any]] = {
    "mlp": {"num_crosses": 0, "gating": False, "id_loss_weight": 0.0, "calibration": False},
    "+ cross": {"num_crosses": 2},
    "+ gating": {"gating": True},
    "+ ids": {"id_loss_weight": 0.1},
    "+ calibration": {"calibration": True},
}
COLUMNS = {"auc": "AUC", "log_loss": "Log loss", "calibration_error": "Calibration error", "id_loss": "Id loss"}


def main(arguments: list[str]) -> list[dict[str, Any]]:
    """Runs the ablation; returns its records."""
    parser = argparse.ArgumentParser(prog="python -m examples.ranking", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="file of JSON lines to write")
    known, options = parser.parse_known_args(arguments)
    for message in (r".*isinstance\(treespec, LeafSpec\)", r"Checkpoint directory .* is not empty"):
        warnings.filterwarnings("ignore", message=message)
    first = {"environment": environment(), "command": " ".join(("python -m examples.ranking", *arguments))}
    records: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    data: ClickData | None = None
    for name, change in ARMS.items():
        settings |= change
        sys.argv = ["lightning-liger"]  # Lightning warns of arguments besides `args`
        args = [
            f"--config={CONFIG}",
            *options,
            *(f"--model.init_args.{key}={value}" for key, value in settings.items()),
        ]
        if not settings["id_loss_weight"]:  # nothing to replace
            args.append("--trainer.strategy=auto")
        cli = LigerCLI(args=args, run=False)
        if data is None:
            data = cli.datamodule
            data.setup("fit")
            records += yardsticks(data)
        records.append({"model": name, **train(cli.trainer, cli.model, data)})
    if known.out is not None:
        known.out.write_text("".join(json.dumps(line) + "\n" for line in [first, *records]), encoding="utf-8")
    Console().print(table(records))
    return records


def yardsticks(data: ClickData) -> list[dict[str, Any]]:
    """The records of the rate of clicks and the popularity of ids, and of the probabilities that made the log."""
    labels, _, ids = data.splits["test"].tensors
    id_loss = -data.click_shares(0).log()[ids[labels == 1, 0]].mean()
    rate = data.splits["val"].tensors[0].mean().expand(len(labels))
    found = [{"model": "popularity", **scores(rate, labels), "id_loss": round(float(id_loss), 4)}]
    if data.test_probabilities is not None:
        found.append({"model": "generator", **scores(data.test_probabilities, labels)})
    return found


def scores(probabilities: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The metrics of probabilities of clicks."""
    values = {
        "auc": binary_auroc(probabilities, labels.int()),
        "log_loss": F.binary_cross_entropy(probabilities, labels),
        "calibration_error": binary_calibration_error(probabilities, labels.int(), n_bins=NUM_BINS),
    }
    return {name: round(float(value), 4) for name, value in values.items()}


def train(trainer: L.Trainer, model: Ranker, data: ClickData) -> dict[str, Any]:
    """Trains and tests a model; returns its record."""
    start = time.perf_counter()
    trainer.fit(model, datamodule=data)
    seconds = time.perf_counter() - start
    (found,) = trainer.test(model, datamodule=data, verbose=False)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    (summary,) = (each for each in callbacks if isinstance(each, LigerMonitor) and each.results)
    names = ("steps", "num_fused_losses", "logits_bytes_avoided", "peak_memory_bytes")
    return {
        "num_ids": data.vocab_sizes[0],
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{name.removeprefix("test_"): round(value, 4) for name, value in found.items()},
        "train_seconds": round(seconds, 1),
        **{name: int(summary.results[name]) for name in names},
    }


def table(records: list[dict[str, Any]]) -> Table:
    """A row of metrics for each model."""
    result = Table(title="Clicks of the last day, and which id is clicked", title_justify="left", box=SIMPLE)
    result.add_column("Model", no_wrap=True)
    for title in COLUMNS.values():
        result.add_column(title, justify="right")
    for record in records:
        result.add_row(record["model"], *(f"{record[name]:.4f}" if name in record else "-" for name in COLUMNS))
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
