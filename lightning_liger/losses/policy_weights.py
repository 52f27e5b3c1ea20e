"""Factors of policy-gradient losses without gradient: importance of samples, masks of completions and of tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy import safe_exp
from lightning_liger.losses.policy_options import PolicyOptions


def sampling_ratio(
    old_log_probs: Tensor, sampling_log_probs: Tensor, options: PolicyOptions, completions: Completions | None = None
) -> Tensor:
    """The ratio of the old policy's to the sampler's probability, which corrects for another engine's arithmetic.

    Of the tokens' shape, ``[num_sequences]`` for ratios of completions. A token whose ``sampling_log_probs`` is NaN has
    the ratio 1.
    """
    mode, low = options.vllm_importance_sampling_mode, options.vllm_importance_sampling_clip_min
    high = options.vllm_importance_sampling_clip_max
    difference = (old_log_probs - sampling_log_probs).detach().nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        assert completions is not None
        difference = completions.sum(difference)
    ratio = safe_exp(difference)
    clamped = ratio if low is None and high is None else ratio.clamp(low, high)
    return clamped if mode.endswith("truncate") else ratio.where(clamped == ratio, 0.0)


def off_policy_mask(
    log_probs: Tensor, sampling_log_probs: Tensor, advantages: Tensor, completions: Completions, threshold: float
) -> Tensor:
    """Which completions to keep, of the advantages' shape: not those of negative advantage far from the sampler.

    That is where the mean of sampling minus policy log-probability is above ``threshold`` (arXiv:2512.02556, equation
    9). A token whose sampling log-probability is NaN counts as no difference.
    """
    mean = completions.mean((sampling_log_probs - log_probs.detach()).nan_to_num(nan=0.0))
    is_near = mean <= threshold
    return (advantages >= 0) | (completions.spread(is_near) if advantages.ndim > 1 else is_near)


def num_top_entropies(num_tokens: Tensor, quantile: float) -> Tensor:
    """How many of so many scored tokens :func:`top_entropy_mask` keeps if no two entropies are equal, a scalar."""
    position = (1 - quantile) * (num_tokens - 1).clamp(min=0).double()
    return num_tokens - (position - 1e-7).ceil().long()  # a rounding error is no further token


def top_entropy_mask(
    entropies: Tensor, mask: Tensor, *, quantile: float, gather: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The scored tokens of the highest entropy, a share ``quantile`` of them (arXiv:2506.01939).

    Those of at least the (1 - quantile)-quantile, which is exact (linear interpolation, as ``torch.quantile``).
    ``gather`` returns a vector of this rank's entropies with those of all other ranks, -1 for tokens that are not
    scored, so that the quantile is that of the whole batch.
    """
    known = entropies.detach().float().clamp(min=0)  # rounding may make one negative
    values = torch.where(mask, known, -1.0).flatten()
    if gather is not None:
        values = gather(values).flatten()
    if not values.numel():
        return mask
    ranked = values.sort().values  # tokens that are not scored come first; no number of tokens reaches the host
    num_scored = (values >= 0).sum()
    position = (1 - quantile) * (num_scored - 1).clamp(min=0).double()
    first = values.numel() - num_scored
    last = values.numel() - 1
    lower, upper = (ranked[(first + place.long()).clamp(max=last)] for place in (position.floor(), position.ceil()))
    threshold = torch.lerp(lower.double(), upper.double(), position - position.floor()).float()
    return mask & (known >= threshold)
