"""The page at the end of a training run: one HTML file with a table and plots, which needs nothing else.

Plots are SVG whose colors are those of the page, so that they follow a light or dark theme.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from rich.table import Column, Table

from lightning_liger.monitor.batches import LENGTH_EDGES

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 708, 12, 184  # of the plot in a drawing of 720 x 220
_STYLE = """:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --faint: #d0d0d0; --mark: #1f4e9c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --faint: #3c4046; --mark: #8ab4f8; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 760px;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; margin: 1.6em 0 0.3em; }
table { border-collapse: collapse; width: 100%; } td { padding: 0.25em 0.8em 0.25em 0; vertical-align: top;
  border-bottom: 1px solid var(--faint); overflow-wrap: anywhere; } td:first-child { white-space: nowrap; }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 560px; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--faint); } .line { stroke: var(--mark); stroke-width: 2; fill: none; }
.bar { fill: var(--mark); }"""
_PLOTS = (
    ("loss", "Loss", 1, False),
    ("tokens_per_second", "Tokens per second", 1, True),
    ("rows_per_second", "Rows per second", 1, True),
    ("model_flops_utilization", "Model FLOPs utilization (%)", 100, True),
    ("gradient_norm", "Gradient norm", 1, False),
    ("expert_imbalance", "Tokens of the busiest expert, times the mean", 1, False),
)
"""Name, heading, factor, and whether the axis starts at 0."""


def table(title: str, rows: Mapping[str, str]) -> Table:
    """A table of two columns for the terminal."""
    columns = Column(no_wrap=True), Column(overflow="fold")  # a path stays whole
    found = Table(*columns, title=title, title_justify="left", title_style="bold", show_header=False)
    for name, value in rows.items():
        found.add_row(name, value)
    return found


def page(
    title: str, rows: Mapping[str, str], points: Sequence[Mapping[str, float]], lengths: Sequence[float] = ()
) -> str:
    """The page as HTML: the rows of the table, numbers by name at some steps, lengths by ``LENGTH_EDGES``."""
    cells = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
    parts = [f"<h1>{escape(title)}</h1>", f"<table>\n{cells}\n</table>"]
    for name, heading, factor, from_zero in _PLOTS:
        line = [(point["step"], point[name] * factor) for point in points if math.isfinite(point.get(name, math.nan))]
        if line:
            parts += [f"<h2>{escape(heading)}</h2>", _line_plot(heading, line, from_zero)]
    if any(lengths):
        parts += ["<h2>Sequence lengths (tokens)</h2>", _histogram(lengths)]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}\n</style>\n</head>\n<body>\n{chr(10).join(parts)}\n</body>\n</html>\n"
    )


def _line_plot(heading: str, points: Sequence[tuple[float, float]], from_zero: bool) -> str:
    steps, values = zip(*points, strict=True)
    ticks = _ticks(0.0 if from_zero else min(values), max(values))
    first, last = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0] - 1, steps[0] + 1)

    def place(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_RIGHT - _LEFT)

    places = [f"{place(step):.1f},{_y(value, ticks):.1f}" for step, value in points]
    line = " ".join(places * 2 if len(places) == 1 else places)  # or a dot
    names = [(place(tick), short(tick)) for tick in _ticks(steps[0], steps[-1]) if first <= tick <= last]
    body = f'<polyline class="line" stroke-linecap="round" points="{line}"/>{_text(386, 218, "step")}'
    description = f"{heading} from {short(values[0])} at step {steps[0]:g} to {short(values[-1])} at {steps[-1]:g}"
    return _drawing(description, ticks, names, body)


def _histogram(lengths: Sequence[float]) -> str:
    used = [index for index, count in enumerate(lengths) if count]
    shown, ticks = range(used[0], used[-1] + 1), _ticks(0, max(lengths))
    width = (_RIGHT - _LEFT) / len(shown)
    body, names = "", []
    for place, index in enumerate(shown):
        first, last = (LENGTH_EDGES[index - 1] + 1 if index else 1), LENGTH_EDGES[index]
        name = f"{last}" if first == last else f"{first}\N{EN DASH}{last}"
        left, top = _LEFT + place * width, _y(lengths[index], ticks)
        body += f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{max(1.0, width - 2):.1f}"'
        body += f' height="{_BOTTOM - top:.1f}"><title>{name}: {short(lengths[index])}</title></rect>'
        if place % math.ceil(len(shown) / 12) == 0:  # names that fit next to each other
            names.append((left + width / 2, f"\N{LESS-THAN OR EQUAL TO}{short(last)}"))
    return _drawing("Histogram of sequence lengths", ticks, names, body)


def _drawing(description: str, ticks: Sequence[float], names: Sequence[tuple[float, str]], body: str) -> str:
    grid = "".join(_text(x, _BOTTOM + 16, name) for x, name in names)
    for tick in ticks:
        y = _y(tick, ticks)
        grid += f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}"/>'
        grid += _text(_LEFT - 6, y + 4, short(tick), "end")
    drawing = f'<svg viewBox="0 0 720 220" role="img" aria-label="{escape(description)}">{grid}{body}</svg>'
    return f"<figure>{drawing}</figure>"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _y(value: float, ticks: Sequence[float]) -> float:
    return _BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (_BOTTOM - _TOP)


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers, from one that is at most ``low`` to one that is at least ``high``."""
    spread = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(spread / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if spread / (step * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """A number in four digits, with k, M or G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and unit != "k"):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
