"""Values of tokens ``[rows, seq_len]`` by the sequences that they belong to, in padded and in packed rows.

``sequence_ids`` number the sequence of each token, ``[rows, seq_len]`` integers, negative for none; a sequence's tokens
are next to each other. None means that each row is one sequence.
"""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, sequence_ids: Tensor | None = None, num_sequences: int | None = None) -> Tensor:
    """The sum of each sequence's values, ``[num_sequences]``, differentiable; float32, or float64 for float64 values.

    Values are 0 where a token is not scored. The order of summation is fixed, so results are the same in every run, on
    every device.
    """
    values = values if values.dtype == torch.float64 else values.float()
    if sequence_ids is None:
        return values.sum(-1)
    flat, numbers = sequence_ids.flatten(), torch.arange(num_sequences or 0, device=values.device)
    return torch.where(flat == numbers[:, None], values.flatten(), 0).sum(-1)


def completion_positions(mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """The number of each scored token among those of its sequence, from 1; 0 for others. ``mask`` is bool."""
    counted = mask.cumsum(-1)
    if sequence_ids is not None:
        starts = torch.ones_like(mask)
        starts[..., 1:] = sequence_ids.diff(dim=-1) != 0
        before = torch.where(starts, counted - mask.long(), 0).cummax(-1).values
        counted = counted - before
    return counted * mask


def length_desensitized(mask: Tensor, num_tokens: Tensor, alpha: float, sequence_ids: Tensor | None = None) -> Tensor:
    """The weights of tokens in LD-DPO (arXiv:2409.06411): 1 up to the length of the shorter completion of a pair.

    Args:
        mask: Whether each token is scored, bool.
        num_tokens: The number of scored tokens of each sequence, ``[2B]``: B chosen and then B rejected ones.
        alpha: The weight of the longer completion's other tokens.
        sequence_ids: See the module.

    Returns:
        ``[rows, seq_len]`` in float32; 0 for tokens that are not scored.
    """
    shared = torch.minimum(*num_tokens.chunk(2)).repeat(2)
    of_token = shared[:, None] if sequence_ids is None else shared[sequence_ids.clamp(min=0)]
    return torch.where(completion_positions(mask, sequence_ids) <= of_token, 1.0, alpha) * mask
