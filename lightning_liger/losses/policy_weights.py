"""Factors of policy-gradient losses without gradient: importance of samples, masks of completions and of tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from liger_ops.arguments import check_choice, check_number
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy import safe_exp
from lightning_liger.losses.policy_options import SAMPLING_MODES


def sampling_ratio(
    old_log_probs: Tensor,
    sampling_log_probs: Tensor,
    *,
    mode: str = "token_truncate",
    completions: Completions | None = None,
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """The ratio of the old policy's to the sampler's probability, which corrects for another engine's arithmetic.

    Args:
        old_log_probs: Of the policy that was sampled from, as this process computes them, of each token.
        sampling_log_probs: As the sampler reported them. Where one is NaN, the token's ratio is 1.
        mode: ``"token_truncate"`` and ``"sequence_truncate"`` clamp the ratio of a token, or of a completion, to the
            bounds; ``"token_mask"`` and ``"sequence_mask"`` make it 0 outside them.
        completions: Which tokens form a completion, for ratios of completions.
        clip_min: Lower bound.
        clip_max: Upper bound.

    Returns:
        Of the tokens' shape, ``[num_sequences]`` for ratios of completions. No gradient.

    Raises:
        ValueError: For an unknown mode, and ratios of completions without ``completions``.
    """
    check_choice("mode", mode, SAMPLING_MODES)
    check_number("clip_min", clip_min, at_least=0, optional=True)
    check_number("clip_max", clip_max, at_least=0, optional=True)
    difference = (old_log_probs - sampling_log_probs).detach().nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        if completions is None:
            raise ValueError(f"completions must be given for mode={mode!r}, got None")
        difference = completions.sum(difference)
    ratio = safe_exp(difference)
    if mode.endswith("truncate"):
        return ratio if clip_min is None and clip_max is None else ratio.clamp(clip_min, clip_max)
    if clip_min is not None:
        ratio = ratio.masked_fill(ratio < clip_min, 0.0)
    return ratio if clip_max is None else ratio.masked_fill(ratio > clip_max, 0.0)


def off_policy_mask(
    log_probs: Tensor,
    sampling_log_probs: Tensor,
    advantages: Tensor,
    completions: Completions,
    *,
    threshold: float,
) -> Tensor:
    """Which completions to keep: not those of negative advantage that are far from the sampler.

    arXiv:2512.02556, equation 9.

    Args:
        log_probs: Of the policy, of each token; no gradient is taken.
        sampling_log_probs: Of the sampler, or of the old policy. A token for which it is NaN counts as no difference.
        advantages: ``[num_sequences]``, or of tokens.
        completions: Which tokens form a completion.
        threshold: Largest mean of sampling minus policy log-probability at which a completion is kept.

    Returns:
        bool, of the advantages' shape.
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

    Args:
        entropies: Of each token, not negative.
        mask: Which tokens are scored, bool of the same shape.
        quantile: Share of tokens to keep, TRL's ``top_entropy_quantile``; 1 keeps all.
        gather: Returns a vector of this rank's entropies with those of all other ranks, -1 for tokens that are not
            scored, so that the quantile is that of the whole batch. None takes this rank's.

    Returns:
        bool of the tokens' shape: entropies of at least the (1 - quantile)-quantile, which is exact (linear
        interpolation, as ``torch.quantile``).
    """
    check_number("quantile", quantile, above=0, at_most=1)
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
