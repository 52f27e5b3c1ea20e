"""Scored tokens of padded or packed rows, and the sequence to which each belongs.

``sequence_ids`` number the sequence of each token, ``[rows, seq_len]`` integers, any number for none; a sequence's
tokens are next to each other. None means that each row is one sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def sequence_sums(values: Tensor, sequence_ids: Tensor | None = None, num_sequences: int | None = None) -> Tensor:
    """The sum of each sequence's values, which are 0 where not scored, ``[num_sequences]``; at least float32.

    The order of summation is fixed, so results are the same in every run, on every device.
    """
    values = values if values.dtype == torch.float64 else values.float()
    if sequence_ids is None:
        return values.sum(-1)
    flat, numbers = sequence_ids.flatten(), torch.arange(num_sequences or 0, device=values.device)
    return torch.where(flat == numbers[:, None], values.flatten(), 0).sum(-1)


@dataclass(frozen=True)
class Completions:
    """The scored tokens of several completions: ``mask`` is bool, ``[rows, seq_len]``."""

    mask: Tensor
    sequence_ids: Tensor | None = None
    num_sequences: int | None = None
    """The number of completions; None for that of rows."""

    @property
    def count(self) -> int:
        return len(self.mask) if self.num_sequences is None else self.num_sequences

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each completion's scored tokens, ``[num_sequences]``; other tokens may hold anything, also NaN."""
        return sequence_sums(torch.where(self.mask, values, 0.0), self.sequence_ids, self.count)

    @property
    def lengths(self) -> Tensor:
        """The number of each completion's scored tokens, ``[num_sequences]``, float32."""
        return self.sum(torch.ones((), device=self.mask.device))

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each completion's scored tokens, ``[num_sequences]``, 0 without any."""
        return self.sum(values) / self.lengths.clamp(min=1)

    @property
    def positions(self) -> Tensor:
        """The number of each scored token among those of its completion, from 1; any number for others."""
        counted = self.mask.cumsum(-1)
        if self.sequence_ids is None:
            return counted
        starts = torch.ones_like(self.mask)
        starts[..., 1:] = self.sequence_ids.diff(dim=-1) != 0
        return counted - torch.where(starts, counted - self.mask.long(), 0).cummax(-1).values

    def spread(self, values: Tensor) -> Tensor:
        """``[num_sequences]`` as one value for each token, in a shape that broadcasts with the mask's."""
        return values[:, None] if self.sequence_ids is None else values[self.sequence_ids.clamp(0, self.count - 1)]

    def length_desensitized(self, alpha: float) -> Tensor:
        """The weights of tokens in LD-DPO (arXiv:2409.06411), float32; of B chosen and then B rejected completions.

        1 up to the length of the shorter completion of a pair, then ``alpha``; 0 for tokens that are not scored.
        """
        shared = torch.minimum(*self.lengths.chunk(2)).repeat(2)
        weights = torch.full(self.mask.shape, alpha, dtype=torch.float32, device=self.mask.device)
        return weights.masked_fill_(self.positions <= self.spread(shared), 1.0) * self.mask
