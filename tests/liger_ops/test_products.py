"""How many matrix products of the size tokens * hidden size * vocabulary each way of calling an op of a head costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import liger_ops
from liger_ops import TokenScores, linear_log_probs
from tests.liger_ops.operators import OperatorLog

HIDDEN, VOCAB, TOKENS, CHUNK = 16, 64, 24, 4
LOGITS = CHUNK * VOCAB * 4


def rows_of(log: OperatorLog) -> float:
    """How many rows were multiplied by the whole head, or its gradient was made of."""
    return sum(math.prod(sizes) for sizes in log.products) / (HIDDEN * VOCAB)


def make(trained: tuple[str, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"input": (TOKENS, HIDDEN), "linear_weight": (VOCAB, HIDDEN), "linear_bias": (VOCAB,)}
    return {name: torch.randn(shape).requires_grad_(name in trained) for name, shape in shapes.items()}


def every_score(scores: TokenScores, index: Tensor) -> Tensor:
    return scores.log_probs * scores.entropy + scores.lse**2


LABELS = {"target": torch.arange(TOKENS), "chunk_bytes": LOGITS}
TEACHER = {"teacher_input": torch.ones(TOKENS, HIDDEN), "teacher_weight": torch.ones(VOCAB, HIDDEN)}
OPS: dict[str, dict[str, Any]] = {
    "cross_entropy": LABELS,
    "log_probs": LABELS,
    "token_loss": {**LABELS, "token_loss": every_score, "outputs": ("log_probs", "entropy", "lse")},
    "topk_log_probs": {"ids": torch.arange(2 * TOKENS).view(TOKENS, 2), "chunk_bytes": LOGITS},
    "divergence": {**TEACHER, "chunk_bytes": 2 * LOGITS},
}
INPUT, WEIGHT, BIAS, ALL = ("input",), ("linear_weight",), ("linear_bias",), ("input", "linear_weight", "linear_bias")
FOUR = {"outputs": ("log_probs", "entropy", "lse", "mean_logit"), "softcap": 2.0}


@pytest.mark.parametrize(
    ("op", "trained", "options", "expected"),
    [
        # Without reduction, backward repeats the projection that forward made for the losses.
        *(
            ("cross_entropy", trained, {"reduction": reduction}, number + (reduction == "none"))
            for trained, number in ((BIAS, 1), (INPUT, 2), (WEIGHT, 2), (ALL, 3))
            for reduction in ("none", "sum")
        ),
        ("log_probs", INPUT, {}, 2),
        ("log_probs", INPUT, {"outputs": ("log_probs", "entropy"), "detach": ("entropy",)}, 2),
        ("log_probs", INPUT, {"outputs": ("log_probs", "entropy")}, 3),
        ("log_probs", INPUT, {"outputs": ("lse", "mean_logit"), "softcap": 2.0}, 3),
        ("log_probs", INPUT, {"softcap": 2.0}, 2),
        ("log_probs", ALL, {}, 4),
        ("log_probs", ALL, FOUR, 4),
        ("log_probs", ALL, {"saved_logits_bytes": 3 * LOGITS}, 3.5),
        ("log_probs", ALL, {"saved_logits_bytes": 6 * LOGITS}, 3),
        ("log_probs", ALL, {**FOUR, "detach": FOUR["outputs"]}, 1),
        ("log_probs", ALL, {"outputs": ("correct", "log_sum_sq_probs")}, 1),
        ("token_loss", INPUT, {}, 2),
        ("token_loss", ALL, {}, 3),
        ("topk_log_probs", INPUT, {}, 2),
        ("topk_log_probs", ALL, {}, 4),
        ("topk_log_probs", ALL, {"saved_logits_bytes": 2**30}, 3),
        ("topk_log_probs", ALL, {"renormalize": True}, 0),
        # One for the teacher's logits, two if backward repeats them.
        ("divergence", INPUT, {"reduction": "none"}, 3),
        ("divergence", INPUT, {"reduction": "mean"}, 3),
        ("divergence", ALL, {"reduction": "mean"}, 4),
        ("divergence", ALL, {"reduction": "none"}, 6),
        *((op, (), {}, 1 + (op == "divergence")) for op in OPS),
    ],
    ids=str,
)
def test_call_and_backward(
    op: str, trained: tuple[str, ...], options: dict[str, Any], expected: float, log: OperatorLog
) -> None:
    tensors = make(trained)
    with log:
        results = tree_leaves(getattr(liger_ops, f"linear_{op}")(**tensors, **{**OPS[op], **options}))
        differentiable = [each.sum() for each in results if isinstance(each, Tensor) and each.requires_grad]
        if differentiable:
            (2 * sum(differentiable)).backward()
            assert all(tensors[name].grad is not None for name in trained)
    assert rows_of(log) == expected * TOKENS


@pytest.mark.parametrize("op", OPS)
def test_call_without_autograd(op: str, log: OperatorLog) -> None:
    with log, torch.no_grad():
        getattr(liger_ops, f"linear_{op}")(**make(ALL), **OPS[op])
    assert rows_of(log) == TOKENS * (1 + (op == "divergence"))


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("trained", [INPUT, ALL])
@pytest.mark.parametrize(("op", "operator"), [("topk_log_probs", "index_select"), ("divergence", "sort")])
def test_tokens_are_sorted_for_a_mask_alone(
    op: str, operator: str, trained: tuple[str, ...], has_mask: bool, log: OperatorLog
) -> None:
    mask = torch.ones(TOKENS, dtype=torch.bool) if has_mask else None
    with log:
        getattr(liger_ops, f"linear_{op}")(**make(trained), **OPS[op], mask=mask).sum().backward()
    assert (getattr(torch.ops.aten, operator) in log.operators) == has_mask


@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("alive", [0, 3, 8, 9, 24])
def test_rows_without_upstream_gradient_are_left_out(alive: int, saved: int, log: OperatorLog) -> None:
    input, weight, _ = make(ALL).values()
    upstream = torch.zeros(TOKENS)
    upstream[torch.randperm(TOKENS)[:alive]] = 1.0
    with log:
        scores = linear_log_probs(input, weight, **LABELS, saved_logits_bytes=saved * LOGITS)
        log.products.clear()
        scores.log_probs.backward(upstream)
    if saved:
        rest = int(upstream[saved * CHUNK :].sum())
        assert rows_of(log) == 2 * saved * CHUNK + 3 * rest
    else:
        # A whole first chunk, which is under way before the host knows how many rows there are.
        assert rows_of(log) == 3 * max(alive, CHUNK)
    expected = -torch.nn.functional.cross_entropy(input @ weight.T, LABELS["target"], reduction="none")
    torch.testing.assert_close(
        [input.grad, weight.grad], list(torch.autograd.grad(expected, [input, weight], upstream)), rtol=1e-4, atol=1e-5
    )
