"""How many matrix products of the size tokens * hidden size * vocabulary each way of calling costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops import TokenScores, backend, linear_log_probs, linear_token_loss

HIDDEN, VOCAB, TOKENS, CHUNK = 16, 64, 24, 4
LOGITS = CHUNK * VOCAB * 4


class Products(TorchDispatchMode):
    """Counts the rows that are multiplied by the whole head, or its gradient is made of."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.rows += left.shape[0] * left.shape[1] * right.shape[1] // (HIDDEN * VOCAB)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    # The mode only watches: a tracer would get an op in place of its products.
    monkeypatch.setattr(backend, "is_traced", lambda: False)
    return Products()


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
def test_scores(frozen: bool, options: dict[str, Any], expected: float, products: Products) -> None:
    input, weight, target = make(frozen)
    with products:
        scores = linear_log_probs(input, weight, target, chunk_bytes=LOGITS, **options)
        sum(score.sum() for score in scores if score is not None and score.requires_grad).backward()
    assert products.rows == expected * TOKENS
    assert input.grad is not None


@pytest.mark.parametrize(("frozen", "expected"), [(True, 2), (False, 3)])
def test_loss_of_tokens(frozen: bool, expected: float, products: Products) -> None:
    input, weight, target = make(frozen)

    def token_loss(scores: TokenScores, index: Tensor) -> Tensor:
        return scores.log_probs * scores.entropy + scores.lse**2

    with products:
        outputs = ("log_probs", "entropy", "lse")
        loss, _ = linear_token_loss(input, weight, target, token_loss, outputs=outputs, chunk_bytes=LOGITS)
        (2 * loss).backward()
    assert products.rows == expected * TOKENS


@pytest.mark.parametrize("call", ["no_grad", "detach", "nothing differentiable", "loss"])
def test_without_gradients(call: str, products: Products) -> None:
    input, weight, target = make(False)
    options: dict[str, Any] = {"chunk_bytes": LOGITS}
    if call == "detach":
        options |= {"outputs": ("log_probs", "entropy"), "detach": ("log_probs", "entropy")}
    if call == "nothing differentiable":
        options |= {"outputs": ("correct", "log_sum_sq_probs")}
    with products, torch.set_grad_enabled(call in ("detach", "nothing differentiable")):
        if call == "loss":
            linear_token_loss(input, weight, target, lambda scores, index: scores.log_probs, **options)
        else:
            linear_log_probs(input, weight, target, **options)
    assert products.rows == TOKENS


@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("alive", [0, 3, 8, 9, 24])
def test_rows_without_upstream_gradient_are_left_out(alive: int, saved: int, products: Products) -> None:
    input, weight, target = make(False)
    upstream = torch.zeros(TOKENS)
    upstream[torch.randperm(TOKENS)[:alive]] = 1.0
    with products:
        scores = linear_log_probs(input, weight, target, chunk_bytes=LOGITS, saved_logits_bytes=saved * LOGITS)
        products.rows = 0
        scores.log_probs.backward(upstream)
    if saved:
        rest = int(upstream[saved * CHUNK :].sum())
        assert products.rows == 2 * saved * CHUNK + 3 * rest
    else:
        # A whole first chunk, which is under way before the host knows how many rows there are.
        assert products.rows == 3 * max(alive, CHUNK)
    expected = -torch.nn.functional.cross_entropy(input @ weight.T, target, reduction="none")
    torch.testing.assert_close(
        [input.grad, weight.grad], list(torch.autograd.grad(expected, [input, weight], upstream)), rtol=1e-4, atol=1e-5
    )
