"""Rows of prompts and completions as models and losses take them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_integer, check_shape, check_tensor, wrong_type, wrong_value
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.sequences.labels import shift_labels

_SEQUENCES = "sequence_ids"
PACKING = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Rows(NamedTuple):
    """Sequences whose completions are scored."""

    inputs: dict[str, Any]
    """Arguments of the model: ``input_ids`` and, as they are given, ``attention_mask`` and those of packed rows."""
    labels: Tensor
    """The label of each token of the inputs, ``[rows, seq_len]``, int64; -100 where none is scored."""
    sequence_ids: Tensor | None
    """The sequence of each token, ``[rows, seq_len]``; None if each row is one."""
    num_sequences: int
    extras: Mapping[str, Tensor] = {}
    """Other values of tokens, ``[rows, seq_len]``, which are split with them."""

    @property
    def num_tokens(self) -> Tensor:
        """The number of tokens that are no padding, prompts included, a scalar."""
        return count_tokens(self.labels, self.inputs.get("attention_mask"), self.sequence_ids)

    def to_context(self, context: ContextParallel | None) -> "Rows":
        """This rank's part of each row under context parallelism. Right padding needs no attention mask."""
        if context is None:
            return self
        columns: dict[str, Any] = {**self.extras, _SEQUENCES: self.sequence_ids}
        inputs, labels, columns = split_rows(context, self.inputs, self.labels, columns)
        return Rows(inputs, labels, columns.pop(_SEQUENCES), self.num_sequences, columns)


def split_rows(
    context: ContextParallel, inputs: Mapping[str, Any], labels: Tensor, columns: Mapping[str, Any]
) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
    """This rank's part of each row: of a model's arguments, of labels ``[rows, seq_len]``, and of further values.

    Right padding needs no attention mask. Of ``columns``, those ``[rows, seq_len, ...]`` are split.
    """
    whole = {key: value for key, value in inputs.items() if key not in ("attention_mask", "seq_idx")}
    shard = dict(context.split({**whole, "shift_labels": labels}))
    parts = {
        name: value.chunk(context.size, dim=1)[context.rank]
        if isinstance(value, Tensor) and value.shape[:2] == labels.shape
        else value
        for name, value in columns.items()
    }
    return shard, shard.pop("shift_labels"), parts


def read_rows(batch: Mapping[str, Any], prefix: str = "") -> Rows:
    """The sequences of a batch.

    Args:
        batch: ``input_ids`` ``[rows, seq_len]`` int64, ``completion_mask`` of the same shape (True or 1 for tokens of
            the completion), and ``attention_mask`` where rows are padded. For packed rows also ``position_ids``, which
            start again with each sequence, ``sequence_ids`` (the number of each token's sequence, from 0; any negative
            number for padding), and their number: ``num_sequences``, an integer, or ``cu_seq_lens_q``, where they start
            and the last one ends; without both the device is asked for the largest.
        prefix: Of the names of the keys, such as ``"KL_"``.

    Raises:
        TypeError: For values that are no tensors of integers.
        ValueError: For missing keys, and shapes that do not fit.
    """
    for key in ("input_ids", "completion_mask"):
        if batch.get(prefix + key) is None:
            raise ValueError(f"batch must have the key {prefix + key!r}, got {sorted(map(str, batch))}")
    input_ids = batch[prefix + "input_ids"]
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        raise wrong_type(f"batch[{prefix + 'input_ids'!r}]", "a tensor of dtype torch.int64", input_ids)
    if input_ids.ndim != 2:
        raise wrong_value(f"batch[{prefix + 'input_ids'!r}]", "a tensor of shape [rows, seq_len]", input_ids)
    inputs: dict[str, Any] = {"input_ids": input_ids}
    for key in ("completion_mask", "attention_mask", "sequence_ids"):
        value = batch.get(prefix + key)
        if value is not None:
            check_tensor(f"batch[{prefix + key!r}]", value)
            check_shape(f"batch[{prefix + key!r}]", value, input_ids.shape, "one value for each token")
    for key in ("attention_mask", *PACKING):
        if batch.get(prefix + key) is not None:
            inputs[key] = batch[prefix + key]
    position_ids, ids = inputs.get("position_ids"), batch.get(prefix + "sequence_ids")
    labels = completion_labels(input_ids, batch[prefix + "completion_mask"], inputs.get("attention_mask"))
    labels = shift_labels(labels, position_ids)
    if ids is None:
        return Rows(inputs, labels, None, len(input_ids))
    # A border is also where the sequence changes, for position_ids of rows that do not start again.
    changes = F.pad(ids.diff(dim=-1) != 0, (0, 1), value=True)
    labels = labels.masked_fill(changes | (ids < 0), IGNORE_INDEX)
    return Rows(inputs, labels, ids, count_sequences(batch, prefix))


def completion_labels(input_ids: Tensor, completion_mask: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The ids of completion tokens in int64, -100 for others: padding is no label, and none is predicted from it."""
    mask = completion_mask.bool()
    if attention_mask is not None:
        is_real = attention_mask.bool()
        mask = mask & is_real & F.pad(is_real[:, :-1], (1, 0), value=True)
    return input_ids.long().masked_fill(~mask, IGNORE_INDEX)


def count_tokens(labels: Tensor, attention_mask: Any, sequence_ids: Tensor | None) -> Tensor:
    """The number of tokens ``[rows, seq_len]`` that are no padding, a scalar; masks of other shapes tell nothing."""
    if isinstance(attention_mask, Tensor) and attention_mask.shape == labels.shape:
        return attention_mask.count_nonzero()
    return (torch.zeros_like(labels) if sequence_ids is None else sequence_ids.expand_as(labels)).ge(0).sum()


def count_sequences(batch: Mapping[str, Any], prefix: str = "") -> int:
    """The number of sequences in packed rows, for which the host waits for the device if nothing else tells it."""
    number, ends = batch.get(prefix + "num_sequences"), batch.get(prefix + "cu_seq_lens_q")
    if number is None:
        number = int(batch[prefix + "sequence_ids"].max()) + 1 if ends is None else len(ends) - 1
    check_integer(f"batch[{prefix + 'num_sequences'!r}]", number, at_least=1)
    return int(number)
