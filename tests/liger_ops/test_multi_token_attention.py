"""Multi-token attention: what it reads of later tokens, and strides."""

import sys

import pytest
import torch

import liger_ops


@pytest.mark.parametrize("dilation", [1, 2])
def test_padding_by_the_whole_kernel_makes_it_causal(dilation: int, device: torch.device) -> None:
    """Later rows, and later columns of any row, change no earlier result."""
    size, kept = 9, 5
    scores, weight = torch.randn(2, 4, size, size, device=device), torch.randn(6, 2, 3, 3, device=device)

    def attend(scores: torch.Tensor) -> torch.Tensor:
        padded = liger_ops.multi_token_attention(scores, weight, None, 1, 2 * dilation, dilation, 2)
        return padded[..., :size, :size]

    changed = scores.clone()
    changed[..., kept:, :] = torch.randn_like(changed[..., kept:, :])
    changed += torch.full((size, size), float("nan"), device=device).triu(1)
    before, after = attend(scores), attend(changed)
    torch.testing.assert_close(after[..., :kept, :], before[..., :kept, :])
    assert (after[..., kept, : kept + 1] != before[..., kept, : kept + 1]).any()


def test_strides_choose_queries_and_keys(device: torch.device) -> None:
    """A kernel of one weight, 2: every third row and column of the probabilities, twice."""
    scores = torch.randn(1, 1, 10, 10, device=device)
    weight = torch.full((1, 1, 1, 1), 2.0, device=device)
    actual = liger_ops.multi_token_attention(scores, weight, stride=3)
    later = torch.ones(10, 10, dtype=torch.bool, device=device).triu(1)
    probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
    torch.testing.assert_close(actual, 2 * probabilities[..., ::3, ::3])


def test_longer_rows_than_registers_hold(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, weight = torch.randn(1, 1, 6, 6, device=device), torch.randn(1, 1, 3, 3, device=device)
    expected = liger_ops.multi_token_attention(scores, weight, padding=1)
    monkeypatch.setattr(sys.modules["liger_ops.softmax"], "MAX_COLUMNS", 5)  # the name is the function
    torch.testing.assert_close(liger_ops.multi_token_attention(scores, weight, padding=1), expected)
