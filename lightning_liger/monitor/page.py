"""The page at the end of a training: one HTML file with a table and plots, which needs nothing else.

Plots are SVG whose colours are those of the page, so that they follow a light or dark theme; lines differ in their
place, not in colour.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from rich.table import Table

from lightning_liger.monitor.batches import LENGTH_EDGES

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 220, 64, 12, 12, 36
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --faint: #d0d0d0; --mark: #1f4e9c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --faint: #3c4046; --mark: #8ab4f8; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 760px;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; margin: 1.6em 0 0.3em; }
table { border-collapse: collapse; width: 100%; } td { padding: 0.25em 0.8em 0.25em 0; vertical-align: top;
  border-bottom: 1px solid var(--faint); overflow-wrap: anywhere; } td:first-child { white-space: nowrap; }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 560px; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--faint); } .line { stroke: var(--mark); stroke-width: 2; fill: none; } .bar { fill: var(--mark); }
""".strip()
_PLOTS = (
    ("loss", "Loss", 1, False),
    ("tokens_per_second", "Tokens per second", 1, True),
    ("rows_per_second", "Rows per second", 1, True),
    ("model_flops_utilization", "Model FLOPs utilisation (%)", 100, True),
    ("gradient_norm", "Gradient norm", 1, False),
)
"""Name, heading, factor, and whether the axis starts at 0."""


def table(title: str, rows: Mapping[str, str]) -> Table:
    """A table of two columns for the terminal."""
    found = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    found.add_column(no_wrap=True)
    found.add_column(overflow="fold")  # a path stays whole
    for name, value in rows.items():
        found.add_row(name, value)
    return found


def page(
    title: str, rows: Mapping[str, str], points: Sequence[Mapping[str, float]], lengths: Sequence[float] = ()
) -> str:
    """The page as HTML.

    Args:
        title: Its heading.
        rows: Of the table: what each number is, and the number with its unit.
        points: What was logged at some steps: ``step``, ``loss`` and further numbers by name.
        lengths: How many sequences have a length in each class of ``LENGTH_EDGES``.
    """
    cells = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
    parts = [f"<h1>{escape(title)}</h1>", f"<table>\n{cells}\n</table>"]
    for name, heading, factor, from_zero in _PLOTS:
        line = [(point["step"], point[name] * factor) for point in points if math.isfinite(point.get(name, math.nan))]
        if line:
            parts += [f"<h2>{escape(heading)}</h2>", _line_plot(heading, line, from_zero)]
    if any(lengths):
        parts += ["<h2>Lengths of sequences (tokens)</h2>", _histogram(lengths)]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}\n</style>\n</head>\n<body>\n{chr(10).join(parts)}\n</body>\n</html>\n"
    )


def _line_plot(heading: str, points: Sequence[tuple[float, float]], from_zero: bool) -> str:
    steps, values = zip(*points, strict=True)
    x_ticks, y_ticks = _ticks(min(steps), max(steps)), _ticks(0.0 if from_zero else min(values), max(values))
    x_range, y_range = (min(steps), max(steps)), (y_ticks[0], y_ticks[-1])
    if len(points) == 1:  # a dot
        points = [points[0], points[0]]
    line = " ".join(f"{_x(x, x_range):.1f},{_y(y, y_range):.1f}" for x, y in points)
    marks = "".join(_x_tick(_x(tick, x_range), _number(tick)) for tick in x_ticks if x_range[0] <= tick <= x_range[1])
    body = f'{_grid(y_ticks, y_range)}{marks}<polyline class="line" stroke-linecap="round" points="{line}"/>'
    description = f"{heading} from {_number(values[0])} at step {steps[0]:g} to {_number(values[-1])} at {steps[-1]:g}"
    return _svg(description, body + _text(_WIDTH / 2, _HEIGHT - 2, "step"))


def _histogram(lengths: Sequence[float]) -> str:
    used = [index for index, count in enumerate(lengths) if count]
    shown = range(used[0], used[-1] + 1)
    y_ticks = _ticks(0, max(lengths))
    y_range = (0.0, y_ticks[-1])
    width = (_WIDTH - _LEFT - _RIGHT) / len(shown)
    every = math.ceil(len(shown) / 12)  # names that fit next to each other
    body = _grid(y_ticks, y_range)
    for place, index in enumerate(shown):
        first, last = (LENGTH_EDGES[index - 1] + 1 if index else 1), LENGTH_EDGES[index]
        name = f"{last}" if first == last else f"{first}\N{EN DASH}{last}"
        top = _y(lengths[index], y_range)
        left = _LEFT + place * width
        body += (
            f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{max(1.0, width - 2):.1f}"'
            f' height="{_HEIGHT - _BOTTOM - top:.1f}"><title>{name}: {_number(lengths[index])}</title></rect>'
        )
        if place % every == 0:
            body += _x_tick(left + width / 2, f"\N{LESS-THAN OR EQUAL TO}{_number(last)}")
    return _svg("Histogram of the lengths of sequences", body)


def _svg(description: str, body: str) -> str:
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(description)}">{body}</svg>'
    return f"<figure>{drawing}</figure>"


def _grid(ticks: Sequence[float], y_range: tuple[float, float]) -> str:
    found = ""
    for tick in ticks:
        y = _y(tick, y_range)
        found += f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        found += _text(_LEFT - 6, y + 4, _number(tick), "end")
    return found


def _x_tick(x: float, name: str) -> str:
    return _text(x, _HEIGHT - _BOTTOM + 16, name)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(value: float, x_range: tuple[float, float]) -> float:
    low, high = x_range
    share = (value - low) / (high - low) if high > low else 0.5
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, y_range: tuple[float, float]) -> float:
    low, high = y_range
    return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers, from one that is at most ``low`` to one that is at least ``high``."""
    spread = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(spread / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if spread / (step * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and unit != "k"):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
