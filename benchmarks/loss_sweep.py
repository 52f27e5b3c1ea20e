"""The LM head and its loss over the heads of real models, with few and many tokens, and its targets."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from benchmarks.cases import Op
from benchmarks.loss import LOSS
from benchmarks.records import Record
from benchmarks.run import Runner, SmallProblem

HEADS = {
    (2048, 128256): "Llama 3.2 1B",
    (3072, 128256): "Llama 3.2 3B",
    (4096, 128256): "Llama 3 8B",
    (4096, 151936): "Qwen3 8B",
    (5120, 131072): "Mistral Nemo",
    (5120, 152064): "Qwen2.5 14B",
    (3584, 152064): "Qwen2.5 7B",
    (5376, 262208): "Gemma 3 27B",
    (2560, 262208): "Gemma 3 4B",
    (2304, 256000): "Gemma 2 2B",
    (4096, 32000): "Mistral 7B",
    (8192, 128256): "Llama 3 70B",
    (7168, 129280): "DeepSeek V3",
    (6144, 92544): "InternLM2 20B",
    (4096, 49155): "Granite 3 8B",
    (768, 50257): "GPT-2",
    (4096, 256000): "Command R7B",
}
"""Models by hidden size and vocabulary."""

NUM_TOKENS = (1024, 4096, 16384, 65536)

MAX_TIME, MAX_MEMORY, FIRST_MEMORY_TOKENS = 1.02, 0.7, 4096
"""Targets against torch.compile; that of memory from so many tokens on."""

MAX_SMALL_TIME, MAX_SMALL_MEMORY = 0.9, 1.1
"""Targets of the small budget against liger-kernel."""

_NOT_MEASURED = SmallProblem(None, None, None)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """``"4096x49155,768x50257"`` as pairs of hidden size and vocabulary, an argument's ``type``."""
    try:
        pairs = [tuple(map(int, pair.split("x"))) for pair in text.split(",")]
        return tuple((hidden_size, vocab_size) for hidden_size, vocab_size in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list like 4096x49155,768x50257") from None


def parse_tokens(text: str) -> tuple[int, ...]:
    """``"1024,4096"`` as numbers, an argument's ``type``."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 1024,4096") from None


def sweep_op(heads: Sequence[tuple[int, int]], num_tokens: Sequence[int]) -> Op:
    """The loss at each head and number of tokens."""
    return dataclasses.replace(LOSS, shapes=tuple((tokens, *head, 0) for head in heads for tokens in num_tokens))


def measure(op: Op, runner: Runner) -> Iterator[Record]:
    """Records of every shape and contender; those that run out of memory or are not available are left out."""
    names = [name for name in op.chosen(runner.settings.against) if name != "torch"]
    yield from runner.measure(op, dict.fromkeys(names, _NOT_MEASURED))


def _over(found: dict[str, Record], ours: str, other: str, quantity: Callable[[Record], float | None]) -> float | None:
    values = [quantity(found[name]) if name in found else None for name in (ours, other)]
    return values[0] / values[1] if values[0] and values[1] else None


def verdict(found: dict[str, Record], num_tokens: int) -> str:
    """Which targets one shape's records miss, or ``"ok"``."""
    checks = (
        ("time", "ours", "compile", _wall_ms, MAX_TIME),
        ("memory", "ours", "compile", _peak_mib, MAX_MEMORY if num_tokens >= FIRST_MEMORY_TOKENS else None),
        ("small: time", "ours, small budget", "liger", _wall_ms, MAX_SMALL_TIME),
        ("small: memory", "ours, small budget", "liger", _peak_mib, MAX_SMALL_MEMORY),
    )
    ratios = [(name, _over(found, ours, other, quantity), limit) for name, ours, other, quantity, limit in checks]
    missed = [f"{name} {ratio:.3f}" for name, ratio, limit in ratios if ratio and limit and ratio > limit]
    return ", ".join(missed) or "ok"


def _wall_ms(record: Record) -> float | None:
    return record.wall_ms


def _peak_mib(record: Record) -> float | None:
    return record.peak_mib


def sweep_table(records: Sequence[Record], shapes: Sequence[tuple[int, ...]]) -> Table:
    """A row for every shape: wall ms (GPU ms) and peak MiB of each contender, our ratios, the verdict."""
    contenders = list(dict.fromkeys(record.contender for record in records))
    table = Table(
        title="LM head and loss, wall ms (GPU ms) / peak MiB; ratios of time and memory: ours to compile's, and with"
        " the small budget to liger-kernel's",
        title_justify="left",
    )
    for column in ("tokens, hidden, vocabulary", "model", *contenders, "ours", "small", "targets"):
        table.add_column(column, no_wrap=True)
    for shape in shapes:
        label = LOSS.label(*shape)
        found = {record.contender: record for record in records if record.shape == label}
        cells = []
        for name in contenders:
            record = found.get(name)
            gpu = "" if record is None or record.gpu_ms is None else f" ({record.gpu_ms:.1f})"
            cells.append("-" if record is None else f"{record.wall_ms:.1f}{gpu} / {record.peak_mib or 0:,.0f}")
        pairs = (("ours", "compile"), ("ours, small budget", "liger"))
        ratios = [
            " / ".join(
                "-" if ratio is None else f"{ratio:.3f}"
                for ratio in (_over(found, *pair, quantity) for quantity in (_wall_ms, _peak_mib))
            )
            for pair in pairs
        ]
        table.add_row(label, HEADS.get(shape[1:3], ""), *cells, *ratios, verdict(found, shape[0]))
    return table
