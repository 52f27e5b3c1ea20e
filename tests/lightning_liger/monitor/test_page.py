"""The page at the end."""

import math
import re
from xml.etree import ElementTree

from lightning_liger.monitor.batches import LENGTH_EDGES
from lightning_liger.monitor.page import page


def _parse(text):
    return ElementTree.fromstring(re.sub(r"(<meta [^>]*)>", r"\1/>", text.partition("\n")[2]))


def test_page_has_a_table_and_plots_and_needs_nothing_else():
    lengths = [0.0] * len(LENGTH_EDGES)
    lengths[4], lengths[6] = 3, 7
    point = {"step": 1, "loss": 3.0, "tokens_per_second": 1e5, "gradient_norm": math.nan}
    points = [point, {**point, "step": 2, "loss": 2.0}]
    text = page("A <model>", {"Tokens/s": "1 & more"}, points, lengths)
    tree = _parse(text)
    headings = [heading.text for heading in tree.iter("h2")]
    assert headings == ["Loss", "Tokens per second", "Sequence lengths (tokens)"]
    assert [cell.text for cell in tree.iter("td")] == ["Tokens/s", "1 & more"]
    bars = [rect.find("title").text.replace("\N{EN DASH}", "-") for rect in tree.iter("rect")]
    assert bars == ["5-6: 3", "7-8: 0", "9-12: 7"]
    assert "prefers-color-scheme: dark" in text
    assert not any(word in text for word in ("http:", "https:", "<script", "<link", "src="))
    assert len(list(tree.iter("polyline"))) == 2
    assert "loss" not in page("empty", {}, []).lower()
    _parse(page("one point", {}, points[:1]))


def test_labels_are_round_and_cover_the_values():
    for values, expected in (
        ((99.0, 101.0), ["99", "99.5", "100", "100.5", "101"]),
        ((5.0, 5.0), ["5", "6"]),
        ((15000.0, 2.5e6), ["0", "500k", "1M", "1.5M", "2M", "2.5M"]),
    ):
        points = [{"step": step, "loss": value} for step, value in enumerate(values)]
        texts = _parse(page("page", {}, points)).iter("text")
        assert [text.text for text in texts if text.get("text-anchor") == "end"] == expected
