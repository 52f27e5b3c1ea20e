"""Batches hold the tokens of the examples, padded or packed, under the documented keys."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_liger.data import (
    FeedbackCollator,
    Layout,
    PreferenceCollator,
    RolloutCollator,
    SupervisedCollator,
    TeacherTopKCollator,
)

PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]},
]
PACKED = {"position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@settings(derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=1, max_size=4),
    max_length=st.none() | st.integers(2, 12),
    truncation=st.sampled_from(["keep_start", "keep_end"]),
    multiple=st.sampled_from([1, 7, 16]),
    packing=st.booleans(),
)
def test_batches_hold_the_sequences_that_truncation_leaves(lengths, max_length, truncation, multiple, packing):
    tokens = itertools.count(1)
    keys = ("prompt_ids", "chosen_ids", "rejected_ids")
    pairs = [{key: [*itertools.islice(tokens, n)] for key, n in zip(keys, each, strict=True)} for each in lengths]
    batch = PreferenceCollator(Layout(500, max_length, truncation, multiple, packing))(pairs)
    kept = slice(max_length) if truncation == "keep_start" else slice(-(max_length or 0), None)
    expected = [
        ((each["prompt_ids"] + each[key])[kept], ([0] * len(each["prompt_ids"]) + [1] * len(each[key]))[kept])
        for key in keys[1:]
        for each in pairs
    ]
    sizes = [len(ids) for ids, _ in expected]
    width = batch["input_ids"].shape[1]
    assert width % multiple == 0
    assert width - (sum(sizes) if packing else max(sizes)) < multiple
    assert (batch["completion_mask"][batch["input_ids"] == 500] == 0).all()
    if not packing:
        for row, (ids, mask) in enumerate(expected):
            padding = width - len(ids)
            assert batch["input_ids"][row].tolist() == ids + [500] * padding
            assert batch["completion_mask"][row].tolist() == mask + [0] * padding
            assert batch["attention_mask"][row].tolist() == [1] * len(ids) + [0] * padding
        return
    assert set(batch) == {"input_ids", "completion_mask", "sequence_ids", "num_sequences"} | PACKED
    assert batch["num_sequences"] == len(sizes)
    ends, padding = np.cumsum(sizes), width - sum(sizes)
    starts = [0, *ends[:-1]]
    for key, values in (("input_ids", 0), ("completion_mask", 1)):
        assert [batch[key][0, a:b].tolist() for a, b in zip(starts, ends, strict=True)] == [e[values] for e in expected]
    numbers = [index for index, size in enumerate(sizes) for _ in range(size)]
    assert batch["sequence_ids"].tolist() == [numbers + [-1] * padding]
    assert batch["seq_idx"].tolist() == [numbers + [len(sizes) - 1] * padding]
    assert batch["position_ids"].tolist() == [[*itertools.chain(*map(range, sizes)), *[0] * padding]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [*starts, width]
    assert batch["max_length_q"] == batch["max_length_k"] == max([*sizes[:-1], sizes[-1] + padding])
    assert batch["cu_seq_lens_q"].dtype == batch["seq_idx"].dtype == torch.int32


ROWS = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8, 9], "loss_mask": [0, 1]}]
TRIPLES = [{**pair, "reference_ids": [12], "ref_chosen_logps": -1.5, "ref_rejected_logps": -3} for pair in PAIRS]
FEEDBACK = [{"prompt_ids": [i], "completion_ids": [10 + i] * i, "label": i % 2, "ref_logps": -i} for i in (1, 2, 3)]
MISMATCHED = [{**each, "KL_completion_ids": FEEDBACK[i - 1]["completion_ids"]} for i, each in enumerate(FEEDBACK)]
GROUPS = [
    {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "completion_lengths": [1, 2], "rewards": [1, 0]},
    {"prompt_ids": [6], "completion_ids": [7], "completion_lengths": [1], "rewards": [1]},
]
OF_TOKENS = [{**GROUPS[0], "token_advantages": [1.0, 2.0, 3.0]}]
for group, advantages, log_probs in zip(GROUPS, ([1.0, -1.0], [0.0]), ([-0.5, -1.0, -1.5], [-2.0]), strict=True):
    group |= {"advantages": advantages, "old_per_token_logps": log_probs}
TEACHER = [
    {
        "input_ids": np.arange(length),
        "labels": np.arange(length),
        "teacher_topk_ids": np.arange(2 * length).reshape(length, 2),
        "teacher_topk_log_probs": -np.arange(2 * length, dtype=np.float16).reshape(length, 2),
    }
    for length in (3, 2)
]


ROLLOUTS = {
    "prompt_ids": [[1, 2], [1, 2], [9, 6]],
    "prompt_mask": [[1, 1], [1, 1], [0, 1]],
    "completion_ids": [[3, 9], [4, 5], [7, 9]],
    "completion_mask": [[1, 0], [1, 1], [1, 0]],
    "old_per_token_logps": [[-0.5, 0.0], [-1.0, -1.5], [-2.0, 0.0]],
    "advantages": [1.0, -1.0, 0.0],
    "rewards": [1.0, 0.0, 1.0],
    "group_ids": [0, 0, 1],
}
PACKED_ROLLOUTS = {
    "input_ids": [[1, 2, 3, 1, 2, 4, 5, 6, 7]],
    "completion_mask": [[0, 0, 1, 0, 0, 1, 1, 0, 1]],
    "old_per_token_logps": [[0, 0, -0.5, 0, 0, -1.0, -1.5, 0, -2.0]],
    "sequence_ids": [[0, 0, 0, 1, 1, 1, 1, 2, 2]],
    "advantages": [1.0, -1.0, 0.0],
}
TOPK = [[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [0, 0]]]
TOPK_LOG_PROBS = [[[0, -1], [-2, -3], [-4, -5]], [[0, -1], [-2, -3], [-np.inf, -np.inf]]]
KL = {"KL_input_ids": [[1, 13, 13], [2, 11, 0], [3, 12, 12]], "KL_completion_mask": [[0, 1, 1], [0, 1, 0], [0, 1, 1]]}
FREE = {"padding_free": True}
KL_PACKED = {"KL_sequence_ids": [[0, 0, 0, 0, 1, 1, 2, 2, 2]], "KL_completion_mask": [[0, 1, 1, 1, 0, 1, 0, 1, 1]]}


@pytest.mark.parametrize(
    ("cls", "examples", "layout", "expected"),
    [
        (PreferenceCollator, TRIPLES[:1], {}, {"input_ids": [[1, 2, 3, 4, 5], [1, 2, 3, 6, 0], [1, 2, 3, 12, 0]]}),
        (PreferenceCollator, TRIPLES, {}, {"ref_chosen_logps": [-1.5] * 2, "ref_rejected_logps": [-3.0] * 2}),
        (FeedbackCollator, MISMATCHED, {"max_length": 3}, KL | {"label": [True, False, True]}),
        (FeedbackCollator, MISMATCHED, {"padding_free": True}, KL_PACKED | {"ref_logps": [-1.0, -2.0, -3.0]}),
        (SupervisedCollator, ROWS, {}, {"labels": [[-100, 6, 7], [-100, 9, -100]]}),
        (SupervisedCollator, ROWS, {"padding_free": True}, {"labels": [[-100, 6, 7, -100, 9]]}),
        (RolloutCollator, GROUPS, {"pad_token_id": 9}, ROLLOUTS),
        (RolloutCollator, GROUPS, {"padding_free": True}, PACKED_ROLLOUTS),
        (RolloutCollator, OF_TOKENS, {}, {"advantages": [[1.0, 0.0], [2.0, 3.0]]}),
        (RolloutCollator, OF_TOKENS, {"max_length": 3}, {"completion_ids": [[3], [4]], "advantages": [[1.0], [2.0]]}),
        (TeacherTopKCollator, TEACHER, {}, {"teacher_topk_ids": TOPK, "teacher_topk_log_probs": TOPK_LOG_PROBS}),
        (TeacherTopKCollator, TEACHER, FREE | {"max_length": 2}, {"teacher_topk_ids": [TOPK[1][:2] * 2]}),
    ],
)
def test_batches_have_the_documented_values(cls, examples, layout, expected):
    batch = cls(Layout(**layout))(examples)
    assert {key: batch[key].tolist() for key in expected} == expected
    assert ("cu_seq_lens_q" in batch) == layout.get("padding_free", False)
    for key, value in batch.items():
        if key not in PACKED | {"label", "num_sequences", "KL_num_sequences"} and not key.startswith("KL_"):
            is_number = any(part in key for part in ("logps", "log_probs", "advantages", "rewards"))
            assert value.dtype == (torch.float32 if is_number else torch.int64), key


def test_mismatched_pairs_are_optional():
    keys = {"input_ids", "attention_mask", "completion_mask", "label", "ref_logps"}
    assert set(FeedbackCollator(Layout())(FEEDBACK)) == keys
