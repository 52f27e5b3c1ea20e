"""Scores, losses and divergences of lazy and of materialized logits: the same values and gradients, in chunks."""

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import TokenScores
from liger_ops.divergence.options import KINDS
from liger_ops.log_probs.scores import DIFFERENTIABLE, OUTPUTS
from lightning_liger import LazyLogits, divergence, lazy_logits, token_loss, token_scores, topk_log_probs
from tests.liger_ops.divergence.cases import reference as reference_divergence
from tests.lightning_liger.lazy.programs import Doubled
from tests.lightning_liger.lazy.twin import BATCH_SIZE, LABELS, MASK, SEQ_LEN, TOKENS, VOCAB_SIZE, Logits, Twin
from tests.lightning_liger.tiny import TensorSizes

IGNORED = LABELS.where(MASK, -100)
TEMPERATURES = torch.linspace(0.5, 1.5, TOKENS).view(BATCH_SIZE, SEQ_LEN)
WEIGHTS = torch.linspace(0.0, 2.0, TOKENS).view(BATCH_SIZE, SEQ_LEN)
IDS = torch.stack([LABELS, LABELS.flip(1), torch.where(MASK, -1, (LABELS + 5) % VOCAB_SIZE)], -1)
CHANGES: tuple[Callable[[Logits], Logits], ...] = (
    lambda x: x,
    lambda x: -5.0 * torch.tanh(x * 1.5 / 5),
    lambda x: x.log_softmax(-1),
    lambda x: x[..., :36],
)


def assert_same(twin: Twin, lazy: Tensor, real: Tensor) -> None:
    assert (lazy.dtype, lazy.shape, lazy.requires_grad) == (real.dtype, real.shape, real.requires_grad)
    torch.testing.assert_close(lazy, real, rtol=1e-4, atol=1e-5)
    if real.requires_grad:
        twin.assert_same_gradients(lazy, real)


def teacher_logits(lazy: bool, mode: Callable[[], Any] = torch.no_grad, vocab_size: int = VOCAB_SIZE) -> Tensor:
    teacher = Twin(vocab_size=vocab_size, bias=False, hidden_size=3)
    with mode(), lazy_logits():
        logits = teacher.lazy if lazy else teacher.real
        logits = 8.0 * torch.tanh(logits / 8.0)
    assert isinstance(logits, LazyLogits) == lazy
    return logits


# Each draws arguments and returns the function of logits that is compared.


def _scores(rng: random.Random) -> Callable[[Logits], Tensor]:
    outputs = rng.choice([OUTPUTS, tuple(rng.sample(OUTPUTS, 3)), ("log_probs", "lse", "mean_logit")])
    wanted = [name for name in outputs if name in DIFFERENTIABLE]
    detach = tuple(rng.sample(wanted, rng.randrange(len(wanted)))) if wanted else ()
    labels = rng.choice([LABELS, IGNORED])
    temperature = rng.choice([1.0, 0.7, TEMPERATURES, TEMPERATURES.where(labels != -100, 0.0)])
    chunk_bytes = rng.choice([None, 3 * VOCAB_SIZE * 4])

    def function(logits: Logits) -> Tensor:
        scores = token_scores(
            logits, labels, temperature=temperature, outputs=outputs, detach=detach, chunk_bytes=chunk_bytes
        )
        for name, score in zip(OUTPUTS, scores, strict=True):
            assert (score is not None) == (name in outputs)
            differs = name in wanted and name not in detach
            assert score is None or score.requires_grad == (differs and logits.requires_grad)
        found = [score.float() * factor for factor, score in enumerate(scores, 1) if score is not None]
        return torch.stack(found)

    return function


def _loss(rng: random.Random) -> Callable[[Logits], Tensor]:
    outputs = rng.choice([("log_probs",), ("log_probs", "entropy"), ("log_probs", "entropy", "lse")])
    temperature = rng.choice([1.0, 1.3, TEMPERATURES])

    def loss(scores: TokenScores, index: Tensor) -> Tensor:
        found = WEIGHTS.view(-1)[index] * scores.log_probs.exp().detach() * scores.log_probs
        found = found if scores.entropy is None else found - 0.1 * scores.entropy
        return found if scores.lse is None else found + 0.01 * scores.lse.square()

    def function(logits: Logits) -> Tensor:
        total, scores = token_loss(logits, IGNORED, loss, outputs=outputs, temperature=temperature)
        assert not any(score is not None and score.requires_grad for score in scores)
        return total + torch.stack([score for score in scores if score is not None]).square().sum()

    return function


def _topk(rng: random.Random) -> Callable[[Logits], Tensor]:
    options = {
        "temperature": rng.choice([0.7, TEMPERATURES]),
        "renormalize": rng.random() < 0.5,
        "mask": rng.choice([None, MASK]),
    }
    return lambda logits: topk_log_probs(logits, IDS.clamp(max=35), **options).clamp(min=-1e3)


