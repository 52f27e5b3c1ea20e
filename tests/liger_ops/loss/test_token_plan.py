"""The mean's factor, and the sum of losses on both paths."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_ops.loss import token_plan
from liger_ops.loss.options import Targets
from liger_ops.loss.token_plan import mean_scale_of, reduce_losses
from tests.liger_ops.accuracy import few

VOCAB = 11
BLOCK = 8
SIZES = st.one_of(st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1]), st.integers(2, 5 * BLOCK))


@given(
    draw=st.builds(
        SimpleNamespace,
        num_tokens=SIZES,
        ignored=st.sampled_from([0.0, 0.4, 1.0]),
        ignore_index=st.sampled_from([-100, 0]),
        weights=st.sampled_from(["", "class", "token", "class and token", "zero class", "zero token"]),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
        wrong=st.sampled_from([None, -1, VOCAB, 2**40]),
        seed=st.integers(0, 2**16),
    )
)
@few(100)
def test_the_mean_divides_by_the_weight_of_tokens_that_count(draw: Any) -> None:
    torch.manual_seed(draw.seed)
    labels = torch.randint(VOCAB, (draw.num_tokens,))
    if draw.wrong is not None:
        labels[1:2] = draw.wrong  # counts, and weighs nothing if classes have weights
    labels.masked_fill_(torch.rand(draw.num_tokens) < draw.ignored, draw.ignore_index)
    kept = labels != draw.ignore_index
    is_class = (labels >= 0) & (labels < VOCAB)
    factor = float("zero" not in draw.weights)
    class_weight = token_weight = None
    each = kept.double()
    if "class" in draw.weights:
        class_weight = ((torch.rand(VOCAB) + 0.5) * factor).to(draw.dtype)
        each *= class_weight.double()[labels.where(is_class, 0)].where(is_class, 0.0)
    if "token" in draw.weights:
        token_weight = (torch.rand(draw.num_tokens) * factor).to(draw.dtype)
        token_weight[~kept] = torch.nan  # of no interest
        each *= token_weight.double().nan_to_num(0.0)
    total = each.sum().item()
    scale = mean_scale_of(Targets(labels, class_weight, token_weight), VOCAB, draw.ignore_index, draw.dtype)
    assert (scale.shape, scale.dtype) == ((), torch.promote_types(draw.dtype, torch.float32))
    assert scale.item() == pytest.approx(1 / total if total else 0.0, rel=1e-5)


@given(num_tokens=SIZES, scale=st.sampled_from([None, 0.3, 0.0]), special=st.sampled_from([None, torch.nan, torch.inf]))
@few(30)
def test_reduced_loss_is_the_scaled_sum_and_the_mean_of_nothing_nan(
    num_tokens: int, scale: float | None, special: float | None, device: torch.device
) -> None:
    losses = torch.randn(num_tokens, device=device)
    if special is not None:
        losses[-1:] = special
    mean_scale = None if scale is None else torch.tensor(scale, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_plan, "_BLOCK_SIZE", BLOCK)
        loss = reduce_losses(losses, mean_scale)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    expected = losses.double().sum() * (1.0 if mean_scale is None else mean_scale.double())
    expected = torch.full_like(expected, torch.nan) if scale == 0.0 else expected
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
