"""Advantages of groups of completions against loops over groups."""

import statistics
from itertools import product

import pytest
import torch

from lightning_liger.losses.advantages import group_advantages, leave_one_out_advantages

NAN = float("nan")
REWARDS = [1.0, 2.0, 4.0, 0.5, 0.5, 0.5, -1.0, NAN, 3.0, NAN, NAN, 2.0]
GROUPS = [REWARDS[i : i + 3] for i in range(0, 12, 3)]


def known(values: list[float]) -> list[float]:
    return [value for value in values if value == value]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else NAN


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_relative_to_the_group(scale: str) -> None:
    expected = []
    for group in GROUPS:
        for reward in group:
            scales = {"group": spread(known(group)), "batch": spread(known(REWARDS)), "none": 1 - 1e-4}
            advantage = (reward - statistics.mean(known(group))) / (scales[scale] + 1e-4)
            expected.append(advantage if advantage == advantage else 0.0)
    found = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), 3, scale_rewards=scale)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert found[7] == 0
    assert found[9] == 0
    assert group_advantages(torch.tensor([3.0, 5.0]), 1, scale_rewards="group").tolist() == [0, 0]


def test_several_rewards_are_added_before_or_after_they_are_normalized() -> None:
    second = [0.0, 1.0, 0.0, 2.0, NAN, 1.0, 5.0, 5.0, 5.0, 1.0, NAN, 0.0]
    table = torch.tensor([REWARDS, second], dtype=torch.float64).T
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    rows = [(r, s) for r, s in zip(REWARDS, second, strict=True)]
    sums = [sum(known([r, 0.5 * s])) if known([r, s]) else NAN for r, s in rows]
    found = group_advantages(table, 3, reward_weights=weights)
    torch.testing.assert_close(found, group_advantages(torch.tensor(sums, dtype=torch.float64), 3))

    normalized = []
    for column in (REWARDS, second):
        values = []
        for i in range(0, 12, 3):
            group = column[i : i + 3]
            values += [(x - statistics.mean(known(group))) / (spread(known(group)) + 1e-4) for x in group]
        normalized.append(values)
    sums = [sum(known([a, 0.5 * b])) if known(list(row)) else NAN for a, b, row in zip(*normalized, rows, strict=True)]
    expected = [(x - statistics.mean(known(sums))) / (spread(known(sums)) + 1e-4) for x in sums]
    found = group_advantages(table, 3, reward_weights=weights, multi_objective_aggregation="normalize_then_sum")
    expected = [x if x == x else 0.0 for x in expected]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_leave_one_out_advantages() -> None:
    kl = [0.1 * i for i in range(12)]
    for normalize, clip, penalized in product((False, True), (None, (0.0, 2.5)), (False, True)):
        rewards = [r if clip is None else min(max(r, clip[0]), clip[1]) if r == r else r for r in REWARDS]
        if penalized:
            rewards = [r - 0.2 * k for r, k in zip(rewards, kl, strict=True)]
        expected = []
        for i, reward in enumerate(rewards):
            first = i // 3 * 3
            others = known([rewards[j] for j in range(first, first + 3) if j != i])
            expected.append(reward - statistics.mean(others) if others else NAN)
        if normalize:
            values = known(expected)
            expected = [(x - statistics.mean(values)) / (spread(values) + 1e-4) for x in expected]
        found = leave_one_out_advantages(
            torch.tensor(REWARDS, dtype=torch.float64),
            3,
            kl=torch.tensor(kl, dtype=torch.float64) if penalized else None,
            beta=0.2,
            reward_clip_range=clip,
            normalize_advantages=normalize,
        )
        torch.testing.assert_close(found, torch.tensor([x if x == x else 0.0 for x in expected], dtype=torch.float64))
    assert leave_one_out_advantages(torch.tensor([3.0, 5.0]), 1).tolist() == [0, 0]
