"""Figures of commands that are a module: speed and memory of whole models, activations, curves of losses, ops."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.losses.figures import draw_losses
from benchmarks.records import Results
from benchmarks.training import activations, context, convergence, medusa
from benchmarks.training.dims import DIMS
from benchmarks.training.job import Row
from benchmarks.training.train import name_of

_RESOLUTION = 150
# Okabe and Ito's colors, as in plots.py; ours in several blues, each with a marker and a hatch for grayscale.
_COLORS = {"hf": ("#000000", "#777777"), "liger_kernel": ("#D55E00", "#E69F00")}
_OURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#004466")
_MARKERS = {"hf": "s", "liger_kernel": "X"}
_HATCHES = {"hf": "", "liger_kernel": "///"}


def draw(results: Results, stem: str) -> list[Path]:
    """Writes the figures of a command's results, ``<stem>_<name>.png`` or ``<stem>.png`` if there is one.

    Raises:
        ValueError: For results of a command that has no figures.
    """
    if results.command not in _FIGURES:
        raise ValueError(f"results of {results.command!r} have no figures")
    try:
        with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
            where = f"{results.environment['device']}, torch {results.environment['torch']}"
            figures = _FIGURES[results.command](results.lines, where)
            paths = [Path(f"{stem}_{name}.png" if len(figures) > 1 else f"{stem}.png") for name in figures]
            for path, figure in zip(paths, figures.values(), strict=True):
                figure.savefig(path, dpi=_RESOLUTION)
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are no results of {results.command!r}: {error!r}") from error
    return paths


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Color, marker and hatch of each arm."""
    styles: dict[str, dict[str, Any]] = {}
    for row in rows:
        arm = row.parsed_arm
        if row.arm in styles:
            continue
        group = "ours" if arm.is_ours else arm.implementation
        same = sum(other.startswith(group) for other in styles)
        colors = _COLORS.get(group, _OURS)
        styles[row.arm] = {
            "color": colors[same % len(colors)],
            "marker": _MARKERS.get(arm.implementation, "oDv^P"[same % 5]),
            "hatch": _HATCHES.get(arm.implementation, "." * (same % 4)),
            "label": name_of(arm),
        }
    return styles


def _train(lines: Sequence[dict[str, Any]], where: str) -> dict[str, Figure]:
    rows = [Row.from_json(line) for line in lines]
    shapes = {(row.batch_size, row.sequence_length) for row in rows}
    if len(shapes) > 1:
        return {name: _sweep([row for row in rows if row.model == name], where) for name in _models(rows)}
    return {name: _bars([row for row in rows if row.model == name], where) for name in _models(rows)}


def _models(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.model for row in rows))


