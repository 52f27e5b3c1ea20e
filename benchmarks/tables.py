"""Records as tables in the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.records import Record

DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Claim:
    """A claim of arXiv:2410.10989: how many times less its kernels need than Hugging Face's at one size (A100)."""

    op: str
    size: int
    title: str
    time: float | None
    memory: float | None


CLAIMS = (
    Claim("cross_entropy", 163840, "Cross entropy, vocabulary 163840", time=3, memory=5),
    Claim("rms_norm", 16384, "RMSNorm, hidden size 16384", time=7, memory=3),
    Claim("rope", 16384, "RoPE, hidden size 16384", time=8, memory=3),
    Claim("silu_mul", 16384, "SwiGLU, sequence length 16384", time=None, memory=1.6),
    Claim("gelu_mul", 16384, "GeGLU, sequence length 16384", time=None, memory=1.6),
)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _grid(title: str, *columns: str, caption: str | None = None) -> Table:
    """An empty table; columns of names are left-aligned, columns of numbers right-aligned."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("shape", "op", "contender") else "right", no_wrap=True)
    return table


def op_table(op: str, records: Sequence[Record]) -> Table:
    """A table of one op with a row for every shape and contender."""
    table = _grid(
        f"{op}, {records[0].dtype}, milliseconds"
        + (" by the clock" if records[0].gpu_ms is None else " of GPU kernels (wall: from step to step)"),
        *("shape", "contender", *DIRECTIONS, "wall", "floor", "both/floor", "peak MiB", "host us", "gradient error"),
    )
    rows: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((record.suite, record.shape, record.contender), {})[record.pass_] = record
    previous = None
    for (suite, shape, contender), by_direction in rows.items():
        both = by_direction["both"]
        if previous is not None and previous != (suite, shape):
            table.add_section()
        table.add_row(
            "" if previous == (suite, shape) else shape,
            contender,
            *(_number(by_direction[name].time_ms if name in by_direction else None, ".3f") for name in DIRECTIONS),
            _number(both.wall_ms, ".3f"),
            _number(both.floor_ms, ".3f"),
            _number(both.ratio, ".2f"),
            _number(both.peak_mib, ",.0f"),
            _number(both.host_us, ".0f"),
            _number(both.gradient_error, ".1e"),
        )
        previous = suite, shape
    return table


def host_table(records: Sequence[Record], environment: dict[str, Any]) -> Table:
    """A table of the host's time for forward and backward, for each op and contender."""
    by_op: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.host_us is not None:
            by_op.setdefault(record.op, {})[record.contender] = record
    contenders = list(dict.fromkeys(name for found in by_op.values() for name in found))
    yardstick = environment["rms_norm_host_us"]
    table = _grid(
        f"The host's time, us, on a small problem (F.rms_norm takes {yardstick:.0f})",
        *("op", *contenders, "our first call, s"),
    )
    for op, found in by_op.items():
        table.add_row(
            op,
            *(_number(found[name].host_us if name in found else None, ".0f") for name in contenders),
            _number(found["ours"].first_call_s if "ours" in found else None, ".2f"),
        )
    return table


def _ratios(records: Sequence[Record], quantity: Callable[[Record], float | None]) -> list[float | None]:
    """Eager's quantity divided by that of liger-kernel and of both of ours; None where one is missing."""
    found = {record.contender: quantity(record) for record in records}
    eager = found.get("eager")
    return [eager / found[name] if eager and found.get(name) else None for name in ("liger", "ours", "ours, in place")]


def claims_table(records: Sequence[Record]) -> Table:
    """A table of the paper's claims and the measurements."""
    table = _grid(
        "The paper's claims (arXiv:2410.10989): how many times less than eager, forward and backward",
        *("op", *("time: paper", "liger", "ours", "in place"), *("memory: paper", "liger", "ours", "in place")),
        caption="Memory is the peak with inputs. For SwiGLU and GeGLU the paper measured the whole MLP.",
    )
    for claim in CLAIMS:
        there = [
            record
            for record in records
            if (record.op, record.suite, record.size, record.pass_) == (claim.op, "sweep", claim.size, "both")
        ]
        cells = [
            *(claim.time, *_ratios(there, lambda record: record.time_ms)),
            *(claim.memory, *_ratios(there, lambda record: record.total_gib)),
        ]
        table.add_row(claim.title, *("-" if cell is None else f"{cell:.1f}x" for cell in cells))
    return table
