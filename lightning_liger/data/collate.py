"""Collators: examples of token ids to the batches of post-training, padded on the right or packed into one row.

Packed sequences need no padding: attention sees where each begins by ``position_ids`` or ``cu_seq_lens_q``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_bool, check_choice, check_integer

Example = Mapping[str, Any]
"""One row of a data set: arrays of one dimension, and numbers."""
Batch = dict[str, Any]
Truncation = Literal["keep_start", "keep_end"]
TRUNCATIONS = ("keep_start", "keep_end")


def check_layout(prefix: str, max_length: Any, truncation: Any, pad_to_multiple_of: Any, packing: Any) -> None:
    """Raises for wrong settings of a :class:`Layout`; ``prefix`` stands before their names in messages."""
    check_integer(f"{prefix}max_length", max_length, at_least=2, optional=True)
    check_choice(f"{prefix}truncation", truncation, TRUNCATIONS)
    check_integer(f"{prefix}pad_to_multiple_of", pad_to_multiple_of, at_least=1)
    check_bool(f"{prefix}packing", packing)


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
        check_layout("", self.max_length, self.truncation, self.pad_to_multiple_of, self.packing)

    def cut(self, sequence: np.ndarray) -> np.ndarray:
        """The tokens of ``sequence`` that stay."""
        if self.max_length is None or len(sequence) <= self.max_length:
            return sequence
        return sequence[: self.max_length] if self.truncation == "keep_start" else sequence[-self.max_length :]

    def batch(self, columns: Mapping[str, Sequence[Any]], fill: Mapping[str, Any], *, prefix: str = "") -> Batch:
        """Truncates the sequences, and pads or packs them.

        Args:
            columns: By key of the batch, one array of ``[length, ...]`` per sequence; ``input_ids`` is one of them, and
                all columns of a sequence have its length.
            fill: The value of padding by key; ``pad_token_id`` for ``input_ids``.
            prefix: Stands before each key of the result.

        Returns:
            Padded: each column ``[num_sequences, seq_len, ...]`` and ``attention_mask``. Packed: each column
            ``[1, total, ...]``; ``position_ids`` ``[1, total]``, which start at 0 in each sequence; ``seq_idx``
            ``[1, total]`` in int32, the number of the sequence; ``cu_seq_lens_q`` and ``cu_seq_lens_k``
            ``[num_sequences + 1]`` in int32; ``max_length_q`` and ``max_length_k``, integers. Padding to a multiple
            belongs to the last sequence, at position 0.
        """
        fill = {"input_ids": self.pad_token_id, **fill}
        cut = {key: [self.cut(np.asarray(each)) for each in column] for key, column in columns.items()}
        lengths = [len(each) for each in cut["input_ids"]]
        found = self._pack(cut, fill, lengths) if self.packing else self._pad(cut, fill, lengths)
        return {prefix + key: value for key, value in found.items()}

    def rounded(self, length: int) -> int:
        """``length``, or the next multiple of ``pad_to_multiple_of``."""
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _pad(self, columns: Mapping[str, list[np.ndarray]], fill: Mapping[str, Any], lengths: list[int]) -> Batch:
        width = self.rounded(max(lengths))
        found: Batch = {key: pad(column, width, fill[key]) for key, column in columns.items()}
        found["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        return found

    def _pack(self, columns: Mapping[str, list[np.ndarray]], fill: Mapping[str, Any], lengths: list[int]) -> Batch:
        total = sum(lengths)
        width = self.rounded(total)
        found: Batch = {key: pad([np.concatenate(column)], width, fill[key]) for key, column in columns.items()}
        found["position_ids"] = pad([np.concatenate([np.arange(length) for length in lengths])], width, 0)
        with_padding = np.array([*lengths[:-1], lengths[-1] + width - total])
        found["seq_idx"] = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), with_padding))[None]
        ends = torch.from_numpy(np.append(0, with_padding.cumsum()).astype(np.int32))
        found["cu_seq_lens_q"], found["cu_seq_lens_k"] = ends, ends.clone()
        found["max_length_q"] = found["max_length_k"] = int(with_padding.max())
        return found


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
    """Sequences of prompt and completion with ``completion_mask``, 1 at the completion's tokens; 0 at all others.

    Packed, also ``sequence_ids`` ``[1, total]``, the number of each token's sequence (-1 at padding), and
    ``num_sequences``, an integer.
    """
    columns = {
        "input_ids": [np.concatenate(pair) for pair in pairs],
        "completion_mask": [np.repeat([0, 1], [len(prompt), len(completion)]) for prompt, completion in pairs],
    }
    batch = layout.batch(columns, {"completion_mask": 0}, prefix=prefix)
    return _numbered(batch, columns["input_ids"], layout, prefix)


def _numbered(batch: Batch, sequences: Sequence[np.ndarray], layout: Layout, prefix: str = "") -> Batch:
    """The batch; if it is packed, with ``sequence_ids`` and ``num_sequences``."""
    if layout.packing:
        total = sum(len(layout.cut(sequence)) for sequence in sequences)
        batch[f"{prefix}sequence_ids"] = batch[f"{prefix}seq_idx"].long()
        batch[f"{prefix}sequence_ids"][:, total:] = -1
        batch[f"{prefix}num_sequences"] = len(sequences)
    return batch


@dataclass(frozen=True)
class PreferenceCollator:
    """Collates examples with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, for triples ``reference_ids`` too.

    A batch of B examples has ``input_ids``, ``attention_mask`` and ``completion_mask``, each ``[2B, seq_len]`` in
    int64: the B chosen sequences, then the B rejected ones, then the B references of triples. Examples with
    ``ref_chosen_logps`` and ``ref_rejected_logps`` give the same keys, ``[B]`` in float32.
    """

    layout: Layout

    def __call__(self, examples: Sequence[Example]) -> Batch:
        parts = [part for part in ("chosen_ids", "rejected_ids", "reference_ids") if part in examples[0]]
        batch = _completions(self.layout, [(each["prompt_ids"], each[part]) for part in parts for each in examples])
        return batch | _numbers(examples, ("ref_chosen_logps", "ref_rejected_logps"))


@dataclass(frozen=True)
class FeedbackCollator:
    """Collates examples with ``prompt_ids``, ``completion_ids`` and ``label`` (whether the completion is good).

    A batch of B examples has ``input_ids``, ``attention_mask`` and ``completion_mask``, each ``[B, seq_len]``, and
    ``label``, ``[B]`` of bool. For KTO (arXiv:2402.01306), examples also have ``KL_completion_ids``, the completion of
    another prompt or nothing: the same three keys with the prefix ``KL_`` then hold these mismatched pairs. Examples
    with ``ref_logps`` give the same key, ``[B]`` in float32.
    """

    layout: Layout

    def __call__(self, examples: Sequence[Example]) -> Batch:
        batch = _completions(self.layout, [(each["prompt_ids"], each["completion_ids"]) for each in examples])
        batch["label"] = torch.tensor([bool(each["label"]) for each in examples])
        batch |= _numbers(examples, ("ref_logps",))
        if "KL_completion_ids" in examples[0]:
            mismatched = [(each["prompt_ids"], each["KL_completion_ids"]) for each in examples]
            batch |= _completions(self.layout, mismatched, prefix="KL_")
        return batch


@dataclass(frozen=True)
class SupervisedCollator:
    """Collates examples with ``input_ids`` and ``loss_mask`` (1 at tokens to learn).

    A batch has ``input_ids``, ``labels`` (not shifted, -100 where nothing is learned) and ``attention_mask``, each
    ``[batch_size, seq_len]`` in int64; and the same with the prefix ``teacher_`` if examples have them.
    """

    layout: Layout

    def __call__(self, examples: Sequence[Example]) -> Batch:
        batch = self._rows(examples, self.layout)
        if "teacher_input_ids" in examples[0]:
            batch |= self._rows(examples, replace(self.layout, pad_token_id=0), "teacher_")
        return batch

    @staticmethod
    def _rows(examples: Sequence[Example], layout: Layout, prefix: str = "") -> Batch:
        ids = [np.asarray(each[f"{prefix}input_ids"]).astype(np.int64) for each in examples]
        labels = [
            np.where(np.asarray(each[f"{prefix}loss_mask"]) > 0, row, IGNORE_INDEX)
            for row, each in zip(ids, examples, strict=True)
        ]
        return layout.batch({"input_ids": ids, "labels": labels}, {"labels": IGNORE_INDEX}, prefix=prefix)


@dataclass(frozen=True)
class MultipleChoiceCollator:
    """Collates questions: ``prompt_ids``; ``completion_ids``, those of all choices one after the other, and
    ``completion_lengths``, how many each choice has; ``num_characters``, the lengths of their texts; ``answer``, the
    place of the right one.

    To train, a batch of B questions has the right answers only: ``input_ids``, ``labels`` and ``attention_mask`` as
    those of :class:`SupervisedCollator`. With ``all_choices`` it has the N choices of all questions: ``input_ids``,
    ``attention_mask`` and ``completion_mask``, each ``[N, seq_len]`` in int64 (or packed, as those of
    :class:`PreferenceCollator`); ``question_ids`` ``[N]`` in int64, the number of the question in the batch;
    ``is_answer`` ``[N]`` of bool; ``num_characters`` ``[N]`` in float32; and ``num_questions``, an integer.
    """

    layout: Layout
    all_choices: bool = False

    def __call__(self, examples: Sequence[Example]) -> Batch:
        choices = [np.split(each["completion_ids"], np.cumsum(each["completion_lengths"])[:-1]) for each in examples]
        if not self.all_choices:
            return SupervisedCollator(self.layout)([
                {
                    "input_ids": np.concatenate((each["prompt_ids"], completions[each["answer"]])),
                    "loss_mask": np.repeat([0, 1], [len(each["prompt_ids"]), len(completions[each["answer"]])]),
                }
                for each, completions in zip(examples, choices, strict=True)
            ])  # fmt: skip
        pairs = zip(examples, choices, strict=True)
        batch = _completions(
            self.layout, [(each["prompt_ids"], one) for each, completions in pairs for one in completions]
        )
        counts = [len(completions) for completions in choices]
        batch["question_ids"] = torch.arange(len(examples)).repeat_interleave(torch.tensor(counts))
        flags = [np.arange(count) == each["answer"] for each, count in zip(examples, counts, strict=True)]
        batch["is_answer"] = torch.from_numpy(np.concatenate(flags))
        lengths = np.concatenate([each["num_characters"] for each in examples])
        batch["num_characters"] = torch.from_numpy(lengths.astype(np.float32))
        batch["num_questions"] = len(examples)
        return batch


@dataclass(frozen=True)
class TeacherTopKCollator:
    """Collates rows of a file of :func:`~lightning_liger.data.write_teacher_topk`.

    A batch has ``input_ids``, ``labels`` and ``attention_mask``, each ``[batch_size, seq_len]`` in int64,
    ``teacher_topk_ids`` ``[batch_size, seq_len, K]`` in int64 and ``teacher_topk_log_probs`` of the same shape in
    float32. As logits, entries at a position are about the next token. Padding has the ids 0 and log-probabilities
    -inf.
    """

    layout: Layout

    def __call__(self, examples: Sequence[Example]) -> Batch:
        fill = {"labels": IGNORE_INDEX, "teacher_topk_ids": 0, "teacher_topk_log_probs": -np.inf}
        return self.layout.batch({key: [each[key] for each in examples] for key in ("input_ids", *fill)}, fill)


PER_TOKEN_LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


@dataclass(frozen=True)
class RolloutCollator:
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

    layout: Layout

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
        batch = self._packed(columns) if self.layout.packing else self._padded(columns)
        if "token_advantages" in batch:
            batch["advantages"] = batch.pop("token_advantages")
        group_sizes = torch.tensor([len(each["completion_lengths"]) for each in examples])
        batch["group_ids"] = torch.arange(len(examples)).repeat_interleave(group_sizes)
        for key in ("advantages", "rewards"):
            if key in examples[0]:
                batch[key] = torch.from_numpy(np.concatenate([each[key] for each in examples]).astype(np.float32))
        return batch

    def _packed(self, columns: Mapping[str, list[np.ndarray]]) -> Batch:
        batch = self.layout.batch(columns, dict.fromkeys(columns, 0) | {"input_ids": self.layout.pad_token_id})
        return _numbered(batch, columns["input_ids"], self.layout)

    def _padded(self, columns: Mapping[str, list[np.ndarray]]) -> Batch:
        cut = {key: [self.layout.cut(each) for each in column] for key, column in columns.items()}
        masks = cut.pop("completion_mask")
        parts = [(len(mask) - int(mask.sum()), int(mask.sum())) for mask in masks]
        prompt_len, completion_len = (self.layout.rounded(max(lengths)) for lengths in zip(*parts, strict=True))
        prompts = [row[:length] for row, (length, _) in zip(cut["input_ids"], parts, strict=True)]
        batch: Batch = {
            "prompt_ids": pad(prompts, prompt_len, self.layout.pad_token_id, left=True),
            "prompt_mask": pad([np.ones_like(row) for row in prompts], prompt_len, 0, left=True),
            "completion_mask": pad([np.ones(length, dtype=np.int64) for _, length in parts], completion_len, 0),
        }
        for key, column in cut.items():
            values = [row[length:] for row, (length, _) in zip(column, parts, strict=True)]
            is_ids = key == "input_ids"
            fill = self.layout.pad_token_id if is_ids else 0
            batch["completion_ids" if is_ids else key] = pad(values, completion_len, fill)
        return batch


def _numbers(examples: Sequence[Example], keys: Sequence[str]) -> Batch:
    return {
        key: torch.tensor([float(each[key]) for each in examples], dtype=torch.float32)
        for key in keys
        if key in examples[0]
    }
