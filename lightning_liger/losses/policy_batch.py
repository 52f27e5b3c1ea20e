"""The policy-gradient loss of a batch of completions, from the log-probabilities of its tokens.

Most losses are functions of each token alone and can be computed inside the loop over tokens of the head
(:func:`token_objective`), in a single pass. Those that need quantities of whole completions, or of all tokens, are
computed from all log-probabilities (:func:`policy_objective`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops.arguments import check_floating, check_same_device, wrong_type, wrong_value
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy import (
    PolicyTokens,
    kl_estimate,
    policy_terms,
    rloo_losses,
    safe_exp,
    vespo_weights,
)
from lightning_liger.losses.policy_options import OF_SEQUENCES, PolicyOptions
from lightning_liger.losses.policy_reductions import token_weights
from lightning_liger.losses.policy_weights import off_policy_mask, sampling_ratio, top_entropy_mask


class PolicyBatch(NamedTuple):
    """Completions with their advantages and other policies' log-probabilities; tokens are ``[num_rows, seq_len]``."""

    completions: Completions
    advantages: Tensor
    """``[num_sequences]``, or one for each token."""
    old_log_probs: Tensor | None = None
    """Of the policy at sampling time, of each token; None takes the policy's own: the batch is on-policy."""
    ref_log_probs: Tensor | None = None
    """Of the reference, needed for ``beta`` above 0."""
    sampling_log_probs: Tensor | None = None
    """As the sampler reported them; NaN where it did not."""


class PolicyObjective(NamedTuple):
    """The loss of a batch before it is divided by a number of units, and what metrics need."""

    total: Tensor
    """The weighted sum over tokens or completions, a differentiable scalar."""
    entropy: Tensor
    """The sum of the entropies that the bonus counts, a scalar, differentiable if the entropies are."""
    details: "PolicyDetails"


class PolicyDetails(NamedTuple):
    """Quantities of a batch without gradient; of tokens, or ``[num_sequences]`` if they are those of completions."""

    ratio: Tensor
    """Of policy to old probability, before any clipping."""
    log_ratio: Tensor
    """Of each token."""
    old_log_probs: Tensor
    """Of each token."""
    kl: Tensor | None
    """The estimate of each token's divergence from the reference that is part of the loss."""
    phi: Tensor | None
    """VESPO's weights, of the advantages' shape."""
    sampling_ratio: Tensor | None
    """Of old to sampling probability."""


def check_policy_batch(batch: PolicyBatch, options: PolicyOptions) -> None:
    """Raises unless the tensors of ``batch`` fit each other and the loss.

    Raises:
        TypeError: For tensors that are not floating-point.
        ValueError: For shapes or devices that do not fit, and for missing tensors.
    """
    shape, of_sequences = batch.completions.mask.shape, (batch.completions.count,)
    check_floating("advantages", batch.advantages)
    if batch.advantages.shape not in (shape, of_sequences):
        expected = f"a tensor of shape {of_sequences} or {tuple(shape)}, one for each completion or token"
        raise wrong_value("advantages", expected, batch.advantages)
    if batch.advantages.ndim > 1 and options.loss_type in OF_SEQUENCES:
        raise wrong_value("advantages", f"[num_sequences] for loss_type={options.loss_type!r}", batch.advantages)
    for name in ("old_log_probs", "ref_log_probs", "sampling_log_probs"):
        value = getattr(batch, name)
        check_floating(name, value, optional=True)
        if value is not None and value.shape != shape:
            raise wrong_value(name, f"a tensor of shape {tuple(shape)}, one for each token", value)
        check_same_device("mask", batch.completions.mask, **{name: value})
    check_same_device("mask", batch.completions.mask, advantages=batch.advantages)
    if options.beta and batch.ref_log_probs is None:
        raise wrong_type("ref_log_probs", f"a tensor, as beta={options.beta} needs a reference", None)
    if _corrects(batch, options):
        mode = options.vllm_importance_sampling_mode
        if options.loss_type == "vespo" and not mode.startswith("token"):
            expected = "'token_truncate' or 'token_mask' for loss_type='vespo', whose weights contain the ratios"
            raise wrong_value("vllm_importance_sampling_mode", expected, mode)
        if options.loss_type in OF_SEQUENCES and not mode.startswith("sequence"):
            expected = f"'sequence_truncate' or 'sequence_mask' for loss_type={options.loss_type!r}"
            raise wrong_value("vllm_importance_sampling_mode", expected, mode)


