"""Losses of log-probabilities, the same for every implementation that computes log-probabilities only."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses.data import Data

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states, weight and labels to log-probabilities of the labels."""

DPO_BETA = 0.1
CLIP_LOW, CLIP_HIGH = 0.2, 0.2


def weighted_sum(log_probs: LogProbs, data: Data) -> Tensor:
    """The sum of log-probabilities with a given upstream gradient each."""
    return -(log_probs(data.hidden_states, data.weight, data.labels) * data.coefficients).sum()


def dpo(log_probs: LogProbs, data: Data) -> Tensor:
    """The sigmoid loss of arXiv:2305.18290, equation 7, with the reference model's forward pass of the head."""
    sizes = data.sizes
    with torch.no_grad():
        reference = log_probs(data.other_hidden_states, data.other_weight, data.labels)
    ratios = log_probs(data.hidden_states, data.weight, data.labels) - reference
    chosen, rejected = ratios.view(sizes.num_sequences, sizes.seq_len).sum(-1).chunk(2)
    return -F.logsigmoid(DPO_BETA * (chosen - rejected)).mean()


def clipped_token_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """The clipped surrogate of each token (arXiv:1707.06347, equation 7)."""
    ratio = (log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)


def grpo(log_probs: LogProbs, data: Data) -> Tensor:
    """The mean over all tokens (arXiv:2503.14476, equation 8), without a reference model."""
    advantages = data.advantages.repeat_interleave(data.sizes.seq_len)
    found = log_probs(data.hidden_states, data.weight, data.labels)
    return clipped_token_loss(found, data.old_log_probs, advantages).mean()
