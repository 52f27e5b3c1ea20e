"""Policy-gradient losses of tokens: GRPO and its kin, as functions of log-probabilities.

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

Log-ratios are clamped to +-40 before ``exp``, far outside any trust region: products of two stay finite in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_options import CLIPPED, PolicyOptions

_MAX_LOG_RATIO = 40.0
_VESPO_LOW, _VESPO_HIGH = -18.420680743952367, 20.0  # log(1e-8), as the paper's code


class PolicyTokens(NamedTuple):
    """What a loss needs to know of each token besides its log-probability: tensors that broadcast with it."""

    advantages: Tensor
    old_log_probs: Tensor | None = None
    """At sampling time; None takes the policy's own, without gradient."""
    ref_log_probs: Tensor | None = None
    log_weights: Tensor | None = None
    """The logarithm of the ratio where it is that of completions, differentiable; None takes that of tokens."""
    factor: Tensor | None = None
    """A factor of the objective without gradient, from masks and the importance of samples."""
    phi: Tensor | None = None
    """VESPO's weights."""


class PolicyTerms(NamedTuple):
    """Losses of tokens, with what metrics need."""

    losses: Tensor
    """Differentiable."""
    ratio: Tensor
    """Of policy to old probability, before any clipping."""
    kl: Tensor | None
    """The estimate of the divergence from the reference that is part of the losses; None without a reference."""


def safe_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to +-40."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """PPO's clipped objective, negated; with ``delta`` clipped on both sides (arXiv:2505.07291).

    Args:
        ratio: Of policy to old probability, of tokens or completions.
        advantages: Of a shape that broadcasts with it.
        epsilon: Distance of the lower bound from 1.
        epsilon_high: Distance of the upper bound from 1; None is ``epsilon``.
        delta: Upper bound of the ratio in the term that is not clipped.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def cispo_loss(ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, epsilon_high: float) -> Tensor:
    """CISPO (arXiv:2506.13585): REINFORCE weighted by the ratio without gradient, at most ``epsilon_high``."""
    return -ratio.detach().clamp(max=epsilon_high) * advantages * log_probs


def sapo_loss(
    ratio: Tensor, advantages: Tensor, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05
) -> Tensor:
    """SAPO (arXiv:2511.20347): a sigmoid of the ratio in place of clipping, its temperature by the advantage's sign."""
    temperature = _by_sign(advantages > 0, temperature_pos, temperature_neg, ratio)
    return -(4 / temperature) * torch.sigmoid(temperature * (ratio - 1)) * advantages


def vespo_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    completions: Completions,
    *,
    sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """VESPO's weights (arXiv:2602.10693), without gradient: phi(w) = exp(lambda + k log w - lambda w).

    Args:
        log_ratio: l - old of each token; w is the product of the ratios of a completion.
        advantages: ``[num_sequences]``, or one for each token.
        completions: Which tokens form a completion.
        sampling_ratio: The ratio of old to sampling probability of each token, a factor of w.
        k_pos: Exponent where the advantage is not negative.
        lambda_pos: Decay there.
        k_neg: Exponent where the advantage is negative.
        lambda_neg: Decay there.

    Returns:
        Weights of the advantages' shape.
    """
    log_w = completions.sum(log_ratio.detach().clamp(-20, 20))
    if sampling_ratio is not None:
        log_w = log_w + completions.sum(sampling_ratio.log().clamp(_VESPO_LOW, 20))
    log_w = log_w.clamp(_VESPO_LOW, _VESPO_HIGH)
    if advantages.ndim > 1:
        log_w = completions.spread(log_w)
    k = _by_sign(advantages >= 0, k_pos, k_neg, log_w)
    decay = _by_sign(advantages >= 0, max(lambda_pos, 1e-4), max(lambda_neg, 1e-4), log_w)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def rloo_losses(
    log_ratio: Tensor,
    advantages: Tensor,
    completions: Completions,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """RLOO (arXiv:2402.14740) as TRL: PPO's objective of the ratio of whole completions, ``[num_sequences]``."""
    ratio = safe_exp(completions.sum(log_ratio))
    return clipped_loss(ratio, advantages, epsilon=epsilon, epsilon_high=epsilon_high)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, *, kind: str = "k3") -> Tensor:
    """Schulman's estimate of KL(policy || reference) of tokens that the policy sampled.

    k3 = exp(ref - l) - (ref - l) - 1, never negative, as GRPO; k1 = l - ref, as RLOO's penalty
    (http://joschu.net/blog/kl-approx.html).
    """
    difference = ref_log_probs - log_probs
    if kind == "k1":
        return -difference
    difference = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def policy_terms(log_probs: Tensor, tokens: PolicyTokens, options: PolicyOptions) -> PolicyTerms:
    """The losses of tokens, before they are reduced; for all loss types but ``"rloo"``.

    Each loss is a function of its own token's log-probability alone unless ``tokens.log_weights`` is given, so this may
    be called with a part of the tokens, in the loop of ``linear_token_loss`` for example.

    Args:
        log_probs: Of the policy, differentiable.
        tokens: What else is known of these tokens.
        options: The loss.
    """
    old = log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs
    ratio = safe_exp(log_probs - old if tokens.log_weights is None else tokens.log_weights)
    advantages = tokens.advantages
    if options.loss_type in CLIPPED:
        losses = clipped_loss(
            ratio, advantages, epsilon=options.epsilon_low, epsilon_high=options.bound_high, delta=options.delta
        )
    elif options.loss_type == "cispo":
        losses = cispo_loss(ratio, log_probs, advantages, epsilon_high=options.bound_high)
    elif options.loss_type == "sapo":
        losses = sapo_loss(
            ratio,
            advantages,
            temperature_pos=options.sapo_temperature_pos,
            temperature_neg=options.sapo_temperature_neg,
        )
    elif options.loss_type == "vespo" and tokens.phi is not None:
        losses = -tokens.phi * advantages * log_probs
    else:
        raise ValueError(f"loss_type={options.loss_type!r} has no losses of tokens without weights of completions")
    if tokens.factor is not None:
        losses = losses * tokens.factor
    kl = None
    if options.beta and tokens.ref_log_probs is not None:
        kl = kl_estimate(log_probs, tokens.ref_log_probs)
        kl = kl * ratio if options.use_bias_correction_kl else kl
        losses = losses + options.beta * kl
    return PolicyTerms(losses, ratio, kl)


def _by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """``yes`` or ``no`` by ``condition``, in the dtype of ``like``."""
    return torch.where(condition, torch.full((), yes, dtype=like.dtype, device=like.device), no)
