"""Sections of README.md and docs/ that are made from data and code; ``make docs`` writes them again.

python -m benchmarks.docs_sections

A section lies between the lines ``<!-- NAME, written by make docs -->`` and ``<!-- end of NAME -->`` of its page.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_liger  # noqa: F401  registers the strategies
from benchmarks.losses.command import read_lines as read_losses
from benchmarks.losses.command import title_of
from benchmarks.losses.measure import Measurement
from benchmarks.losses.problems import AGAINST, IN_LOOP, WITHIN_BUDGET
from benchmarks.ops import OPS
from benchmarks.records import Record, read, read_results
from benchmarks.tables import CLAIMS
from benchmarks.training.activations import TITLES
from benchmarks.training.activations import cells as activation_cells
from benchmarks.training.activations import read_lines as read_activations
from benchmarks.training.context import attention_share, slope_mib
from benchmarks.training.context import read_lines as read_context
from benchmarks.training.convergence import STOCK, text_cells
from benchmarks.training.convergence import cells as convergence_cells
from benchmarks.training.convergence import read_lines as read_convergence
from benchmarks.training.dims import DIMS
from benchmarks.training.estimates import compare
from benchmarks.training.job import Row
from benchmarks.training.medusa import cells as medusa_cells
from benchmarks.training.medusa import groups as medusa_groups
from benchmarks.training.medusa import lengths_of
from benchmarks.training.optimizer import HEADER as OPTIMIZER_HEADER
from benchmarks.training.optimizer import Step
from benchmarks.training.optimizer import cells as optimizer_cells
from benchmarks.training.train import baseline
from lightning_liger.data.packing import LengthSampler

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STRATEGIES = ("liger", "liger_ddp", "liger_fsdp", "liger_model_parallel", "liger_deepspeed_stage_2")
MEASURED = {
    "training": ("train_llama3_8b_2xh200.jsonl", "train_llama3_8b_4xh200.jsonl", "host_h200.jsonl"),
    "budgets": ("train_llama3_8b_h200.jsonl", "train_llama3_8b_2xh200.jsonl"),
    "batches": ("batches_2xh200.jsonl",),
    "context": ("context_h200.jsonl",),
    "context_limit": ("context_limit_h200.jsonl",),
    "context_parallel": ("context_8_layers_h200.jsonl", "context_8_layers_2xh200.jsonl"),
    "activations": ("activations_h200.jsonl",),
    "convergence": ("convergence_h200.jsonl",),
    "convergence_text": ("convergence_text_h200.jsonl",),
    "losses": ("losses_h200.jsonl",),
    "medusa": ("medusa_h200.jsonl",),
    "optimizer": ("optimizer_h200.jsonl",),
}
"""The files that sections are made from, where these are more than one or tests have others."""


_BEFORE_OUR_ADAMW = {"train_llama3_8b_4xh200.jsonl"}
"""Files that were measured with PyTorch's AdamW in all arms."""

_RECIPES = {"": "", "_gw_hp": ", `high_precision_wgrad=True`", "_save": ', `save="fp8"`'}
"""Settings of float8 by the end of an implementation's name."""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    results = read_results(path)
    return results.environment, [Row.from_json(line) for line in results.lines]


def _arm(row: Row, environment: dict[str, Any]) -> str:
    """An arm in the words of users."""
    plan = row.parsed_arm.plan
    plans = {"": "", "none": ", nothing recomputed", "full": ", layers recomputed"}
    if plan.isdecimal():
        words = f", `activation_checkpointing={plan}`"
    else:
        budget = '"auto"' if plan == "auto" else plan.removesuffix("GiB")
        words = plans.get(plan, f", `memory_budget={budget}`")
    implementation, in_float8, recipe = row.parsed_arm.implementation.partition("_fp8")
    names = {
        "hf": "Hugging Face",
        "liger_kernel": f"liger-kernel {environment['liger-kernel']}",
        "ours": f"`{'liger' if row.devices == 1 else 'liger_fsdp'}{in_float8}`",
        "ours_fsdp2": f"`liger_model_parallel{in_float8}`",
    }
    return names[implementation] + _RECIPES[recipe] + words


