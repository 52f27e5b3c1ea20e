"""Batches hold the tokens of the examples, padded or packed, under the documented keys."""

import itertools
import pickle

import numpy as np
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


def documents(batch, *keys):
    """The sequences of a batch as lists: of each the values under each key."""
    if "cu_seq_lens_q" not in batch:
        lengths = batch["attention_mask"].sum(1).tolist()
        return [tuple(batch[key][row, :length].tolist() for key in keys) for row, length in enumerate(lengths)]
    bounds = batch["cu_seq_lens_q"].tolist()
    return [tuple(batch[key][0, a:b].tolist() for key in keys) for a, b in itertools.pairwise(bounds)]


def test_pairs_are_first_all_chosen_then_all_rejected():
    batch = PreferenceCollator(Layout(pad_token_id=99))(PAIRS)
    expected = {
        "input_ids": [[1, 2, 3, 4, 5], [7, 8, 9, 99, 99], [1, 2, 3, 6, 99], [7, 8, 10, 11, 99]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]],
        "completion_mask": [[0, 0, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 1, 0]],
    }
    assert {key: value.tolist() for key, value in batch.items()} == expected
    assert {value.dtype for value in batch.values()} == {torch.int64}


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
        assert documents(batch, "input_ids", "completion_mask") == expected
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


def test_triples_and_reference_log_probabilities():
    examples = [{**pair, "reference_ids": [12], "ref_chosen_logps": -1.5, "ref_rejected_logps": -3} for pair in PAIRS]
    batch = PreferenceCollator(Layout())(examples)
    assert batch["input_ids"].shape == (6, 5)
    assert batch["input_ids"][4, :4].tolist() == [1, 2, 3, 12]
    assert batch["ref_chosen_logps"].tolist() == [-1.5, -1.5]
    assert batch["ref_rejected_logps"].dtype == torch.float32


def test_feedback_with_mismatched_pairs():
    plain = [{"prompt_ids": [i], "completion_ids": [10 + i] * i, "label": i % 2} for i in (1, 2, 3)]
    examples = [{**each, "KL_completion_ids": plain[place - 1]["completion_ids"]} for place, each in enumerate(plain)]
    batch = FeedbackCollator(Layout(max_length=3))(examples)
    assert batch["label"].tolist() == [True, False, True]
    assert batch["label"].dtype == torch.bool
    assert batch["KL_input_ids"].tolist() == [[1, 13, 13], [2, 11, 0], [3, 12, 12]]
    assert batch["KL_completion_mask"].tolist() == [[0, 1, 1], [0, 1, 0], [0, 1, 1]]
    assert set(FeedbackCollator(Layout())(plain)) == {*("input_ids", "attention_mask", "completion_mask", "label")}
    packed = FeedbackCollator(Layout(packing=True))(examples)
    assert packed["KL_sequence_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2]]
    alone = FeedbackCollator(Layout())([{**plain[2], "KL_completion_ids": []}])
    assert alone["KL_completion_mask"].sum() == 0
    assert alone["completion_mask"].sum() == 3


def test_supervised_labels():
    examples = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8, 9], "loss_mask": [0, 1]}]
    batch = SupervisedCollator(Layout())(examples)
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, 9, -100]]
    packed = SupervisedCollator(Layout(packing=True))(examples)
    assert set(packed) == {"input_ids", "labels"} | PACKED
    assert packed["labels"].tolist() == [[-100, 6, 7, -100, 9]]


def test_teacher_entries_stay_with_their_tokens():
    rows = [
        {
            "input_ids": np.arange(length),
            "labels": np.arange(length),
            "teacher_topk_ids": np.arange(2 * length).reshape(length, 2),
            "teacher_topk_log_probs": -np.arange(2 * length, dtype=np.float16).reshape(length, 2),
        }
        for length in (3, 2)
    ]
    batch = TeacherTopKCollator(Layout())(rows)
    assert batch["teacher_topk_ids"].shape == batch["teacher_topk_log_probs"].shape == (2, 3, 2)
    assert batch["teacher_topk_log_probs"].dtype == torch.float32
    assert batch["teacher_topk_ids"][1].tolist() == [[0, 1], [2, 3], [0, 0]]
    assert batch["teacher_topk_log_probs"][1, 2].tolist() == [-np.inf, -np.inf]
    packed = TeacherTopKCollator(Layout(packing=True, max_length=2))(rows)
    assert packed["teacher_topk_ids"].tolist() == [[[0, 1], [2, 3], [0, 1], [2, 3]]]


GROUPS = [
    {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "completion_lengths": [1, 2],
        "advantages": [1.0, -1.0],
        "rewards": [1, 0],
        "old_per_token_logps": [-0.5, -1.0, -1.5],
    },
    {
        "prompt_ids": [6],
        "completion_ids": [7],
        "completion_lengths": [1],
        "advantages": [0.0],
        "rewards": [1],
        "old_per_token_logps": [-2.0],
    },
]


def test_groups_pad_prompts_on_the_left_and_completions_on_the_right():
    batch = RolloutCollator(Layout(pad_token_id=9))(GROUPS)
    expected = {
        "prompt_ids": [[1, 2], [1, 2], [9, 6]],
        "prompt_mask": [[1, 1], [1, 1], [0, 1]],
        "completion_ids": [[3, 9], [4, 5], [7, 9]],
        "completion_mask": [[1, 0], [1, 1], [1, 0]],
        "advantages": [1.0, -1.0, 0.0],
        "rewards": [1.0, 0.0, 1.0],
        "group_ids": [0, 0, 1],
        "old_per_token_logps": [[-0.5, 0.0], [-1.0, -1.5], [-2.0, 0.0]],
    }
    assert {key: value.tolist() for key, value in batch.items()} == expected


def test_packed_groups_have_values_at_their_tokens():
    batch = RolloutCollator(Layout(packing=True))(GROUPS)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 1, 2, 4, 5, 6, 7]]
    assert batch["completion_mask"].tolist() == [[0, 0, 1, 0, 0, 1, 1, 0, 1]]
    assert batch["old_per_token_logps"].tolist() == [[0, 0, -0.5, 0, 0, -1.0, -1.5, 0, -2.0]]
    assert batch["sequence_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2]]
    assert batch["advantages"].tolist() == [1.0, -1.0, 0.0]


def test_advantages_of_tokens():
    examples = [{**GROUPS[0], "token_advantages": [1.0, 2.0, 3.0]}]
    del examples[0]["advantages"]
    assert RolloutCollator(Layout())(examples)["advantages"].tolist() == [[1.0, 0.0], [2.0, 3.0]]
    cut = RolloutCollator(Layout(max_length=3))(examples)
    assert cut["completion_ids"].tolist() == [[3], [4]]
    assert cut["advantages"].tolist() == [[1.0], [2.0]]


def test_collators_can_be_sent_to_workers():
    collator = PreferenceCollator(Layout(max_length=4, packing=True))
    assert pickle.loads(pickle.dumps(collator)) == collator
