"""``medusa``: further heads over a model, tokens per second and peak memory at longer and longer sequences.

Stage 1 trains the heads over a frozen model, stage 2 both. The losses of the heads are eager, a loop of liger-kernel's
fused linear cross entropy, or those of ``LigerMedusaMixin``; the layers are patched by the same package. Each arm ends
at the length at which memory runs out.
"""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.training.arms import parse_numbers
from benchmarks.training.dims import DIMS
from benchmarks.training.job import OK, Job, Row
from benchmarks.training.train import add_model_arguments, measure, name_of, number, succeeded

DEFAULT_ARMS = "hf:none,liger_kernel:none,ours:none"
DEFAULT_LAYERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, DEFAULT_ARMS)
    parser.set_defaults(layers=DEFAULT_LAYERS)
    parser.add_argument("--model", choices=tuple(DIMS), default="llama3_8b", help="dimensions (default: llama3_8b)")
    parser.add_argument(
        "--heads", type=parse_numbers, default=(3, 5), metavar="N,...", help="numbers of heads (default: 3,5)"
    )
    parser.add_argument("--stages", type=parse_numbers, default=(1, 2), metavar="N,...", help="1, 2 (default: both)")
    parser.add_argument(
        "--lengths", type=parse_numbers, metavar="N,...", help="tokens per sequence (default: 4k,8k,16k,32k)"
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument("--warm-up", type=int, default=1, metavar="N", help="steps before those measured (default: 1)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="measured steps (default: 2)")


def make_jobs(options: argparse.Namespace) -> list[Job]:
    lengths = options.lengths or ((16, 32) if options.quick else (4096, 8192, 16384, 32768))
    return [
        Job(
            model=options.model,
            arm=str(arm),
            shapes=tuple((options.batch_size, length) for length in lengths),
            layers=options.layers,
            warm_up=options.warm_up,
            steps=options.steps,
            optimizer=options.optimizer,
            memory_limit_gib=options.memory_limit_gib,
            medusa_heads=heads,
            medusa_stage=stage,
            tiny=options.quick,
        )
        for stage in options.stages
        for heads in options.heads
        for arm in options.arms
    ]


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all of our arms ran or ran out of memory."""
    rows = measure(make_jobs(options), stem, "medusa", options, console)
    console.print(table(rows))
    return succeeded(rows)


def groups(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """The rows of each stage and number of heads."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.medusa_stage, row.medusa_heads), []).append(row)
    return found


def lengths_of(rows: Sequence[Row]) -> list[int]:
    """All lengths, in ascending order."""
    return sorted({row.sequence_length for row in rows})


def cells(rows: Sequence[Row], lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """Of one stage and number of heads: each arm with its tokens/s / peak GiB at each length."""
    found = []
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = {row.sequence_length: row for row in rows if row.arm == arm}
        texts = [_cell(mine.get(length)) for length in lengths]
        found.append((name_of(next(iter(mine.values())).parsed_arm).removesuffix(", nothing recomputed"), *texts))
    return found


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.status != OK:
        return row.status
    return f"{number(row.tokens_per_second, ',.0f')} / {number(row.peak_gib, '.1f')}"


def table(rows: Sequence[Row]) -> Table:
    """Speed and memory of each arm at each length."""
    lengths = lengths_of(rows)
    first = rows[0]
    grid = Table(
        title=f"Medusa over {DIMS[first.model].title}, {first.layers} layers, batch {first.batch_size}:"
        " tokens/s / peak GiB at each length",
        title_justify="left",
    )
    for column in ("stage", "heads", "arm", *map(str, lengths)):
        grid.add_column(column, no_wrap=True)
    for (stage, heads), mine in groups(rows).items():
        for arm, *texts in cells(mine, lengths):
            grid.add_row(str(stage), str(heads), arm, *texts)
        grid.add_section()
    return grid
