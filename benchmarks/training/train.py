"""``train``: tokens per second and peak memory of a model under each implementation, within memory budgets."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import names
from benchmarks.environment import environment
from benchmarks.records import Writer
from benchmarks.training.arms import IMPLEMENTATIONS, SYNTAX, Arm, parse_arms, parse_numbers
from benchmarks.training.dims import DIMS
from benchmarks.training.job import OK, OPTIMIZERS, Job, Row
from benchmarks.training.processes import run_jobs

DEFAULT_ARMS = "hf:full,liger_kernel:full,ours:full"


parse_models = names("model", DIMS)
"""The ``type`` of an argument that is a comma-separated list of models."""


def add_models_argument(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """``--model`` of commands that measure several models."""
    parser.add_argument(
        "--model",
        type=parse_models,
        default=tuple(default),
        metavar="MODEL,...",
        help=f"which dimensions (default: {','.join(default)}), out of {', '.join(DIMS)}",
    )


def add_model_arguments(parser: argparse.ArgumentParser, arms: str) -> None:
    """Arguments that several commands share."""
    parser.add_argument(
        "--arms",
        type=parse_arms,
        default=parse_arms(arms),
        metavar="ARM,...",
        help=f"what to compare (default: {arms}), each {SYNTAX}",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="depth (default: the published one)")
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="adamw",
        help="fused (default: adamw); sgd keeps no states, those with a dtype round stochastically in our arms",
    )
    parser.add_argument("--memory-limit-gib", type=float, metavar="GIB", help="the most memory PyTorch may take")
    parser.add_argument("--timeout", type=float, default=570.0, metavar="SECONDS", help="of one arm (default: 570)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, DEFAULT_ARMS)
    add_models_argument(parser, ["llama3_8b"])
    parser.add_argument(
        "--batches",
        type=parse_numbers,
        metavar="N,...",
        help="batch sizes per GPU, each until memory runs out (default: 8)",
    )
    parser.add_argument(
        "--sequence-length", type=parse_numbers, metavar="N", help="tokens per sequence, 2k is 2048 (default: 2048)"
    )
    parser.add_argument(
        "--devices", type=parse_numbers, default=(1,), metavar="N,...", help="GPUs; several run FSDP (default: 1)"
    )
    parser.add_argument(
        "--lora-rank", type=int, default=0, metavar="N", help="of adapters, which alone are trained (default: none)"
    )
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="steps before those measured (default: 3)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="measured steps (default: 4)")
    parser.add_argument(
        "--traced-steps", type=int, default=0, metavar="N", help="steps after those, traced for the GPU's idle share"
    )


def make_jobs(options: argparse.Namespace) -> list[Job]:
    (length,) = options.sequence_length or ((16,) if options.quick else (2048,))
    batches = options.batches or ((2,) if options.quick else (8,))
    return [
        Job(
            model=model,
            arm=str(arm),
            shapes=tuple((batch_size, length) for batch_size in batches),
            layers=options.layers,
            devices=devices,
            warm_up=options.warm_up,
            steps=options.steps,
            traced_steps=options.traced_steps,
            optimizer=options.optimizer,
            lora_rank=options.lora_rank,
            memory_limit_gib=options.memory_limit_gib,
            tiny=options.quick,
        )
        for model in options.model
        for devices in options.devices
        for arm in options.arms
    ]


def measure(jobs: Sequence[Job], stem: str, command: str, options: argparse.Namespace, console: Console) -> list[Row]:
    """Runs jobs, and says and writes each row as soon as it is there."""
    rows: list[Row] = []
    in_process = options.quick and all(job.devices == 1 for job in jobs)
    with Writer(Path(f"{stem}.jsonl"), environment(), command) as writer:
        for row in run_jobs(jobs, in_process=in_process, timeout=options.timeout):
            writer.write(row)
            rows.append(row)
            console.print(describe(row))
    return rows


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all of our arms ran or ran out of memory."""
    rows = measure(make_jobs(options), stem, "train", options, console)
    console.print(table(rows))
    return succeeded(rows)


def succeeded(rows: Sequence[Row]) -> bool:
    return all(row.status != "failed" for row in rows if row.parsed_arm.is_ours)


def describe(row: Row) -> str:
    """A row as one line."""
    where = f"{row.model}, {row.layers} layers, {row.devices} x {row.batch_size} x {row.sequence_length}, {row.arm}"
    if row.status != OK:
        return f"{where}: {row.status} ({row.error})"
    float8 = "" if row.fp8_share is None else f", {row.fp8_share:.1%} of linear FLOPs in float8"
    return (
        f"{where}: {number(row.tokens_per_second, ',.0f')} tokens/s per GPU, {number(row.peak_gib, '.1f')} GiB,"
        f" {row.chosen_plan or 'no plan'}{float8}; {number(row.seconds, '.0f')} s in all"
    )


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """The first row of the Hugging Face model at the same shape that ran."""
    same = ("model", "layers", "devices", "batch_size", "sequence_length", "context_parallel_size", "memory_limit_gib")
    same += ("lora_rank",)
    for other in rows:
        is_same = all(getattr(other, name) == getattr(row, name) for name in same)
        if is_same and other.parsed_arm.implementation.startswith("hf") and other.tokens_per_second is not None:
            return other
    return None


def ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Speed relative to :func:`baseline`."""
    plain = baseline(row, rows)
    if plain is None or row.tokens_per_second is None:
        return None
    return row.tokens_per_second / plain.tokens_per_second


def name_of(arm: Arm) -> str:
    """An arm as tables and figures name it."""
    plans = {"": "", "none": ", nothing recomputed", "full": ", layers recomputed", "auto": ", budget auto"}
    if arm.plan in plans:
        plan = plans[arm.plan]
    elif arm.plan.isdecimal():
        plan = f", {arm.plan} layers recomputed"
    elif arm.plan.endswith("GiB"):
        plan = f", at most {arm.plan.removesuffix('GiB')} GiB"
    else:
        plan = f", at most {float(arm.plan):.0%} of the GPU"
    return IMPLEMENTATIONS[arm.implementation] + plan


def table(rows: Sequence[Row]) -> Table:
    """Speed and memory of each arm; speed relative to the first arm of the Hugging Face model that ran."""
    grid = Table(title="Training, per GPU; speed relative to the first Hugging Face arm", title_justify="left")
    for column in ("model", "GPUs", "batch", "arm", "plan"):
        grid.add_column(column, justify="right" if column in ("GPUs", "batch") else "left")
    for column in ("step ms", "tokens/s", "speed", "peak GiB", "reserved GiB", "idle", "float8", "loss"):
        grid.add_column(column, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        place = row.model, row.layers, row.devices
        if previous not in (None, place):
            grid.add_section()
        previous = place
        shape = f"{row.batch_size}x{row.sequence_length}"
        start = (f"{DIMS[row.model].title}, {row.layers} layers", str(row.devices), shape, name_of(row.parsed_arm))
        if row.status != OK:
            grid.add_row(*start, row.status, *["-"] * 8)
            continue
        seconds = sorted(row.step_seconds)
        grid.add_row(
            *start,
            row.chosen_plan or "-",
            number(seconds[len(seconds) // 2] * 1e3 if seconds else None, ",.1f"),
            number(row.tokens_per_second, ",.0f"),
            "-" if (found := ratio(row, rows)) is None else f"{found:.3f}x",
            number(row.peak_gib, ".1f"),
            number(row.reserved_gib, ".1f"),
            number(row.idle_share, ".1%"),
            number(row.fp8_share, ".0%"),
            number(row.loss, ".4f"),
        )
    return grid
