"""Policy-gradient losses of tokens: GRPO and its variants, as functions of log-probabilities.

l is the log-probability of a token under the policy, old that at sampling time (l without gradient if there is none),
ref that under a reference, A the advantage. r = exp(l - old), or for a whole completion the geometric mean of its
tokens' r (GSPO, arXiv:2507.18071). Tensors of tokens have any shape, ``[num_sequences, seq_len]`` or ``[num_tokens]``,
and all functions are elementwise unless they take :class:`Completions`.

=========  ====================================================================================  ===================
clipped    -min(r A, clamp(r, 1 - epsilon, 1 + epsilon_high) A), r at most delta in the first    PPO, arXiv:1707.06347
cispo      -sg[min(r, epsilon_high)] A l                                                         arXiv:2506.13585
sapo       -(4 / t) sigmoid(t (r - 1)) A, t by the sign of A                                     arXiv:2511.20347
vespo      -sg[phi(w)] A l, w the product of a completion's r                                    arXiv:2602.10693
rloo       PPO's objective of the product of a completion's r                                    arXiv:2402.14740
=========  ====================================================================================  ===================

The loss of a batch is the sum of

==================================  ==========================================  ==========================
loss type                           sum                                         divided by the number of
==================================  ==========================================  ==========================
grpo, sapo                          of the means of completions                 completions
bnpo, dapo, cispo, vespo            of tokens                                   tokens
dr_grpo                             of tokens / ``max_completion_length``       completions
luspo                               of tokens                                   completions
rloo                                of completions                              completions
==================================  ==========================================  ==========================

The numbers are those of the whole optimizer step, on all ranks, so that the loss does not depend on how a batch was
split. TRL divides bnpo by the tokens of each micro-batch, and dapo, cispo and vespo by the share of
``num_items_in_batch`` of an average step; both agree with this where a step is one micro-batch, or all hold as many.

Log-ratios are clamped to +-40 before ``exp``, far outside any trust region: products of two stay finite in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_options import CLIPPED, PolicyOptions

_MAX_LOG_RATIO = 40.0
_VESPO_LOW, _VESPO_HIGH = -18.420680743952367, 20.0  # log(1e-8), as the paper's code


def safe_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to +-40."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, options: PolicyOptions) -> Tensor:
    """PPO's clipped objective, negated; with ``delta`` clipped on both sides (arXiv:2505.07291)."""
    clipped = ratio.clamp(1 - options.epsilon_low, 1 + options.bound_high)
    bounded = ratio if options.delta is None else ratio.clamp(max=options.delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def vespo_weights(
    log_ratio: Tensor, advantages: Tensor, completions: Completions, options: PolicyOptions,
    sampling_ratio: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """VESPO's weights (arXiv:2602.10693), of the advantages' shape: phi(w) = exp(lambda + k log w - lambda w).

    The advantage's sign chooses k and lambda. w is the product of the ratios of a completion's tokens, and of those of
    old to sampling probability if given. No gradient.
    """
    log_w = completions.sum(log_ratio.detach().clamp(-20, 20))
    if sampling_ratio is not None:
        log_w = log_w + completions.sum(sampling_ratio.log().clamp(_VESPO_LOW, 20))
    log_w = log_w.clamp(_VESPO_LOW, _VESPO_HIGH)
    if advantages.ndim > 1:
        log_w = completions.spread(log_w)
    k = _by_sign(advantages >= 0, options.vespo_k_pos, options.vespo_k_neg, log_w)
    decay = _by_sign(advantages >= 0, max(options.vespo_lambda_pos, 1e-4), max(options.vespo_lambda_neg, 1e-4), log_w)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Schulman's estimate k3 of KL(policy || reference) of tokens that the policy sampled, never negative.

    ``exp(ref - l) - (ref - l) - 1`` (http://joschu.net/blog/kl-approx.html).
    """
    difference = (ref_log_probs - log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def policy_terms(
    log_probs: Tensor,
    options: PolicyOptions,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    *,
    log_weights: Tensor | None = None,
    factor: Tensor | None = None,
    phi: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The losses of tokens, before they are reduced, and the divergence from the reference in them if there is one.

    For all loss types but ``"rloo"``, and any part of the tokens. ``log_weights`` are the logarithms of ratios of
    completions in place of those of tokens, ``factor`` is that of the objective, without gradient, ``phi`` VESPO's.
    """
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio = safe_exp(log_probs - old if log_weights is None else log_weights)
    if options.loss_type in CLIPPED:
        losses = clipped_loss(ratio, advantages, options)
    elif options.loss_type == "cispo":
        losses = -ratio.detach().clamp(max=options.bound_high) * advantages * log_probs
    elif options.loss_type == "sapo":
        t = _by_sign(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, ratio)
        losses = -(4 / t) * torch.sigmoid(t * (ratio - 1)) * advantages
    elif options.loss_type == "vespo" and phi is not None:
        losses = -phi * advantages * log_probs
    else:
        raise ValueError(f"loss_type={options.loss_type!r} has no per-token losses without per-completion weights")
    if factor is not None:
        losses = losses * factor
    kl = None
    if options.beta and ref_log_probs is not None:
        kl = kl_estimate(log_probs, ref_log_probs)
        kl = kl * ratio if options.use_bias_correction_kl else kl
        losses = losses + options.beta * kl
    return losses, kl


def token_weights(completions: Completions, options: PolicyOptions, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight of each token in the sum, of a shape that broadcasts with the tokens."""
    if options.loss_type in ("grpo", "sapo"):
        return completions.spread(1 / completions.lengths.to(dtype).clamp(min=1))
    length = options.max_completion_length if options.loss_type == "dr_grpo" else None
    return torch.full((1, 1), 1 / (length or 1), dtype=dtype, device=completions.mask.device)


def num_items(completions: Completions, options: PolicyOptions) -> Tensor:
    """The number of tokens or of completions that the sum over a batch is divided by, a scalar."""
    mask = completions.mask
    return mask.sum() if options.counts_tokens else torch.full((), completions.count, device=mask.device)


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


def _by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """``yes`` or ``no`` by ``condition``, in the dtype of ``like``."""
    return torch.where(condition, torch.full((), yes, dtype=like.dtype, device=like.device), no)
