"""The policy-gradient loss of a batch of completions, from the log-probabilities of its tokens.

Most losses are functions of each token alone and can be computed inside the loop over tokens of the head
(:func:`token_objective`), in a single pass. Those that need quantities of whole completions, or of all tokens, are
computed from all log-probabilities (:func:`policy_objective`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops.arguments import wrong_type, wrong_value
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy import (
    clipped_loss,
    off_policy_mask,
    policy_terms,
    safe_exp,
    sampling_ratio,
    token_weights,
    top_entropy_mask,
    vespo_weights,
)
from lightning_liger.losses.policy_options import OF_SEQUENCES, PolicyOptions


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
    """The loss of a batch before it is divided by a number of items, and without gradient what metrics need.

    Of tokens, or ``[num_sequences]`` where it is of completions.
    """

    total: Tensor
    """The weighted sum over tokens or completions, a differentiable scalar."""
    entropy: Tensor
    """The sum of the entropies that the bonus counts, a scalar, differentiable if the entropies are."""
    ratio: Tensor
    """Of policy to old probability, before any clipping."""
    old_log_probs: Tensor
    kl: Tensor | None
    """The estimate of the divergence from the reference that is part of the loss."""
    phi: Tensor | None
    """VESPO's weights."""
    sampling_ratio: Tensor | None
    """Of old to sampling probability."""


def check_policy_batch(batch: PolicyBatch, options: PolicyOptions) -> None:
    """Raises ValueError for a batch of another form, or with fewer tensors, than the loss needs."""
    if batch.advantages.ndim > 1 and options.loss_type in OF_SEQUENCES:
        raise wrong_value("advantages", f"[num_sequences] for loss_type={options.loss_type!r}", batch.advantages)
    if options.beta and batch.ref_log_probs is None:
        raise wrong_type("ref_log_probs", f"a tensor, as beta={options.beta} needs a reference", None)
    if _corrects(batch, options):
        mode = options.vllm_importance_sampling_mode
        level = {"vespo": "token"}.get(options.loss_type, "sequence" if options.loss_type in OF_SEQUENCES else "")
        if not mode.startswith(level):
            expected = f"'{level}_truncate' or '{level}_mask' for loss_type={options.loss_type!r}"
            raise wrong_value("vllm_importance_sampling_mode", expected, mode)


def _corrects(batch: PolicyBatch, options: PolicyOptions) -> bool:
    return options.vllm_importance_sampling_correction and batch.sampling_log_probs is not None


def is_token_local(batch: PolicyBatch, options: PolicyOptions) -> bool:
    """Whether each token's loss is a function of its own log-probability and of constants."""
    if options.importance_sampling_level == "sequence" or options.loss_type in ("vespo", *OF_SEQUENCES):
        return False
    if options.top_entropy_quantile < 1 or options.off_policy_mask_threshold is not None:
        return False
    is_token_level = batch.old_log_probs is not None or options.vllm_importance_sampling_mode.startswith("token")
    return is_token_level or not _corrects(batch, options)


def token_objective(
    batch: PolicyBatch, options: PolicyOptions, *, entropy_weight: Tensor | float | None = None
) -> Callable[[Any, Tensor], Tensor]:
    """The loss of some tokens of a batch of which :func:`is_token_local` is True, for the loop of ``token_loss``.

    From the scores of tokens and their indices in the flattened batch to their weighted losses, ``[n]``, which add up
    to :attr:`PolicyObjective.total`, less ``entropy_weight`` times the entropy of each, with a gradient.
    """
    shape, dtype = batch.completions.mask.shape, torch.promote_types(batch.advantages.dtype, torch.float32)

    def flat(value: Tensor | None) -> Any:
        return None if value is None else _per_token(batch, value).expand(shape).reshape(-1)

    weights = flat(token_weights(batch.completions, options, dtype))
    advantages, old, ref, sampled = map(flat, batch[1:])
    corrects_here, importance = _corrects(batch, options) and old is None, None
    if _corrects(batch, options) and batch.old_log_probs is not None:
        assert batch.sampling_log_probs is not None
        importance = flat(sampling_ratio(batch.old_log_probs, batch.sampling_log_probs, options, batch.completions))

    def losses_of(scores: Any, indices: Tensor) -> Tensor:
        def at(value: Any) -> Any:
            return None if value is None else value[indices]

        factor = at(importance)
        if corrects_here:
            factor = sampling_ratio(scores.log_probs, at(sampled), options)
        columns = at(advantages), at(old), at(ref)
        losses = policy_terms(scores.log_probs, options, *columns, factor=factor)[0] * weights[indices]
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

    From log-probabilities, ``[num_rows, seq_len]``, differentiable, and entropies of tokens; anything where a token is
    not scored. ``gather`` is as for :func:`~lightning_liger.losses.policy.top_entropy_mask`.
    """
    completions, mask = batch.completions, batch.completions.mask
    # Nothing that is not scored reaches the arithmetic, whose gradient a mask afterward would not keep from NaN.
    log_probs = torch.where(mask, log_probs, 0.0)
    per_token = (value if value is None or value.ndim == 1 else torch.where(mask, value, 0.0) for value in batch[1:])
    batch = PolicyBatch(completions, *per_token)  # type: ignore[arg-type]
    old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    log_ratio, importance, kept, kl, phi = log_probs - old, None, None, None, None
    if _corrects(batch, options):
        assert batch.sampling_log_probs is not None
        importance = sampling_ratio(old, batch.sampling_log_probs, options, completions)
    if options.loss_type in OF_SEQUENCES:  # RLOO as TRL: PPO's objective of the ratio of whole completions
        ratio = safe_exp(completions.sum(log_ratio))
        losses = clipped_loss(ratio, batch.advantages, options)
        total = (losses if importance is None else losses * importance).sum()
    else:
        log_weights, factor = log_ratio, importance
        if options.importance_sampling_level == "sequence":
            log_weights = completions.mean(log_ratio)
        if options.loss_type == "vespo":  # whose weights contain the importance
            phi, factor = vespo_weights(log_ratio, batch.advantages, completions, options, importance), None
        if options.top_entropy_quantile < 1:
            kept = top_entropy_mask(entropies, mask, quantile=options.top_entropy_quantile, gather=gather)
        near = None
        if (threshold := options.off_policy_mask_threshold) is not None:
            sampled = old if batch.sampling_log_probs is None else batch.sampling_log_probs
            near = off_policy_mask(log_probs, sampled, batch.advantages, completions, threshold)
        values = batch.advantages, log_weights, factor, near, phi
        advantages, weights, factor, near, token_phi = (_per_token(batch, value) for value in values)
        for masked in (near, kept):
            if masked is not None:
                factor = masked if factor is None else factor * masked
        columns = advantages, old, batch.ref_log_probs
        losses, kl = policy_terms(log_probs, options, *columns, log_weights=weights, factor=factor, phi=token_phi)
        losses = losses * token_weights(completions, options, log_probs.dtype)
        total, ratio = torch.where(mask, losses, 0.0).sum(), safe_exp(log_weights)
    entropy = torch.where(mask if kept is None else kept, entropies, 0.0).sum()
    details = (None if x is None else x.detach() for x in (ratio, old, kl, phi, importance))
    return PolicyObjective(total, entropy, *details)  # type: ignore[arg-type]


def _per_token(batch: PolicyBatch, value: Any) -> Any:
    """``[num_sequences]`` as values that broadcast with tokens; values of tokens, and None, as they are."""
    return batch.completions.spread(value) if value is not None and value.ndim == 1 else value
