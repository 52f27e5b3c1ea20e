"""Collators: examples of token ids to the batches of post-training, padded on the right or joined into one row."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_bool, check_choice, check_integer

Example = Mapping[str, Any]
"""One row of a data set: arrays of one dimension, and numbers."""
Batch = dict[str, Any]
Truncation = Literal["keep_start", "keep_end"]
TRUNCATIONS = get_args(Truncation)
_FILL = {"labels": IGNORE_INDEX, "teacher_topk_log_probs": -np.inf}
"""What is not padded with 0."""
_CANDIDATES = ("chosen_ids", "rejected_ids", "reference_ids")


@dataclass(frozen=True)
class Layout:
    """How sequences of different lengths become tensors.

    Args:
        pad_token_id: The token of padding.
        max_length: The maximum number of tokens of a sequence; None for any number.
        truncation: Which tokens of a longer sequence stay: ``"keep_start"`` or ``"keep_end"``.
        pad_to_multiple_of: The number of tokens of a row is a multiple of this.
        padding_free: Whether all sequences of a batch are concatenated into one row.
    """

    pad_token_id: int = 0
    max_length: int | None = None
    truncation: Truncation = "keep_start"
    pad_to_multiple_of: int = 1
    padding_free: bool = False

    def __post_init__(self) -> None:
        check_integer("pad_token_id", self.pad_token_id, at_least=0)
        check_integer("max_length", self.max_length, at_least=2, optional=True)
        check_choice("truncation", self.truncation, TRUNCATIONS)
        check_integer("pad_to_multiple_of", self.pad_to_multiple_of, at_least=1)
        check_bool("padding_free", self.padding_free)

    def cut(self, sequence: np.ndarray) -> np.ndarray:
        """The tokens of ``sequence`` that stay."""
        if self.max_length is None or len(sequence) <= self.max_length:
            return sequence
        return sequence[: self.max_length] if self.truncation == "keep_start" else sequence[-self.max_length :]

    def batch(
        self, columns: Mapping[str, Sequence[Any]], fill: Mapping[str, Any] = _FILL, *, prefix: str = ""
    ) -> Batch:
        """Truncates the sequences, and pads or concatenates them.

        Args:
            columns: By key of the batch, one array of ``[length, ...]`` per sequence; ``input_ids`` is one of them, and
                all columns of a sequence have its length.
            fill: The value of padding by key; by default 0, but for ``labels`` and log-probabilities of a teacher. That
                of ``input_ids`` is ``pad_token_id``.
            prefix: Stands before each key of the result.

        Returns:
            Padded: each column ``[num_sequences, seq_len, ...]`` and ``attention_mask``. Padding-free: each column
            ``[1, total, ...]``; ``position_ids`` ``[1, total]``, which start at 0 in each sequence; ``seq_idx``
            ``[1, total]`` in int32, the number of the sequence; ``cu_seq_lens_q`` and ``cu_seq_lens_k``
            ``[num_sequences + 1]`` in int32; ``max_length_q`` and ``max_length_k``, integers. Padding to a multiple
            belongs to the last sequence, at position 0. With a column ``completion_mask`` also ``sequence_ids``
            ``[1, total]``, the number of the sequence (-1 at padding), and ``num_sequences``, an integer.
        """
        cut = {key: [self.cut(np.asarray(each)) for each in column] for key, column in columns.items()}
        lengths = [len(each) for each in cut["input_ids"]]
        total = sum(lengths)
        if self.padding_free:
            cut = {key: [np.concatenate(column)] for key, column in cut.items()}
        multiple = self.pad_to_multiple_of
        width = -(-(total if self.padding_free else max(lengths)) // multiple) * multiple
        fill = {**fill, "input_ids": self.pad_token_id}
        found: Batch = {key: _pad(column, width, fill.get(key, 0)) for key, column in cut.items()}
        if not self.padding_free:
            found["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
            return {prefix + key: value for key, value in found.items()}
        found["position_ids"] = _pad([np.concatenate([np.arange(length) for length in lengths])], width, 0)
        with_padding = np.array([*lengths[:-1], lengths[-1] + width - total])
        found["seq_idx"] = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), with_padding))[None]
        ends = torch.from_numpy(np.append(0, with_padding.cumsum()).astype(np.int32))
        found["cu_seq_lens_q"], found["cu_seq_lens_k"] = ends, ends.clone()
        found["max_length_q"] = found["max_length_k"] = int(with_padding.max())
        if "completion_mask" in columns:
            found["sequence_ids"] = found["seq_idx"].long()
            found["sequence_ids"][:, total:] = -1
            found["num_sequences"] = len(lengths)
        return {prefix + key: value for key, value in found.items()}


def _pad(column: Sequence[np.ndarray], width: int, fill: Any) -> Tensor:
    """Arrays of ``[length, ...]`` as one tensor ``[len(column), width, ...]``: int64, or float32 of floating-point."""
    dtype = np.float32 if np.issubdtype(column[0].dtype, np.floating) else np.int64
    found = np.full((len(column), width, *column[0].shape[1:]), fill, dtype=dtype)
    for row, values in zip(found, column, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(found)


def _completions(layout: Layout, pairs: Sequence[tuple[np.ndarray, np.ndarray]], prefix: str = "") -> Batch:
    """Sequences of prompt and completion with ``completion_mask``, 1 at the completion's tokens; 0 at all others."""
    masks = [_completion_mask(*pair) for pair in pairs]
    return layout.batch({"input_ids": [*map(np.concatenate, pairs)], "completion_mask": masks}, prefix=prefix)


