"""What only a GPU can show of scores and token losses."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import TokenScores, linear_log_probs, linear_token_loss
from tests.liger_ops.accuracy import assert_as_accurate
from tests.liger_ops.log_probs.cases import (
    ALL,
    DIFFERENTIABLE,
    Case,
    call,
    chunk_of,
    leaves_of,
    linear_log_probs_reference,
    linear_token_loss_reference,
    loss_and_gradients,
    make,
    make_loss,
    scores_and_gradients,
)
from tests.liger_ops.loss.cases import capture, no_waits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def make_real(case: Case, dtype: torch.dtype, vocab_size: int) -> Any:
    """Logits of a usual size."""
    head = make(case, dtype, DEVICE, sizes=(256, vocab_size, 300))
    head.tensors["linear_weight"] *= 0.1
    return head


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1000, 32000, 50257, 128256])
def test_real_vocabularies_match_plain_pytorch(vocab_size: int, dtype: torch.dtype, frozen: bool) -> None:
    case = Case(ALL, frozen, temperature="tokens", softcap=30.0)
    head = make_real(case, dtype, vocab_size)
    double = head.to(torch.float64)
    eager = scores_and_gradients(linear_log_probs_reference, head, frozen)
    truth = scores_and_gradients(linear_log_probs_reference, double, frozen)
    for options in ({}, chunk_of(128, head), chunk_of(128, head) | {"saved_logits_bytes": 2**40}):
        actual = scores_and_gradients(linear_log_probs, head, frozen, **options)
        for name in ("log_probs", "entropy", "lse", "mean_logit", "log_sum_sq_probs"):
            values = (getattr(each[0], name) for each in (actual, eager, truth))
            assert_as_accurate(name, *values, factor=4.0, magnitude=32.0)
        for number, values in enumerate(zip(actual[1], eager[1], truth[1], strict=True)):
            assert_as_accurate(f"gradient {number}", *values, factor=4.0)
    eager, truth = (loss_and_gradients(linear_token_loss_reference, each, frozen) for each in (head, double))
    actual = loss_and_gradients(linear_token_loss, head, frozen, **chunk_of(128, head))
    assert_as_accurate("loss", actual[0], eager[0], truth[0], factor=4.0, magnitude=300.0)
    for number, values in enumerate(zip(actual[2], eager[2], truth[2], strict=True)):
        assert_as_accurate(f"gradient {number}", *values, factor=4.0)


def steps(frozen: bool, max_valid_tokens: int | None, saved: int) -> Any:
    """A step of each op, and what refills its data."""
    head = make(Case(DIFFERENTIABLE, frozen, temperature="tokens"), torch.bfloat16, DEVICE, sizes=(64, 507, 512))
    options = chunk_of(128, head) | {"max_valid_tokens": max_valid_tokens}
    advantages = torch.randn(512, device=DEVICE)
    upstream = {name: torch.randn(head.target.shape, device=DEVICE) for name in DIFFERENTIABLE}

    def step() -> list[Tensor]:
        leaves = leaves_of(head, frozen)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        scores = call(linear_log_probs, leaves, head, saved_logits_bytes=saved, **options)
        outputs = [getattr(scores, name) for name in upstream]
        first = torch.autograd.grad(outputs, wanted, list(upstream.values()))
        loss, _ = call(linear_token_loss, leaves, head, make_loss(advantages), **options)
        return [*(score.detach() for score in outputs), *first, loss.detach(), *torch.autograd.grad(loss, wanted)]

    def fill() -> None:
        head.tensors["input"].normal_()
        advantages.normal_()
        upstream["log_probs"].normal_()

    return step, fill


@pytest.mark.parametrize("saved", [0, 2**30])
@pytest.mark.parametrize("frozen", [False, True])
def test_replay_of_a_cuda_graph_computes_new_data(frozen: bool, saved: int) -> None:
    step, fill = steps(frozen, 512, saved)
    replay = capture(step)
    for _ in range(3):
        fill()
        results = replay()
        torch.testing.assert_close(results, step())
        assert not any(result.isnan().any() for result in results)


@pytest.mark.parametrize("saved", [0, 2**30])
@pytest.mark.parametrize("frozen", [False, True])
def test_host_never_waits_for_the_device(frozen: bool, saved: int) -> None:
    step, _ = steps(frozen, 512, saved)
    step()
    with no_waits():
        results = step()
    assert not any(result.isnan().any() for result in results)


MIB = 2**20


@pytest.mark.parametrize("kind", ["frozen", "trained", "loss"])
def test_one_sequence_of_64k_tokens_takes_a_chunk_and_the_gradients(kind: str) -> None:
    """Whole logits would take 16 GiB."""
    num_tokens, hidden_size, vocab_size = 65536, 1024, 128256
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    input = torch.randn(1, num_tokens, hidden_size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab_size, hidden_size, device=DEVICE, dtype=torch.bfloat16).mul_(0.02)
    weight.requires_grad_(kind != "frozen")
    target = torch.randint(vocab_size, (1, num_tokens), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunk = 512 * MIB
    if kind == "loss":
        loss = linear_token_loss(input, weight, target, negative_log_probs, chunk_bytes=chunk)[0]
    else:
        loss = linear_log_probs(input, weight, target, chunk_bytes=chunk).log_probs.sum()
    loss.backward()
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    input_grad = num_tokens * hidden_size * 2 / MIB
    # Over many chunks the head's gradient is summed in float32, and rounded to its dtype at the end.
    head_grads = 0 if kind == "frozen" else vocab_size * hidden_size * (4 + 2) / MIB
    assert peak <= 512 + 2 * input_grad + head_grads + 64
    assert input.grad is not None
    assert input.grad.isfinite().all()


def negative_log_probs(scores: TokenScores, index: Tensor) -> Tensor:
    assert scores.log_probs is not None
    return -scores.log_probs
