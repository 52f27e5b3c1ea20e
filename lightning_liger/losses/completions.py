"""Which tokens of a batch are scored, and to which completion each belongs: padded rows or packed ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_ops.arguments import check_integer, check_same_device, check_shape, check_tensor, wrong_type, wrong_value
from lightning_liger.losses.sequences import sequence_sums


@dataclass(frozen=True)
class Completions:
    """The scored tokens of ``num_sequences`` completions.

    Args:
        mask: ``[num_rows, seq_len]``, bool: which tokens are scored. Without ``sequence_ids`` each row is a completion.
        sequence_ids: ``[num_rows, seq_len]``, int64: the completion of each token, from 0, for rows that hold several.
            Any number where a token is not scored.
        num_sequences: The number of completions; None takes the number of rows.

    Raises:
        TypeError: For tensors of other dtypes.
        ValueError: For shapes that do not fit, or no number of completions with ``sequence_ids``.
    """

    mask: Tensor
    sequence_ids: Tensor | None = None
    num_sequences: int | None = None

    def __post_init__(self) -> None:
        check_tensor("mask", self.mask)
        if self.mask.dtype != torch.bool:
            raise wrong_type("mask", "a tensor of dtype torch.bool", self.mask)
        if self.mask.ndim != 2:
            raise wrong_value("mask", "a tensor of shape [num_rows, seq_len]", self.mask)
        if self.sequence_ids is None:
            object.__setattr__(self, "num_sequences", self.mask.shape[0])
            return
        check_tensor("sequence_ids", self.sequence_ids)
        if self.sequence_ids.dtype != torch.int64:
            raise wrong_type("sequence_ids", "a tensor of dtype torch.int64", self.sequence_ids)
        check_shape("sequence_ids", self.sequence_ids, self.mask.shape, "that of mask")
        check_same_device("mask", self.mask, sequence_ids=self.sequence_ids)
        check_integer("num_sequences", self.num_sequences, at_least=1)

    @property
    def count(self) -> int:
        """The number of completions."""
        assert self.num_sequences is not None
        return self.num_sequences

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
