"""Steps of Medusa's heads (arXiv:2401.10774) as they are written with plain PyTorch and with liger-kernel."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import MedusaHeads

DECAY = 0.8
COEFFICIENT = 0.2
"""Of all heads in stage 2."""

HeadLoss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""Hidden states ``[num_tokens, hidden_size]``, the projection and labels to the mean cross entropy."""


def _eager(hidden_states: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden_states).float(), labels)


def _liger_kernel(hidden_states: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(head.weight, hidden_states, labels)


HEAD_LOSSES: dict[str, HeadLoss] = {"hf": _eager, "liger_kernel": _liger_kernel}
"""By implementation of an arm; ours trains with ``LigerMedusaMixin``."""


def shifted(ids: Tensor, offset: int) -> Tensor:
    """Of each position, the token ``offset`` positions later, -100 where there is none; flat."""
    return F.pad(ids[:, offset:], (0, offset), value=-100).flatten()


def medusa_loss(model: nn.Module, heads: MedusaHeads, ids: Tensor, stage: int, head_loss: HeadLoss) -> Tensor:
    """The loss of stage 1 (the heads over a frozen model) or 2 (the next token too, all trained).

    Sums over tokens are divided by the number of tokens that have a next one.
    """
    seq_len = ids.shape[1]
    with torch.set_grad_enabled(stage == 2):
        hidden_states = model.model(input_ids=ids).last_hidden_state
    total = hidden_states.new_zeros((), dtype=torch.float32)
    for number, (block, projection) in enumerate(heads, start=1):
        found = head_loss(block(hidden_states).flatten(0, 1), projection, shifted(ids, number + 1))
        total = total + DECAY**number * found * ((seq_len - number - 1) / (seq_len - 1))
    if stage == 1:
        return total
    return head_loss(hidden_states.flatten(0, 1), model.lm_head, shifted(ids, 1)) + COEFFICIENT * total
