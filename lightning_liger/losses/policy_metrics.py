"""Metrics of policy-gradient losses by TRL's names, as parts of exact means and extremes over batches and ranks."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_batch import PolicyBatch, PolicyDetails
from lightning_liger.losses.policy_options import CLIPPED, PolicyOptions


class PolicyMetrics(NamedTuple):
    """A batch's part of each metric."""

    means: Mapping[str, tuple[Tensor, Tensor]]
    """Sum and number of units, scalars."""
    extremes: Mapping[str, Tensor]
    """Largest or smallest values, as the last part of the name says; infinite where the batch has none."""


def metric_names(options: PolicyOptions) -> list[str]:
    """The metrics that every batch of the loss has."""
    names = ["entropy"]
    if options.beta:
        names.append("kl")
    if options.loss_type in (*CLIPPED, "rloo"):
        names += [f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")]
    if options.loss_type == "cispo":
        names.append("cispo_clip_ratio")
    if options.loss_type == "vespo":
        names.append("vespo/phi_seq_mean")
    return names + [f"completions/{name}_length" for name in ("mean", "min", "max")]


def names_of_data() -> list[str]:
    """The metrics of batches with rewards, with log-probabilities of the sampler or of a reference, of known ends."""
    names = [f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")]
    names += [f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")]
    names += [
        "completions/clipped_ratio",
        *(f"completions/{name}_terminated_length" for name in ("mean", "min", "max")),
    ]
    return [*names, "kl", "reward", "reward_std", "frac_reward_zero_std"]


def metric_kind(name: str) -> str:
    """How a metric is reduced over batches and ranks: ``"mean"``, ``"max"`` or ``"min"``."""
    words = name.rpartition("/")[2].split("_")
    return next((kind for kind in ("min", "max") if kind in words), "mean")


def policy_metrics(
    entropies: Tensor,
    batch: PolicyBatch,
    details: PolicyDetails,
    options: PolicyOptions,
    is_terminated: Tensor | None = None,
) -> PolicyMetrics:
    """The metrics of a batch, without gradient and without waiting for the device.

    Args:
        entropies: Of each token.
        batch: The completions.
        details: What :func:`~lightning_liger.losses.policy_batch.policy_objective` returned.
        options: The loss.
        is_terminated: ``[num_sequences]``, bool: the completions that the policy has ended, and no limit of length.
    """
    completions = batch.completions
    means: dict[str, tuple[Tensor, Tensor]] = {"entropy": _mean(entropies.detach(), completions)}
    extremes: dict[str, Tensor] = {}
    if details.kl is not None:
        means["kl"] = _mean(details.kl, completions)
    elif options.loss_type == "rloo" and batch.ref_log_probs is not None and batch.old_log_probs is not None:
        means["kl"] = _mean(batch.old_log_probs - batch.ref_log_probs, completions)
    if options.loss_type in (*CLIPPED, "rloo"):
        low, high = _clipped(details, batch, options)
        for name, clipped in (("low_mean", low), ("high_mean", high), ("region_mean", low | high)):
            means[f"clip_ratio/{name}"] = _mean(clipped.float(), completions)
        extremes["clip_ratio/low_min"] = _extreme_share(low, completions, math.inf)
        extremes["clip_ratio/high_max"] = _extreme_share(high, completions, -math.inf)
    if options.loss_type == "cispo":
        ratio, advantages = _broadcast(details.ratio, batch)
        means["cispo_clip_ratio"] = _mean(((ratio > options.bound_high) & (advantages > 0)).float(), completions)
    if details.phi is not None:
        means["vespo/phi_seq_mean"] = _mean(details.phi, completions)
    if details.sampling_ratio is not None:
        _add_sampling(means, extremes, batch, details)
    lengths = completions.lengths
    means["completions/mean_length"] = lengths.sum(), _number(lengths)
    extremes["completions/min_length"] = _extreme(lengths, math.inf)
    extremes["completions/max_length"] = _extreme(lengths, -math.inf)
    if is_terminated is not None:
        is_known, is_terminated = lengths > 0, is_terminated & (lengths > 0)
        means["completions/clipped_ratio"] = (is_known & ~is_terminated).sum(), is_known.sum()
        means["completions/mean_terminated_length"] = (lengths * is_terminated).sum(), is_terminated.sum()
        extremes["completions/min_terminated_length"] = _extreme(lengths, math.inf, is_terminated)
        extremes["completions/max_terminated_length"] = _extreme(lengths, -math.inf, is_terminated)
    return PolicyMetrics(means, extremes)


def reward_metrics(rewards: Tensor, group_ids: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """The parts of the mean reward, of its standard deviation, and of the share of completions in groups that tie.

    Args:
        rewards: ``[num_sequences]``.
        group_ids: ``[num_sequences]``, the same for completions of one prompt; None leaves out ties.

    Returns:
        ``reward``, ``reward_std`` (of a batch, averaged over batches) and ``frac_reward_zero_std``.
    """
    rewards, number = rewards.double(), _number(rewards)
    means = {"reward": (rewards.sum(), number)}
    if len(rewards) > 1:
        means["reward_std"] = (rewards.std() * number, number)
    if group_ids is not None:
        # No deviation: all of the group are equal.
        is_equal = (rewards[:, None] == rewards) | (group_ids[:, None] != group_ids)
        means["frac_reward_zero_std"] = (is_equal.all(1).sum(), number)
    return means


def _add_sampling(
    means: dict[str, tuple[Tensor, Tensor]], extremes: dict[str, Tensor], batch: PolicyBatch, details: PolicyDetails
) -> None:
    assert batch.sampling_log_probs is not None
    assert details.sampling_ratio is not None
    mask, ratio = batch.completions.mask, details.sampling_ratio
    difference = (details.old_log_probs - batch.sampling_log_probs).abs()
    known = mask & ~batch.sampling_log_probs.isnan()
    name = "sampling/sampling_logp_difference"
    means[f"{name}/mean"] = torch.where(known, difference, 0.0).sum(), known.sum()
    extremes[f"{name}/max"] = _extreme(difference, -math.inf, known)
    name = "sampling/importance_sampling_ratio"
    means[f"{name}/mean"] = _mean(ratio, batch.completions)
    extremes[f"{name}/min"] = _extreme(ratio, math.inf, mask if ratio.ndim > 1 else None)
    extremes[f"{name}/max"] = _extreme(ratio, -math.inf, mask if ratio.ndim > 1 else None)


def _clipped(details: PolicyDetails, batch: PolicyBatch, options: PolicyOptions) -> tuple[Tensor, Tensor]:
    """Where the ratio is below its bound and A negative, and where it is above its bound and A positive."""
    ratio, advantages = _broadcast(details.ratio, batch)
    low, high = 1 - options.epsilon_low, 1 + options.bound_high
    return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)


def _broadcast(ratio: Tensor, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
    """The ratio and the advantages, both of completions or both of tokens."""
    if ratio.ndim == batch.advantages.ndim:
        return ratio, batch.advantages
    if ratio.ndim == 1:
        return batch.completions.spread(ratio), batch.advantages
    return ratio, batch.completions.spread(batch.advantages)


def _mean(values: Tensor, completions: Completions) -> tuple[Tensor, Tensor]:
    """Over completions for ``[num_sequences]``, else over scored tokens."""
    if values.ndim == 1:
        return values.sum(), _number(values)
    return torch.where(completions.mask, values, 0.0).sum(), completions.mask.sum()


def _extreme_share(clipped: Tensor, completions: Completions, start: float) -> Tensor:
    """The extreme over completions of the share of their tokens; those without tokens do not count."""
    if clipped.ndim == 1:
        return _extreme(clipped.float(), start)
    return _extreme(completions.mean(clipped.float()), start, completions.lengths > 0)


def _extreme(values: Tensor, start: float, where: Tensor | None = None) -> Tensor:
    """The largest value from ``start`` = -inf, the smallest from inf; ``start`` itself without values."""
    values = values.flatten() if where is None else torch.where(where, values, start).flatten()
    return (torch.amax if start < 0 else torch.amin)(torch.cat((values, values.new_full((1,), start))), 0)


def _number(values: Tensor) -> Tensor:
    return torch.full((), values.numel(), device=values.device)
