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
