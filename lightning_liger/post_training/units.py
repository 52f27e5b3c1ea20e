"""Losses of units of tokens, such as preference pairs, taken unit by unit where the head's gradient is computed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_ops import TokenScores
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.lazy.scores import token_loss

MAX_UNIT_BYTES = 2**30  # of the logits of a unit, which are in memory at once


def can_take_units(logits: Tensor, max_unit_tokens: int) -> bool:
    """Whether it saves a product of the head's size to take units, of at most so many tokens, with all their logits."""
    if not torch.is_grad_enabled() or not isinstance(logits, LazyLogits):
        return False
    unit_bytes = max_unit_tokens * logits.shape[-1] * logits.element_size()
    return logits.head.requires_grad and unit_bytes <= MAX_UNIT_BYTES


def unit_loss(
    logits: Tensor,
    labels: Tensor,
    units: Tensor,
    losses: Callable[[TokenScores], Tensor],
    *,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
) -> tuple[Tensor, TokenScores]:
    """The sum of a loss over units of tokens, differentiable; and the scores of all tokens, which are not.

    Args:
        logits: ``[..., vocab_size]``, lazy or materialized.
        labels: ``[...]``, int64, -100 for tokens without a label.
        units: ``[...]``, int64: the unit of each token, from 0.
        losses: From the scores of all tokens, ``[...]`` each, to the losses of all units, each of which depends on its
            own tokens only. It is called for some units at a time; the scores of the others' tokens are 0 then.
        outputs: The scores it gets.
        detach: Those that it gets without gradient.
    """

    def chunk_losses(scores: TokenScores, index: Tensor) -> Tensor:
        whole = (
            None if each is None else each.new_zeros(labels.numel()).index_put((index,), each).view(labels.shape)
            for each in scores
        )
        total = losses(TokenScores(*whole)).sum()
        return torch.cat([total[None], total.new_zeros(len(index) - 1)])  # which token has it does not matter

    # Its gradient is that of the sum, but its value counts units with scores of 0.
    total, scores = token_loss(logits, labels, chunk_losses, units=units, outputs=outputs, detach=detach)
    with torch.no_grad():
        value = losses(scores).sum()
    return value.to(total.dtype) + (total - total.detach()), scores
