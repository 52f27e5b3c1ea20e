"""Small batches of completions for the tests of policy-gradient losses, and the losses as loops over their tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_batch import PolicyBatch
from lightning_liger.losses.policy_options import PolicyOptions

LENGTHS = (5, 0, 1, 7, 4, 6)
TOKEN_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")


def options_for(loss_type: str, **changes: Any) -> PolicyOptions:
    """Options of ``loss_type`` that are legal, with bounds that some of the batch's ratios cross."""
    defaults: dict[str, Any] = {"loss_type": loss_type, "epsilon": 0.1, "epsilon_high": 0.15}
    if loss_type == "cispo":
        defaults["epsilon_high"] = 1.1
    if loss_type == "dr_grpo":
        defaults["max_completion_length"] = 9
    if loss_type == "vespo":
        defaults["vllm_importance_sampling_mode"] = "token_truncate"
    return PolicyOptions(**(defaults | changes))


def padded_batch(
    *,
    of_tokens: bool = False,
    old: bool = True,
    ref: bool = False,
    sampled: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, PolicyBatch]:
    """Log-probabilities, entropies and the rest of six completions, one empty, one of a token; NaN where padded."""
    random = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS) + 1)

    def draw(scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) * scale

    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    mask[3, 2] = False  # a tool's token
    log_probs = -draw().exp()
    values = {
        "log_probs": log_probs,
        "entropies": draw().exp(),
        "old": log_probs + draw(0.2),
        "ref": log_probs + draw(0.5),
        "sampled": log_probs + draw(0.8),
    }
    values = {name: torch.where(mask, value, torch.nan).to(dtype) for name, value in values.items()}
    advantages = draw().to(dtype)
    batch = PolicyBatch(
        Completions(mask),
        advantages if of_tokens else advantages[:, 0],
        values["old"] if old else None,
        values["ref"] if ref else None,
        values["sampled"] if sampled else None,
    )
    return values["log_probs"], values["entropies"], batch


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
    of_tokens = batch.advantages.ndim == 2
    others = (None if value is None else packed(value, mask) for value in batch[2:])
    advantages = packed(batch.advantages, mask) if of_tokens else batch.advantages
    return packed(log_probs, mask), packed(entropies, mask), PolicyBatch(completions, advantages, *others)


def naive_sampling_ratio(mode: str, differences: list[Tensor], low: float | None, high: float | None) -> list[Tensor]:
    """One ratio for each of a completion's tokens, from old minus sampling log-probabilities without NaN."""
    values = [sum(differences, torch.zeros(()))] * len(differences) if "sequence" in mode else differences
    ratios = []
    for value in values:
        ratio = math.exp(value)
        low_, high_ = -math.inf if low is None else low, math.inf if high is None else high
        if "truncate" in mode:
            ratio = min(max(ratio, low_), high_)
        elif not low_ <= ratio <= high_:
            ratio = 0.0
        ratios.append(torch.tensor(ratio, dtype=torch.float64))
    return ratios


def naive_loss(log_probs: Tensor, batch: PolicyBatch, options: PolicyOptions) -> Tensor:
    """The loss of a padded batch by its published formula, in loops over completions and tokens."""
    low, high = options.epsilon_low, options.bound_high
    total, num_tokens, num_sequences = torch.zeros((), dtype=torch.float64), 0, len(batch.advantages)
    for row in range(num_sequences):
        places = batch.completions.mask[row].nonzero()[:, 0].tolist()
        num_tokens += len(places)
        if not places:
            if options.loss_type == "rloo":  # the ratio of no tokens is 1
                total = total - batch.advantages[row]
            continue
        current = [log_probs[row, t] for t in places]
        advantages = [batch.advantages[row, t] if batch.advantages.ndim == 2 else batch.advantages[row] for t in places]
        old = current if batch.old_log_probs is None else [batch.old_log_probs[row, t] for t in places]
        old = [x.detach() for x in old]
        log_ratios = [a - b for a, b in zip(current, old, strict=True)]
        mean_log_ratio = sum(log_ratios) / len(places)
        importance = [torch.ones(())] * len(places)
        if batch.sampling_log_probs is not None and options.vllm_importance_sampling_correction:
            differences = [b - batch.sampling_log_probs[row, t] for t, b in zip(places, old, strict=True)]
            importance = naive_sampling_ratio(
                options.vllm_importance_sampling_mode,
                [torch.zeros(()) if d.isnan() else d for d in differences],
                options.vllm_importance_sampling_clip_min,
                options.vllm_importance_sampling_clip_max,
            )
        if options.loss_type == "rloo":
            rho, a = torch.exp(sum(log_ratios)), advantages[0]
            total = total - importance[0] * torch.min(rho * a, rho.clamp(1 - low, 1 + high) * a)
            continue
        kls = []
        if options.beta:
            kls = [
                torch.exp(batch.ref_log_probs[row, t] - x) - (batch.ref_log_probs[row, t] - x) - 1
                for t, x in zip(places, current, strict=True)
            ]
        sampling_drift = 0.0
        if options.off_policy_mask_threshold is not None:
            source = old if batch.sampling_log_probs is None else [batch.sampling_log_probs[row, t] for t in places]
            drifts = [(s - x.detach()).nan_to_num(nan=0.0) for s, x in zip(source, current, strict=True)]
            sampling_drift = float(sum(drifts)) / len(places)
        losses = []
        for i, (current_log_prob, a) in enumerate(zip(current, advantages, strict=True)):
            rho = torch.exp(mean_log_ratio if options.importance_sampling_level == "sequence" else log_ratios[i])
            if options.loss_type == "cispo":
                loss = -min(float(rho.detach()), high) * a * current_log_prob
            elif options.loss_type == "sapo":
                t = options.sapo_temperature_pos if a > 0 else options.sapo_temperature_neg
                loss = -(4 / t) / (1 + torch.exp(-t * (rho - 1))) * a
            elif options.loss_type == "vespo":
                weights = [math.log(max(float(w), 1e-8)) for w in importance]
                log_w = sum(float(x.detach()) for x in log_ratios) + sum(weights)
                k, decay = (
                    (options.vespo_k_pos, options.vespo_lambda_pos)
                    if a >= 0
                    else (options.vespo_k_neg, options.vespo_lambda_neg)
                )
                loss = (
                    -math.exp(decay) * math.exp(log_w) ** k * math.exp(-decay * math.exp(log_w)) * a * current_log_prob
                )
            else:
                bounded = rho if options.delta is None else rho.clamp(max=options.delta)
                loss = -torch.min(bounded * a, rho.clamp(1 - low, 1 + high) * a)
            if options.loss_type != "vespo":
                loss = loss * importance[i]
            if options.off_policy_mask_threshold is not None and a < 0:
                loss = loss * float(sampling_drift <= options.off_policy_mask_threshold)
            if kls:
                loss = loss + options.beta * kls[i] * (rho if options.use_bias_correction_kl else 1.0)
            losses.append(loss)
        of_row = sum(losses)
        if options.loss_type in ("grpo", "sapo"):
            of_row = of_row / len(places)
        if options.loss_type == "dr_grpo":
            of_row = of_row / options.max_completion_length
        total = total + of_row
    return total / (num_tokens if options.counts_tokens else num_sequences)
