"""Metrics of policy-gradient losses by TRL's names, as parts of exact means and extremes over batches and ranks."""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_batch import PolicyBatch, PolicyObjective
from lightning_liger.losses.policy_options import CLIPPED, PolicyOptions

_LENGTHS = ("completions/mean_length", "completions/min_length", "completions/max_length")
_CLIPS = ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
OF_DATA = (
    *(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")),
    "completions/clipped_ratio",
    *("completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length"),
    *("kl", "reward", "reward_std", "frac_reward_zero_std"),
)
"""The metrics of batches with rewards, with log-probabilities of the sampler or of a reference, of known ends."""


def metric_names(options: PolicyOptions) -> list[str]:
    """The metrics that every batch of the loss has."""
    clips = [f"clip_ratio/{name}" for name in _CLIPS] if options.loss_type in (*CLIPPED, "rloo") else []
    own = {"cispo": ["cispo_clip_ratio"], "vespo": ["vespo/phi_seq_mean"]}.get(options.loss_type, clips)
    return ["entropy", *(["kl"] if options.beta else []), *own, *_LENGTHS]


def metric_kind(name: str) -> str:
    """How a metric is reduced over batches and ranks: ``"mean"``, ``"max"`` or ``"min"``."""
    words = name.rpartition("/")[2].split("_")
    return next((kind for kind in ("min", "max") if kind in words), "mean")


def policy_metrics(
    entropies: Tensor,
    batch: PolicyBatch,
    result: PolicyObjective,
    options: PolicyOptions,
    is_terminated: Tensor | None = None,
) -> dict[str, Any]:
    """The metrics of a batch, without gradient and without waiting for the device.

    ``is_terminated``, ``[num_sequences]`` of bool, are the completions that the policy has ended, and no limit of
    length.

    Returns:
        Of means, the sum and the number of items, scalars. Of largest and smallest values, as the last part of the name
        says, the value, infinite where the batch has none.
    """
    completions, ratio, advantages = batch.completions, result.ratio, batch.advantages
    if ratio.ndim != advantages.ndim:  # one of completions, the other of tokens
        ratio, advantages = (completions.spread(x) if x.ndim == 1 else x for x in (ratio, advantages))
    found: dict[str, Any] = {}
    averaged: dict[str, Tensor | None] = {"entropy": entropies.detach(), "kl": result.kl}
    if options.loss_type == "rloo" and batch.ref_log_probs is not None and batch.old_log_probs is not None:
        averaged["kl"] = batch.old_log_probs - batch.ref_log_probs
    if options.loss_type in (*CLIPPED, "rloo"):
        low = ((ratio < 1 - options.epsilon_low) & (advantages < 0)).float()
        high = ((ratio > 1 + options.bound_high) & (advantages > 0)).float()
        both = torch.maximum(low, high)
        averaged |= {f"clip_ratio/{name}_mean": x for name, x in (("low", low), ("high", high), ("region", both))}
        for name, clipped, start in (("low_min", low, math.inf), ("high_max", high, -math.inf)):
            # Of the share of each completion's tokens; those without tokens do not count.
            is_of_tokens = clipped.ndim > 1
            shares = completions.mean(clipped) if is_of_tokens else clipped
            found[f"clip_ratio/{name}"] = _extreme(shares, start, completions.lengths > 0 if is_of_tokens else None)
    if options.loss_type == "cispo":
        averaged["cispo_clip_ratio"] = ((ratio > options.bound_high) & (advantages > 0)).float()
    averaged["vespo/phi_seq_mean"] = result.phi
    averaged["sampling/importance_sampling_ratio/mean"] = sampling = result.sampling_ratio
    found |= {name: _mean(value, completions) for name, value in averaged.items() if value is not None}
    if sampling is not None and batch.sampling_log_probs is not None:
        difference = (result.old_log_probs - batch.sampling_log_probs).abs()
        known, scored = completions.mask & ~batch.sampling_log_probs.isnan(), completions.mask
        found[OF_DATA[0]] = torch.where(known, difference, 0.0).sum(), known.sum()
        found[OF_DATA[1]] = _extreme(difference, -math.inf, known)
        for name, start in (("min", math.inf), ("max", -math.inf)):
            value = _extreme(sampling, start, scored if sampling.ndim > 1 else None)
            found[f"sampling/importance_sampling_ratio/{name}"] = value
    lengths = completions.lengths
    found |= zip(_LENGTHS, _length_stats(lengths, torch.ones_like(lengths, dtype=torch.bool)), strict=True)
    if is_terminated is not None:
        is_known = lengths > 0
        found["completions/clipped_ratio"] = (is_known & ~is_terminated).sum(), is_known.sum()
        found |= zip(OF_DATA[6:9], _length_stats(lengths, is_terminated), strict=True)
    return found


def _length_stats(lengths: Tensor, where: Tensor) -> tuple[Any, Tensor, Tensor]:
    """The mean, the smallest and the largest of the lengths of some completions."""
    mean = (lengths * where).sum(), where.sum()
    return mean, _extreme(lengths, math.inf, where), _extreme(lengths, -math.inf, where)


def reward_metrics(rewards: Tensor, group_ids: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum and number of items of ``reward``, ``reward_std`` (of a batch) and ``frac_reward_zero_std``.

    The last is the share of completions in groups that tie, left out without ``group_ids``, ``[num_sequences]``.
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


def _mean(values: Tensor, completions: Completions) -> tuple[Tensor, Tensor]:
    """Over completions for ``[num_sequences]``, else over scored tokens."""
    if values.ndim == 1:
        return values.sum(), _number(values)
    return torch.where(completions.mask, values, 0.0).sum(), completions.mask.sum()


def _extreme(values: Tensor, start: float, where: Tensor | None = None) -> Tensor:
    """The largest value from ``start`` = -inf, the smallest from inf; ``start`` itself without values."""
    values = values.flatten() if where is None else torch.where(where, values, start).flatten()
    return (torch.amax if start < 0 else torch.amin)(torch.cat((values, values.new_full((1,), start))), 0)


def _number(values: Tensor) -> Tensor:
    return torch.full((), values.numel(), device=values.device)
