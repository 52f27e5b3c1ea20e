"""Labels of packed rows, and sharding of rows over ranks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_floating, check_integer, wrong_type, wrong_value

_PER_TOKEN = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "seq_idx")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_WHOLE_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def shift_labels(labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """The label that each token predicts: that of the next token of the same document.

    Args:
        labels: ``[..., seq_len]``, signed integers, not shifted; -100 is ignored.
        position_ids: For rows of several documents, the position of each token in its document: ``[..., seq_len]``,
            integers, with as many dimensions as the labels or fewer. A document starts wherever the position does not
            increase by one. None means one document per row.

    Returns:
        ``[..., seq_len]`` like the labels. The last token of each document has -100.

    Raises:
        TypeError: If one of the two is no tensor of signed integers.
        ValueError: If the shape or the device of ``position_ids`` does not fit the labels.
    """
    _check_integers("labels", labels)
    if not labels.dim():
        raise wrong_value("labels", "a tensor of shape [..., seq_len]", labels)
    targets = F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    if position_ids is None:
        return targets
    _check_positions(position_ids, labels, labels.shape)
    ends = F.pad(position_ids.diff(dim=-1) != 1, (0, 1), value=True)
    return targets.masked_fill(ends, IGNORE_INDEX)


def split_sequence(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The shard of each row that rank ``rank`` of ``size`` computes; together they are the whole rows.

    Args:
        batch: The whole rows: ``input_ids`` ``[batch_size, seq_len]`` or ``inputs_embeds``
            ``[batch_size, seq_len, hidden_size]``, at most one of ``labels`` and ``shift_labels`` (see
            :func:`shift_labels`), ``position_ids`` and maybe ``seq_idx`` if a row holds several documents, and flash
            attention's ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` of whole rows, which
            stay whole.
        rank: The rank, from 0.
        size: The number of ranks; must divide seq_len.

    Returns:
        The same keys, each tensor ``[batch_size, seq_len / size, ...]``. ``position_ids`` are always there, and
        ``shift_labels`` replace ``labels``: the last token of a shard predicts the first token of the next one.

    Raises:
        TypeError: For values of other types.
        ValueError: For a key that cannot be split, shapes that do not fit, or a rank or size out of range.
    """
    check_integer("rank", rank)
    check_integer("size", size)
    if not isinstance(batch, Mapping):
        raise wrong_type("batch", "a dict of tensors", batch)
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank={rank} and size={size}")
    whole = {key: value for key, value in batch.items() if value is not None}
    tokens = whole.get("inputs_embeds", whole.get("input_ids"))
    if tokens is None:
        raise ValueError(f"batch must have 'input_ids' or 'inputs_embeds' to be split over ranks, got {list(batch)}")
    if unknown := [key for key in whole if key not in _PER_TOKEN + _WHOLE_ROW]:
        raise ValueError(
            f"the batch has {unknown}, which cannot be split over ranks; expected only"
            f" {_PER_TOKEN + _WHOLE_ROW}. Padding on the right whose labels are -100 needs no 'attention_mask'"
        )
    for first, second in (("labels", "shift_labels"), ("input_ids", "inputs_embeds")):
        if first in whole and second in whole:
            raise ValueError(f"the batch has both {first!r} and {second!r}: expected one of them")
    for key in filter(whole.__contains__, _PER_TOKEN):
        name, value, has_states = f"batch[{key!r}]", whole[key], key == "inputs_embeds"
        (check_floating if has_states else _check_integers)(name, value)
        if value.dim() != 2 + has_states:
            expected = "[batch_size, seq_len" + (", hidden_size]" if has_states else "]")
            raise wrong_value(name, f"a tensor of shape {expected}", value)
    batch_size, seq_len = tokens.shape[:2]
    if seq_len % size:
        raise ValueError(f"size={size} must divide the {seq_len} tokens of a row: pad the rows")
    positions = whole.setdefault("position_ids", torch.arange(seq_len, device=tokens.device)[None])
    _check_positions(positions, tokens, (batch_size, seq_len))
    if "labels" in whole:
        whole["shift_labels"] = shift_labels(whole.pop("labels"), batch.get("position_ids"))
    length = seq_len // size
    for key in filter(whole.__contains__, _PER_TOKEN):
        value = whole[key]
        if value.shape[1] != seq_len or (key != "position_ids" and value.shape[0] != batch_size):
            raise ValueError(f"{key} must hold {seq_len} tokens per row in {batch_size} rows, got {tuple(value.shape)}")
        whole[key] = value.narrow(1, rank * length, length).contiguous()
    return whole


def _check_integers(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        raise wrong_type(name, "a tensor of signed integers", value)


def _check_positions(position_ids: Any, tokens: Tensor, shape: tuple[int, ...]) -> None:
    _check_integers("position_ids", position_ids)
    own = tuple(position_ids.shape)
    fits = own[-1:] == tuple(shape[-1:]) and all(
        size in (1, wanted) for size, wanted in zip(own[-2::-1], shape[-2::-1], strict=False)
    )
    if not fits or len(own) > len(shape):
        raise ValueError(f"position_ids must hold one position for each of {tuple(shape)} tokens, got shape {own}")
    if position_ids.device != tokens.device:
        raise ValueError(f"position_ids must be on {tokens.device} as the tokens are, got {position_ids.device}")
