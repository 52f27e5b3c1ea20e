"""Sums of per-token values over sequences, in padded and in packed rows."""

import torch
from torch import Tensor

from liger_ops.arguments import check_integer, check_shape, check_tensor


def sequence_sums(values: Tensor, sequence_ids: Tensor | None = None, num_sequences: int | None = None) -> Tensor:
    """The sum of each sequence's values, in float32 (float64 for float64 values).

    The order of summation is fixed, so results are the same in every run, on every device.

    Args:
        values: ``[rows, seq_len]``, 0 where a token is not scored; differentiable.
        sequence_ids: The sequence of each token, ``[rows, seq_len]`` integers; negative for none. None means that each
            row is one sequence.
        num_sequences: The number of sequences, needed with ``sequence_ids``.

    Returns:
        ``[num_sequences]``.

    Raises:
        TypeError: If ``values`` or ``sequence_ids`` is no tensor, or ``num_sequences`` no integer.
        ValueError: If shapes do not fit.
    """
    check_tensor("values", values)
    values = values if values.dtype == torch.float64 else values.float()
    if sequence_ids is None:
        return values.sum(-1)
    check_tensor("sequence_ids", sequence_ids)
    check_shape("sequence_ids", sequence_ids, values.shape, "one for each value")
    check_integer("num_sequences", num_sequences, at_least=1)
    flat, numbers = sequence_ids.flatten(), torch.arange(num_sequences or 0, device=values.device)
    return torch.where(flat == numbers[:, None], values.flatten(), 0).sum(-1)


def completion_positions(mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """The number of each scored token among those of its sequence, from 1; 0 for others.

    Args:
        mask: Whether each token is scored, ``[rows, seq_len]``, bool.
        sequence_ids: The sequence of each token, whose tokens are next to each other; None if each row is one.

    Returns:
        ``[rows, seq_len]``, int64.
    """
    check_tensor("mask", mask)
    counted = mask.cumsum(-1)
    if sequence_ids is not None:
        check_shape("sequence_ids", sequence_ids, mask.shape, "one for each token")
        starts = torch.ones_like(mask)
        starts[..., 1:] = sequence_ids.diff(dim=-1) != 0
        before = torch.where(starts, counted - mask.long(), 0).cummax(-1).values
        counted = counted - before
    return counted * mask


def length_desensitized(mask: Tensor, num_tokens: Tensor, alpha: float, sequence_ids: Tensor | None = None) -> Tensor:
    """The weights of tokens in LD-DPO (arXiv:2409.06411): 1 up to the length of the shorter completion of a pair.

    Args:
        mask: Whether each token is scored, ``[rows, seq_len]``, bool.
        num_tokens: The number of scored tokens of each sequence, ``[2B]``: B chosen and then B rejected ones.
        alpha: The weight of the longer completion's other tokens.
        sequence_ids: The sequence of each token; None if each row is one.

    Returns:
        ``[rows, seq_len]`` in float32; 0 for tokens that are not scored.
    """
    shared = torch.minimum(*num_tokens.chunk(2)).repeat(2)
    of_token = shared[:, None] if sequence_ids is None else shared[sequence_ids.clamp(min=0)]
    positions = completion_positions(mask, sequence_ids)
    return torch.where(positions <= of_token, 1.0, alpha) * mask
