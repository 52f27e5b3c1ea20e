"""Weights, schedules and targets of several heads."""

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_liger import deepseek_mtp_weights, medusa_weights, multi_token_loss, multi_token_weights, targets_ahead
from lightning_liger.losses.multi_head import scheduled_coefficient


def test_weights() -> None:
    assert medusa_weights(3) == pytest.approx([0.8, 0.64, 0.512])
    assert multi_token_weights(2, 0.5) == [0.5, 0.5]
    assert deepseek_mtp_weights(3, 0.3) == pytest.approx([0.1] * 3)


def test_coefficient_rises_to_its_value() -> None:
    def rise(schedule: str) -> list[float]:
        return [scheduled_coefficient(step, 4, 0.2, schedule) for step in (0, 2, 4, 9)]

    assert rise("constant") == [0.2] * 4
    assert rise("linear") == pytest.approx([0.0, 0.1, 0.2, 0.2])
    assert rise("sine") == pytest.approx([0.0, 0.2 * math.sin(math.pi / 4), 0.2, 0.2])


def test_targets_stay_in_their_document() -> None:
    targets = torch.tensor([[1, 2, -100, 4, 5, -100]])
    assert targets_ahead(targets, 0) is targets
    assert targets_ahead(targets, 1).tolist() == [[2, -100, 4, 5, -100, -100]]
    assert targets_ahead(targets, 9).tolist() == [[-100] * 6]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert targets_ahead(targets, 1, positions).tolist() == [[2, -100, -100, 5, -100, -100]]
    assert targets_ahead(targets, 2, positions).tolist() == [[-100] * 6]
    assert targets_ahead(targets, 9, positions).tolist() == [[-100] * 6]


def test_loss_of_several_predictions_is_the_weighted_sum() -> None:
    logits = torch.randn(2, 3, 4, 7, requires_grad=True)
    targets = torch.randint(7, (2, 3, 4))
    targets[0, 0, 0] = targets[1, :, 2:] = -100
    loss, scores = multi_token_loss(logits, targets, [0.8, 0.3])
    parts = [F.cross_entropy(logits[k].flatten(0, 1), targets[k].flatten(), reduction="sum") for k in (0, 1)]
    torch.testing.assert_close(loss, 0.8 * parts[0] + 0.3 * parts[1])
    assert scores.correct is not None
    assert torch.equal(scores.correct, (logits.argmax(-1) == targets) & (targets >= 0))
