"""Small batches of completions for the tests of policy-gradient losses, and the losses as loops over their tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_batch import PolicyBatch
from lightning_liger.losses.policy_options import PolicyOptions

LENGTHS = (5, 0, 1, 7, 4, 6)


def options_for(loss_type: str, **changes: Any) -> PolicyOptions:
    """Options of ``loss_type`` that are legal, with bounds that some of the batch's ratios cross."""
    defaults: dict[str, Any] = {"loss_type": loss_type, "epsilon": 0.1, "epsilon_high": 0.15}
    own: dict[str, dict[str, Any]] = {
        "cispo": {"epsilon_high": 1.1},
        "dr_grpo": {"max_completion_length": 9},
        "vespo": {"vllm_importance_sampling_mode": "token_truncate"},
    }
    return PolicyOptions(**(defaults | own.get(loss_type, {}) | changes))


def padded_batch(
    *, per_token: bool = False, old: bool = True, ref: bool = False, sampled: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, PolicyBatch]:  # fmt: skip
    """Log-probabilities, entropies and the rest of six completions, one empty, one of a token; NaN where padded."""
    random = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS) + 1)

    def draw(scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) * scale

    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    mask[3, 2] = False  # a tool's token
    log_probs = -draw().exp()
    values = [log_probs, draw().exp(), log_probs + draw(0.2), log_probs + draw(0.5), log_probs + draw(0.8)]
    own, entropies, *others = (torch.where(mask, value, torch.nan).to(dtype) for value in values)
    columns = (column if is_there else None for column, is_there in zip(others, (old, ref, sampled), strict=True))
    advantages = draw().to(dtype)
    return own, entropies, PolicyBatch(Completions(mask), advantages if per_token else advantages[:, 0], *columns)


def packed(values: Tensor, mask: Tensor, row_length: int = 13) -> Tensor:
    """The scored tokens of padded rows, one completion after the other, in rows that break off anywhere."""
    flat = values[mask]
    rows = math.ceil(len(flat) / row_length)
    return torch.cat((flat, flat[:1].expand(rows * row_length - len(flat)))).view(rows, row_length)


def packed_batch(log_probs: Tensor, entropies: Tensor, batch: PolicyBatch) -> tuple[Tensor, Tensor, PolicyBatch]:
    """The same completions in packed rows."""
    mask = batch.completions.mask
    ids = packed(torch.arange(len(mask))[:, None].expand_as(mask), mask)
    is_scored = (torch.arange(ids.numel()) < mask.sum()).view_as(ids)
    completions = Completions(is_scored, ids.masked_fill(~is_scored, -1), len(mask))
    per_token = batch.advantages.ndim == 2
    others = (None if value is None else packed(value, mask) for value in batch[2:])
    advantages = packed(batch.advantages, mask) if per_token else batch.advantages
    return packed(log_probs, mask), packed(entropies, mask), PolicyBatch(completions, advantages, *others)


def naive_sampling_ratio(old: Tensor, sampled: Tensor, options: PolicyOptions) -> Tensor:
    """The ratio of each token of a completion; tokens without a sampler's log-probability have none."""
    mode, low = options.vllm_importance_sampling_mode, options.vllm_importance_sampling_clip_min or 0.0
    high = options.vllm_importance_sampling_clip_max or math.inf
    difference = (old - sampled).nan_to_num(nan=0.0)
    ratio = (difference.sum().expand_as(old) if "sequence" in mode else difference).exp()
    return ratio.clamp(low, high) if "truncate" in mode else ratio * ((ratio >= low) & (ratio <= high))


def by_sign(is_positive: Tensor, yes: float, no: float) -> Tensor:
    return is_positive.double() * yes + (~is_positive).double() * no


def naive_loss(
    log_probs: Tensor, batch: PolicyBatch, options: PolicyOptions, entropies: Tensor | None = None
) -> Tensor:
    """The loss of a padded batch by its published formula, in a loop over completions."""
    kind, low, high = options.loss_type, options.epsilon_low, options.bound_high
    total = torch.zeros((), dtype=torch.float64)
    for row, mask in enumerate(batch.completions.mask):
        x, a = log_probs[row][mask], batch.advantages[row]
        if not mask.any():
            total = total - (a if kind == "rloo" else 0.0)  # the ratio of no tokens is 1
            continue
        a = a[mask] if a.ndim else a.expand(len(x))
        old, ref, sampled = (None if column is None else column[row][mask] for column in batch[2:])
        old = (x if old is None else old).detach()
        log_ratio, importance = x - old, torch.ones_like(x)
        if sampled is not None and options.vllm_importance_sampling_correction:
            importance = naive_sampling_ratio(old, sampled, options)
        if kind == "rloo":
            rho = log_ratio.sum().exp()
            total = total - importance[0] * torch.min(rho * a[0], rho.clamp(1 - low, 1 + high) * a[0])
            continue
        rho = (log_ratio.mean().expand_as(x) if options.importance_sampling_level == "sequence" else log_ratio).exp()
        if kind == "cispo":
            losses = -rho.detach().clamp(max=high) * a * x
        elif kind == "sapo":
            t = by_sign(a > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
            losses = -(4 / t) / (1 + torch.exp(-t * (rho - 1))) * a
        elif kind == "vespo":  # whose weights contain the importance
            w = (log_ratio.detach().sum() + importance.clamp(min=1e-8).log().sum()).exp()
            k = by_sign(a >= 0, options.vespo_k_pos, options.vespo_k_neg)
            decay = by_sign(a >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg)
            losses, importance = -decay.exp() * w**k * (-decay * w).exp() * a * x, torch.ones_like(x)
        else:
            bounded = rho if options.delta is None else rho.clamp(max=options.delta)
            losses = -torch.min(bounded * a, rho.clamp(1 - low, 1 + high) * a)
        losses = losses * importance
        if options.off_policy_mask_threshold is not None:
            drift = ((old if sampled is None else sampled) - x.detach()).nan_to_num(nan=0.0).mean()
            losses = losses * ((a >= 0) | (drift <= options.off_policy_mask_threshold))
        if options.top_entropy_quantile < 1:
            least = entropies[batch.completions.mask].quantile(1 - options.top_entropy_quantile)
            losses = losses * (entropies[row][mask] >= least)
        if options.beta:
            kl = torch.exp(ref - x) - (ref - x) - 1
            losses = losses + options.beta * kl * (rho if options.use_bias_correction_kl else 1.0)
        divisor = {"grpo": len(x), "sapo": len(x), "dr_grpo": options.max_completion_length}.get(kind, 1)
        total = total + losses.sum() / divisor
    mask = batch.completions.mask
    return total / (mask.sum() if options.counts_tokens else len(mask))
