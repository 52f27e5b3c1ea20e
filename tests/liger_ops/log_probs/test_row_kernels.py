"""The row kernels' scores and gradients, with blocks so small that short rows cross their borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops.log_probs.rows import Coefficients, ScoreBuffers, gradient_rows, options_of_gradient, score_rows
from liger_ops.log_probs.scores import scores_reference
from liger_ops.loss.launch import launch_shard_gradient
from liger_ops.loss.options import TokenLossOptions
from liger_ops.loss.rows import transform_logits
from tests.liger_ops.log_probs.cases import ALL, DIFFERENTIABLE
from tests.liger_ops.loss.test_row_kernels import device, loss_kernel

__all__ = ["device", "loss_kernel"]

# One class, several blocks and some, a power of two past the blocks.
SIZES = (1, 75, 128)
CLOSE = {"rtol": 1e-5, "atol": 1e-4}  # of logits up to 100, divided by temperatures of half that


def close_to(dtype: torch.dtype) -> dict[str, float]:
    """The error of a gradient that is rounded to ``dtype``."""
    return CLOSE | {"rtol": max(torch.finfo(dtype).eps, 1e-4)}


def make_rows(vocab_size: int, dtype: torch.dtype, where: torch.device, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits whose rows are ``padding`` columns apart, with classes that are impossible; labels and temperatures."""
    torch.manual_seed(vocab_size)
    wide = torch.full((5, vocab_size + padding), torch.nan, device=where, dtype=dtype)
    logits = wide[:, :vocab_size]
    logits.copy_(3 * torch.randn(5, vocab_size))
    if vocab_size > 2:
        logits[1, 1::2] = -torch.inf
    logits[3] -= 9.0  # not so far that a soft-cap makes all of them equal
    labels = torch.randint(vocab_size, (5,), device=where)
    labels[1] = 0
    labels[2] = -100
    return logits, labels, (0.5 + torch.rand(5)).to(where)


def score(logits: Tensor, labels: Tensor, options: TokenLossOptions, **more: Any) -> ScoreBuffers:
    # Every value is to be written, zeros at ignored tokens.
    buffers = ScoreBuffers.zeros(labels, torch.float32, ALL)
    for buffer in (*buffers[:3], *buffers.stats[1:4], *buffers[4:]):
        buffer.fill_(77.0)
    score_rows(logits, labels, options, buffers, **{"temperature": None, "token_index": None, **more})
    return buffers


@pytest.mark.parametrize(
    ("softcap", "dtype"), [(None, torch.float32), (5.0, torch.float32), (None, torch.bfloat16)], ids=str
)
def test_scores_and_gradient_match_plain_pytorch(
    softcap: float | None, dtype: torch.dtype, loss_kernel: str, device: torch.device
) -> None:
    options = TokenLossOptions(softcap=softcap, logit_scale=0.7)
    for vocab_size in SIZES:
        for padding, with_temperature in ((0, True), (3, False)):
            logits, labels, temperature = make_rows(vocab_size, dtype, device, padding)
            some = temperature if with_temperature else None
            leaf = logits.double().requires_grad_()
            z = transform_logits(leaf, options, None if some is None else some.double())
            expected = scores_reference(z, labels, -100, ALL)
            gradient = torch.autograd.grad(-expected.log_probs.sum(), leaf)[0]
            buffers = score(logits, labels, options, temperature=some, with_gradient=True)
            for name, actual, truth in zip(ALL, buffers.scores(ALL), expected, strict=True):
                if truth.is_floating_point():
                    torch.testing.assert_close(actual.double(), truth, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
                else:
                    assert torch.equal(actual, truth)
            torch.testing.assert_close(logits.double(), gradient.nan_to_num(0.0), **close_to(dtype))


@pytest.mark.parametrize(
    ("softcap", "dtype", "wanted"),
    [
        (None, torch.float32, DIFFERENTIABLE),
        (5.0, torch.float32, DIFFERENTIABLE),
        (5.0, torch.bfloat16, DIFFERENTIABLE),
        (None, torch.float32, ("entropy",)),
        (None, torch.float32, ("lse", "mean_logit")),
    ],
    ids=str,
)
def test_gradient_of_every_score_matches_plain_pytorch(
    softcap: float | None, dtype: torch.dtype, wanted: tuple[str, ...], device: torch.device
) -> None:
    options = TokenLossOptions(softcap=softcap, logit_scale=0.7)
    for vocab_size in SIZES:
        for padding, with_temperature in ((0, True), (3, False)):
            logits, labels, temperature = make_rows(vocab_size, dtype, device, padding)
            some = temperature if with_temperature else None
            leaf = logits.double().requires_grad_()
            z = transform_logits(leaf, options, None if some is None else some.double())
            expected = scores_reference(z, labels, -100, DIFFERENTIABLE)
            upstream = {name: torch.randn(5, device=device) for name in wanted}
            upstream["unused"] = torch.ones(5, device=device)
            for each in upstream.values():
                each[4] = 0.0
            outputs = [getattr(expected, name) for name in wanted]
            gradient = torch.autograd.grad(outputs, leaf, [upstream[name].double() for name in wanted])[0]
            buffers = score(logits, labels, options, temperature=some)
            coefficients = Coefficients(**{name: upstream[name] for name in wanted})
            rows = gradient_rows(
                labels, options, buffers.lse, buffers.lse_error, buffers.stats.entropy, coefficients,
                temperature=some, num_columns=vocab_size,
            )  # fmt: skip
            launch_shard_gradient(logits, rows, None, options_of_gradient(options, coefficients))
            torch.testing.assert_close(logits.double(), gradient.nan_to_num(0.0), **close_to(dtype))


def test_rows_of_some_tokens(loss_kernel: str, device: torch.device) -> None:
    options = TokenLossOptions(softcap=5.0)
    logits, labels, temperature = make_rows(75, torch.float32, device, 0)
    whole = score(logits, labels, options, temperature=temperature)
    index = torch.tensor([3, 0, 4], device=device)
    some = score(logits[index], labels, options, temperature=temperature, token_index=index)
    for one, other in zip(some.scores(ALL, index), whole.scores(ALL, index), strict=True):
        torch.testing.assert_close(one, other)
    assert (some.lse[1:3] == 77.0).all()
