"""Rows of tokens: what each token is to predict, and the piece of a row that one of several ranks computes."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import IGNORE_INDEX

_PER_TOKEN = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")
_OF_THE_WHOLE_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def shift_labels(labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """What each token is to predict: the label of the next token of its own document.

    Args:
        labels: ``[..., seq_len]``, int64, each token's own; -100 is ignored.
        position_ids: Where several documents follow each other in a row, the positions of tokens within theirs:
            ``[..., seq_len]`` with the labels' or fewer dimensions, integers. A document starts wherever they do not go
            on by one. None is one document a row.

    Returns:
        ``[..., seq_len]`` like the labels. Last tokens, which have nothing to predict, get -100.

    Raises:
        ValueError: If ``position_ids`` do not fit the labels.
    """
    targets = F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    if position_ids is None:
        return targets
    _check_positions(position_ids, labels.shape)
    ends = F.pad(position_ids.diff(dim=-1) != 1, (0, 1), value=True)
    return targets.masked_fill(ends, IGNORE_INDEX)


def split_sequence(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The piece of each row that one of ``size`` ranks computes, which together hold the whole rows.

    Args:
        batch: The whole rows: ``input_ids`` ``[batch_size, seq_len]`` or ``inputs_embeds``
            ``[batch_size, seq_len, hidden_size]``, at most one of ``labels`` and ``shift_labels`` (see
            :func:`shift_labels`), ``position_ids`` if a row holds several documents, and flash attention's
            ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` of whole rows, which stay whole.
        rank: Whose piece, from 0.
        size: Number of pieces, which must divide seq_len.

    Returns:
        The same keys, each tensor ``[batch_size, seq_len / size, ...]``, with ``position_ids`` in any case, and
        ``shift_labels`` in place of ``labels``: a piece's last token predicts the first of the next piece.

    Raises:
        ValueError: For a key that cannot be split, shapes that do not fit, or a rank or size out of range.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank={rank} and size={size}")
    tokens = batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]
    if tokens is None:
        raise ValueError(f"a batch whose rows are split needs 'input_ids' or 'inputs_embeds', got {sorted(batch)}")
    unknown = sorted(key for key in batch if key not in _PER_TOKEN + _OF_THE_WHOLE_ROW and batch[key] is not None)
    if unknown:
        raise ValueError(
            f"the batch has {unknown}, which cannot be split over ranks; expected only"
            f" {_PER_TOKEN + _OF_THE_WHOLE_ROW}. Padding on the right whose labels are -100 needs no 'attention_mask'"
        )
    if batch.get("labels") is not None and batch.get("shift_labels") is not None:
        raise ValueError("the batch has both 'labels' and 'shift_labels': expected one of them")
    batch_size, seq_len = tokens.shape[:2]
    if seq_len % size:
        raise ValueError(f"size={size} ranks cannot have equal pieces of rows of {seq_len} tokens: pad the rows")
    whole = {key: value for key, value in batch.items() if value is not None}
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(seq_len, device=tokens.device)[None]
    _check_positions(whole["position_ids"], (batch_size, seq_len))
    if "labels" in whole:
        whole["shift_labels"] = shift_labels(whole.pop("labels"), batch.get("position_ids"))
    length = seq_len // size
    pieces = {}
    for key, value in whole.items():
        if key in _PER_TOKEN:
            if value.shape[1] != seq_len:
                raise ValueError(f"{key} must hold {seq_len} tokens a row as the inputs do, got {tuple(value.shape)}")
            value = value.narrow(1, rank * length, length).contiguous()
        pieces[key] = value
    return pieces


def _check_positions(position_ids: Tensor, shape: tuple[int, ...]) -> None:
    own = tuple(position_ids.shape)
    fits = own[-1:] == tuple(shape[-1:]) and all(
        size in (1, wanted) for size, wanted in zip(own[-2::-1], shape[-2::-1], strict=False)
    )
    if not fits or len(own) > len(shape):
        raise ValueError(f"position_ids must hold one position for each of {tuple(shape)} tokens, got shape {own}")
