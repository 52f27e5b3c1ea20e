"""How many matrix products of the size tokens * hidden size * vocabulary each way of calling costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import TokenScores, backend, linear_log_probs, linear_token_loss
from tests.liger_ops.operators import OperatorLog

HIDDEN, VOCAB, TOKENS, CHUNK = 16, 64, 24, 4
LOGITS = CHUNK * VOCAB * 4


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> OperatorLog:
    """Sees the products inside of the ops."""
    monkeypatch.setattr(backend, "is_traced", lambda: False)
    return OperatorLog()


def rows_of(log: OperatorLog) -> float:
    """How many rows were multiplied by the whole head, or its gradient was made of."""
    return sum(math.prod(sizes) for sizes in log.products) / (HIDDEN * VOCAB)


def make(frozen: bool) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    input, weight = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN)
    return input, weight.requires_grad_(not frozen), torch.randint(VOCAB, (TOKENS,))


@pytest.mark.parametrize(
    ("frozen", "options", "expected"),
    [
        (True, {}, 2),
        (True, {"outputs": ("log_probs", "entropy"), "detach": ("entropy",)}, 2),
        (True, {"outputs": ("log_probs", "entropy")}, 3),
        (True, {"outputs": ("lse", "mean_logit"), "softcap": 2.0}, 3),
        (True, {"softcap": 2.0}, 2),
        (False, {}, 4),
        (False, {"outputs": ("log_probs", "entropy", "lse", "mean_logit"), "softcap": 2.0}, 4),
        (False, {"saved_logits_bytes": 3 * LOGITS}, 3.5),
        (False, {"saved_logits_bytes": 6 * LOGITS}, 3),
    ],
    ids=str,
)
def test_scores(frozen: bool, options: dict[str, Any], expected: float, log: OperatorLog) -> None:
    input, weight, target = make(frozen)
    with log:
        scores = linear_log_probs(input, weight, target, chunk_bytes=LOGITS, **options)
        sum(score.sum() for score in scores if score is not None and score.requires_grad).backward()
    assert rows_of(log) == expected * TOKENS
    assert input.grad is not None


@pytest.mark.parametrize(("frozen", "expected"), [(True, 2), (False, 3)])
def test_loss_of_tokens(frozen: bool, expected: float, log: OperatorLog) -> None:
    input, weight, target = make(frozen)

    def token_loss(scores: TokenScores, index: Tensor) -> Tensor:
        return scores.log_probs * scores.entropy + scores.lse**2

    with log:
        outputs = ("log_probs", "entropy", "lse")
        loss, _ = linear_token_loss(input, weight, target, token_loss, outputs=outputs, chunk_bytes=LOGITS)
        (2 * loss).backward()
    assert rows_of(log) == expected * TOKENS


@pytest.mark.parametrize("call", ["no_grad", "detach", "nothing differentiable", "loss"])
def test_without_gradients(call: str, log: OperatorLog) -> None:
    input, weight, target = make(False)
    options: dict[str, Any] = {"chunk_bytes": LOGITS}
    if call == "detach":
        options |= {"outputs": ("log_probs", "entropy"), "detach": ("log_probs", "entropy")}
    if call == "nothing differentiable":
        options |= {"outputs": ("correct", "log_sum_sq_probs")}
    with log, torch.set_grad_enabled(call in ("detach", "nothing differentiable")):
        if call == "loss":
            linear_token_loss(input, weight, target, lambda scores, index: scores.log_probs, **options)
        else:
            linear_log_probs(input, weight, target, **options)
    assert rows_of(log) == TOKENS


@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("alive", [0, 3, 8, 9, 24])
def test_rows_without_upstream_gradient_are_left_out(alive: int, saved: int, log: OperatorLog) -> None:
    input, weight, target = make(False)
    upstream = torch.zeros(TOKENS)
    upstream[torch.randperm(TOKENS)[:alive]] = 1.0
    with log:
        scores = linear_log_probs(input, weight, target, chunk_bytes=LOGITS, saved_logits_bytes=saved * LOGITS)
        log.products.clear()
        scores.log_probs.backward(upstream)
    if saved:
        rest = int(upstream[saved * CHUNK :].sum())
        assert rows_of(log) == 2 * saved * CHUNK + 3 * rest
    else:
        # A whole first chunk, which is under way before the host knows how many rows there are.
        assert rows_of(log) == 3 * max(alive, CHUNK)
    expected = -torch.nn.functional.cross_entropy(input @ weight.T, target, reduction="none")
    torch.testing.assert_close(
        [input.grad, weight.grad], list(torch.autograd.grad(expected, [input, weight], upstream)), rtol=1e-4, atol=1e-5
    )
