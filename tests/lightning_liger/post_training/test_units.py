"""Losses of units, taken with chunks of whole units, against the same losses of all scores at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import TokenScores
from lightning_liger import token_scores
from lightning_liger.post_training import units as units_module
from lightning_liger.post_training.units import can_take_units, unit_loss
from tests.lightning_liger.lazy.twin import BATCH_SIZE, LABELS, MASK, SEQ_LEN, VOCAB_SIZE, Twin

NUM_UNITS = 3
UNITS = (torch.arange(BATCH_SIZE * SEQ_LEN) % (NUM_UNITS - 1)).view(BATCH_SIZE, SEQ_LEN)
"""The last unit has no token."""
LABELLED = LABELS.where(MASK, -100)


def losses(scores: TokenScores) -> Tensor:
    """Of each unit, from the sums of its scores."""
    assert scores.log_probs is not None
    assert scores.correct is not None
    sums = torch.zeros(NUM_UNITS, dtype=scores.log_probs.dtype)
    sums = sums.index_add(0, UNITS.flatten(), scores.log_probs.flatten())
    accuracy = torch.zeros(NUM_UNITS).index_add(0, UNITS.flatten(), scores.correct.flatten().float())
    return -F.logsigmoid(0.1 * sums + 1.0) * (1.0 + accuracy)


@pytest.mark.parametrize("empty_unit", [False, True])
def test_losses_of_units_are_those_of_all_scores_at_once(empty_unit: bool) -> None:
    twin, outputs = Twin(), ("log_probs", "correct")
    labels = LABELLED.masked_fill(UNITS == 0, -100) if empty_unit else LABELLED
    expected = losses(token_scores(twin.real, labels, outputs=outputs)).sum()
    for logits in (twin.lazy, twin.real):
        total, scores = unit_loss(logits, labels, UNITS, losses, outputs=outputs)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        assert scores.log_probs is not None
        assert not scores.log_probs.requires_grad
        torch.testing.assert_close(losses(scores).sum(), expected.detach(), rtol=1e-5, atol=1e-5)
    lazy, _ = unit_loss(twin.lazy, labels, UNITS, losses, outputs=outputs)
    twin.assert_same_gradients(lazy, expected)


def test_units_are_taken_where_a_trained_head_gains_and_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin()
    lazy = twin.lazy
    assert can_take_units(lazy, 10)
    assert not can_take_units(twin.real, 10)
    with torch.no_grad():
        assert not can_take_units(lazy, 10)
    monkeypatch.setattr(units_module, "MAX_UNIT_BYTES", 10 * VOCAB_SIZE * 4)
    assert can_take_units(lazy, 10)
    assert not can_take_units(lazy, 11)
    twin.lazy_head.requires_grad_(False)
    assert not can_take_units(twin.lazy, 10)
