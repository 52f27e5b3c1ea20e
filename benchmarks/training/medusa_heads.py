"""Medusa's heads (arXiv:2401.10774) over a model, with the loss of each arm."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_ops

DECAY = 0.8
COEFFICIENT = 0.2
"""Of all heads in stage 2."""

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states ``[num_tokens, hidden_size]``, weight and labels to the mean cross entropy."""


def _eager(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_states, weight).float(), labels)


def _liger_kernel(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden_states, labels)


HEAD_LOSSES: dict[str, HeadLoss] = {
    "hf": _eager,
    "liger_kernel": _liger_kernel,
    "ours": liger_ops.linear_cross_entropy,
}
"""By implementation of an arm."""


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Heads with one residual block and an unembedding each; head k predicts the token k + 1 positions ahead."""

    def __init__(self, num_heads: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(num_heads))
        self.unembeddings = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_heads))

    def loss(self, hidden_states: Tensor, labels: Tensor, head_loss: HeadLoss) -> Tensor:
        """The weighted sum of the heads' cross entropies.

        Args:
            hidden_states: ``[batch_size, seq_len, hidden_size]``.
            labels: The token ids, ``[batch_size, seq_len]``.
            head_loss: The implementation.
        """
        total = hidden_states.new_zeros((), dtype=torch.float32)
        for number, (block, unembedding) in enumerate(zip(self.blocks, self.unembeddings, strict=True), start=1):
            targets = shifted(labels, number + 1)
            found = head_loss(block(hidden_states).flatten(0, 1), unembedding.weight, targets)
            total = total + DECAY**number * found
        return total


def shifted(labels: Tensor, offset: int) -> Tensor:
    """Of each position, the label ``offset`` positions later, -100 where there is none; flat."""
    return F.pad(labels[:, offset:], (0, offset), value=-100).flatten()


def medusa_loss(model: nn.Module, heads: MedusaHeads, ids: Tensor, stage: int, head_loss: HeadLoss) -> Tensor:
    """The loss of stage 1 (a frozen model) or 2 (the next token and the heads, all trained)."""
    with torch.set_grad_enabled(stage == 2):
        hidden_states = model.model(input_ids=ids).last_hidden_state
    of_heads = heads.loss(hidden_states, ids, head_loss)
    if stage == 1:
        return of_heads
    next_token = head_loss(hidden_states.flatten(0, 1), model.lm_head.weight, shifted(ids, 1))
    return next_token + COEFFICIENT * of_heads
