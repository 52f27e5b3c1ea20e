"""``losses``: post-training losses over an LM head, forward and backward: time and peak memory of each implementation.

Llama 3 8B's head (hidden size 4096, vocabulary 128256) and 8 x 1024 tokens in bfloat16, unless a row says otherwise.
Each value and gradient is compared with that of eager code in float32 first.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import names
from benchmarks.environment import environment
from benchmarks.losses.measure import FAILED, OK, WRONG, Measurement, Settings, measure
from benchmarks.losses.problems import AGAINST, PROBLEMS, TITLES
from benchmarks.records import Writer


def title_of(contender: str) -> str:
    """A contender as tables and figures name it."""
    name, comma, setting = contender.partition(",")
    return TITLES[name] + comma + setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        type=names("problem", PROBLEMS),
        default=tuple(PROBLEMS),
        metavar="PROBLEM,...",
        help=f"which problems (default: all): {', '.join(PROBLEMS)}",
    )
    parser.add_argument(
        "--against",
        type=names("contender", AGAINST),
        default=AGAINST,
        metavar="CONTENDER,...",
        help=f"contenders to compare ours with (default: all that are installed): {', '.join(AGAINST)}",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="steps that a time is the median of (default: 5)"
    )


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether ours ran everywhere with the right gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(device, options.against, max(2, options.repeats), options.quick)
    found: list[Measurement] = []
    with Writer(Path(f"{stem}.jsonl"), environment(), "losses") as writer:
        for measurement in measure(options.only, settings, console.print):
            writer.write(measurement)
            found.append(measurement)
            if measurement.status != OK:
                console.print(
                    f"{measurement.problem}: {measurement.contender}: {measurement.status}: {measurement.error}"
                )
    console.print(table(found))
    return not any(one.status in (WRONG, FAILED) for one in found if one.contender.startswith("ours"))


def read_lines(lines: Sequence[dict[str, Any]]) -> list[Measurement]:
    """The measurements of a file's lines."""
    return [Measurement(**line) for line in lines]


def cells(measurement: Measurement) -> tuple[str, str, str, str]:
    """Wall time, GPU time, peak memory and error as text."""
    if measurement.wall_ms is None:
        return measurement.status, "-", "-", "-"
    mark = " (wrong)" if measurement.status == WRONG else ""
    numbers = (
        (measurement.wall_ms, ".1f"),
        (measurement.gpu_ms, ".1f"),
        (measurement.peak_mib, ",.0f"),
        (measurement.gradient_error, ".1e"),
    )
    wall, gpu, peak, error = ("-" if value is None else format(value, form) for value, form in numbers)
    return wall, gpu, peak, error + mark


def table(found: Sequence[Measurement]) -> Table:
    """A row for each problem and contender."""
    grid = Table(
        title="Losses over an LM head, forward and backward; peak memory beyond the inputs", title_justify="left"
    )
    for column in ("problem", "sizes", "contender"):
        grid.add_column(column)
    for column in ("wall ms", "GPU ms", "peak MiB", "gradient error"):
        grid.add_column(column, justify="right", no_wrap=True)
    previous = None
    for one in found:
        new = one.problem != previous
        if new and previous is not None:
            grid.add_section()
        previous = one.problem
        grid.add_row(one.title if new else "", one.sizes if new else "", title_of(one.contender), *cells(one))
    return grid
