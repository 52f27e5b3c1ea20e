"""Padding, ignored labels, lengths and pairs of attention in batches of every form."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_liger.data.collate import FeedbackCollator, Layout, PreferenceCollator, RolloutCollator
from lightning_liger.monitor.batches import LENGTH_EDGES, NUM_SUMS, BatchCounter, contents_of

WINDOWS = (None, 3)
IDS, LONGER = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64)
LABELS = torch.tensor([[-100, -100, 1, 1, 1, 1], [1, 1, 1, -100, -100, -100]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
BATCH = {"input_ids": IDS, "labels": LABELS, "attention_mask": MASK}
BOTH = ((3, 21), 4, (12, 5), [72 + 81, 36 + 27], {2: 1, 6: 1, 9: 1})
PROMPTS = {"prompt_ids": IDS, "prompt_mask": MASK.flip(1), "completion_ids": IDS[:, :2]}
PROMPTS["completion_mask"] = torch.tensor([[1, 0], [1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
KEPT = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]])
LEFT = torch.tensor([[0, 0, 1, 1]])
TWO = torch.zeros(2, 8, dtype=torch.int64)


def _counts(*batches):
    """Rows and tokens; padding; labels and those that are ignored; pairs; lengths."""
    counter = BatchCounter(torch.device("cpu"), WINDOWS)
    for batch in batches:
        counter.add(*contents_of(batch))
    rows, tokens, padding, labels, ignored, *rest = counter.take().tolist()
    lengths = {LENGTH_EDGES[index]: count for index, count in enumerate(rest[len(WINDOWS) :]) if count}
    return (rows, tokens), padding, (labels, ignored), rest[: len(WINDOWS)], lengths


def _edge(length):
    return next(edge for edge in LENGTH_EDGES if edge >= length)


@pytest.mark.parametrize(
    ("batch", "size", "padding", "labels", "pairs", "lengths"),
    [
        ({"input_ids": IDS}, (2, 12), 0, (0, 0), [72, 36], {6: 2}),
        (BATCH, (2, 12), 4, (12, 5), [72, 36], {2: 1, 6: 1}),
        ({"input_ids": IDS, "attention_mask": MASK.bool()}, (2, 12), 4, (0, 0), [72, 36], {2: 1, 6: 1}),
        ({"input_ids": IDS, "completion_mask": MASK}, (2, 12), 0, (12, 4), [72, 36], {6: 2}),
        ({"inputs_embeds": torch.zeros(2, 6, 3), "shift_labels": LABELS}, (2, 12), 0, (12, 5), [72, 36], {6: 2}),
        ({"input_ids": IDS[0], "attention_mask": MASK[1]}, (1, 6), 4, (0, 0), [36, 18], {2: 1}),
        ({"input_ids": IDS[None], "attention_mask": MASK[None]}, (1, 12), 4, (0, 0), [72, 36], {2: 1, 6: 1}),
        ((torch.zeros(5, 2), torch.zeros(5)), (5, 0), 0, (0, 0), [0, 0], {}),
        ({"a": torch.zeros(3, 2), "b": 1}, (3, 0), 0, (0, 0), [0, 0], {}),
        ("text", (0, 0), 0, (0, 0), [0, 0], {}),
        ({"input_ids": IDS[:, :0], "labels": LABELS[:, :0]}, (2, 0), 0, (0, 0), [0, 0], {}),
        # Packed rows: a token alone counts as padding; with a mask, attention sees whole rows.
        ({"input_ids": TWO, "position_ids": POSITIONS}, (2, 16), 3, (0, 0), [77, 37], {2: 1, 3: 1, 8: 1}),
        (
            {"input_ids": TWO, "position_ids": POSITIONS, "attention_mask": KEPT},
            *((2, 16), 3, (0, 0), [128, 48], {1: 1, 2: 1, 3: 1, 8: 1}),
        ),
        # Padded on the left, as transformers numbers such rows.
        (
            {"input_ids": IDS[:1, :4], "position_ids": torch.tensor([[1, 1, 0, 1]]), "attention_mask": LEFT},
            *((1, 4), 2, (0, 0), [16, 12], {2: 1}),
        ),
        # Parts of nested and prefixed batches add up; what a teacher reads is none.
        ({"a": [BATCH, None], "b": ({"input_ids": LONGER}, 3, 1)}, *BOTH),
        ([BATCH, {"input_ids": LONGER}], *BOTH),
        ((BATCH, torch.zeros(2)), (2, 12), 4, (12, 5), [72, 36], {2: 1, 6: 1}),
        (
            {f"{key}_{name}": BATCH[name] for key in ("chosen", "rejected") for name in BATCH},
            *((4, 24), 8, (24, 10), [144, 72], {2: 2, 6: 2}),
        ),
        (
            {"input_ids": LONGER, "completion_mask": LONGER + 1, "KL_input_ids": IDS, "KL_attention_mask": MASK,
             "KL_completion_mask": IDS, "label": torch.ones(3)},
            *((3, 21), 4, (21, 12), *BOTH[3:]),
        ),
        (PROMPTS, (2, 16), 5, (16, 13), [128, 48], {4: 1, 8: 1}),
        ({name: PROMPTS[name] for name in ("prompt_ids", "completion_ids")}, (2, 16), 0, (0, 0), [128, 48], {8: 2}),
        ({"input_ids": LONGER, "teacher_input_ids": IDS, "teacher_labels": IDS}, (1, 9), 0, (0, 0), [81, 27], {9: 1}),
    ],
)  # fmt: skip
def test_batches_of_every_form_are_counted(batch, size, padding, labels, pairs, lengths):
    by_class: dict[int, int] = {}
    for length, count in lengths.items():
        by_class[_edge(length)] = by_class.get(_edge(length), 0) + count
    assert _counts(batch) == (size, padding, labels, pairs, by_class)
    twice = _counts(batch, batch)
    assert twice[:2] == ((2 * size[0], 2 * size[1]), 2 * padding)
    assert twice[3:] == ([2 * each for each in pairs], {edge: 2 * count for edge, count in by_class.items()})


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_packed_rows_are_counted_by_documents(rows, has_mask):
    width = max(map(sum, rows)) + 3
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        joined = torch.cat([torch.arange(length) for length in row])
        positions[index, : len(joined)], mask[index, : len(joined)] = joined, 1
    batch = {"input_ids": torch.zeros_like(mask), "position_ids": positions}
    documents = [length for row in rows for length in row]
    (_, tokens), padding, _, pairs, lengths = _counts({**batch, "attention_mask": mask} if has_mask else batch)
    assert (tokens, padding) == (mask.numel(), mask.numel() - sum(documents))
    expected = [width] * len(rows) if has_mask else documents
    assert pairs == [sum(length * min(length, window or length) for length in expected) for window in WINDOWS]
    assert sum(lengths.values()) == len(documents)
    assert {edge: sum(_edge(length) == edge for length in documents) for edge in lengths} == lengths


def test_batches_are_counted_only_once_and_not_kept_for_long(monkeypatch):
    batch = {"input_ids": IDS, "labels": torch.full((2, 6), -100)}
    counter = BatchCounter(torch.device("cpu"), [None])
    monkeypatch.setattr("lightning_liger.monitor.batches._MAX_PENDING", 20)  # counted after each second batch
    for _ in range(5):
        counter.add(*contents_of(batch))
        assert len(counter._pending) < 2
    counted = counter.take()
    assert (counted[4], counted[NUM_SUMS]) == (60, 5 * 72)
    assert not counter.take().any()
    assert LENGTH_EDGES[:9] == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert _counts({"input_ids": torch.zeros(1, 2**25, dtype=torch.int8)})[-1] == {LENGTH_EDGES[-1]: 1}


@pytest.mark.parametrize("packing", [False, True])
def test_batches_of_the_data_modules_are_counted(packing):
    examples = [
        {"prompt_ids": np.arange(3), "completion_ids": np.arange(length), "KL_completion_ids": np.arange(6 - length),
         "label": True} for length in (2, 4)
    ]  # fmt: skip
    pairs = [{"prompt_ids": np.arange(3), "chosen_ids": np.arange(2), "rejected_ids": np.arange(4)}]
    groups = [{"prompt_ids": np.arange(3), "completion_ids": np.arange(6), "completion_lengths": np.array([2, 4]),
               "advantages": np.zeros(2)}]  # fmt: skip
    for collator, rows, factor in (
        (PreferenceCollator, pairs, 1),
        (FeedbackCollator, examples, 2),
        (RolloutCollator, groups, 1),
    ):
        batch = collator(Layout(packing=packing, pad_to_multiple_of=4))(rows)
        (_, tokens), padding, labels, _, lengths = _counts(batch)
        # Sequences of 3 + 2 and 3 + 4 tokens, in two rows or one, and for KTO also with completions exchanged.
        padded = 4 + 4 if collator is RolloutCollator else 8
        assert tokens == factor * (12 if packing else 2 * padded), collator
        assert (padding, labels) == (tokens - factor * 12, (tokens, tokens - factor * 6)), collator
        assert lengths == {6: factor, 8: factor}, collator
