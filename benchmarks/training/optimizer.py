"""``optimizer``: AdamW's step over a model's parameters, compared with the time of its memory traffic alone."""

import argparse
import dataclasses
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environment import environment
from benchmarks.records import Writer
from benchmarks.timing import Rates, wall_ms
from benchmarks.training.arms import parse_numbers
from benchmarks.training.dims import DIMS, make_model
from benchmarks.training.train import add_models_argument, number
from liger_ops.optim import AdamW

CONTENDERS: dict[str, Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "ours": AdamW,
}
TITLES = {"foreach": "PyTorch, foreach", "fused": "PyTorch, fused", "ours": "lightning-liger"}
_DTYPES = (torch.bfloat16, torch.float32)
_PASSES = 7  # parameter, gradient and both averages are read, all but the gradient written


@dataclass(frozen=True)
class Step:
    """One optimizer's step over a model's parameters in one dtype.

    Attributes:
        model, contender: Names in ``DIMS`` and ``CONTENDERS``.
        layers: Of the model.
        dtype: Of parameters, gradients and states.
        num_parameters: Numbers in all parameters.
        step_ms: Milliseconds of a step.
        floor_ms: Milliseconds of the least memory traffic at the rate of a copy, None on a CPU.
    """

    model: str
    contender: str
    layers: int
    dtype: str
    num_parameters: int
    step_ms: float
    floor_ms: float | None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models_argument(parser, ["llama3_8b"])
    parser.add_argument("--layers", type=parse_numbers, default=(8,), metavar="N", help="depth (default: 8)")


def _measure(name: str, contender: str, layers: int, dtype: torch.dtype, options: Any, rate: float | None) -> Step:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(DIMS[name].config(layers, options.quick), device, dtype)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step = CONTENDERS[contender](parameters).step
    wall_ms([step], 3, device)
    size = sum(parameter.numel() for parameter in parameters)
    num_bytes = _PASSES * size * dtype.itemsize
    return Step(
        model=name,
        contender=contender,
        layers=layers,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=size,
        step_ms=statistics.median(wall_ms([step], 3 if options.quick else 20, device)),
        floor_ms=None if rate is None else num_bytes / rate * 1e3,
    )


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns True."""
    device = torch.device("cuda") if torch.cuda.is_available() else None
    rate = None if device is None else Rates.measure(device).copy
    (layers,) = options.layers
    steps: list[Step] = []
    with Writer(Path(f"{stem}.jsonl"), environment() | {"copy_tb_s": rate and rate / 1e12}, "optimizer") as writer:
        for name in options.model:
            for dtype in _DTYPES:
                for contender in CONTENDERS:
                    steps.append(_measure(name, contender, layers, dtype, options, rate))
                    writer.write(steps[-1])
                    gc.collect()  # parameters, gradients and states of the last one
                    if device is not None:
                        torch.cuda.empty_cache()
    console.print(table(steps))
    return True


def cells(step: Step) -> tuple[str, ...]:
    """A row of the table."""
    ratio = None if step.floor_ms is None else step.step_ms / step.floor_ms
    title = f"{DIMS[step.model].title}, {step.layers} layers, {step.num_parameters / 1e6:,.0f}M parameters"
    return title, step.dtype, TITLES[step.contender], number(step.step_ms, ".2f"), number(ratio, ".2f")


HEADER = ("model", "dtype", "AdamW", "step ms", "multiple of the floor")


def table(steps: Sequence[Step]) -> Table:
    grid = Table(title="AdamW's step, and its multiple of the least time of its memory traffic", title_justify="left")
    for place, column in enumerate(HEADER):
        grid.add_column(column, justify="right" if place > 2 else "left")
    for step in steps:
        grid.add_row(*cells(step))
    return grid