def _completion_mask(prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
    return np.repeat([0, 1], [len(prompt), len(completion)])


def _group_ids(examples: Sequence[Example]) -> Tensor:
    """The number of its example for each completion."""
    sizes = torch.tensor([len(each["completion_lengths"]) for each in examples])
    return torch.arange(len(examples)).repeat_interleave(sizes)


@dataclass(frozen=True)
class _Collator:
    layout: Layout

    def sequence_lengths(self, example: Example) -> Sequence[int]:
        """The number of tokens of each sequence that a batch has of an example, before truncation."""
        if "input_ids" in example:
            return [len(example["input_ids"])]
        lengths = [len(example[key]) for key in ("completion_ids", *_CANDIDATES) if key in example]
        lengths = example.get("completion_lengths", lengths)
        return [len(example["prompt_ids"]) + int(length) for length in lengths]


class PreferenceCollator(_Collator):
    """Collates examples with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, for triples ``reference_ids`` too.

    A batch of B examples has ``input_ids``, ``attention_mask`` and ``completion_mask``, each ``[2B, seq_len]`` in
    int64: the B chosen sequences, then the B rejected ones, then the B references of triples. Examples with
    ``ref_chosen_logps`` and ``ref_rejected_logps`` give the same keys, ``[B]`` in float32.
    """

    def __call__(self, examples: Sequence[Example]) -> Batch:
        parts = [part for part in _CANDIDATES if part in examples[0]]
        batch = _completions(self.layout, [(each["prompt_ids"], each[part]) for part in parts for each in examples])
        return batch | _numbers(examples, ("ref_chosen_logps", "ref_rejected_logps"))


class FeedbackCollator(_Collator):
    """Collates examples with ``prompt_ids``, ``completion_ids`` and ``label`` (whether the completion is good).

    A batch of B examples has ``input_ids``, ``attention_mask`` and ``completion_mask``, each ``[B, seq_len]``, and
    ``label``, ``[B]`` of bool. For KTO (arXiv:2402.01306), examples also have ``KL_completion_ids``, the completion of
    another prompt or nothing: the same three keys with the prefix ``KL_`` then hold these mismatched pairs. Examples
    with ``ref_logps`` give the same key, ``[B]`` in float32.
    """

    def __call__(self, examples: Sequence[Example]) -> Batch:
        batch = _completions(self.layout, [(each["prompt_ids"], each["completion_ids"]) for each in examples])
        batch["label"] = torch.tensor([bool(each["label"]) for each in examples])
        batch |= _numbers(examples, ("ref_logps",))
        if "KL_completion_ids" in examples[0]:
            mismatched = [(each["prompt_ids"], each["KL_completion_ids"]) for each in examples]
            batch |= _completions(self.layout, mismatched, prefix="KL_")
        return batch


class SupervisedCollator(_Collator):
    """Collates examples with ``input_ids`` and ``loss_mask`` (1 at tokens to learn).

    A batch has ``input_ids``, ``labels`` (not shifted, -100 where nothing is learned) and ``attention_mask``, each
    ``[batch_size, seq_len]`` in int64; and the same with the prefix ``teacher_`` if examples have them.
    """

    def __call__(self, examples: Sequence[Example]) -> Batch:
        batch: Batch = {}
        for prefix, pad_token_id in (("", self.layout.pad_token_id), ("teacher_", 0)):
            if f"{prefix}input_ids" not in examples[0]:
                continue
            ids = [np.asarray(each[f"{prefix}input_ids"]).astype(np.int64) for each in examples]
            masks = [np.asarray(each[f"{prefix}loss_mask"]) > 0 for each in examples]
            labels = [np.where(mask, row, IGNORE_INDEX) for mask, row in zip(masks, ids, strict=True)]
            layout = replace(self.layout, pad_token_id=pad_token_id)
            batch |= layout.batch({"input_ids": ids, "labels": labels}, prefix=prefix)
        return batch


@dataclass(frozen=True)
class MultipleChoiceCollator(_Collator):
    """Collates questions: ``prompt_ids``; ``completion_ids``, those of all choices one after the other, and
    ``completion_lengths``, how many each choice has; ``num_characters``, the lengths of their texts; ``answer``, the
    place of the right one.

    To train, a batch of B questions has the right answers only: ``input_ids``, ``labels`` and ``attention_mask`` as
    those of :class:`SupervisedCollator`. With ``all_choices`` it has the N choices of all questions: ``input_ids``,
    ``attention_mask`` and ``completion_mask``, each ``[N, seq_len]`` in int64 (or padding-free, as those of
    :class:`PreferenceCollator`); ``question_ids`` ``[N]`` in int64, the number of the question in the batch;
    ``is_answer`` ``[N]`` of bool; ``num_characters`` ``[N]`` in float32; and ``num_questions``, an integer.
    """

    all_choices: bool = False

    def sequence_lengths(self, example: Example) -> Sequence[int]:
        lengths = super().sequence_lengths(example)
        return lengths if self.all_choices else [lengths[int(example["answer"])]]

    def __call__(self, examples: Sequence[Example]) -> Batch:
        pairs, is_answer = [], []
        for each in examples:
            choices = np.split(each["completion_ids"], np.cumsum(each["completion_lengths"])[:-1])
            pairs += [(each["prompt_ids"], choice) for choice in choices]
            is_answer += [place == each["answer"] for place in range(len(choices))]
        if not self.all_choices:
            right = itertools.compress(pairs, is_answer)
            return SupervisedCollator(self.layout)(
                [{"input_ids": np.concatenate(pair), "loss_mask": _completion_mask(*pair)} for pair in right]
            )
        batch = _completions(self.layout, pairs)
        batch["question_ids"] = _group_ids(examples)
        batch["is_answer"] = torch.tensor(is_answer, dtype=torch.bool)
        lengths = np.concatenate([each["num_characters"] for each in examples])
        batch["num_characters"] = torch.from_numpy(lengths.astype(np.float32))
        batch["num_questions"] = len(examples)
        return batch


class TeacherTopKCollator(_Collator):
    """Collates rows of a file of :func:`~lightning_liger.data.write_teacher_topk`.

    A batch has ``input_ids``, ``labels`` and ``attention_mask``, each ``[batch_size, seq_len]`` in int64,
    ``teacher_topk_ids`` ``[batch_size, seq_len, K]`` in int64 and ``teacher_topk_log_probs`` of the same shape in
    float32. As logits, entries at a position are about the next token. Padding has the ids 0 and log-probabilities
    -inf.
    """

    def __call__(self, examples: Sequence[Example]) -> Batch:
        keys = ("input_ids", "labels", "teacher_topk_ids", "teacher_topk_log_probs")
        return self.layout.batch({key: [each[key] for each in examples] for key in keys})


PER_TOKEN_LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


class RolloutCollator(_Collator):
    """Collates groups: ``prompt_ids``, and for all completions of the prompt, one after the other, ``completion_ids``.

    Examples also have ``completion_lengths``, the number of tokens of each completion of the group; ``advantages``, one
    for each completion, or ``token_advantages``, one for each token of them; and maybe ``rewards``, one for each
    completion, ``tool_mask`` (0 at tokens that the policy did not write) and log-probabilities of each token. Groups
    stay together.

    A batch with N completions in all has ``prompt_ids`` (padded on the left) and ``prompt_mask``, ``[N, prompt_len]``;
    ``completion_ids`` (padded on the right) and ``completion_mask``, ``[N, completion_len]``; ``group_ids`` ``[N]``,
    the number of the group in the batch; ``advantages``, ``[N]`` or ``[N, completion_len]``; ``rewards`` ``[N]``; and
    ``tool_mask``, ``old_per_token_logps``, ``ref_per_token_logps`` and ``sampling_per_token_logps``,
    ``[N, completion_len]``. Ids, numbers and masks are int64, all others float32; padding is 0.

    Padding-free, prompts and completions are ``input_ids`` ``[1, total]`` with ``completion_mask`` and
    ``sequence_ids``, as those of :class:`PreferenceCollator`; values of tokens are ``[1, total]``, each at its token.
    """

    def __call__(self, examples: Sequence[Example]) -> Batch:
        per_token = [key for key in ("token_advantages", "tool_mask", *PER_TOKEN_LOG_PROBS) if key in examples[0]]
        columns: dict[str, list[np.ndarray]] = {key: [] for key in ("input_ids", "completion_mask", *per_token)}
        for each in examples:
            prompt, ends = each["prompt_ids"], np.cumsum(each["completion_lengths"])[:-1]
            for completion in np.split(each["completion_ids"], ends):
                columns["input_ids"].append(np.concatenate((prompt, completion)))
                columns["completion_mask"].append(_completion_mask(prompt, completion))
            for key in per_token:
                values = np.asarray(each[key], dtype=np.uint8 if key == "tool_mask" else np.float32)
                columns[key] += [np.pad(part, (len(prompt), 0)) for part in np.split(values, ends)]
        batch = self.layout.batch(columns) if self.layout.padding_free else self._padded(columns)
        if "token_advantages" in batch:
            batch["advantages"] = batch.pop("token_advantages")
        batch["group_ids"] = _group_ids(examples)
        for key in ("advantages", "rewards"):
            if key in examples[0]:
                batch[key] = torch.from_numpy(np.concatenate([each[key] for each in examples]).astype(np.float32))
        return batch

    def _padded(self, columns: Mapping[str, Sequence[np.ndarray]]) -> Batch:
        """Prompts and completions apart."""
        cut = {key: [*map(self.layout.cut, column)] for key, column in columns.items()}
        starts = [int(np.sum(mask == 0)) for mask in cut.pop("completion_mask")]
        reversed_prompts = [row[:start][::-1] for row, start in zip(cut["input_ids"], starts, strict=True)]
        prompts = self.layout.batch({"input_ids": reversed_prompts})
        completions = self.layout.batch(
            {key: [row[start:] for row, start in zip(column, starts, strict=True)] for key, column in cut.items()}
        )
        return {
            "prompt_ids": prompts["input_ids"].flip(1),
            "prompt_mask": prompts["attention_mask"].flip(1),
            "completion_ids": completions.pop("input_ids"),
            "completion_mask": completions.pop("attention_mask"),
            **completions,
        }


def _numbers(examples: Sequence[Example], keys: Sequence[str]) -> Batch:
    return {
        key: torch.tensor([float(each[key]) for each in examples], dtype=torch.float32)
        for key in keys
        if key in examples[0]
    }
