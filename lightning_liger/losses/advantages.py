"""Advantages of completions from their rewards: relative to a group of completions of one prompt, or leave-one-out.

Rewards that are NaN were not given: they take no part in means, and a completion without any has advantage 0.
"""

import torch
from torch import Tensor

from liger_ops.arguments import check_bool, check_choice, check_floating, check_integer, check_number, wrong_value

_EPS = 1e-4  # TRL's
_AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


def group_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    reward_weights: Tensor | None = None,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> Tensor:
    """GRPO's advantages: rewards minus the mean of their group, divided by a standard deviation (arXiv:2402.03300).

    Args:
        rewards: ``[num_groups * num_generations]``, the completions of a prompt next to each other, or
            ``[num_groups * num_generations, num_rewards]``.
        num_generations: Completions of each prompt.
        reward_weights: ``[num_rewards]``; None is 1 for each.
        scale_rewards: Divide by the standard deviation of the ``"group"``, of the whole ``"batch"``, or by nothing
            (``"none"``, Dr. GRPO, arXiv:2503.20783). Standard deviations are unbiased, plus 1e-4.
        multi_objective_aggregation: ``"sum_then_normalize"``, or ``"normalize_then_sum"``: each reward is normalized in
            its group, their weighted sum in the batch, whatever ``scale_rewards`` is (GDPO, arXiv:2601.05242).

    Returns:
        ``[num_groups * num_generations]``, float32 (float64 for float64 rewards).

    Raises:
        ValueError: For rewards that are no whole groups.
    """
    check_choice("scale_rewards", scale_rewards, ("group", "batch", "none"))
    check_choice("multi_objective_aggregation", multi_objective_aggregation, _AGGREGATIONS)
    table, weights = _table(rewards, num_generations, reward_weights)
    is_unscored = table.isnan().all(-1)
    normalizes_first = multi_objective_aggregation == "normalize_then_sum"
    if normalizes_first:
        table = _normalized(table.unflatten(0, (-1, num_generations)), 1).flatten(0, 1)
    totals = (table * weights).nansum(-1).masked_fill(is_unscored, torch.nan)
    if normalizes_first:
        advantages = _normalized(totals, 0)
    else:
        groups = totals.unflatten(0, (-1, num_generations))
        scales = {"group": _std(groups, 1) + _EPS, "batch": _std(totals, 0) + _EPS, "none": 1.0}
        advantages = ((groups - groups.nanmean(1, keepdim=True)) / scales[scale_rewards]).flatten()
    return advantages.nan_to_num(nan=0.0)


def leave_one_out_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    reward_weights: Tensor | None = None,
    kl: Tensor | None = None,
    beta: float = 0.05,
    reward_clip_range: tuple[float, float] | None = None,
    normalize_advantages: bool = False,
) -> Tensor:
    """RLOO's advantages: each reward minus the mean of the others of its group (arXiv:2402.14740).

    Args:
        rewards: As for :func:`group_advantages`.
        num_generations: Completions of each prompt.
        reward_weights: ``[num_rewards]``; None is 1 for each.
        kl: ``[num_groups * num_generations]``, the sum over tokens of old minus reference log-probability (k1); the
            reward loses ``beta`` times it. None subtracts nothing.
        beta: Its weight.
        reward_clip_range: Bounds of the reward before the penalty.
        normalize_advantages: Whether to subtract the mean of all and divide by their standard deviation plus 1e-4.

    Returns:
        ``[num_groups * num_generations]``, float32 (float64 for float64 rewards).

    Raises:
        ValueError: For rewards that are no whole groups.
    """
    check_number("beta", beta, at_least=0)
    check_bool("normalize_advantages", normalize_advantages)
    table, weights = _table(rewards, num_generations, reward_weights)
    totals = (table * weights).nansum(-1).masked_fill(table.isnan().all(-1), torch.nan)
    if reward_clip_range is not None:
        low, high = reward_clip_range
        check_number("reward_clip_range[0]", low)
        check_number("reward_clip_range[1]", high, at_least=low)
        totals = totals.clamp(low, high)
    if kl is not None:
        if kl.shape != totals.shape:
            raise wrong_value("kl", f"a tensor of shape {tuple(totals.shape)}, one value for each completion", kl)
        totals = totals - beta * kl
    groups = totals.unflatten(0, (-1, num_generations))
    others = groups.isfinite().sum(1, keepdim=True) - 1
    baselines = (groups.nansum(1, keepdim=True) - groups) / others  # 0 / 0, NaN, for the only one with a reward
    advantages = (groups - baselines).flatten() if num_generations > 1 else torch.zeros_like(totals)
    if normalize_advantages:
        advantages = _normalized(advantages, 0)
    return advantages.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _table(rewards: Tensor, num_generations: int, reward_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards as ``[num_completions, num_rewards]``, and the weights of columns."""
    check_floating("rewards", rewards)
    check_integer("num_generations", num_generations, at_least=1)
    if rewards.ndim not in (1, 2) or len(rewards) % num_generations:
        expected = f"one or more for each completion of whole groups of num_generations={num_generations}"
        raise wrong_value("rewards", f"{expected}: [num_completions] or [num_completions, num_rewards]", rewards)
    table = rewards if rewards.dtype == torch.float64 else rewards.float()
    table = table if table.ndim == 2 else table[:, None]
    if reward_weights is None:
        return table, table.new_ones(table.shape[1])
    check_floating("reward_weights", reward_weights)
    if reward_weights.shape != table.shape[1:]:
        raise wrong_value("reward_weights", f"a tensor of shape ({table.shape[1]},)", reward_weights)
    return table, reward_weights.to(table)


def _normalized(values: Tensor, dim: int) -> Tensor:
    return (values - values.nanmean(dim, keepdim=True)) / (_std(values, dim) + _EPS)


def _std(values: Tensor, dim: int) -> Tensor:
    """Unbiased standard deviation without NaN; NaN for a single value of several, 0 if the dimension has one."""
    if values.shape[dim] == 1:
        return torch.zeros_like(values)
    count = values.isnan().logical_not().sum(dim, keepdim=True)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / torch.where(count > 1, count - 1, torch.nan)).sqrt()
