"""Which tokens of a batch are scored, and to which completion each belongs: padded rows or packed ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_liger.losses.sequences import sequence_sums


@dataclass(frozen=True)
class Completions:
    """The scored tokens of several completions."""

    mask: Tensor
    """``[num_rows, seq_len]``, bool: which tokens are scored."""
    sequence_ids: Tensor | None = None
    """``[num_rows, seq_len]``, int64: the completion of each token, from 0, and any number where a token is not scored;
    None if each row is a completion."""
    num_sequences: int | None = None
    """The number of completions; None for that of rows."""

    @property
    def count(self) -> int:
        """The number of completions."""
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

    def last(self, values: Tensor) -> Tensor:
        """The value at each completion's last scored token, ``[num_sequences]``; any token's without scored ones."""
        places = torch.arange(self.mask.numel(), device=self.mask.device).view_as(self.mask)
        ids = self.sequence_ids
        if ids is None:
            ids = torch.arange(len(self.mask), device=self.mask.device)[:, None].expand_as(self.mask)
        found = torch.zeros(self.count + 1, dtype=torch.int64, device=self.mask.device)
        into = torch.where(self.mask, ids, self.count).flatten()
        return values.flatten()[found.scatter_reduce(0, into, places.flatten(), "amax")[: self.count]]

    def spread(self, values: Tensor) -> Tensor:
        """``[num_sequences]`` as one value for each token, in a shape that broadcasts with the mask's."""
        return values[:, None] if self.sequence_ids is None else values[self.sequence_ids.clamp(0, self.count - 1)]