def _divergence(rng: random.Random) -> Callable[[Logits], Tensor]:
    options: dict[str, Any] = {
        "kind": rng.choice(KINDS),
        "beta": 0.3,
        "temperature": rng.choice([1.0, 1.7]),
        "t_squared": rng.random() < 0.5,
        "mask": rng.choice([None, MASK]),
        "token_weight": rng.choice([None, WEIGHTS]),
        "reduction": rng.choice(["mean", "sum", "none"]),
        "vocab": "common",
    }
    is_lazy, mode = rng.random() < 0.5, rng.choice([torch.no_grad, torch.inference_mode])
    vocab_size = rng.choice([29, VOCAB_SIZE])

    def function(logits: Logits) -> Tensor:
        if isinstance(logits, LazyLogits):
            return divergence(logits, teacher_logits(is_lazy, mode, vocab_size), **options)
        if rng.random() < 0.5:
            return divergence(logits, teacher_logits(is_lazy, mode, vocab_size), **options)
        size = min(logits.shape[-1], vocab_size)
        del options["vocab"]
        teacher = teacher_logits(False, vocab_size=vocab_size)
        return reference_divergence(logits[..., :size], teacher[..., :size], **options)

    return function


@pytest.mark.parametrize("kind", [_scores, _loss, _topk, _divergence])
@pytest.mark.parametrize("seed", range(30))
def test_function_of_lazy_logits_is_that_of_real_ones(
    seed: int, kind: Callable[[random.Random], Callable[[Logits], Tensor]]
) -> None:
    rng = random.Random(seed)
    function, change = kind(rng), rng.choice(CHANGES)
    twin = Twin(bias=rng.random() < 0.5)
    assert_same(twin, function(change(twin.lazy)), function(change(twin.real)))
    assert twin.counters.num_materialized == 0


def test_counters_take_the_chunks_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    def choose(num_tokens: int, vocab_size: int, element_size: int, device: Any, hidden_size: int = 0) -> int:
        chosen.append(2 + (hidden_size > 0) + element_size // 4)
        return chosen[-1]

    for name in ("liger_ops.loss.linear_head", "lightning_liger.lazy.chunks"):
        monkeypatch.setattr(importlib.import_module(name), "default_chunk_size", choose)
    for call, chunk_size, bytes_of_logit in (
        (lambda x: x.cross_entropy(LABELS), 4, 4),
        (lambda x: token_scores(x, LABELS), 4, 4),
        (lambda x: token_loss(x, LABELS, lambda scores, index: scores.log_probs), 4, 4),
        (lambda x: topk_log_probs(x, IDS), 4, 4),
        (lambda x: divergence(x, Twin().lazy), 5, 8),  # of a teacher too
        (torch.no_grad()(lambda x: token_scores(x, LABELS)), 3, 4),
        (lambda x: token_scores(x, LABELS, chunk_bytes=2 * VOCAB_SIZE * 4), 2, 4),
    ):
        twin = Twin()
        chosen.clear()
        call(twin.lazy)
        assert set(chosen) <= {chunk_size}
        assert twin.counters.num_losses == 1
        assert twin.counters.bytes_avoided == (TOKENS - chunk_size) * VOCAB_SIZE * bytes_of_logit


def test_masked_tokens_of_the_teacher_may_be_nan() -> None:
    teacher = teacher_logits(False)
    for reduction in ("mean", "none"):
        twin = Twin()
        got = divergence(twin.lazy, teacher.masked_fill(~MASK[..., None], torch.nan), mask=MASK, reduction=reduction)
        assert_same(twin, got, reference_divergence(twin.real, teacher, mask=MASK, reduction=reduction))


def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(torch.bfloat16)
    teacher = teacher_logits(True).bfloat16()
    sizes = TensorSizes(monkeypatch)
    with sizes:
        scores = token_scores(twin.lazy, LABELS, outputs=OUTPUTS)
        total = scores.entropy.sum() + topk_log_probs(twin.lazy, LABELS[..., None]).sum()
        (total + divergence(twin.lazy, teacher)).backward()
    assert sizes.largest < TOKENS * VOCAB_SIZE


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
def test_gradient_of_scores_passes_functions_that_logits_were_given_to() -> None:
    twin = Twin()
    lazy, real = (token_scores(Doubled.apply(x), LABELS).log_probs for x in (twin.lazy, twin.real))
    assert_same(twin, lazy, real)


@pytest.mark.parametrize("name", ["lazy", "real"])
def test_without_any_wanted_token_the_loss_is_zero_and_differentiable(name: str) -> None:
    twin = Twin()
    logits = getattr(twin, name)
    ignored = torch.full_like(LABELS, -100)
    losses = [
        token_scores(logits, ignored).log_probs.sum(),
        token_loss(logits, ignored, lambda scores, index: -scores.log_probs)[0],
        topk_log_probs(logits, LABELS[..., None], mask=torch.zeros_like(MASK)).sum(),
        divergence(logits, teacher_logits(True), mask=torch.zeros_like(MASK)),
    ]
    total = torch.stack(losses).sum()
    assert total == 0
    total.backward()
    leaf = twin.lazy_input if name == "lazy" else twin.real_input
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))
