"""Losses of units of tokens, taken in chunks of whole units, against float64 autograd on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import TokenScores, linear_token_loss
from liger_ops.log_probs.linear_token_loss import plan_units
from tests.liger_ops.log_probs.cases import (
    CASES,
    Case,
    call,
    chunk_of,
    leaves_of,
    linear_log_probs_reference,
    make,
)

NUM_UNITS = 3


def unit_loss(log_probs: Tensor, index: Tensor, units: Tensor) -> Tensor:
    """A loss that is not a sum over tokens: of the sum of each unit's log-probabilities, at its first token."""
    numbers, place = units.reshape(-1)[index].unique(return_inverse=True)
    sums = log_probs.new_zeros(len(numbers)).index_add(0, place, log_probs)
    first = torch.full_like(numbers, len(index)).scatter_reduce(
        0, place, torch.arange(len(index), device=index.device), "amin"
    )
    return torch.zeros_like(log_probs).index_put((first,), -F.logsigmoid(0.1 * sums + 1.0))


def chunks_seen(head: Any, units: Tensor, **options: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    seen = []

    def loss(scores: TokenScores, index: Tensor) -> Tensor:
        seen.append(index)
        assert scores.log_probs is not None
        return unit_loss(scores.log_probs, index, units)

    leaves = leaves_of(head, False)
    total, _ = call(linear_token_loss, leaves, head, loss, units=units, **options)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return total, seen, dict(zip(leaves, torch.autograd.grad(total, wanted, allow_unused=True), strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if case.outputs == ("log_probs",)], ids=str)
def test_losses_of_units_are_those_of_whole_logits_in_float64(case: Case) -> None:
    head = make(case._replace(frozen=False), torch.float64)
    # Of different sizes, whose tokens alternate; the numbers have gaps.
    units = (torch.arange(head.target.numel()) % NUM_UNITS * 7 - 7).view_as(head.target)
    leaves = leaves_of(head, False)
    index = (head.target.reshape(-1) != -100).nonzero()[:, 0]
    log_probs = call(linear_log_probs_reference, leaves, head).log_probs.reshape(-1)[index]
    expected = unit_loss(log_probs, index, units).sum()
    truth = torch.autograd.grad(expected, list(leaves.values()))
    for rows in (1, 4, 8, 100):
        total, seen, gradients = chunks_seen(head, units, **chunk_of(rows, head))
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(list(gradients.values()), list(truth), rtol=1e-10, atol=1e-12)
        in_chunks = [set(units.reshape(-1)[chunk].tolist()) for chunk in seen]
        assert sum(map(len, in_chunks)) == NUM_UNITS, "a unit was in two chunks"
        assert torch.cat(seen).sort().values.equal(index)


@pytest.mark.parametrize(
    ("counts", "chunk_size", "expected"),
    [
        ((2, 2, 2), 4, [(0, 4), (4, 6)]),
        ((2, 2, 2), 3, [(0, 2), (2, 4), (4, 6)]),
        ((9, 1, 1), 4, [(0, 9), (9, 11)]),
        ((1, 9, 1), 4, [(0, 1), (1, 10), (10, 11)]),
        ((3,), 1, [(0, 3)]),
    ],
)
def test_chunks_hold_as_many_whole_units_as_fit(
    counts: tuple[int, ...], chunk_size: int, expected: list[tuple[int, int]]
) -> None:
    units = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    plan = plan_units(units, torch.ones_like(units, dtype=torch.bool), chunk_size)
    assert list(plan.chunks(len(units), chunk_size)) == expected
    assert plan.max_rows(len(units), chunk_size) == max(stop - start for start, stop in expected)
