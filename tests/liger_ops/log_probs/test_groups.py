"""Groups of tokens over one head against a call for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import TokenScores, linear_cross_entropy, linear_log_probs, linear_token_loss
from tests.liger_ops.operators import OperatorLog

HIDDEN, VOCAB = 6, 37
SHAPES = [(2, 5), (7,), (1, 3), (0,)]
CHUNK = {"chunk_bytes": 4 * VOCAB * 8}


def make() -> tuple[list[Tensor], Tensor, list[Tensor], tuple[list[Tensor], Tensor]]:
    """Hidden states, the head, labels and an adapter, of which the labels of a group are all ignored."""
    torch.manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    targets = [torch.randint(VOCAB, shape) for shape in SHAPES]
    targets[0][1, 2:] = -100
    targets[2][:] = -100
    adapter = [leaf(*shape, 2) for shape in SHAPES], leaf(VOCAB, 2)
    return [leaf(*shape, HIDDEN) for shape in SHAPES], leaf(VOCAB, HIDDEN), targets, adapter


def gradients(loss: Tensor, inputs: list[Tensor], weight: Tensor, adapter: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [*inputs, weight, *adapter[0], adapter[1]])


@pytest.mark.parametrize("weights", [None, [0.5, 2, 1.0, 1.0], "tensors"], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_cross_entropy(reduction: str, weights: Any) -> None:
    inputs, weight, targets, adapter = make()
    if weights == "tensors":
        weights = [torch.rand(shape, dtype=torch.float64) for shape in SHAPES]
    loss, stats = linear_cross_entropy(
        inputs, weight, targets, token_weight=weights, adapter=adapter, reduction=reduction, return_stats=True, **CHUNK
    )
    one_by_one = [
        linear_cross_entropy(
            states, weight, labels, reduction="none", return_stats=True, adapter=(low_rank, adapter[1]),
            token_weight=None if weights is None else torch.as_tensor(weights[number]).expand(labels.shape),
        )
        for number, (states, labels, low_rank) in enumerate(zip(inputs, targets, adapter[0], strict=True))
    ]  # fmt: skip
    expected = sum(losses.sum() for losses, _ in one_by_one)
    if reduction == "none":
        assert isinstance(loss, tuple)
        torch.testing.assert_close(loss, tuple(losses for losses, _ in one_by_one))
        loss = sum(losses.sum() for losses in loss)
    if reduction == "mean":
        each = [1.0] * 4 if weights is None else weights
        pairs = zip(targets, each, strict=True)
        expected = expected / sum(((labels != -100) * factor).sum() for labels, factor in pairs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(stats, tuple(found for _, found in one_by_one))
    torch.testing.assert_close(gradients(loss, inputs, weight, adapter), gradients(expected, inputs, weight, adapter))


@pytest.mark.parametrize("temperature", [0.7, [0.7, 1.0, 2, 1.0]], ids=str)
def test_scores(temperature: Any) -> None:
    inputs, weight, targets, adapter = make()
    outputs = TokenScores._fields
    options = {"outputs": outputs, "softcap": 3.0}
    scores = linear_log_probs(inputs, weight, targets, adapter=adapter, temperature=temperature, **options, **CHUNK)
    each = temperature if isinstance(temperature, list) else [temperature] * 4
    expected = tuple(
        linear_log_probs(states, weight, labels, adapter=(low_rank, adapter[1]), temperature=one, **options)
        for states, labels, low_rank, one in zip(inputs, targets, adapter[0], each, strict=True)
    )
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    losses = [
        sum((group.log_probs * group.entropy + group.lse).sum() for group in groups) for groups in (scores, expected)
    ]
    actual, truth = (gradients(loss, inputs, weight, adapter) for loss in losses)
    torch.testing.assert_close(actual, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("has_units", [False, True])
def test_loss_of_tokens(has_units: bool) -> None:
    inputs, weight, targets, adapter = make()
    num_tokens = sum(labels.numel() for labels in targets)
    advantages, unit_of_token = torch.randn(num_tokens, dtype=torch.float64), torch.arange(num_tokens) % 3
    flat_units = unit_of_token.split([labels.numel() for labels in targets])
    units = [each.view(labels.shape) for each, labels in zip(flat_units, targets, strict=True)]
    seen: list[set[int]] = []
    options: dict[str, Any] = {"outputs": ("log_probs", "entropy")}

    def token_loss(scores: TokenScores, index: Tensor) -> Tensor:
        seen.append({*unit_of_token[index].tolist()})
        return advantages[index] * scores.log_probs.exp() - scores.entropy

    options |= {"units": units if has_units else None}
    loss, scores = linear_token_loss(inputs, weight, targets, token_loss, adapter=adapter, **options, **CHUNK)
    assert not has_units or seen == [{0}, {1}, {2}]
    expected = linear_log_probs(inputs, weight, targets, adapter=adapter, outputs=options["outputs"])
    flat = torch.cat([group.log_probs.exp().flatten() for group in expected])
    kept = torch.cat([labels.flatten() for labels in targets]) != -100
    truth = (advantages * flat)[kept].sum() - sum(group.entropy.sum() for group in expected)
    torch.testing.assert_close(loss, truth)
    detached = tuple(TokenScores(group.log_probs.detach(), group.entropy.detach()) for group in expected)
    torch.testing.assert_close(scores, detached)
    torch.testing.assert_close(gradients(loss, inputs, weight, adapter), gradients(truth, inputs, weight, adapter))


def test_the_head_gets_one_gradient(log: OperatorLog) -> None:
    inputs, weight, targets, _ = make()
    num_tokens = sum(labels.numel() for labels in targets)
    with log:
        whole = SimpleNamespace(batch_chunk_size=num_tokens)
        linear_cross_entropy(inputs, weight, targets, reduction="sum", options=whole).backward()
    assert [sizes for sizes in log.products if sizes[0] == VOCAB] == [(VOCAB, num_tokens, HIDDEN)]
