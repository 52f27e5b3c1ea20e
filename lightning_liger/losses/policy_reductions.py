"""Reductions of policy-gradient losses: what is summed, and by how many units the sum is divided.

==================================  ==========================================  ==========================
loss type                           sum                                         units
==================================  ==========================================  ==========================
grpo, sapo                          of the means of completions                 completions
bnpo, dapo, cispo, vespo            of tokens                                   tokens
dr_grpo                             of tokens / ``max_completion_length``       completions
luspo                               of tokens                                   completions
rloo                                of completions                              completions
==================================  ==========================================  ==========================

Units are those of the whole optimizer step, on all ranks, so that the loss does not depend on how a batch was split.
TRL divides bnpo by the tokens of each micro-batch, and dapo, cispo and vespo by the share of
``num_items_in_batch`` of an average step; both agree with this where a step is one micro-batch, or all hold as many.
"""

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_options import PolicyOptions


def token_weights(completions: Completions, options: PolicyOptions, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight of each token in the sum, of a shape that broadcasts with the tokens."""
    if options.loss_type in ("grpo", "sapo"):
        return completions.spread(1 / completions.lengths.to(dtype).clamp(min=1))
    weight = 1.0 if options.max_completion_length is None else 1 / options.max_completion_length
    weight = weight if options.loss_type == "dr_grpo" else 1.0
    return torch.full((1, 1), weight, dtype=dtype, device=completions.mask.device)


def num_units(completions: Completions, options: PolicyOptions) -> Tensor:
    """The number of a batch's units, a scalar: tokens or completions."""
    if options.counts_tokens:
        return completions.mask.sum()
    return torch.full((), completions.count, device=completions.mask.device)
