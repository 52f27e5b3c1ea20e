"""Padding, ignored labels, lengths and pairs of attention in batches of every form."""

import torch

from lightning_liger.data.collate import Layout
from lightning_liger.monitor.batches import LENGTH_EDGES, BatchCounter, BatchTotals
from lightning_liger.monitor.tokens import contents_of, size_of


def _totals(*batches, windows=(None, 3)):
    counter = BatchCounter(torch.device("cpu"), windows)
    for batch in batches:
        counter.add(*contents_of(batch))
    return BatchTotals.from_list(_taken(counter).tolist(), len(windows))


def _taken(counter):
    known, counted = counter.take()
    return torch.tensor([*known, *counted.tolist()], dtype=torch.float64)


def _lengths(totals):
    return {LENGTH_EDGES[index]: count for index, count in enumerate(totals.lengths) if count}


def test_batches_of_every_form_are_counted():
    ids = torch.zeros(2, 6, dtype=torch.int64)
    labels = torch.tensor([[-100, -100, 1, 1, 1, 1], [1, 1, 1, -100, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    sequences = {
        "input_ids": [torch.arange(n).numpy() for n in (3, 2)],
        "labels": [torch.ones(n).numpy() for n in (3, 2)],
    }
    packed = Layout(packing=True, pad_to_multiple_of=8).batch(sequences, {"labels": -100})
    packed["labels"] = packed["labels"].long()
    for batch, size, padding, (num_labels, ignored), pairs, lengths in (
        ({"input_ids": ids}, (2, 12), 0, (0, 0), [72, 36], {6: 2}),
        ({"input_ids": ids, "labels": labels}, (2, 12), 0, (12, 5), [72, 36], {6: 2}),
        ({"input_ids": ids, "labels": labels, "attention_mask": mask}, (2, 12), 4, (12, 5), [72, 36], {2: 1, 6: 1}),
        ({"input_ids": ids, "attention_mask": mask.bool()}, (2, 12), 4, (0, 0), [72, 36], {2: 1, 6: 1}),
        ({"input_ids": ids, "completion_mask": mask}, (2, 12), 0, (12, 4), [72, 36], {6: 2}),
        ({"inputs_embeds": torch.zeros(2, 6, 3), "shift_labels": labels}, (2, 12), 0, (12, 5), [72, 36], {6: 2}),
        (packed, (1, 8), 3, (8, 3), [9 + 4, 9 + 4], {2: 1, 3: 1}),
        ({"input_ids": ids[0], "attention_mask": mask[1]}, (1, 6), 4, (0, 0), [36, 18], {2: 1}),
        ({"input_ids": ids.view(1, 2, 6)}, (1, 12), 0, (0, 0), [72, 36], {6: 2}),
        (
            {"input_ids": ids.view(1, 2, 6), "attention_mask": mask.view(1, 2, 6)},
            (1, 12),
            4,
            (0, 0),
            [72, 36],
            {2: 1, 6: 1},
        ),
        ((torch.zeros(5, 2), torch.zeros(5)), (5, 0), 0, (0, 0), [0, 0], {}),
        ({"x": torch.zeros(3, 2)}, (3, 0), 0, (0, 0), [0, 0], {}),
        ("text", (0, 0), 0, (0, 0), [0, 0], {}),
    ):
        totals = _totals(batch)
        assert (totals.num_rows, totals.num_tokens) == size == size_of(batch), batch
        assert (totals.num_padding, totals.num_labels, totals.num_ignored) == (padding, num_labels, ignored), batch
        assert totals.pairs == pairs, batch
        assert _lengths(totals) == lengths, batch
        twice = _totals(batch, batch)
        assert (twice.num_tokens, twice.num_padding, twice.pairs) == (2 * size[1], 2 * padding, [2 * p for p in pairs])


def test_batches_are_counted_together_and_only_once(monkeypatch):
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "labels": torch.full((2, 6), -100)}
    counter = BatchCounter(torch.device("cpu"), [None])
    counter.add(*contents_of(batch))
    first = _taken(counter)
    assert torch.equal(_taken(counter), torch.zeros_like(first))
    monkeypatch.setattr("lightning_liger.monitor.batches._MAX_PENDING", 20)  # counted after each second batch
    for _ in range(5):
        counter.add(*contents_of(batch))
        assert sum(map(len, counter._labels.values())) < 2
    assert torch.equal(_taken(counter), 5 * first)
    assert LENGTH_EDGES[:9] == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert _lengths(_totals({"input_ids": torch.zeros(1, 2**25, dtype=torch.int8)})) == {LENGTH_EDGES[-1]: 1}
