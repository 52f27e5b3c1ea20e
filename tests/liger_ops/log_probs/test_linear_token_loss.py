"""linear_token_loss against float64 autograd on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_ops import TokenScores, linear_log_probs, linear_token_loss
from tests.liger_ops.log_probs.cases import (
    CASES,
    ROWS,
    TOKENS,
    Case,
    call,
    chunk_of,
    leaves_of,
    linear_token_loss_reference,
    loss_and_gradients,
    make,
    make_loss,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits_in_float64(case: Case) -> None:
    head = make(case, torch.float64)
    expected = loss_and_gradients(linear_token_loss_reference, head, case.frozen)
    for options in ({}, chunk_of(ROWS, head), chunk_of(ROWS, head) | {"max_valid_tokens": TOKENS - 3}):
        actual = loss_and_gradients(linear_token_loss, head, case.frozen, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        assert not any(score.requires_grad for score in actual[1] if score is not None)


def test_loss_is_called_with_each_token_once() -> None:
    head = make(Case(("log_probs", "correct")))
    seen: list[Tensor] = []

    def token_loss(scores: TokenScores, index: Tensor) -> Tensor:
        assert scores.entropy is None
        assert scores.correct is not None
        assert scores.log_probs is not None
        assert scores.log_probs.shape == scores.correct.shape == index.shape
        assert scores.log_probs.requires_grad
        seen.append(index.clone())
        index.zero_()  # belongs to the loss
        scores.correct.zero_()
        return -scores.log_probs

    loss, scores = call(linear_token_loss, leaves_of(head, False), head, token_loss, **chunk_of(ROWS, head))
    assert torch.equal(torch.cat(seen).sort()[0], (head.target.reshape(-1) != -100).nonzero()[:, 0])
    expected = call(linear_log_probs, head.tensors, head)
    torch.testing.assert_close(loss, -expected.log_probs.sum())
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("rows", [ROWS, TOKENS])
def test_ignored_tokens_do_not_count(rows: int, device: torch.device) -> None:
    """Even if the loss makes infinities of their scores."""
    head = make(Case(("log_probs",)), device=device)
    leaves = leaves_of(head, False)

    def token_loss(scores: TokenScores, index: Tensor) -> Tensor:
        return 1 / scores.log_probs

    loss, _ = call(linear_token_loss, leaves, head, token_loss, **chunk_of(rows, head))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    kept = head.target != -100
    log_probs = call(linear_log_probs, leaves, head).log_probs
    torch.testing.assert_close(loss, (1 / log_probs[kept]).sum())
    torch.testing.assert_close(gradients, torch.autograd.grad((1 / log_probs[kept]).sum(), list(leaves.values())))


def test_nothing_is_called_under_autograd_without_gradients() -> None:
    head = make(Case(("log_probs", "entropy")))

    def token_loss(scores: TokenScores, index: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not scores.log_probs.requires_grad
        return -scores.log_probs

    loss, _ = call(linear_token_loss, head.tensors, head, token_loss)
    assert not loss.requires_grad


def test_graph_breaks_around_it_under_the_compiler() -> None:
    head = make(Case())
    leaves = leaves_of(head, False)
    token_loss = make_loss(torch.randn(TOKENS))

    def step() -> Tensor:
        loss, _ = call(linear_token_loss, leaves, head, token_loss, **chunk_of(ROWS, head))
        return loss * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager")
    wanted = list(leaves.values())
    torch.testing.assert_close(torch.autograd.grad(compiled(), wanted), torch.autograd.grad(step(), wanted))


def test_chunk_of_ignored_tokens_alone_needs_no_gradient() -> None:
    hidden_states, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    target = torch.full((4,), -100)

    def kept_loss(scores: TokenScores, index: Tensor) -> Tensor:
        losses, kept = torch.ones(len(index)), target[index] != -100
        assert scores.log_probs is not None
        return losses.masked_scatter(kept, scores.log_probs[kept]) if kept.any() else losses

    loss, _ = linear_token_loss(hidden_states, weight, target, kept_loss)
    gradients = torch.autograd.grad(loss, (hidden_states, weight))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)
