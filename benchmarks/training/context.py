"""``context``: the longest sequences that fit, their speed, and the attention's share of it."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.environment import environment
from benchmarks.records import Writer
from benchmarks.timing import wall_ms
from benchmarks.training.arms import parse_numbers
from benchmarks.training.dims import DIMS
from benchmarks.training.job import OK, Job, Row
from benchmarks.training.processes import run_jobs
from benchmarks.training.train import add_model_arguments, describe, name_of, number, parse_models, succeeded

DEFAULT_ARMS = "hf:full,liger_kernel:full,ours:full,ours:auto"
_LENGTHS = (16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class Attention:
    """The time of attention alone in a step whose layers are recomputed: two forward passes and a backward pass.

    Attributes:
        model, layers, sequence_length, context_parallel_size: As in :class:`Job`.
        seconds: Of all layers, on one GPU.
    """

    model: str
    layers: int
    sequence_length: int
    context_parallel_size: int
    seconds: float

    def to_json(self) -> str:
        return json.dumps({"attention": dataclasses.asdict(self)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, DEFAULT_ARMS)
    parser.add_argument(
        "--model", type=parse_models, default=("llama3_8b",), metavar="MODEL", help=f"one of {', '.join(DIMS)}"
    )
    parser.add_argument(
        "--lengths", type=parse_numbers, metavar="N,...", help="tokens per sequence (default: 16k,32k,64k,128k)"
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument(
        "--context-parallel-size", type=int, default=1, metavar="N", help="GPUs that share a sequence (default: 1)"
    )
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="steps before those measured (default: 2)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="measured steps (default: 1)")


def attention_seconds(model: str, lengths: Sequence[int], context_parallel_size: int, tiny: bool) -> list[float]:
    """Seconds of attention in one layer at each length, as :class:`Attention` counts them; NaN out of memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = DIMS[model].config(None, tiny)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = [count // context_parallel_size or 1 for count in (config.num_attention_heads, config.num_key_value_heads)]

    def measure(length: int) -> float:
        query, key, value = (
            torch.randn(1, count, length, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for count in (heads[0], heads[1], heads[1])
        )
        upstream = torch.randn_like(query)

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads[0] != heads[1])

        def both() -> None:
            torch.autograd.grad(forward(), (query, key, value), upstream)

        # The first call of each length takes longer: the backend makes a plan for it.
        return sum(wall_ms([step], 2, device)[1] for step in (forward, both)) / 1e3

    found = []
    for length in lengths:
        try:
            found.append(measure(length))
        except torch.OutOfMemoryError:
            found.append(float("nan"))
    return found


def make_jobs(options: argparse.Namespace, lengths: Sequence[int]) -> list[Job]:
    """A job for each arm, which goes through the lengths until memory runs out."""
    return [
        Job(
            model=options.model[0],
            arm=str(arm),
            shapes=tuple((options.batch_size, length) for length in lengths),
            layers=options.layers,
            devices=options.context_parallel_size,
            warm_up=options.warm_up,
            steps=options.steps,
            optimizer=options.optimizer,
            context_parallel_size=options.context_parallel_size,
            states_first=True,
            memory_limit_gib=options.memory_limit_gib,
            tiny=options.quick,
        )
        for arm in options.arms
        if arm.is_ours or options.context_parallel_size == 1
    ]


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all of our arms ran or ran out of memory."""
    lengths = options.lengths or ((16, 32) if options.quick else _LENGTHS)
    size = options.context_parallel_size
    jobs = make_jobs(options, lengths)
    in_process = options.quick and size == 1
    layers = DIMS[options.model[0]].config(options.layers, options.quick).num_hidden_layers
    asked = options.model[0], lengths, size, options.quick
    if in_process:
        seconds = attention_seconds(*asked)
    else:  # in a process that gives its memory back
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            seconds = process.submit(attention_seconds, *asked).result()
    attention = [
        Attention(options.model[0], layers, length, size, one * layers * options.batch_size)
        for length, one in zip(lengths, seconds, strict=True)
        if one == one
    ]
    rows: list[Row] = []
    with Writer(Path(f"{stem}.jsonl"), environment(), "context") as writer:
        for one in attention:
            writer.write(one)
        for row in run_jobs(jobs, in_process=in_process, timeout=options.timeout):
            writer.write(row)
            rows.append(row)
            console.print(describe(row))
    console.print(table(rows, attention))
    return succeeded(rows)


def read_lines(lines: Sequence[dict]) -> tuple[list[Row], list[Attention]]:
    """The measurements in a file of results."""
    attention = [Attention(**line["attention"]) for line in lines if "attention" in line]
    return [Row.from_json(line) for line in lines if "attention" not in line], attention


def attention_share(row: Row, attention: Sequence[Attention]) -> float | None:
    """The share of a step that attention alone takes."""
    if row.tokens_per_second is None:
        return None
    for one in attention:
        if (one.sequence_length, one.context_parallel_size) == (row.sequence_length, row.context_parallel_size):
            tokens = row.batch_size * row.sequence_length / row.context_parallel_size
            return one.seconds * row.tokens_per_second / tokens
    return None


def slope_mib(row: Row, rows: Sequence[Row]) -> float | None:
    """MiB of peak memory for each further token, from the next shorter length of the same arm."""
    shorter = [
        other
        for other in rows
        if (other.arm, other.memory_limit_gib) == (row.arm, row.memory_limit_gib)
        and other.sequence_length < row.sequence_length
        and other.peak_gib is not None
    ]
    if not shorter or row.peak_gib is None:
        return None
    last = max(shorter, key=lambda other: other.sequence_length)
    tokens = row.batch_size * (row.sequence_length - last.sequence_length) / row.context_parallel_size
    return (row.peak_gib - last.peak_gib) * 1024 / tokens


def table(rows: Sequence[Row], attention: Sequence[Attention]) -> Table:
    """Memory and speed at each length."""
    first = rows[0]
    limit = f", at most {first.memory_limit_gib:g} GiB" if first.memory_limit_gib else ""
    grid = Table(
        title=f"{DIMS[first.model].title}, {first.layers} layers, {first.devices} GPU, batch {first.batch_size}{limit};"
        " states are parameters, gradients and the optimizer's",
        title_justify="left",
    )
    grid.add_column("arm")
    grid.add_column("plan")
    columns = ("tokens", "tokens/s", "step s", "attention", "peak GiB", "states GiB", "MiB/token", "MiB/further token")
    for column in columns:
        grid.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        start = name_of(row.parsed_arm), (row.chosen_plan or "-") if row.status == OK else row.status
        share = attention_share(row, attention)
        grid.add_row(
            *start,
            f"{row.sequence_length:,}",
            number(row.tokens_per_second, ",.0f"),
            number(min(row.step_seconds, default=None), ".2f"),
            "-" if share is None else f"{share:.0%}",
            number(row.peak_gib, ".1f"),
            number(row.states_gib, ".1f"),
            number(row.mib_per_token if row.peak_gib is not None else None, ".3f"),
            number(slope_mib(row, rows), ".3f"),
        )
    return grid
