"""Sections of README.md and docs/ that are made from data and code; ``make docs`` writes them again.

python -m tests.docs_sections

A section lies between the lines ``<!-- NAME, written by make docs -->`` and ``<!-- end of NAME -->`` of its page.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_liger  # noqa: F401  registers the strategies
from benchmarks.ops import OPS
from benchmarks.records import Record, read, read_training
from benchmarks.tables import CLAIMS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STRATEGIES = ("liger", "liger_ddp", "liger_fsdp", "liger_model_parallel", "liger_deepspeed_stage_2")
ARMS = {
    "fsdp": "`fsdp`, the Hugging Face model as it is",
    "liger_kernel": "`fsdp`, the model patched by liger-kernel {liger}",
    "liger_fsdp": "`liger_fsdp`",
    "liger_model_parallel": "`liger_model_parallel`",
}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def training() -> str:
    """Speed, memory and loss of each strategy on the same model."""
    run = read_training(RESULTS / "train_llama3_8b_4xh200.json")
    first = run.arms[0]
    rows = []
    for arm in run.arms:
        rows.append(
            (
                ARMS[arm["arm"]].format(liger=run.environment["liger-kernel"]),
                f"{arm['tokens_per_second'] / arm['processes']:,.0f}",
                f"{arm['peak_memory_bytes'] / 2**30:.1f}",
                f"{arm['tokens_per_second'] / first['tokens_per_second']:.2f}x",
                f"{arm['peak_memory_bytes'] / first['peak_memory_bytes']:.2f}x",
                f"{arm['step_losses'][-1]:.3f}",
            )
        )
    header = ("strategy", "tokens/s per GPU", "peak GiB per GPU", "speed", "memory", f"loss, step {first['steps']}")
    return _table(header, rows)


def scaling() -> str:
    """Speed and memory per GPU on more and more GPUs."""
    run = read_training(RESULTS / "scaling_llama3_8b_h200.json")
    gpus = sorted({arm["processes"] for arm in run.arms})
    rows = []
    for name in dict.fromkeys(arm["arm"] for arm in run.arms):
        found = {arm["processes"]: arm for arm in run.arms if arm["arm"] == name}
        speeds = {count: found[count]["tokens_per_second"] / count for count in gpus}
        cells = [f"{speeds[count]:,.0f} / {found[count]['peak_memory_bytes'] / 2**30:.1f}" for count in gpus]
        rows.append((ARMS[name], *cells, f"{speeds[gpus[-1]] / speeds[gpus[0]]:.3f}"))
    counts = [f"{count} GPU{'s' if count > 1 else ''}" for count in gpus]
    return _table(("strategy", *counts, f"speed per GPU, {gpus[-1]} against {gpus[0]}"), rows)


def models() -> str:
    """Time, memory and error of two layers of each model."""
    records = json.loads((RESULTS / "models_h200.json").read_text(encoding="utf-8"))["records"]
    rows = []
    for name in dict.fromkeys(record["model"] for record in records):
        arms = {record["arm"]: record for record in records if record["model"] == name}
        plain, ours = arms["unpatched"], arms["ours"]
        cells = [
            f"{arms[arm]['step_ms']:.1f} / {arms[arm]['peak_mib']:,.0f} / {arms[arm]['gradient_error']:.4f}"
            if arm in arms
            else "-"
            for arm in ("unpatched", "liger-kernel", "ours")
        ]
        ratios = f"{plain['step_ms'] / ours['step_ms']:.2f}x", f"{ours['peak_mib'] / plain['peak_mib']:.2f}x"
        rows.append((name, *cells, *ratios))
    return _table(("model", "Hugging Face", "liger-kernel", "lightning-liger", "speed", "memory"), rows)


def _by_shape(records: Iterable[Record], op: str) -> dict[str, dict[str, Record]]:
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if (record.op, record.suite, record.pass_) == (op, "shapes", "both"):
            found.setdefault(record.shape, {})[record.contender] = record
    return found


def loss() -> str:
    """Time and memory of the LM head with its loss."""
    _, records = read(RESULTS / "loss_h200.jsonl")
    contenders = {
        "eager": "eager",
        "compile": "`torch.compile`",
        "liger": "liger-kernel",
        "ours": "lightning-liger",
        "ours, small budget": "lightning-liger, small `chunk_bytes`",
    }
    rows = []
    for shape, found in _by_shape(records, "linear_cross_entropy").items():
        sizes, _, ignored = shape.partition(", ")
        label = ", ".join(re.findall(r"\d+", sizes)) + (f"; {ignored}" if ignored else "")
        cells = [f"{found[name].time_ms:.1f} / {found[name].peak_mib:,.0f}" for name in contenders]
        rows.append((label, f"{found['products'].time_ms:.1f}", *cells))
    return _table(("tokens, hidden size, vocabulary", "three products", *contenders.values()), rows)


def ops() -> str:
    """Time of each op as a multiple of its floor."""
    _, records = read(RESULTS / "ops_h200.jsonl")
    contenders = ("ours", "torch", "compile", "liger", "eager")
    rows = []
    for op in OPS:
        for shape, found in _by_shape(records, op).items():
            cells = [f"{found[name].ratio:.2f}" if name in found else "-" for name in contenders]
            rows.append((f"`{op}` {shape}", *cells))
    names = ("lightning-liger", "PyTorch's fused op", "`torch.compile`", "liger-kernel", "Hugging Face / eager")
    return _table(("op", *names), rows)


def claims() -> str:
    """The claims of arXiv:2410.10989 and what was measured here, as ratios to eager code."""
    _, records = read(RESULTS / "ops_h200.jsonl")
    rows = []
    for claim in CLAIMS:
        found = {
            record.contender: record
            for record in records
            if (record.op, record.suite, record.size, record.pass_) == (claim.op, "sweep", claim.size, "both")
        }
        for ours in ("ours", "ours, in place"):
            if ours in found:
                first = ours == "ours"
                times = _ratios(found, ours, claim.time, lambda record: record.time_ms, first)
                memory = _ratios(found, ours, claim.memory, lambda record: record.total_gib, first)
                rows.append((claim.title if first else "the same, `inplace_backward=True`", *times, *memory))
    three = ("paper", "liger-kernel", "lightning-liger")
    return _table(("op", f"time: {three[0]}", *three[1:], f"memory: {three[0]}", *three[1:]), rows)


def _ratios(
    found: dict[str, Record], ours: str, claim: float | None, quantity: Callable[[Record], Any], first: bool
) -> tuple[str, str, str]:
    def ratio(name: str) -> str:
        return f"{quantity(found['eager']) / quantity(found[name]):.1f}x"

    return ("-" if claim is None else f"{claim:g}x") if first else "", ratio("liger") if first else "", ratio(ours)


def class_order(strategy: type) -> list[type]:
    """The classes of a strategy in method resolution order, down to and including Lightning's class."""
    order = strategy.__mro__
    last = next(place for place, cls in enumerate(order) if cls.__module__.startswith("lightning."))
    return list(order[: last + 1])