def _training_row(row: Row, rows: Sequence[Row], environment: dict[str, Any]) -> tuple[str, ...]:
    plain = baseline(row, rows)
    if row.tokens_per_second is None:
        return _arm(row, environment), row.status, "-", "-", "-", "-"
    return (
        _arm(row, environment),
        f"{row.tokens_per_second:,.0f}",
        _number(row.peak_gib, ".1f"),
        "-" if plain is None else f"{row.tokens_per_second / plain.tokens_per_second:.2f}x",
        "-" if plain is None or plain.peak_gib is None else f"{row.peak_gib / plain.peak_gib:.2f}x",
        _number(row.loss, ".3f"),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_TRAINING_HEADER = ("strategy", "tokens/s per GPU", "peak GiB per GPU", "speed", "memory")


def training() -> str:
    """Speed, memory and loss of each strategy on the same model, each compared within its run."""
    table = []
    for name in MEASURED["training"]:
        environment, rows = _rows(RESULTS / name)
        if name == "host_h200.jsonl":  # of which the largest step, and the arms of the other tables
            arms = {arm: f"{arm}:none" for arm in ("hf", "liger_kernel", "ours")}
            shape = "llama3_1b", 8, 1024
            rows = [
                dataclasses.replace(row, arm=arms[row.arm])
                for row in rows
                if (row.model, row.batch_size, row.sequence_length) == shape and row.arm in arms
            ]
        for row in rows:
            ours = row.parsed_arm.is_ours and name not in _BEFORE_OUR_ADAMW
            optimizer = "`liger_ops.optim.AdamW`" if ours else "PyTorch's fused AdamW"
            arm, *cells = _training_row(row, rows, environment)
            table.append((DIMS[row.model].title, str(row.devices), arm, optimizer, *cells))
    return _table(("model", "GPUs", _TRAINING_HEADER[0], "optimizer", *_TRAINING_HEADER[1:], "final loss"), table)


def scaling() -> str:
    """Speed and memory per GPU on more and more GPUs."""
    environment, rows = _rows(RESULTS / "scaling_llama3_8b_h200.jsonl")
    gpus = sorted({row.devices for row in rows})
    table = []
    for arm in dict.fromkeys(row.arm for row in rows):
        found = {row.devices: row for row in rows if row.arm == arm}
        speeds = {count: found[count].tokens_per_second for count in gpus}
        cells = [f"{speeds[count]:,.0f} / {found[count].peak_gib:.1f}" for count in gpus]
        name = _arm(found[gpus[-1]], environment)  # FSDP on one GPU too
        table.append((name, *cells, f"{speeds[gpus[-1]] / speeds[gpus[0]]:.3f}"))
    counts = [f"{count} GPU{'s' if count > 1 else ''}" for count in gpus]
    return _table(("strategy", *counts, f"speed per GPU, {gpus[-1]} against {gpus[0]}"), table)


def budgets(paths: Sequence[Path] | None = None) -> str:
    """Speed within memory budgets, on one GPU and on two."""
    table = []
    for path in paths or [RESULTS / name for name in MEASURED["budgets"]]:
        environment, rows = _rows(path)
        for row in rows:
            name, *cells = _training_row(row, rows, environment)
            table.append((str(row.devices), name, row.chosen_plan or "-", *cells[:-1]))
    return _table(("GPUs", _TRAINING_HEADER[0], "plan", *_TRAINING_HEADER[1:]), table)


def batches(path: Path = RESULTS / MEASURED["batches"][0]) -> str:
    """Of each arm: the fastest batch, and the largest that fits."""
    environment, rows = _rows(path)
    table = []
    for model, arm in dict.fromkeys((row.model, row.arm) for row in rows):
        mine = [row for row in rows if (row.model, row.arm) == (model, arm)]
        ran = [row for row in mine if row.tokens_per_second is not None]
        if not ran:
            table.append((DIMS[model].title, _arm(mine[0], environment), "-", "-", "-", "-"))
            continue
        best, largest = max(ran, key=lambda row: row.tokens_per_second), max(ran, key=lambda row: row.batch_size)
        more = "" if largest is not mine[-1] else " or more"
        cells = f"{best.tokens_per_second:,.0f}", str(best.batch_size), _number(best.peak_gib, ".1f")
        table.append((DIMS[model].title, _arm(best, environment), *cells, f"{largest.batch_size}{more}"))
    header = (
        "model",
        "strategy",
        "tokens/s per GPU",
        "fastest batch size",
        "peak GiB at that size",
        "largest batch size",
    )
    return _table(header, table)


def context(path: Path = RESULTS / MEASURED["context"][0]) -> str:
    """Speed and memory at each length of a sequence."""
    results = read_results(path)
    rows, attention = read_context(results.lines)
    table = []
    for row in rows:
        share = attention_share(row, attention)
        table.append(
            (
                _arm(row, results.environment),
                f"{row.sequence_length:,}",
                _number(row.tokens_per_second, ",.0f") if row.tokens_per_second else row.status,
                _number(share, ".0%"),
                _number(row.peak_gib, ".1f"),
                _number(row.mib_per_token, ".2f"),
                _number(slope_mib(row, rows), ".2f"),
            )
        )
    memory = ("peak GiB", "MiB per token beyond the states", "MiB per additional token")
    return _table(("strategy", "tokens", "tokens/s per GPU", "attention's share", *memory), table)


def context_limit() -> str:
    """The same within a limit of memory."""
    return context(RESULTS / MEASURED["context_limit"][0])


def context_parallel() -> str:
    """Speed and memory of one sequence on one GPU, and of one twice as long on two."""
    table = []
    for name in MEASURED["context_parallel"]:
        (row,), attention = read_context(read_results(RESULTS / name).lines)
        share = _number(attention_share(row, attention), ".0%")
        speed, peak = _number(row.tokens_per_second, ",.0f"), _number(row.peak_gib, ".1f")
        cells = speed, share, peak, _number(row.states_gib, ".1f"), _number(row.mib_per_token, ".2f")
        table.append((str(row.devices), f"{row.sequence_length:,}", *cells))
    memory = ("peak GiB per GPU", "of which states", "MiB per local token")
    return _table(("GPUs", "tokens", "tokens/s per GPU", "attention's share", *memory), table)


def activations(path: Path = RESULTS / MEASURED["activations"][0]) -> str:
    """Bytes that layers keep between forward and backward."""
    found = read_activations(read_results(path).lines)
    names = dict.fromkeys(result.model for result in found)
    return _table(
        ("model", *TITLES.values(), "relative to all stored"), [activation_cells(name, found) for name in names]
    )


def convergence(path: Path = RESULTS / MEASURED["convergence"][0]) -> str:
    """Distances of losses with kernels and plans from those of stock runs."""
    groups, _ = read_convergence(read_results(path).lines)
    runs = list(dict.fromkeys(curve.run for group in groups for curve in group if curve.run not in STOCK))
    header = ("architecture", "dtype", "final loss", "noise", *runs)
    return _table(header, [convergence_cells(group, runs) for group in groups])


def convergence_text() -> str:
    """The last losses of a model on text, and how far its losses are from those of the first run."""
    _, rows = read_convergence(read_results(RESULTS / MEASURED["convergence_text"][0]).lines)
    return _table(("run", "loss, mean of the last 20 steps", "RMS difference from the first"), text_cells(rows))


def losses(path: Path = RESULTS / MEASURED["losses"][0]) -> str:
    """Time and memory of post-training losses, with a sentence on how they were measured."""
    results = read_results(path)
    by_problem: dict[str, dict[str, Measurement]] = {}
    for one in read_losses(results.lines):
        by_problem.setdefault(one.problem, {})[one.contender] = one
    contenders = (*AGAINST, "ours", IN_LOOP, WITHIN_BUDGET)
    table = []
    for found in by_problem.values():
        first = next(iter(found.values()))
        table.append((first.title, first.sizes, *(_loss_cell(found.get(name)) for name in contenders)))
    header = ("loss", "sizes", *map(title_of, contenders))
    about = f"{results.environment['device']}, torch {results.environment['torch']}, bfloat16, each row from one run"
    text = f"Forward and backward, wall ms / peak MiB beyond the inputs, gradients included ({about}):\n\n"
    return text + _table(header, table)


def _loss_cell(one: Measurement | None) -> str:
    if one is None:
        return "-"
    if one.wall_ms is None:
        return one.status
    return f"{one.wall_ms:.1f} / {_number(one.peak_mib, ',.0f')}" + (" (wrong)" if one.status == "wrong" else "")


def medusa(path: Path = RESULTS / MEASURED["medusa"][0]) -> str:
    """Speed and memory of Medusa's heads at each length, with a sentence on how they were measured."""
    environment, rows = _rows(path)
    lengths = lengths_of(rows)
    first = rows[0]
    about = f"{DIMS[first.model].title}'s dimensions with {first.layers} layers, batch {first.batch_size}"
    text = f"Tokens/s / peak GiB at each length ({about}, {environment['device']}, bfloat16, one run):\n\n"
    table = [
        (str(stage), str(heads), *cells)
        for (stage, heads), mine in medusa_groups(rows).items()
        for cells in medusa_cells(mine, lengths)
    ]
    return text + _table(("stage", "heads", "implementation", *(f"{length:,}" for length in lengths)), table)


def models() -> str:
    """Time, memory and error of two layers of each model."""
    records = read_results(RESULTS / "models_h200.jsonl").lines
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


def experts() -> str:
    """Time, rate and memory of layers of experts, and of a model of four."""
    table = []
    for path in sorted(RESULTS.glob("experts_*h200.jsonl")):
        lines = [line for line in read_results(path).lines if line["kind"] != "phase"]
        for key in dict.fromkeys((line["model"], line["num_tokens"], line["routing"]) for line in lines):
            model, num_tokens, routing = key
            found = {
                line["name"]: line for line in lines if (line["model"], line["num_tokens"], line["routing"]) == key
            }
            cells = [
                f"{one['ms']:.1f} / {_number(one['flops'] and one['flops'] / one['ms'] / 1e9, ',.0f')} / "
                f"{one['peak_mib']:,.0f}"
                if (one := found.get(name))
                else "-"
                for name in ("transformers", "liger-kernel", "lightning-liger")
            ]
            title = f"`{model}`" + ("" if routing is None else f", Dirichlet {routing:g}")
            table.append((title, f"{num_tokens:,}", *cells))
    return _table(("layer", "tokens", "transformers", "liger-kernel", "lightning-liger"), table)


def estimates() -> str:
    """Measured peaks of memory and their estimates."""
    table = [
        (each.title, each.arm, each.setup, f"{each.measured:.2f}", f"{each.estimated:.2f}", f"{each.error:+.1%}")
        for each in compare(RESULTS)
    ]
    return _table(("model", "arm", "setup", "measured GiB", "estimated GiB", "error"), table)


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
    return _table(("tokens, hidden size, vocabulary", "three matrix products", *contenders.values()), rows)


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


def optimizer() -> str:
    """Time of AdamW's step."""
    (name,) = MEASURED["optimizer"]
    return _table(OPTIMIZER_HEADER, [optimizer_cells(Step(**line)) for line in read_results(RESULTS / name).lines])


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


def packing() -> str:
    """Padding, and the tokens of the busiest rank, of batches of long-tailed random lengths."""
    num_ranks, max_length = 8, 2048
    lengths = np.random.default_rng(0).lognormal(5.5, 1, 20_000).astype(int).clip(2, max_length)
    examples: dict[str, Any] = {"batch_size": 8, "costs": lengths}
    arms: dict[str, tuple[dict[str, Any], bool]] = {
        "padded, `balance_ranks: null`": (examples | {"costs": None}, True),
        "padded, `train_sampling_strategy: group_by_length`": (examples | {"group_by_length": True}, True),
        "`padding_free`, `balance_ranks: null`": (examples | {"costs": None}, False),
        "`padding_free`": (examples, False),
        "`packing`": (examples | {"batch_size": 2, "capacity": max_length}, False),
    }
    table = []
    for name, (options, is_padded) in arms.items():
        samplers = [LengthSampler(lengths, **options, num_replicas=num_ranks, rank=rank) for rank in range(num_ranks)]
        batches = [[np.atleast_1d(row) for row in sampler] for sampler in samplers]
        tokens = np.array([[lengths[row].sum() for row in each] for each in batches])
        tokens = tokens.reshape(num_ranks, -1, options["batch_size"])  # of each row
        held = tokens.max(-1) * tokens.shape[-1] if is_padded else tokens.sum(-1)
        room = tokens.size * max_length if "capacity" in options else held.sum()
        excess = held.max(0) / held.mean(0) - 1
        cells = (1 - tokens.sum() / room, np.median(excess), np.quantile(excess, 0.99))
        table.append((name, *(f"{cell:.1%}" for cell in cells)))
    return _table(("", "padding, or empty in rows", "busiest rank: median step", "99% of steps"), table)


SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "README.md: training": ("README.md", training),
    "docs/index.md: training": ("docs/index.md", training),
    **{
        f"docs/benchmarks.md: {section.__name__}": ("docs/benchmarks.md", section)
        for section in (training, budgets, scaling, batches, models, experts, loss, ops, optimizer, claims)
    },
    **{
        f"docs/benchmarks.md: {section.__name__}": ("docs/benchmarks.md", section)
        for section in (context, context_limit, context_parallel, activations, convergence, convergence_text)
    },
    **{f"docs/benchmarks.md: {section.__name__}": ("docs/benchmarks.md", section) for section in (losses, medusa)},
    "docs/inspect.md: estimates": ("docs/inspect.md", estimates),
    "docs/data.md: packing": ("docs/data.md", packing),
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
