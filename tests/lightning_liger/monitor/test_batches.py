"""Padding, ignored labels, lengths and pairs of attention in batches of every form."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_liger.data.collate import FeedbackCollator, Layout, PreferenceCollator, RolloutCollator
from lightning_liger.monitor.batches import LENGTH_EDGES, BatchCounter, BatchTotals
from lightning_liger.monitor.tokens import contents_of, count_tokens, size_of


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


def test_parts_of_nested_and_prefixed_batches_add_up():
    ids, longer = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64)
    labels = torch.tensor([[-100, -100, 1, 1, 1, 1], [1, 1, 1, -100, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    batch, other = {"input_ids": ids, "labels": labels, "attention_mask": mask}, {"input_ids": longer}
    both = ((3, 21), 4, (12, 5), {2: 1, 6: 1, 12: 1})  # 9 is in the class up to 12
    pair = {f"{prefix}_{name}": value for prefix in ("chosen", "rejected") for name, value in batch.items()}
    kto = {"input_ids": longer, "completion_mask": torch.ones(1, 9).long(), "KL_input_ids": ids}
    kto |= {"KL_attention_mask": mask, "KL_completion_mask": torch.zeros(2, 6).long(), "label": torch.ones(3)}
    prompts = {"prompt_ids": ids, "prompt_mask": mask.flip(1), "completion_ids": ids[:, :2]}
    prompts["completion_mask"] = torch.tensor([[1, 0], [1, 1]])
    teacher = {"teacher_input_ids": longer, "teacher_labels": longer}
    for nested, size, padding, num_labels, lengths in (
        ({"a": batch, "b": other}, *both),
        ([batch, other], *both),
        ((batch, 0, 0), (2, 12), 4, (12, 5), {2: 1, 6: 1}),
        ({"a": [batch, None], "b": (other, 3, 1)}, *both),
        ((batch, torch.zeros(2)), (2, 12), 4, (12, 5), {2: 1, 6: 1}),
        (pair, (4, 24), 8, (24, 10), {2: 2, 6: 2}),
        (kto, (3, 21), 4, (21, 12), both[-1]),
        (prompts, (2, 16), 5, (16, 13), {4: 1, 8: 1}),
        ({name: prompts[name] for name in ("prompt_ids", "completion_ids")}, (2, 16), 0, (0, 0), {8: 2}),
        ({**other, **teacher}, (1, 9), 0, (0, 0), {12: 1}),
        ({"a": torch.zeros(3, 2), "b": 1}, (3, 0), 0, (0, 0), {}),
    ):
        totals = _totals(nested)
        assert (totals.num_rows, totals.num_tokens) == size == size_of(nested), nested
        assert count_tokens(nested) == size[1]
        assert (totals.num_padding, totals.num_labels, totals.num_ignored) == (padding, *num_labels), nested
        assert _lengths(totals) == lengths, nested


def test_batches_of_the_data_modules_are_counted():
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
        for packing in (False, True):
            totals = _totals(collator(Layout(packing=packing, pad_to_multiple_of=4))(rows))
            # Sequences of 3 + 2 and 3 + 4 tokens, in two rows or one, and for KTO also with completions exchanged.
            padded = 4 + 4 if collator is RolloutCollator else 8
            assert totals.num_tokens == factor * (12 if packing else 2 * padded), collator
            assert totals.num_padding == totals.num_tokens - factor * 12, collator
            assert (totals.num_labels, totals.num_ignored) == (totals.num_tokens, totals.num_tokens - factor * 6), (
                collator
            )
            assert _lengths(totals) == {6: factor, 8: factor}, collator


def test_lengths_of_packed_rows_with_a_mask_are_those_of_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]])
    for batch, padding, lengths in (
        ({"position_ids": positions, "attention_mask": mask}, 3, {1: 1, 2: 1, 3: 1, 8: 1}),
        ({"position_ids": positions}, 3, {2: 1, 3: 1, 8: 1}),  # a token alone counts as padding
        ({"attention_mask": mask}, 3, {6: 1, 8: 1}),
        # Padded on the left, as transformers numbers such rows.
        ({"position_ids": torch.tensor([[1, 1, 0, 1]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}, 2, {2: 1}),
    ):
        shape = next(iter(batch.values())).shape
        batch = {"input_ids": torch.zeros(shape, dtype=torch.int64), **batch}
        totals = _totals(batch)
        assert (totals.num_padding, _lengths(totals)) == (padding, lengths), batch
        if "attention_mask" in batch:  # attention sees whole rows then
            assert totals.pairs == ([2 * 64, 2 * 24] if shape[1] == 8 else [16, 12])
        assert _lengths(_totals(batch, batch)) == {length: 2 * count for length, count in lengths.items()}


def test_few_operators_count_many_batches():
    class Operators(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += 1
            return func(*args, **(kwargs or {}))

    ids = torch.zeros(2, 6, dtype=torch.int64)
    counter = BatchCounter(torch.device("cpu"), [None])
    for _ in range(10):
        counter.add(*contents_of({"input_ids": ids, "labels": ids, "attention_mask": ids}))
    with Operators() as operators:
        counter.take()
    assert operators.number <= 12
