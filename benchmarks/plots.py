"""Figures of records: of ops in the form of figures 2 to 7 of arXiv:2410.10989, and of the loss."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.cases import Op
from benchmarks.loss import LOSS
from benchmarks.ops import OPS
from benchmarks.records import Record

# From Okabe and Ito's palette, which is safe for color blindness; a contender has the same color in every figure.
_STYLES = {
    "ours": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 4},
    "ours, in place": {"color": "#56B4E9", "marker": "d"},
    "ours, small budget": {"color": "#56B4E9", "marker": "D"},
    "eager": {"color": "#000000", "marker": "s"},
    "compile": {"color": "#E69F00", "marker": "^"},
    "torch": {"color": "#009E73", "marker": "v"},
    "liger": {"color": "#D55E00", "marker": "X"},
}
_BOUND = {"color": "#777777", "linestyle": ":", "linewidth": 1.4, "zorder": 1}
_NAMES = {
    "eager": "Hugging Face / eager",
    "compile": "torch.compile",
    "torch": "PyTorch's fused op",
    "liger": "liger-kernel",
}
_OVERVIEW = ("cross_entropy", "rms_norm", "layer_norm", "rope", "silu_mul", "gelu_mul")
_RESOLUTION = 150


def draw(environment: dict[str, Any], records: Sequence[Record], stem: str) -> list[Path]:
    """Writes one figure for each op with a sweep, an overview of the ops in the paper, and one of the loss.

    Args:
        environment: Device and versions, for the titles.
        records: The measurements to draw.
        stem: Start of the paths, ``<stem>_<op>.png``.

    Returns:
        The files written.
    """
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figures = _figures(environment, records)
        paths = [Path(f"{stem}_{name}.png") for name in figures]
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.savefig(path, dpi=_RESOLUTION)
    return paths


def _figures(environment: dict[str, Any], records: Sequence[Record]) -> dict[str, Figure]:
    where = f"{environment['device']}, torch {environment['torch']}, bfloat16"
    swept = {
        name: mine
        for name in OPS
        if (mine := [record for record in records if record.op == name and record.suite == "sweep"])
    }
    figures = {name: _op_figure(OPS[name], mine, where) for name, mine in swept.items()}
    if overview := [name for name in _OVERVIEW if name in swept]:
        figures["overview"] = _overview(overview, swept, where)
    if losses := [record for record in records if record.op == LOSS.name and record.peak_mib is not None]:
        figures[LOSS.name] = _loss_figure(losses, where)
    return figures


def _style(contender: str) -> dict[str, Any]:
    return {"markersize": 5, "linewidth": 1.4, **_STYLES[contender], "label": _name(contender)}


def _name(contender: str) -> str:
    return _NAMES.get(contender, contender)


def _contenders(records: Iterable[Record]) -> list[str]:
    present = {record.contender for record in records}
    return [name for name in _STYLES if name in present]


def _panel(axes: Axes, records: Sequence[Record], direction: str, quantity: str, op: Op) -> None:
    """Draws one line per contender, and in a panel of times one for the floor."""
    for contender in _contenders(records):
        points = sorted(
            (record for record in records if record.contender == contender and record.pass_ == direction),
            key=lambda record: record.size,
        )
        values = [(record.size, getattr(record, quantity)) for record in points]
        if values and all(value is not None for _, value in values):
            axes.plot(*zip(*values, strict=True), **_style(contender))
    floors = sorted(
        {(record.size, record.floor_ms) for record in records if record.pass_ == direction and record.floor_ms}
    )
    if floors and quantity == "time_ms":
        axes.plot(*zip(*floors, strict=True), **_BOUND, label="least memory traffic at the copy's rate")
    sizes = sorted({record.size for record in records})
    axes.set_xticks(sizes, [f"{size / 1024:g}k" for size in sizes])
    axes.set_xlabel(op.sweep.axis)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)


def _time_label(records: Sequence[Record]) -> str:
    return "wall time, ms" if records[0].gpu_ms is None else "GPU time, ms"


def _finish(figure: Figure, title: str) -> Figure:
    """Adds a title, and one legend for all panels."""
    figure.suptitle(title, fontsize=10)
    handles = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = [*map(_name, _STYLES), *handles]  # contenders first
    labels = sorted(handles, key=order.index)
    figure.legend(
        [handles[label] for label in labels], labels, loc="outside lower center", ncols=len(labels), frameon=False
    )
    return figure


def _op_figure(op: Op, records: Sequence[Record], where: str) -> Figure:
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, 4)
    for axes, direction in zip(panels, ("forward", "backward", "both"), strict=False):
        _panel(axes, records, direction, "time_ms", op)
        axes.set_title("forward and backward" if direction == "both" else direction)
        axes.set_ylabel(_time_label(records))
    _panel(panels[3], records, "both", "total_gib", op)
    panels[3].set_title("memory")
    panels[3].set_ylabel("peak memory with inputs, GiB")
    return _finish(figure, f"{op.title}, {op.sweep.fixed}; {where}")


def _overview(names: Sequence[str], swept: dict[str, list[Record]], where: str) -> Figure:
    """A figure with two ops per row, each with its time and its memory."""
    num_rows = (len(names) + 1) // 2
    figure = Figure(figsize=(13, 3.1 * num_rows + 0.6), layout="constrained")
    panels = figure.subplots(num_rows, 4, squeeze=False).reshape(-1, 2)
    for (time, memory), name in zip(panels, names, strict=False):
        _panel(time, swept[name], "both", "time_ms", OPS[name])
        _panel(memory, swept[name], "both", "total_gib", OPS[name])
        time.set_ylabel(_time_label(swept[name]))
        memory.set_ylabel("peak memory, GiB")
        time.set_title(f"{OPS[name].title}: time")
        memory.set_title(f"{OPS[name].title}: memory")
    for axes in panels.reshape(-1)[2 * len(names) :]:
        axes.remove()
    return _finish(figure, f"Forward and backward, memory with inputs; {where}")


def _loss_figure(records: Sequence[Record], where: str) -> Figure:
    """A figure of time against memory, in which down and to the left is better."""
    shapes = list(dict.fromkeys(record.shape for record in records))
    figure = Figure(figsize=(3.2 * len(shapes), 3.6), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        for record in records:
            if record.shape != shape:
                continue
            if record.contender == "products":
                axes.axhline(record.wall_ms, **_BOUND, label="the three matrix products alone")
            else:
                axes.plot([record.peak_mib / 1024], [record.wall_ms], linestyle="", **_style(record.contender))
        axes.set_title(shape, fontsize=8)
        axes.set_xlabel("peak memory, GiB")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(bottom=0)
        axes.grid(linewidth=0.4, alpha=0.6)
    figure.axes[0].set_ylabel("wall time, ms")
    return _finish(figure, f"{LOSS.title}, forward and backward, gradients included; {where}")
