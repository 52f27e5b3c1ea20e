"""Options, targets and checks that every loss over class indices shares."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from liger_ops.loss.options import (
    IGNORE_INDEX,
    REDUCTIONS,
    TokenLossOptions,
    TokenStats,
    check_labels,
    check_reduction,
    check_weights,
    flat_targets,
)


@pytest.mark.parametrize(
    "options",
    [
        TokenLossOptions(),
        TokenLossOptions(ignore_index=-1, label_smoothing=0.1, softcap=30.0, logit_scale=0.5, z_loss_weight=1e-4),
    ],
    ids=["defaults", "everything"],
)
def test_options_survive_the_way_through_an_op(options: TokenLossOptions) -> None:
    scalars = options.as_scalars()
    assert all(type(scalar) in (int, float) for scalar in scalars)
    assert TokenLossOptions.from_scalars(*scalars) == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": -0.1}, "label_smoothing must be .* of at least 0 and at most 1, got -0.1"),
        ({"label_smoothing": 1.1}, "label_smoothing must be .* of at least 0 and at most 1, got 1.1"),
        ({"label_smoothing": float("nan")}, "label_smoothing must be .* of at least 0 and at most 1, got nan"),
        ({"softcap": 0.0}, "softcap must be .* above 0 or None, got 0.0"),
        ({"softcap": -3.0}, "softcap must be .* above 0 or None, got -3.0"),
        ({"z_loss_weight": -1e-4}, "z_loss_weight must be .* of at least 0, got -0.0001"),
    ],
    ids=str,
)
def test_options_out_of_range_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenLossOptions(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stats_of_ignored_tokens_are_zero_false_and_their_label(dtype: torch.dtype) -> None:
    labels = torch.full((3,), IGNORE_INDEX)
    stats = TokenStats.zeros_like(labels, dtype)
    assert [stat.dtype for stat in stats] == [dtype] * 4 + [torch.int64, torch.bool]
    assert all(stat.shape == (3,) for stat in stats)
    assert not any(stat.any() for stat in (*stats[:4], stats.correct))
    assert torch.equal(stats.predictions, labels)
    storages = {stat.data_ptr() for stat in (*stats, labels)}
    assert len(storages) == 7  # each is written on its own


@pytest.mark.parametrize("ignore_index", [IGNORE_INDEX, 11])
def test_labels_in_range_and_ignored_ones_pass(ignore_index: int) -> None:
    check_labels("target", torch.tensor([[0, 10], [ignore_index, 5]]), 11, ignore_index)
    check_labels("target", torch.empty(0, dtype=torch.int64), 11, ignore_index)


@pytest.mark.parametrize("label", [-1, 11, IGNORE_INDEX])
def test_labels_out_of_range_raise_on_the_cpu(label: int) -> None:
    message = rf"labels must be between 0 and vocab_size - 1 = 10, or ignore_index = -2; got {label} \(2 of 4 labels"
    with pytest.raises(ValueError, match=message):
        check_labels("labels", torch.tensor([3, label, -2, label]), 11, -2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
def test_labels_of_another_dtype_raise(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"target must hold class indices of dtype torch.int64, got {dtype}"):
        check_labels("target", torch.ones(3, dtype=dtype), 11, IGNORE_INDEX)


@pytest.mark.gpu
def test_labels_on_the_gpu_are_not_looked_at() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        check_labels("target", torch.full((3,), 99, device="cuda"), 11, IGNORE_INDEX)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("weight", "token_weight", "message"),
    [
        (torch.ones(4), None, r"^weight must have shape \(5,\), got \(4,\)"),
        (torch.ones(5, 1), None, r"^weight must have shape \(5,\), got \(5, 1\)"),
        (None, torch.ones(6), r"^token_weight must have target's shape \(2, 3\), got \(6,\)"),
        (torch.ones(5), torch.ones(()), r"^token_weight must have target's shape \(2, 3\), got \(\)"),
    ],
)
def test_weights_that_do_not_fit_raise(
    weight: torch.Tensor | None, token_weight: torch.Tensor | None, message: str
) -> None:
    target = torch.zeros(2, 3, dtype=torch.int64)
    check_weights(torch.ones(5), torch.ones(2, 3), target, 5, -100)
    check_weights(None, None, target, 5, -100)
    with pytest.raises(ValueError, match=message):
        check_weights(weight, token_weight, target, 5, -100)


@pytest.mark.parametrize("name", ["weight", "token_weight"])
def test_weights_that_would_lose_their_gradient_raise(name: str) -> None:
    weights = {"weight": torch.ones(5), "token_weight": torch.ones(2, 3)}
    weights[name].requires_grad_()
    target = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"^{name} must not require a gradient.*pass {name}\.detach\(\)"):
        check_weights(**weights, target=target, vocab_size=5, ignore_index=-100)
    with torch.no_grad():
        check_weights(**weights, target=target, vocab_size=5, ignore_index=-100)


@pytest.mark.parametrize(
    "options",
    [
        TokenLossOptions(np.int64(-1), np.float32(0.5), np.float32(30.0), np.float64(0.5), np.float16(0.25)),
        TokenLossOptions(-1, Fraction(1, 2), 30, Fraction(1, 2), Fraction(1, 4)),
    ],
    ids=["numpy", "exact"],
)
def test_options_of_other_kinds_of_numbers_become_pythons(options: TokenLossOptions) -> None:
    scalars = options.as_scalars()
    assert [type(scalar) for scalar in scalars] == [int, float, float, float, float]
    assert scalars == (-1, 0.5, 30.0, 0.5, 0.25)


def test_targets_are_flat_contiguous_and_free_of_gradients() -> None:
    labels = torch.arange(6).view(3, 2).t()
    weight = torch.rand(10)[::2].requires_grad_()
    token_weight = torch.rand(3, 2).t().requires_grad_()
    targets = flat_targets(labels, weight, token_weight, torch.float32)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in targets)
    assert targets.labels.tolist() == [0, 2, 4, 1, 3, 5]
    assert torch.equal(targets.class_weight, weight)
    assert torch.equal(targets.token_weight, token_weight.flatten())
    assert flat_targets(labels, None, None, torch.float32)[1:] == (None, None)


def test_reduction_is_one_of_three() -> None:
    for reduction in REDUCTIONS:
        check_reduction(reduction)
    with pytest.raises(ValueError, match=r"reduction must be one of 'none', 'mean', 'sum', got 'average'"):
        check_reduction("average")
