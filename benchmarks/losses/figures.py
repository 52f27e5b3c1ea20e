"""The figure of losses: time against memory, a panel for each problem."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.losses.command import read_lines, title_of
from benchmarks.losses.measure import OK
from benchmarks.losses.problems import IN_LOOP, WITHIN_BUDGET

# Okabe and Ito's colors, as in plots.py.
_STYLES = {
    "ours": {"color": "#0072B2", "marker": "o"},
    IN_LOOP: {"color": "#56B4E9", "marker": "D"},
    WITHIN_BUDGET: {"color": "#CC79A7", "marker": "P"},
    "eager": {"color": "#000000", "marker": "s"},
    "compile": {"color": "#E69F00", "marker": "^"},
    "trl": {"color": "#009E73", "marker": "v"},
    "liger": {"color": "#D55E00", "marker": "X"},
}
_COLUMNS = 6


def draw_losses(lines: Sequence[dict[str, Any]], where: str) -> dict[str, Figure]:
    """One panel for each problem, in which down and to the left is better; those without memory are left out."""
    found = [one for one in read_lines(lines) if one.status == OK and one.peak_mib and one.wall_ms]
    problems = list(dict.fromkeys(one.problem for one in found))
    if not problems:
        return {}
    num_rows = -(-len(problems) // _COLUMNS)
    figure = Figure(figsize=(16, 2.7 * num_rows + 0.8), layout="constrained")
    panels = figure.subplots(num_rows, _COLUMNS, squeeze=False).reshape(-1)
    handles: dict[str, Any] = {}
    for axes, problem in zip(panels, problems, strict=False):
        mine = [one for one in found if one.problem == problem]
        for one in mine:
            style = {"markersize": 6, "linestyle": "", **_STYLES[one.contender]}
            (handles[one.contender],) = axes.plot([one.peak_mib / 1024], [one.wall_ms], **style)
        axes.set_title(f"{mine[0].title}\n{mine[0].sizes}", fontsize=7)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(0, 1.1 * max(one.wall_ms for one in mine))
        axes.set_xlabel("peak GiB", fontsize=7)
        axes.grid(linewidth=0.4, alpha=0.6)
    for axes in panels[len(problems) :]:
        axes.remove()
    figure.supylabel("wall time, ms", fontsize=9)
    figure.suptitle(
        f"Losses over an LM head, forward and backward, peak memory beyond the inputs; {where}", fontsize=10
    )
    order = [name for name in _STYLES if name in handles]
    figure.legend(
        [handles[name] for name in order],
        [title_of(name) for name in order],
        loc="outside lower center",
        ncols=len(order),
        frameon=False,
    )
    return {"losses": figure}
