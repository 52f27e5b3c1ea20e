"""Padding, ignored labels, lengths and pairs of attention in batches of every form."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_liger.monitor import batches
from lightning_liger.monitor.batches import LENGTH_EDGES, BatchCounter, contents_of

WINDOWS = (None, 3)
PREFIXES = ("", "chosen_", "rejected_", "KL_")
IDS = torch.zeros(2, 6, dtype=torch.int64)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
COUNTS = Counter[str]


def _counts(*given_batches) -> COUNTS:
    """Each number by its name, ``<= 6`` for the lengths of a class; without zeros."""
    counter = BatchCounter(torch.device("cpu"), WINDOWS)
    for batch in given_batches:
        counter.add(*contents_of(batch))
    names = ("rows", "tokens", "padding", "labels", "ignored", *map(str, WINDOWS), *(f"<= {n}" for n in LENGTH_EDGES))
    return +Counter(dict(zip(names, counter.take().tolist(), strict=True)))


def _class(length) -> str:
    return f"<= {next(edge for edge in LENGTH_EDGES if edge >= length)}"


@st.composite
def parts(draw, prefix) -> tuple[dict, COUNTS]:
    """Rows of tokens, each of documents and padding on one side, and what is in them."""
    rows = draw(st.lists(st.lists(st.integers(2, 20), min_size=1, max_size=3), min_size=1, max_size=3))
    kind, is_left = draw(st.sampled_from(["plain", "mask", "positions", "both"])), draw(st.booleans())
    if kind in ("plain", "mask"):
        rows = [[sum(row)] for row in rows]
    width = max(map(sum, rows)) + draw(st.integers(0, 3))
    mask, positions = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for row, documents in enumerate(rows):
        start = width - sum(documents) if is_left and kind != "positions" else 0
        mask[row, start : start + sum(documents)] = 1
        positions[row, start : start + sum(documents)] = torch.cat([torch.arange(length) for length in documents])
    batch = {"input_ids": torch.zeros_like(mask)}
    expected = Counter(rows=len(rows), tokens=mask.numel())
    lengths = [length for row in rows for length in row] if kind != "plain" else [width] * len(rows)
    if kind in ("mask", "both"):
        batch["attention_mask"] = mask.bool() if draw(st.booleans()) else mask
    if kind in ("positions", "both"):
        batch["position_ids"] = positions
    expected["padding"] = mask.numel() - sum(lengths)
    expected.update(map(_class, lengths))
    for window in WINDOWS:  # a mask lets attention see whole rows, also packed ones
        seen = lengths if kind == "positions" else [width] * len(rows)
        expected[str(window)] = sum(length * min(length, window or length) for length in seen)
    labels = draw(st.sampled_from(["", "labels", "shift_labels", "completion_mask"]))
    if labels:
        kept = torch.tensor(draw(st.lists(st.booleans(), min_size=mask.numel(), max_size=mask.numel())))
        batch[labels] = kept.long().view_as(mask) - (0 if labels == "completion_mask" else 100 * ~kept.view_as(mask))
        expected |= {"labels": kept.numel(), "ignored": int((~kept).sum())}
    return {f"{prefix}{name}": value for name, value in batch.items()}, expected


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_batches_are_counted_by_their_documents(data):
    prefixes = data.draw(st.lists(st.sampled_from(PREFIXES), min_size=1, max_size=3, unique=True))
    drawn = [data.draw(parts(prefix)) for prefix in prefixes]
    total = sum((expected for _, expected in drawn), Counter())
    flat = {name: value for batch, _ in drawn for name, value in batch.items()}
    assert _counts(flat) == total
    # Of nested batches; what a teacher reads, and what is no batch, is none.
    teacher = {f"teacher_{name}": value for name, value in flat.items() if name == "input_ids"}
    nested = {"a": [batch for batch, _ in drawn], "b": (None, 3, {**teacher, "label": torch.ones(3)})}
    assert _counts(nested) == total
    assert _counts(flat, flat) == total + total


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (
            {"inputs_embeds": torch.zeros(2, 6, 3), "shift_labels": IDS - 100},
            {"rows": 2, "tokens": 12, "labels": 12, "ignored": 12, "None": 72, "3": 36, "<= 6": 2},
        ),
        ({"input_ids": IDS[0], "attention_mask": MASK[1]}, {"rows": 1, "tokens": 6, "padding": 3, "<= 3": 1}),
        ((torch.zeros(5, 2), torch.zeros(5)), {"rows": 5, "tokens": 0}),
        ({"a": torch.zeros(3, 2), "b": 1}, {"rows": 3, "tokens": 0}),
        ("text", {"rows": 0}),
        ({"input_ids": IDS[:, :0], "labels": IDS[:, :0]}, {"rows": 2, "tokens": 0, "labels": 0}),
        ({"prompt_ids": IDS, "completion_ids": IDS[:, :2]}, {"rows": 2, "tokens": 16, "None": 128, "<= 8": 2}),
        (
            {"prompt_ids": IDS, "prompt_mask": MASK, "completion_ids": IDS, "completion_mask": MASK.tril()},
            {"rows": 2, "tokens": 24, "padding": 14, "labels": 24, "ignored": 23, "<= 3": 1, "<= 8": 1},
        ),
        ({"input_ids": torch.zeros(1, 2**25, dtype=torch.int8)}, {f"<= {LENGTH_EDGES[-1]}": 1}),
    ],
)
def test_batches_of_other_forms(batch, expected):
    found = _counts(batch)
    assert {name: found[name] for name in expected} == expected


def test_batches_are_not_kept_for_long(monkeypatch):
    counter = BatchCounter(torch.device("cpu"), [None])
    monkeypatch.setattr(batches, "_MAX_PENDING", 20)  # counted after each second batch
    for _ in range(5):
        counter.add(*contents_of({"input_ids": IDS, "labels": IDS - 100}))
        assert len(counter._pending) < 2
    assert counter.take()[:6].tolist() == [10, 60, 0, 60, 60, 5 * 72]
    assert not counter.take().any()