def _bars(rows: Sequence[Row], where: str) -> Figure:
    """A figure with one labeled bar for each number of GPUs and arm; those out of memory have words instead."""
    rows = sorted(rows, key=lambda row: row.devices)
    gpus = list(dict.fromkeys(row.devices for row in rows))
    styles = _styles(rows)
    labels = [
        styles[row.arm]["label"] + (f", {row.devices} GPU{'s'[: row.devices - 1]}" if len(gpus) > 1 else "")
        for row in rows
    ]
    figure = Figure(figsize=(10, 1.2 + 0.34 * len(labels)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    quantities = (
        ("tokens/s per GPU (more is better)", [row.tokens_per_second for row in rows], ",.0f"),
        ("peak GiB per GPU (less is better)", [row.peak_gib for row in rows], ".1f"),
    )
    for axes, (title, values, form) in zip(panels, quantities, strict=True):
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            style = {name: styles[row.arm][name] for name in ("color", "hatch")}
            if value is not None:
                axes.barh(place, value, height=0.68, edgecolor="black", linewidth=0.8, **style)
            words = row.status if value is None else f"{value:{form}}"
            axes.annotate(words, (value or 0, place), (4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.15 * max((value for value in values if value), default=1))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_title(title, fontsize=9)
    panels[0].invert_yaxis()  # shared: the first arm on top in both
    first = rows[0]
    shape = f"{first.batch_size} x {first.sequence_length} tokens per GPU"
    figure.suptitle(f"{_title(first)}, {shape}; {', '.join(map(str, gpus))} x {where}", fontsize=10)
    return figure


def _title(row: Row) -> str:
    dims = DIMS[row.model]
    return dims.title + (f", {row.layers} layers" if row.layers != dims.num_layers else "")


def _lines(axes: Axes, rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float | None]) -> None:
    """One line for each arm, and a cross where it ran out of memory."""
    for arm, style in _styles(rows).items():
        mine = [row for row in rows if row.arm == arm]
        points = sorted((x(row), value) for row in mine if (value := y(row)) is not None)
        look = {name: style[name] for name in ("color", "marker", "label")}
        axes.plot(*(zip(*points, strict=True) if points else ([], [])), markersize=5, linewidth=1.6, **look)
        for row in mine:
            if row.status == "out of memory":
                top = points[-1][1] if points else 0
                axes.plot([x(row)], [top], marker="x", markersize=9, markeredgewidth=2, color=style["color"])
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)


def _finish(figure: Figure, title: str) -> Figure:
    figure.suptitle(title, fontsize=10)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    return figure


def _sweep(rows: Sequence[Row], where: str) -> Figure:
    """Speed and memory against batch size, as in figures 8 to 12 of arXiv:2410.10989."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    quantities = (("tokens/s per GPU", "tokens_per_second"), ("peak GiB per GPU", "peak_gib"))
    for axes, (title, name) in zip(figure.subplots(1, 2), quantities, strict=True):
        _lines(axes, rows, lambda row: row.batch_size, lambda row, name=name: getattr(row, name))
        axes.set_xlabel(f"batch size per GPU, {rows[0].sequence_length} tokens each")
        axes.set_ylabel(title)
    gpus = ", ".join(map(str, dict.fromkeys(row.devices for row in rows)))
    return _finish(figure, f"{_title(rows[0])}; {gpus} x {where}; a cross: out of memory")


def _context(lines: Sequence[dict[str, Any]], where: str) -> dict[str, Figure]:
    rows, attention = context.read_lines(lines)
    figure = Figure(figsize=(12, 4), layout="constrained")
    speed, memory, share = figure.subplots(1, 3)
    _lines(speed, rows, lambda row: row.sequence_length / 1024, lambda row: row.tokens_per_second)
    _lines(memory, rows, lambda row: row.sequence_length / 1024, lambda row: row.peak_gib)
    _lines(share, rows, lambda row: row.sequence_length / 1024, lambda row: context.attention_share(row, attention))
    for axes, title in ((speed, "tokens/s per GPU"), (memory, "peak GiB per GPU"), (share, "attention's share")):
        axes.set_xlabel("length of the sequence, in 1024 tokens")
        axes.set_ylabel(title)
    share.set_ylim(0, 1)
    return {"context": _finish(figure, f"{_title(rows[0])}, batch {rows[0].batch_size}; {rows[0].devices} x {where}")}


def _medusa(lines: Sequence[dict[str, Any]], where: str) -> dict[str, Figure]:
    """Speed and memory against length, a column for each stage and number of heads."""
    groups = medusa.groups([Row.from_json(line) for line in lines])
    figure = Figure(figsize=(3.4 * len(groups), 6), layout="constrained")
    panels = figure.subplots(2, len(groups), squeeze=False)
    for (stage, heads), (speed, memory) in zip(groups, panels.T, strict=True):
        rows = groups[stage, heads]
        _lines(speed, rows, lambda row: row.sequence_length / 1024, lambda row: row.tokens_per_second)
        _lines(memory, rows, lambda row: row.sequence_length / 1024, lambda row: row.peak_gib)
        speed.set_title(f"stage {stage}, {heads} heads", fontsize=9)
        memory.set_xlabel("length of the sequence, in 1024 tokens")
    panels[0, 0].set_ylabel("tokens/s")
    panels[1, 0].set_ylabel("peak GiB")
    first = rows[0]
    return {"medusa": _finish(figure, f"Medusa over {_title(first)}, batch {first.batch_size}; {where}")}


def _activations(lines: Sequence[dict[str, Any]], where: str) -> dict[str, Figure]:
    found = activations.read_lines(lines)
    names = list(dict.fromkeys(result.model for result in found))
    colors = dict(zip(activations.CONTENDERS, ("#D9D9D9", "#E69F00", "#56B4E9", "#0072B2"), strict=True))
    figure = Figure(figsize=(max(9, 2 + 1.6 * len(names)), 4), layout="constrained")
    axes = figure.subplots()
    for offset, contender in enumerate(activations.CONTENDERS):
        by_model = {result.model: result.bytes_per_token or 0 for result in found if result.contender == contender}
        places = [place + (offset - 1.5) * 0.2 for place in range(len(names))]
        heights = [by_model.get(name, 0) / 1024 for name in names]
        label = activations.TITLES[contender]
        axes.bar(places, heights, 0.2, color=colors[contender], edgecolor="black", linewidth=0.6, label=label)
    axes.set_xticks(range(len(names)), [DIMS[name].title for name in names])
    axes.set_ylabel("KiB kept for each token and layer")
    return {"activations": _finish(figure, f"Kept between forward and backward, bfloat16; {where}")}


def _convergence(lines: Sequence[dict[str, Any]], where: str) -> dict[str, Figure]:
    groups, rows = convergence.read_lines(lines)
    figures = {}
    if groups:
        figures["tiny"] = _differences(groups, where)
    if rows := [row for row in rows if row.losses]:
        figures["text"] = _curves(rows, where)
    return figures


def _differences(groups: Sequence[Sequence[convergence.Curve]], where: str) -> Figure:
    """The distance of each run's losses from the stock run's, in a panel for each architecture and dtype."""
    columns = min(5, len(groups))
    num_rows = -(-len(groups) // columns)
    figure = Figure(figsize=(max(10, 3 * columns), 2.8 * num_rows + 0.9), layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False).reshape(-1)
    for axes, group in zip(panels, groups, strict=False):
        stock = group[0].losses
        for place, curve in enumerate(group[1:]):
            is_stock = curve.run in convergence.STOCK
            style = {"color": "#777777", "linewidth": 2.2} if is_stock else {"color": f"C{place}", "linewidth": 0.9}
            differences = [abs(one - other) or None for one, other in zip(curve.losses, stock, strict=True)]
            axes.plot(range(1, len(stock) + 1), differences, label=curve.run, **style)
        axes.set_yscale("log")
        axes.set_title(f"{group[0].architecture}, {group[0].dtype}", fontsize=9)
        axes.set_xlabel("step")
    for axes in panels[len(groups) :]:
        axes.remove()
    panels[0].set_ylabel("difference of the loss")
    return _finish(
        figure, f"Tiny models: differences of losses from those of a stock run, other stock runs in gray; {where}"
    )


def _curves(rows: Sequence[Row], where: str) -> Figure:
    """Losses on text over each other, and their differences from the first run."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, differences = figure.subplots(1, 2)
    colors = ("#000000", "#777777", *_OURS)
    for row, color in zip(rows, colors, strict=False):
        label = name_of(row.parsed_arm) + (", rows reversed" if row.permute_rows else "")
        steps = range(1, len(row.losses) + 1)
        losses.plot(steps, row.losses, color=color, label=label, linewidth=1.0)
        if row is not rows[0]:
            gaps = [one - other for one, other in zip(row.losses, rows[0].losses, strict=True)]
            differences.plot(steps, gaps, color=color, linewidth=1.0)
    losses.set_ylabel("loss")
    differences.set_ylabel(f"difference from {name_of(rows[0].parsed_arm)}")
    for axes in (losses, differences):
        axes.set_xlabel("step")
        axes.grid(linewidth=0.4, alpha=0.6)
    tokens = f"{rows[0].batch_size} x {rows[0].sequence_length} tokens per step"
    return _finish(figure, f"The dimensions of {_title(rows[0])}, Python's standard library, {tokens}; {where}")


_FIGURES: dict[str | None, Callable[[Sequence[dict[str, Any]], str], dict[str, Figure]]] = {
    "train": _train,
    "context": _context,
    "activations": _activations,
    "convergence": _convergence,
    "convergence_seeds": lambda lines, where: {},
    "host": lambda lines, where: {},
    "fp8": lambda lines, where: {},
    "experts": lambda lines, where: {},
    "packing": lambda lines, where: {},
    "losses": draw_losses,
    "medusa": _medusa,
    "examples": lambda lines, where: {},  # tables only
    "models": lambda lines, where: {},
    "optimizer": lambda lines, where: {},
}
