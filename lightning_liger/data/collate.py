"""Collators: examples of token ids to the batches of post-training, padded on the right or packed into one row.

Packed sequences need no padding: attention sees where each begins by ``position_ids`` or ``cu_seq_lens_q``.
"""

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


@dataclass(frozen=True)
class Layout:
    """How sequences of different lengths become tensors.

    Args:
        pad_token_id: The token of padding.
        max_length: The maximum number of tokens of a sequence; None for any number.
        truncation: Which tokens of a longer sequence stay: ``"keep_start"`` or ``"keep_end"``.
        pad_to_multiple_of: The number of tokens of a row is a multiple of this.
        packing: Whether all sequences of a batch are concatenated into one row.
    """

    pad_token_id: int = 0
    max_length: int | None = None
    truncation: Truncation = "keep_start"
    pad_to_multiple_of: int = 1
    packing: bool = False

    def __post_init__(self) -> None:
        check_integer("pad_token_id", self.pad_token_id, at_least=0)
        check_integer("max_length", self.max_length, at_least=2, optional=True)
        check_choice("truncation", self.truncation, TRUNCATIONS)
        check_integer("pad_to_multiple_of", self.pad_to_multiple_of, at_least=1)
        check_bool("packing", self.packing)

    def cut(self, sequence: np.ndarray) -> np.ndarray:
        """The tokens of ``sequence`` that stay."""
        if self.max_length is None or len(sequence) <= self.max_length:
            return sequence
        return sequence[: self.max_length] if self.truncation == "keep_start" else sequence[-self.max_length :]

    def batch(
        self, columns: Mapping[str, Sequence[Any]], fill: Mapping[str, Any] = _FILL, *, prefix: str = ""
    ) -> Batch:
        """Truncates the sequences, and pads or packs them.

        Args:
            columns: By key of the batch, one array of ``[length, ...]`` per sequence; ``input_ids`` is one of them, and
                all columns of a sequence have its length.
            fill: The value of padding by key; by default 0, but for ``labels`` and log-probabilities of a teacher. That
                of ``input_ids`` is ``pad_token_id``.
            prefix: Stands before each key of the result.

        Returns:
            Padded: each column ``[num_sequences, seq_len, ...]`` and ``attention_mask``. Packed: each column
            ``[1, total, ...]``; ``position_ids`` ``[1, total]``, which start at 0 in each sequence; ``seq_idx``
            ``[1, total]`` in int32, the number of the sequence; ``cu_seq_lens_q`` and ``cu_seq_lens_k``
            ``[num_sequences + 1]`` in int32; ``max_length_q`` and ``max_length_k``, integers. Padding to a multiple
            belongs to the last sequence, at position 0. With a column ``completion_mask`` also ``sequence_ids``
            ``[1, total]``, the number of the sequence (-1 at padding), and ``num_sequences``, an integer.
        """
        cut = {key: [self.cut(np.asarray(each)) for each in column] for key, column in columns.items()}
        lengths = [len(each) for each in cut["input_ids"]]
        total = sum(lengths)
        if self.packing:
            cut = {key: [np.concatenate(column)] for key, column in cut.items()}
        width = self.rounded(total if self.packing else max(lengths))
        fill = {**fill, "input_ids": self.pad_token_id}
        found: Batch = {key: pad(column, width, fill.get(key, 0)) for key, column in cut.items()}
        if not self.packing:
            found["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
            return {prefix + key: value for key, value in found.items()}
        found["position_ids"] = pad([np.concatenate([np.arange(length) for length in lengths])], width, 0)
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

    def rounded(self, length: int) -> int:
        """``length``, or the next multiple of ``pad_to_multiple_of``."""
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of


def pad(column: Sequence[np.ndarray], width: int, fill: Any, *, left: bool = False) -> Tensor:
    """Arrays of ``[length, ...]`` as one tensor ``[len(column), width, ...]``: int64, or float32 of floating-point."""
    first = np.asarray(column[0])
    dtype = np.float32 if np.issubdtype(first.dtype, np.floating) else np.int64
    found = np.full((len(column), width, *first.shape[1:]), fill, dtype=dtype)
    for row, values in zip(found, column, strict=True):
        if len(values):
            row[slice(-len(values), None) if left else slice(len(values))] = values
    return torch.from_numpy(found)


def _completions(layout: Layout, pairs: Sequence[tuple[np.ndarray, np.ndarray]], prefix: str = "") -> Batch:
    """Sequences of prompt and completion with ``completion_mask``, 1 at the completion's tokens; 0 at all others."""
    columns = {
        "input_ids": [np.concatenate(pair) for pair in pairs],
        "completion_mask": [_completion_mask(*pair) for pair in pairs],
    }
    return layout.batch(columns, prefix=prefix)


def _completion_mask(prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
    return np.repeat([0, 1], [len(prompt), len(completion)])


def _group_ids(sizes: Sequence[int]) -> Tensor:
    """The number of its group for each member."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


@dataclass(frozen=True)
class _Collator:
    layout: Layout


class PreferenceCollator(_Collator):
    """Collates examples with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, for triples ``reference_ids`` too.

    A batch of B examples has ``input_ids``, ``attention_mask`` and ``completion_mask``, each ``[2B, seq_len]`` in
    int64: the B chosen sequences, then the B rejected ones, then the B references of triples. Examples with
    ``ref_chosen_logps`` and ``ref_rejected_logps`` give the same keys, ``[B]`` in float32.
    """

    def __call__(self, examples: Sequence[Example]) -> Batch:
        parts = [part for part in ("chosen_ids", "rejected_ids", "reference_ids") if part in examples[0]]
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
    ``attention_mask`` and ``completion_mask``, each ``[N, seq_len]`` in int64 (or packed, as those of
    :class:`PreferenceCollator`); ``question_ids`` ``[N]`` in int64, the number of the question in the batch;
    ``is_answer`` ``[N]`` of bool; ``num_characters`` ``[N]`` in float32; and ``num_questions``, an integer.
    """

    all_choices: bool = False

    def __call__(self, examples: Sequence[Example]) -> Batch:
        choices = [np.split(each["completion_ids"], np.cumsum(each["completion_lengths"])[:-1]) for each in examples]
        answers = [each["answer"] for each in examples]
        if not self.all_choices:
            parts = zip(examples, choices, answers, strict=True)
            pairs = [(each["prompt_ids"], several[answer]) for each, several, answer in parts]
            return SupervisedCollator(self.layout)(
                [{"input_ids": np.concatenate(pair), "loss_mask": _completion_mask(*pair)} for pair in pairs]
            )
        counts = [len(completions) for completions in choices]
        pairs = [(each["prompt_ids"], one) for each, several in zip(examples, choices, strict=True) for one in several]
        batch = _completions(self.layout, pairs)
        batch["question_ids"] = _group_ids(counts)
        flags = [np.arange(count) == answer for answer, count in zip(answers, counts, strict=True)]
        batch["is_answer"] = torch.from_numpy(np.concatenate(flags))
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

    Packed, prompts and completions are ``input_ids`` ``[1, total]`` with ``completion_mask`` and ``sequence_ids``, as
    those of :class:`PreferenceCollator`; values of tokens are ``[1, total]``, each at its token.
    """

    def __call__(self, examples: Sequence[Example]) -> Batch:
        per_token = [key for key in ("token_advantages", "tool_mask", *PER_TOKEN_LOG_PROBS) if key in examples[0]]
        columns: dict[str, list[np.ndarray]] = {key: [] for key in ("input_ids", "completion_mask", *per_token)}
        for each in examples:
            num_prompt_tokens = len(each["prompt_ids"])
            ends = np.cumsum(each["completion_lengths"])
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                columns["input_ids"].append(np.concatenate((each["prompt_ids"], each["completion_ids"][start:end])))
                columns["completion_mask"].append(np.repeat([0, 1], [num_prompt_tokens, end - start]))
                for key in per_token:
                    values = np.asarray(each[key][start:end], dtype=np.uint8 if key == "tool_mask" else np.float32)
                    columns[key].append(np.pad(values, (num_prompt_tokens, 0)))
        if self.layout.packing:
            batch = self.layout.batch(columns)
        else:
            batch = self._padded({key: [*map(self.layout.cut, column)] for key, column in columns.items()})
        if "token_advantages" in batch:
            batch["advantages"] = batch.pop("token_advantages")
        batch["group_ids"] = _group_ids([len(each["completion_lengths"]) for each in examples])
        for key in ("advantages", "rewards"):
            if key in examples[0]:
                batch[key] = torch.from_numpy(np.concatenate([each[key] for each in examples]).astype(np.float32))
        return batch

    def _padded(self, columns: dict[str, list[np.ndarray]]) -> Batch:
        """Prompts and completions of rows that are cut already."""
        masks = columns.pop("completion_mask")
        starts = [int(np.sum(mask == 0)) for mask in masks]
        prompts = [row[:start] for row, start in zip(columns["input_ids"], starts, strict=True)]
        prompt_len = self.layout.rounded(max(starts))
        completion_len = self.layout.rounded(max(int(mask.sum()) for mask in masks))
        batch = {
            "prompt_ids": pad(prompts, prompt_len, self.layout.pad_token_id, left=True),
            "prompt_mask": pad([np.ones_like(row) for row in prompts], prompt_len, 0, left=True),
            "completion_mask": pad([mask[mask > 0] for mask in masks], completion_len, 0),
        }
        for key, column in columns.items():
            key, fill = ("completion_ids", self.layout.pad_token_id) if key == "input_ids" else (key, 0)
            batch[key] = pad([row[start:] for row, start in zip(column, starts, strict=True)], completion_len, fill)
        return batch


def _numbers(examples: Sequence[Example], keys: Sequence[str]) -> Batch:
    return {
        key: torch.tensor([float(each[key]) for each in examples], dtype=torch.float32)
        for key in keys
        if key in examples[0]
    }
