"""``host``: whole steps of models so small that the GPU waits for Python, in eager code, compiled and in CUDA graphs.

A step is forward, backward, clipping and the optimizer. Memory that CUDA graphs hold between steps is in the reserved
memory, not in the peak of allocated memory.
"""

import argparse
import statistics
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.training.dims import DIMS
from benchmarks.training.job import OK, Job, Row
from benchmarks.training.train import add_model_arguments, add_models_argument, measure, name_of, number, succeeded

SHAPES = {"llama3_1b": ((1, 512), (4, 512), (8, 1024)), "llama_120m": ((4, 512),)}
"""Batch sizes and lengths of each model."""
ARMS = "hf,hf_compiled,liger_kernel,ours,ours_compiled"
_CAPTURED = "ours_captured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models_argument(parser, tuple(SHAPES))
    add_model_arguments(parser, f"{ARMS},{_CAPTURED}" if torch.cuda.is_available() else ARMS)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="measured steps (default: 20)")


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """A job, and so a process, for each shape: another shape of the same process would find compiled code."""
    quick = options.quick
    return [
        Job(
            model=model,
            arm=str(arm),
            shapes=((2, 16) if quick else shape,),
            layers=options.layers,
            warm_up=2 if quick else 8,
            steps=options.steps,
            traced_steps=0 if quick else 3,
            pretrains=True,  # clips
            optimizer=options.optimizer,
            memory_limit_gib=options.memory_limit_gib,
            tiny=quick,
        )
        for model in options.model
        for shape in (SHAPES.get(model, SHAPES["llama_120m"])[: 1 if quick else None])
        for arm in options.arms
    ]


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all of our arms ran or ran out of memory."""
    rows = measure(make_jobs(options), stem, "host", options, console)
    console.print(table(rows))
    return succeeded(rows)


def table(rows: Sequence[Row]) -> Table:
    """Milliseconds of a step, the share of it in which the GPU is idle, seconds of the first step, and memory."""
    grid = Table(title="Steps that wait for the host: forward, backward, clipping, optimizer", title_justify="left")
    for column in ("model", "batch", "arm"):
        grid.add_column(column)
    for column in ("step ms", "GPU idle", "first step s", "peak GiB", "reserved GiB", "loss"):
        grid.add_column(column, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        place = f"{DIMS[row.model].title}, {row.layers} layers", f"{row.batch_size}x{row.sequence_length}"
        if previous not in (None, place):
            grid.add_section()
        previous = place
        if row.status != OK:
            grid.add_row(*place, name_of(row.parsed_arm), row.status, *["-"] * 5)
            continue
        grid.add_row(
            *place,
            name_of(row.parsed_arm),
            f"{statistics.median(row.step_seconds) * 1e3:,.2f}",
            number(row.idle_share, ".1%"),
            number(row.first_step_seconds, ".1f"),
            number(row.peak_gib, ".1f"),
            number(row.reserved_gib, ".1f"),
            number(row.loss, ".4f"),
        )
    return grid
