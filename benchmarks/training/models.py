"""``models``: two layers of models at real width, patched and unpatched: time, memory and distance to float64.

Each model has two layers of its real width and random weights in bfloat16. Errors are relative L2 distances of all
gradients together, and of the loss, to the same weights in float64, on fewer tokens.
"""

import argparse
import copy
import gc
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.environment import environment
from benchmarks.records import Line, Writer
from benchmarks.timing import synchronize, wall_ms
from benchmarks.training.dims import DIMS, make_model
from benchmarks.training.train import add_models_argument
from benchmarks.training.worker import apply_liger_kernel
from lightning_liger import apply_liger_kernels

MODELS = (
    "llama3_8b",
    "qwen3_8b",
    "gemma3_4b",
    "mistral_7b",
    "phi3_mini",
    "glm4_9b",
    "olmo2_7b",
    "granite3_8b",
    "mixtral_narrow",
    "bamba_9b",
)
SETTINGS: dict[str, dict[str, Any]] = {"gemma3_4b": {"layer_types": ["sliding_attention", "full_attention"]}}
"""Settings of some models with two layers."""


ARMS: dict[str, Callable[[nn.Module], Any]] = {
    "unpatched": lambda model: None,
    "ours": apply_liger_kernels,
    "liger-kernel": apply_liger_kernel,  # last: its changes cannot be undone
}


def _gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


def _distance(actual: list[Tensor], exact: list[Tensor]) -> float:
    pairs = [(got, want) for got, want in zip(actual, exact, strict=True) if want is not None]
    error = sum(((got.double() - want).square().sum() for got, want in pairs))
    return (error / sum(want.square().sum() for _, want in pairs)).sqrt().item()


def measure(name: str, quick: bool, device: torch.device) -> list[dict[str, Any]]:
    """Records of one model, one for each arm."""
    dims = DIMS[name]
    config = dims.config(2, quick, **SETTINGS.get(name, {}))
    batch_size, seq_len = (2, 16) if quick else (4, 2048)
    if dims.model_type == "bamba" and not quick:
        batch_size, seq_len = 1, 512  # its fallback without the mamba package makes tensors of 64 GiB at 2048
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (batch_size, seq_len), generator=generator).to(device)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator).to(device) < 0.1, -100),
    }
    few = {key: value[:1, : 16 if quick else 512] for key, value in batch.items()}
    original = make_model(config, device, torch.bfloat16)
    in_double = copy.deepcopy(original).double()
    in_double.config._experts_implementation = "eager"  # grouped products have no float64
    exact_loss, exact = _gradients(in_double, few)
    del in_double
    records = []
    for arm, patch in ARMS.items():
        model = copy.deepcopy(original)
        try:
            report = patch(model)
            loss, gradients = _gradients(model, few)
        except (ImportError, RuntimeError, TypeError, ValueError) as failure:
            if arm != "liger-kernel":  # liger-kernel does not support or run every model
                raise
            print(f"{name}, {arm}: skipped, {failure}")
            continue
        error = _distance(gradients, exact)
        del gradients

        def once(model: nn.Module = model) -> None:
            model(**batch).loss.backward()
            model.zero_grad()

        once()
        gc.collect()
        peak = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            synchronize(device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            once()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        milliseconds = wall_ms([once], 3 if quick else 10, device)
        records.append(
            {
                "model": dims.title,
                "model_type": dims.model_type,
                "tokens": ids.numel(),
                "arm": arm,
                "step_ms": statistics.median(milliseconds),
                "step_ms_samples": milliseconds,
                "peak_mib": peak,
                "gradient_error": error,
                "loss_error": abs((loss.double() - exact_loss).item() / exact_loss.item()),
                "replaced": report.as_dict() if arm == "ours" else None,
            }
        )
        del model
    return records


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table(title="A step of two layers and the loss, forward and backward", title_justify="left")
    for column in ("model", "arm", "step ms", "speed", "peak MiB", "memory", "gradient error", "loss error"):
        table.add_column(column, justify="left" if column in ("model", "arm") else "right")
    for record in records:
        plain = next(other for other in records if other["model"] == record["model"])
        memory = record["peak_mib"]
        table.add_row(
            record["model"] if record is plain else "",
            record["arm"],
            f"{record['step_ms']:.2f}",
            f"{plain['step_ms'] / record['step_ms']:.2f}x",
            "-" if memory is None else f"{memory:,.0f}",
            "-" if memory is None else f"{memory / plain['peak_mib']:.2f}x",
            f"{record['gradient_error']:.2e}",
            f"{record['loss_error']:.1e}",
        )
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models_argument(parser, MODELS)


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; an error in one of ours is raised."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    records: list[dict[str, Any]] = []
    with Writer(Path(f"{stem}.jsonl"), environment(), "models") as writer:
        for name in options.model:
            # In a separate process: liger-kernel's changes are for every model of the process.
            with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
                found = process.submit(measure, name, options.quick, device).result()
            for record in found:
                writer.write(Line(record))
            records += found
    console.print(_table(records))
    return True
