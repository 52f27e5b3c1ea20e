"""Weights, schedules and targets of several heads."""

import math

import pytest
import torch

from lightning_liger import deepseek_mtp_weights, medusa_weights, multi_token_weights, targets_ahead
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
