"""The page at the end."""

import math
from xml.etree import ElementTree

from lightning_liger.monitor.batches import LENGTH_EDGES
from lightning_liger.monitor.page import _ticks, page, short


def _parse(text):
    return ElementTree.fromstring(text.partition("<html")[2].join(("<html", "")).replace("<meta ", "<br ").replace(
        'charset="utf-8">', 'charset="utf-8"/>').replace('initial-scale=1">', 'initial-scale=1"/>'))  # fmt: skip


def test_page_has_a_table_and_plots_and_needs_nothing_else():
    lengths = [0.0] * len(LENGTH_EDGES)
    lengths[4], lengths[6] = 3, 7
    points = [
        {"step": step, "loss": 3.0 - step, "tokens_per_second": 1e5, "gradient_norm": math.nan} for step in (1, 2)
    ]
    text = page("A <model>", {"Tokens/s": "1 & more"}, points, lengths)
    tree = _parse(text)
    headings = [heading.text for heading in tree.iter("h2")]
    assert headings == ["Loss", "Tokens per second", "Lengths of sequences (tokens)"]
    assert [cell.text for cell in tree.iter("td")] == ["Tokens/s", "1 & more"]
    bars = [rect.find("title").text.replace("\N{EN DASH}", "-") for rect in tree.iter("rect")]
    assert bars == ["5-6: 3", "7-8: 0", "9-12: 7"]
    assert "prefers-color-scheme: dark" in text
    assert not any(word in text for word in ("http:", "https:", "<script", "<link", "src="))
    assert len(list(tree.iter("polyline"))) == 2
    assert "loss" not in page("empty", {}, []).lower()
    _parse(page("one point", {}, points[:1]))


def test_ticks_are_round_and_cover_the_values():
    for low, high, expected in (
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (2.4, 10.5, [2, 4, 6, 8, 10, 12]),
        (99.0, 101.0, [99, 99.5, 100, 100.5, 101]),
        (5.0, 5.0, [5, 6]),
        (0.0, 0.0, [0, 0.2]),
        (-1e-3, 1e-3, [-0.001, -0.0005, 0, 0.0005, 0.001]),
    ):
        ticks = _ticks(low, high)
        assert ticks == expected or all(abs(a - b) < 1e-12 for a, b in zip(ticks, expected, strict=True)), (low, high)
    for value, text in ((0.5, "0.5"), (1500, "1500"), (15000, "15k"), (2.5e6, "2.5M"), (3e9, "3G")):
        assert short(value) == text