def strategy_class(name: str, user: str) -> type:
    """The class that a registered name stands for, ``user`` being "Trainer" or "Fabric"."""
    registry: Any = StrategyRegistry if user == "Trainer" else STRATEGY_REGISTRY
    return registry[name]["strategy"]


def classes() -> str:
    """The class order of each strategy, and file and first line of each class of this project in it."""
    text = ""
    ours: dict[type, None] = {}
    for name in STRATEGIES:
        text += f"`{name}`\n\n"
        for user in ("Trainer", "Fabric"):
            order = class_order(strategy_class(name, user))
            names = ", ".join(f"`{cls.__name__}`" for cls in order[:-1])
            text += f"- {user}: {names}, Lightning's `{order[-1].__name__}`\n"
            ours |= dict.fromkeys(order[:-1])
        text += "\n"
    rows = [(f"`{cls.__name__}`", f"`{cls.__module__.replace('.', '/')}.py`", _first_line(cls)) for cls in ours]
    return text + _table(("class", "file", "summary"), sorted(rows, key=lambda row: row[1]))


def _first_line(cls: type) -> str:
    """The first line of a docstring in Markdown."""
    line = (cls.__doc__ or "").strip().split("\n", 1)[0].replace("``", "`")
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", line).replace("|", "\\|")


SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "README.md: training": ("README.md", training),
    **{
        f"docs/benchmarks.md: {section.__name__}": ("docs/benchmarks.md", section)
        for section in (training, scaling, models, loss, ops, claims)
    },
    "docs/how_it_works.md: classes": ("docs/how_it_works.md", classes),
}
"""Page and writer of each section."""


def bounds(page: str, name: str) -> tuple[int, int]:
    """Where the section ``name`` begins and ends in the text of a page.

    Raises:
        ValueError: If the page does not have both marks.
    """
    begin, end = f"<!-- {name}, written by make docs -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"a page must have one line {begin.strip()!r} and one {end!r}")
    return page.index(begin) + len(begin), page.index(end)


def main() -> None:
    """Writes all sections into their pages."""
    for name, section in SECTIONS.values():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        start, stop = bounds(page, section.__name__)
        path.write_text(page[:start] + section().strip("\n") + "\n" + page[stop:], encoding="utf-8")


if __name__ == "__main__":
    main()