def _corrects(batch: PolicyBatch, options: PolicyOptions) -> bool:
    return options.vllm_importance_sampling_correction and batch.sampling_log_probs is not None


def is_token_local(batch: PolicyBatch, options: PolicyOptions) -> bool:
    """Whether each token's loss is a function of its own log-probability and of constants."""
    if options.importance_sampling_level == "sequence" or options.loss_type in ("vespo", *OF_SEQUENCES):
        return False
    if options.top_entropy_quantile < 1 or options.off_policy_mask_threshold is not None:
        return False
    of_token = batch.old_log_probs is not None or options.vllm_importance_sampling_mode.startswith("token")
    return of_token or not _corrects(batch, options)


def token_objective(
    batch: PolicyBatch, options: PolicyOptions, *, entropy_weight: Tensor | float | None = None
) -> Callable[[Any, Tensor], Tensor]:
    """The loss of some tokens of a batch, for the loop of ``linear_token_loss`` or ``token_loss``.

    Args:
        batch: One of which :func:`is_token_local` is True.
        options: The loss.
        entropy_weight: What the entropy of each token is multiplied by and subtracted from its loss, with a gradient;
            None leaves it out.

    Returns:
        A function of the scores of tokens (``log_probs``, with a weight ``entropy`` too) and their indices in the
        flattened batch, which returns their weighted losses, ``[n]``. Over all tokens they add up to
        :attr:`PolicyObjective.total`.
    """
    shape, dtype = batch.completions.mask.shape, torch.promote_types(batch.advantages.dtype, torch.float32)

    def flat(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.expand(shape).reshape(-1)

    advantages, weights = (
        flat(_of_tokens(batch, batch.advantages)),
        flat(token_weights(batch.completions, options, dtype)),
    )
    old, ref, sampled = map(flat, (batch.old_log_probs, batch.ref_log_probs, batch.sampling_log_probs))
    of_sequences = None
    if _corrects(batch, options) and batch.old_log_probs is not None:
        of_sequences = flat(_of_tokens(batch, _sampling_ratio(batch.old_log_probs, batch, options)))
    corrects_here = _corrects(batch, options) and batch.old_log_probs is None

    def losses_of(scores: Any, indices: Tensor) -> Tensor:
        def at(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[indices]

        factor = at(of_sequences)
        if corrects_here:
            factor = _ratio_of_tokens(scores.log_probs, at(sampled), options)
        tokens = PolicyTokens(at(advantages), at(old), at(ref), factor=factor)  # type: ignore[arg-type]
        losses = policy_terms(scores.log_probs, tokens, options).losses * weights[indices]  # type: ignore[index]
        return losses if entropy_weight is None else losses - entropy_weight * scores.entropy

    return losses_of


def policy_objective(
    log_probs: Tensor,
    entropies: Tensor,
    batch: PolicyBatch,
    options: PolicyOptions,
    *,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> PolicyObjective:
    """The loss of a batch, of any type.

    Args:
        log_probs: Of the policy, ``[num_rows, seq_len]``, differentiable; anything where a token is not scored.
        entropies: Of each token.
        batch: The completions.
        options: The loss.
        gather: As for :func:`~lightning_liger.losses.policy_weights.top_entropy_mask`.

    Returns:
        Sums, to be divided by :func:`~lightning_liger.losses.policy_reductions.num_units` of the optimizer step.
    """
    completions, mask = batch.completions, batch.completions.mask
    # Nothing that is not scored reaches the arithmetic, whose gradient a mask afterwards would not keep from NaN.
    log_probs = torch.where(mask, log_probs, 0.0)
    others = (None if value is None else torch.where(mask, value, 0.0) for value in batch[2:])
    batch = PolicyBatch(completions, batch.advantages, *others)
    old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    importance = _sampling_ratio(old, batch, options) if _corrects(batch, options) else None
    kept = None
    if options.top_entropy_quantile < 1:
        kept = top_entropy_mask(entropies, mask, quantile=options.top_entropy_quantile, gather=gather)
    loss_of = _loss_of_completions if options.loss_type in OF_SEQUENCES else _loss_of_tokens
    total, ratio, kl, phi = loss_of(log_probs, old, batch, importance, kept, options)
    entropy = torch.where(mask if kept is None else kept, entropies, 0.0).sum()
    details = (ratio, log_probs - old, old, kl, phi, importance)
    return PolicyObjective(total, entropy, PolicyDetails(*(None if x is None else x.detach() for x in details)))  # type: ignore[arg-type]


_Loss = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The weighted sum; the ratio, of tokens or completions; the divergence of tokens; VESPO's weights."""


def _loss_of_tokens(
    log_probs: Tensor,
    old: Tensor,
    batch: PolicyBatch,
    importance: Tensor | None,
    kept: Tensor | None,
    options: PolicyOptions,
) -> _Loss:
    completions, advantages = batch.completions, batch.advantages
    log_weights = log_ratio = log_probs - old
    if options.importance_sampling_level == "sequence":
        log_weights = completions.mean(log_ratio)
    phi, factors = None, [] if importance is None else [_of_tokens(batch, importance)]
    if options.loss_type == "vespo":
        phi, factors = _vespo_weights(log_ratio, batch, importance, options), []
    if options.off_policy_mask_threshold is not None:
        sampled = old if batch.sampling_log_probs is None else batch.sampling_log_probs
        threshold = options.off_policy_mask_threshold
        near = off_policy_mask(log_probs, sampled, advantages, completions, threshold=threshold)
        factors.append(_of_tokens(batch, near))
    factors += [] if kept is None else [kept]
    tokens = PolicyTokens(
        _of_tokens(batch, advantages),
        old,
        batch.ref_log_probs,
        _of_tokens(batch, log_weights),
        functools.reduce(torch.mul, factors) if factors else None,
        None if phi is None else _of_tokens(batch, phi),
    )
    terms = policy_terms(log_probs, tokens, options)
    losses = terms.losses * token_weights(completions, options, log_probs.dtype)
    return torch.where(completions.mask, losses, 0.0).sum(), safe_exp(log_weights), terms.kl, phi


def _loss_of_completions(
    log_probs: Tensor,
    old: Tensor,
    batch: PolicyBatch,
    importance: Tensor | None,
    kept: Tensor | None,
    options: PolicyOptions,
) -> _Loss:
    """RLOO."""
    completions, log_ratio = batch.completions, log_probs - old
    losses = rloo_losses(
        log_ratio, batch.advantages, completions, epsilon=options.epsilon_low, epsilon_high=options.bound_high
    )
    ratio = safe_exp(completions.sum(log_ratio))
    losses = losses if importance is None else losses * importance
    kl = None
    if options.beta and batch.ref_log_probs is not None:
        kl = kl_estimate(log_probs, batch.ref_log_probs)
        losses = losses + options.beta * completions.mean(kl)
    return losses.sum(), ratio, kl, None


def _vespo_weights(log_ratio: Tensor, batch: PolicyBatch, importance: Tensor | None, options: PolicyOptions) -> Tensor:
    return vespo_weights(
        log_ratio,
        batch.advantages,
        batch.completions,
        sampling_ratio=importance,
        k_pos=options.vespo_k_pos,
        lambda_pos=options.vespo_lambda_pos,
        k_neg=options.vespo_k_neg,
        lambda_neg=options.vespo_lambda_neg,
    )


def _of_tokens(batch: PolicyBatch, value: Tensor) -> Tensor:
    """``[num_sequences]`` as values that broadcast with tokens; values of tokens as they are."""
    return batch.completions.spread(value) if value.ndim == 1 else value


def _sampling_ratio(old: Tensor, batch: PolicyBatch, options: PolicyOptions) -> Tensor:
    assert batch.sampling_log_probs is not None
    return sampling_ratio(
        old,
        batch.sampling_log_probs,
        mode=options.vllm_importance_sampling_mode,
        completions=batch.completions,
        clip_min=options.vllm_importance_sampling_clip_min,
        clip_max=options.vllm_importance_sampling_clip_max,
    )


def _ratio_of_tokens(log_probs: Tensor, sampled: Tensor | None, options: PolicyOptions) -> Tensor:
    assert sampled is not None
    return sampling_ratio(
        log_probs.detach(),
        sampled,
        mode=options.vllm_importance_sampling_mode,
        clip_min=options.vllm_importance_sampling_clip_min,
        clip_max=options.vllm_importance_sampling_clip_max,
    )
