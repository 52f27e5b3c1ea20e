"""linear_log_probs against float64 autograd on whole logits."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import TokenScores, backend, linear_log_probs
from liger_ops.loss import chunked_loss
from tests.liger_ops.accuracy import assert_as_accurate, few
from tests.liger_ops.log_probs.cases import (
    ALL,
    DIFFERENTIABLE,
    HIDDEN,
    ROWS,
    TOKENS,
    VOCAB,
    Case,
    call,
    chunk_of,
    leaves_of,
    linear_log_probs_reference,
    make,
    scores_and_gradients,
)


def assert_matches(
    actual: tuple[TokenScores, list[Tensor]],
    eager: tuple[TokenScores, list[Tensor]],
    truth: Any,
    case: Case,
    spread: float,
) -> None:
    """Scores and gradients are as accurate as those of plain PyTorch; integers are equal where no logits tie."""
    for name, score in actual[0]._asdict().items():
        if name not in case.outputs:
            assert score is None
            continue
        expected = getattr(truth[0], name)
        assert score.requires_grad == (name in DIFFERENTIABLE and name not in case.detach)
        if score.is_floating_point():
            assert score.dtype == torch.promote_types(actual[1][0].dtype, torch.float32)
            # Scores of half precision are those of logits that were rounded.
            factor = 2.0 if actual[1][0].dtype == torch.float32 else 4.0
            assert_as_accurate(name, score, getattr(eager[0], name), expected, factor=factor, magnitude=8.0 * spread)
        else:
            assert score.dtype == expected.dtype
            assert actual[1][0].dtype != torch.float32 or torch.equal(score.cpu(), expected.cpu())
    for number, values in enumerate(zip(actual[1], eager[1], truth[1], strict=True)):
        # Gradients of single scores, whose sum may be smaller, are rounded to the dtype of the hidden states.
        assert_as_accurate(f"gradient {number}", *values, factor=4.0, magnitude=16.0 * spread)


@given(
    draw=st.builds(
        SimpleNamespace,
        case=st.builds(
            Case,
            outputs=st.sets(st.sampled_from(ALL), min_size=1).map(lambda some: tuple(x for x in ALL if x in some)),
            frozen=st.booleans(),
            softcap=st.sampled_from([None, None, 2.0]),
            logit_scale=st.sampled_from([1.0, 0.5]),
            temperature=st.sampled_from([1.0, 0.7, "tokens"]),
            bias=st.booleans(),
            adapter=st.booleans(),
            detach=st.sampled_from([(), ("entropy",), ("log_probs", "lse")]),
        ).filter(lambda case: {*DIFFERENTIABLE} & {*case.outputs} - {*case.detach}),
        dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16]),
        spread=st.sampled_from([1.0, 6.0]),  # usual and saturated
        rows=st.sampled_from([1, ROWS, 5, TOKENS]),
        saved=st.sampled_from([0, 2, 100]),
        bound=st.sampled_from([None, TOKENS - 3]),
        is_padded=st.booleans(),
    )
)
@few(60)
def test_scores_and_gradients_are_as_accurate_as_those_of_whole_logits(draw: Any, device: torch.device) -> None:
    case, dtype = draw.case, draw.dtype
    head = make(case, dtype, device, sizes=(6 if draw.is_padded else HIDDEN, VOCAB, TOKENS))
    if case.softcap is None:
        head.tensors["linear_weight"] *= draw.spread
    eager, truth = (
        scores_and_gradients(linear_log_probs_reference, some, case.frozen) for some in (head, head.to(torch.float64))
    )
    with pytest.MonkeyPatch.context() as patch:
        if draw.is_padded:  # as on a GPU, where sizes that no 16 bytes divide are multiplied in parts and with padding
            patch.setattr(chunked_loss, "_product_multiple", lambda like: 8)
            patch.setattr(chunked_loss, "_COLUMN_MULTIPLE", 16)
        if dtype == torch.float64:
            patch.setattr(backend, "use_triton", lambda tensor: False)
        actual = scores_and_gradients(
            linear_log_probs, head, case.frozen, max_valid_tokens=draw.bound,
            saved_logits_bytes=draw.saved * draw.rows * VOCAB * dtype.itemsize, **chunk_of(draw.rows, head),
        )  # fmt: skip
    assert all(gradient.is_contiguous() for gradient in actual[1])
    if dtype == torch.float64:
        tolerance = 1e-6 if case.temperature == "tokens" else 1e-10
        torch.testing.assert_close(actual, truth, rtol=tolerance, atol=tolerance)
    else:
        assert_matches(actual, eager, truth, case, draw.spread)


def test_values_are_those_of_pytorch() -> None:
    head = make(Case(ALL), torch.float64)
    scores = call(linear_log_probs, head.tensors, head, **chunk_of(ROWS, head))
    z = F.linear(head.tensors["input"], head.tensors["linear_weight"])
    kept = head.target != -100
    class_grads = torch.distributions.Categorical(logits=z[kept])
    torch.testing.assert_close(scores.log_probs[kept], class_grads.log_prob(head.target[kept]))
    torch.testing.assert_close(scores.entropy[kept], class_grads.entropy())
    torch.testing.assert_close(scores.lse[kept], z[kept].logsumexp(-1))
    torch.testing.assert_close(scores.mean_logit[kept], z[kept].mean(-1))
    torch.testing.assert_close(scores.log_sum_sq_probs[kept], class_grads.probs.square().sum(-1).log())
    assert torch.equal(scores.predictions[kept], z[kept].argmax(-1))
    assert torch.equal(scores.correct[kept], z[kept].argmax(-1) == head.target[kept])
    assert all(
        (score[~kept] == (-100 if name == "predictions" else 0)).all() for name, score in scores._asdict().items()
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_certain_and_impossible_classes(dtype: torch.dtype, frozen: bool, device: torch.device) -> None:
    """One class with all the probability, and classes with none, as of a mask of minus infinity."""
    head = make(Case(ALL, frozen, bias=True, detach=("lse", "mean_logit")), dtype, device)
    bias = head.tensors["linear_bias"]
    bias[1::2] = -torch.inf
    bias[4] = 300.0
    head.target[head.target != -100] = 4
    head.target[0, 1] = 6
    scores, gradients = scores_and_gradients(linear_log_probs, head, frozen, **chunk_of(5, head))
    assert (scores.log_probs <= 0).all()
    assert (scores.entropy >= 0).all()
    assert (scores.log_sum_sq_probs <= 1e-6).all()
    assert scores.log_probs[0, 0] > -1e-5
    assert scores.log_probs[0, 1] < -200
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_labels_out_of_range_are_nan_where_the_host_does_not_look(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("liger_ops.log_probs.linear_log_probs")  # the package's is the function
    monkeypatch.setattr(module, "check_labels", lambda *_: None)
    for frozen in (False, True):
        head = make(Case(("log_probs", "entropy"), frozen), device=device)
        head.target[0, 1] = VOCAB
        leaves = leaves_of(head, frozen)
        scores = call(linear_log_probs, leaves, head, **chunk_of(ROWS, head))
        assert scores.log_probs.isnan().nonzero().tolist() == [[0, 1]]
        assert not scores.entropy.isnan().any()
        gradient = torch.autograd.grad(scores.log_probs.sum(), leaves["input"])[0]
        assert gradient[0, 1].isnan().all()
        assert not gradient[0, 3].isnan().any()
