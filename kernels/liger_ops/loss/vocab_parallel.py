"""A vocabulary whose logits are spread over the ranks of a process group.

Each rank holds some rows of the head and computes their logits, for the same tokens; a few numbers for each token and
rank are exchanged (see :mod:`liger_ops.loss.rows`), in one collective for each chunk of tokens, and logits are never
sent. One more sums the gradient of the hidden states, of which each rank has a part. The split is that of Megatron-LM
(arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from liger_ops.arguments import check_bool, check_integer, wrong_type


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head that this rank holds; the other ranks of the group hold the others.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For a vocabulary without classes.
    """

    group: dist.ProcessGroup
    """The ranks that share the head; each has the same tokens."""
    start: int
    """The class of this rank's first row."""
    vocab_size: int
    """Classes of all ranks together."""
    sums_input_gradient: bool = True
    """Whether the gradient of the hidden states is summed over ranks. Otherwise it is this rank's part, and the caller
    sums it."""

    def __post_init__(self) -> None:
        if not isinstance(self.group, dist.ProcessGroup):
            raise wrong_type("group", "a torch.distributed.ProcessGroup", self.group)
        check_integer("start", self.start)
        check_integer("vocab_size", self.vocab_size, at_least=1)
        check_bool("sums_input_gradient", self.sums_input_gradient)

    def check(self, num_rows: int) -> None:
        """Raises a ValueError if a shard of ``num_rows`` rows is not inside the vocabulary."""
        if not 0 <= self.start <= self.start + num_rows <= self.vocab_size:
            raise ValueError(
                f"vocab_shard must lie within its vocab_size = {self.vocab_size}, got {num_rows} rows of linear_weight"
                f" from start = {self.start} on"
            )

    def sum_input_gradients(self, *gradients: Tensor) -> None:
        """Sums gradients over ranks in place; skips empty tensors."""
        for gradient in gradients:
            if self.sums_input_gradient and gradient.numel():
                dist.all_reduce(gradient, group=self.group)
