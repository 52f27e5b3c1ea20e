"""Scores, losses and divergences of lazy and of materialized logits: the same values and gradients, in chunks."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_ops import TokenScores
from liger_ops.divergence.options import KINDS
from liger_ops.log_probs.scores import DIFFERENTIABLE, OUTPUTS
from lightning_liger import LazyLogits, divergence, lazy_logits, token_loss, token_scores, topk_log_probs
from lightning_liger.patching.rules.head import HeadReplacement
from tests.liger_ops.divergence.cases import reference as reference_divergence
from tests.lightning_liger.lazy.twin import (
    BATCH_SIZE,
    LABELS,
    MASK,
    SEQ_LEN,
    TOKENS,
    VOCAB_SIZE,
    Doubled,
    Logits,
    Twin,
)
from tests.lightning_liger.tiny import TensorSizes

IGNORED = LABELS.where(MASK, -100)
TEMPERATURES = torch.linspace(0.5, 1.5, TOKENS).view(BATCH_SIZE, SEQ_LEN)
WEIGHTS = torch.linspace(0.0, 2.0, TOKENS).view(BATCH_SIZE, SEQ_LEN)
CHANGES: dict[str, Callable[[Logits], Logits]] = {
    "none": lambda x: x,
    "softcap": lambda x: -5.0 * torch.tanh(x * 1.5 / 5),
    "log_softmax": lambda x: x.log_softmax(-1),
    "part_of_the_vocabulary": lambda x: x[..., :36],
    "function": lambda x: 0.5 * x.softmax(-1).clamp(min=0.01).log(),
}


def assert_same(twin: Twin, lazy: Tensor, real: Tensor) -> None:
    assert (lazy.dtype, lazy.shape, lazy.requires_grad) == (real.dtype, real.shape, real.requires_grad)
    torch.testing.assert_close(lazy, real, rtol=1e-5, atol=1e-5)
    if real.requires_grad:
        twin.assert_same_gradients(lazy, real)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, TEMPERATURES], ids=["1", "0.7", "one_for_each_token"])
def test_scores_of_lazy_logits_are_those_of_real_ones(change: Callable[[Logits], Logits], temperature: Any) -> None:
    twin = Twin()
    lazy, real = (
        token_scores(change(x), IGNORED, temperature=temperature, outputs=OUTPUTS) for x in (twin.lazy, twin.real)
    )
    for got, want in zip(lazy, real, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    totals = [
        sum(factor * getattr(scores, name) for factor, name in enumerate(DIFFERENTIABLE, 1)) for scores in (lazy, real)
    ]
    assert_same(twin, *totals)
    assert twin.counters.num_materialized == 0


def test_counters_take_the_chunks_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    def choose(num_tokens: int, vocab_size: int, element_size: int, device: Any, hidden_size: int = 0) -> int:
        chosen.append(2 + (hidden_size > 0) + element_size // 4)
        return chosen[-1]

    for name in ("liger_ops.loss.linear_head", "liger_ops.divergence.linear_divergence", "lightning_liger.lazy.head"):
        monkeypatch.setattr(importlib.import_module(name), "default_chunk_size", choose)
    ids = LABELS[..., None]
    for call, chunk_size, bytes_of_logit in (
        (lambda x: x.cross_entropy(LABELS), 4, 4),
        (lambda x: token_scores(x, LABELS), 4, 4),
        (lambda x: token_loss(x, LABELS, lambda scores, index: scores.log_probs), 4, 4),
        (lambda x: topk_log_probs(x, ids), 4, 4),
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


def test_scores_of_real_logits_follow_their_formulas() -> None:
    logits = Twin(torch.float64).real
    scores = token_scores(logits, IGNORED, temperature=0.7, outputs=OUTPUTS, chunk_bytes=3 * VOCAB_SIZE * 8)
    log_probs = (logits / 0.7).log_softmax(-1)
    want = TokenScores(
        log_probs.gather(-1, LABELS[..., None])[..., 0],
        -(log_probs.exp() * log_probs).sum(-1),
        (logits / 0.7).logsumexp(-1),
        (logits / 0.7).mean(-1),
        logits.argmax(-1),
        logits.argmax(-1) == LABELS,
        (2 * log_probs).logsumexp(-1),
    )
    for name, got, wanted in zip(OUTPUTS, scores, want, strict=True):
        ignored = {"predictions": -100, "correct": False}.get(name, 0.0)
        torch.testing.assert_close(got, wanted.where(MASK, ignored))
        assert got.requires_grad == (name in DIFFERENTIABLE)


def test_methods_of_lazy_logits_return_the_same_scores() -> None:
    twin = Twin()
    assert_same(twin, twin.lazy.log_probs(IGNORED), token_scores(twin.real, IGNORED).log_probs)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (1, 0)


def test_detached_outputs_get_no_gradient() -> None:
    twin = Twin()
    for logits in (twin.lazy, twin.real):
        scores = token_scores(logits, LABELS, outputs=("log_probs", "entropy"), detach=("entropy",))
        assert (scores.log_probs.requires_grad, scores.entropy.requires_grad) == (True, False)


def test_detached_scores_of_a_log_softmax_are_apart_from_the_others() -> None:
    outputs = ("log_probs", "lse", "mean_logit")
    for detach in (("lse",), ("mean_logit",), ("lse", "mean_logit")):
        twin = Twin()
        options: dict[str, Any] = {"temperature": 0.7, "outputs": outputs, "detach": detach}
        lazy, real = (token_scores(x.log_softmax(-1), LABELS, **options) for x in (twin.lazy, twin.real))
        for name in outputs:
            assert getattr(lazy, name).requires_grad == getattr(real, name).requires_grad == (name not in detach)
        assert_same(twin, *(sum(getattr(scores, name) for name in outputs) for scores in (lazy, real)))


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy", "lse")], ids=len)
@pytest.mark.parametrize("change", [CHANGES[name] for name in ("none", "softcap", "log_softmax", "function")])
def test_token_loss_of_lazy_logits_is_that_of_real_ones(
    outputs: tuple[str, ...], change: Callable[[Logits], Logits]
) -> None:
    def loss(scores: TokenScores, index: Tensor) -> Tensor:
        found = WEIGHTS.view(-1)[index] * scores.log_probs.exp().detach() * scores.log_probs
        return found if scores.entropy is None else found - 0.1 * scores.entropy + 0.01 * scores.lse.square()

    twin = Twin()
    (lazy, scores), (real, real_scores) = (
        token_loss(change(x), IGNORED, loss, outputs=outputs, temperature=1.3) for x in (twin.lazy, twin.real)
    )
    assert_same(twin, lazy, real)
    for got, want in zip(scores, real_scores, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert not got.requires_grad
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("temperature", [0.7, TEMPERATURES], ids=["0.7", "one_for_each_token"])
@pytest.mark.parametrize("change", [CHANGES["none"], CHANGES["softcap"], CHANGES["function"]])
def test_log_probabilities_of_given_classes(
    renormalize: bool, temperature: Any, change: Callable[[Logits], Logits]
) -> None:
    ids = torch.stack([LABELS, LABELS.flip(1), LABELS * 2 % VOCAB_SIZE], -1)
    twin = Twin()
    lazy, real = (
        topk_log_probs(change(x), ids, temperature=temperature, renormalize=renormalize, mask=MASK)
        for x in (twin.lazy, twin.real)
    )
    assert_same(twin, lazy, real)
    z = change(Twin().real) / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    want = z.gather(-1, ids).log_softmax(-1) if renormalize else z.log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(real, want.where(MASK[..., None], 0.0))


def test_negative_classes_are_padding() -> None:
    ids = torch.stack([LABELS, torch.full_like(LABELS, -1)], -1)
    twin = Twin()
    for logits in (twin.lazy, twin.real):
        for renormalize, want in ((False, twin.real.log_softmax(-1).gather(-1, ids[..., :1])), (True, torch.zeros(1))):
            log_probs = topk_log_probs(logits, ids, renormalize=renormalize)
            torch.testing.assert_close(log_probs[..., :1], want.expand(2, 5, 1), rtol=1e-5, atol=1e-5)
            assert (log_probs[..., 1] == -torch.inf).all()


def test_gradient_at_padding_reaches_no_class() -> None:
    ids = torch.stack([LABELS, torch.where(MASK, -1, (LABELS + 5) % VOCAB_SIZE)], -1)
    for renormalize in (False, True):
        twin = Twin()
        assert_same(twin, *(topk_log_probs(x, ids, renormalize=renormalize) for x in (twin.lazy, twin.real)))


def test_temperature_of_ignored_tokens_may_be_zero() -> None:
    zero = TEMPERATURES.where(MASK, 0.0)

    def loss_of(logits: Logits, temperature: Tensor) -> Tensor:
        found = token_scores(logits, IGNORED, temperature=temperature, outputs=("log_probs", "lse"))
        total = token_loss(logits, IGNORED, lambda scores, _: scores.log_probs, temperature=temperature)[0]
        return found.log_probs + 2 * found.lse + total

    for change in (CHANGES["none"], CHANGES["log_softmax"]):
        for of_lazy, of_real in ((zero, TEMPERATURES), (TEMPERATURES, zero)):
            twin = Twin()
            assert_same(twin, loss_of(change(twin.lazy), of_lazy), loss_of(change(twin.real), of_real))


class Teacher(Twin):
    """A head with another hidden size."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__(vocab_size=vocab_size, bias=False)
        generator = torch.Generator().manual_seed(7)
        self.real_head = nn.Linear(3, vocab_size, bias=False)
        with torch.no_grad():
            self.real_head.weight.copy_(torch.randn(vocab_size, 3, generator=generator))
        self.lazy_head = nn.Linear(3, vocab_size, bias=False)
        self.lazy_head.load_state_dict(self.real_head.state_dict())
        self.lazy_head.__class__ = HeadReplacement().patched_class(nn.Linear)
        self.lazy_input = self.real_input = torch.randn(BATCH_SIZE, SEQ_LEN, 3, generator=generator)


def teacher_logits(lazy: bool, mode: Callable[[], Any] = torch.no_grad, vocab_size: int = VOCAB_SIZE) -> Tensor:
    teacher = Teacher(vocab_size)
    with mode(), lazy_logits():
        logits = teacher.lazy if lazy else teacher.real
        logits = 8.0 * torch.tanh(logits / 8.0)
    assert isinstance(logits, LazyLogits) == lazy
    return logits


@pytest.mark.parametrize("lazy_teacher", [True, False], ids=["lazy_teacher", "real_teacher"])
@pytest.mark.parametrize("lazy_student", [True, False], ids=["lazy_student", "real_student"])
def test_divergence_of_two_models(lazy_student: bool, lazy_teacher: bool) -> None:
    for number, kind in enumerate(KINDS):
        twin = Twin()
        options: dict[str, Any] = {"kind": kind, "beta": 0.3, "temperature": 1.7, "t_squared": True}
        options["reduction"] = ("mean", "sum", "none")[number % 3]
        options["mask"] = MASK if number % 2 else None
        options["token_weight"] = WEIGHTS if number % 3 else None
        got = divergence(twin.lazy if lazy_student else twin.real, teacher_logits(lazy_teacher), **options)
        reference = Twin()
        want = reference_divergence(reference.real, teacher_logits(False), **options)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        upstream = torch.rand(want.shape, generator=torch.Generator().manual_seed(1))
        leaves = [twin.lazy_input, *twin.lazy_head.parameters()]
        if not lazy_student:
            leaves = [twin.real_input, *twin.real_head.parameters()]
        wanted = torch.autograd.grad(want, [reference.real_input, *reference.real_head.parameters()], upstream)
        for gradient, each in zip(torch.autograd.grad(got, leaves, upstream), wanted, strict=True):
            torch.testing.assert_close(gradient, each, rtol=1e-4, atol=1e-4 * float(each.abs().max()))
        assert not lazy_student or twin.counters.num_materialized == 0


def test_masked_tokens_of_the_teacher_may_be_nan() -> None:
    teacher = teacher_logits(False)
    for reduction in ("mean", "none"):
        twin = Twin()
        got = divergence(twin.lazy, teacher.masked_fill(~MASK[..., None], torch.nan), mask=MASK, reduction=reduction)
        assert_same(twin, got, reference_divergence(twin.real, teacher, mask=MASK, reduction=reduction))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_teacher_may_have_run_in_any_mode(mode: Callable[[], Any], reduction: str) -> None:
    results = []
    for lazy in (True, False):
        twin = Twin()
        loss = divergence(twin.lazy, teacher_logits(lazy, mode), kind="jsd", reduction=reduction)
        loss.sum().backward()
        results.append((loss, twin.lazy_head.weight.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lazy_teacher", [True, False])
def test_vocabularies_of_different_sizes_are_compared_where_both_have_classes(lazy_teacher: bool) -> None:
    twin = Twin()
    got = divergence(twin.lazy, teacher_logits(lazy_teacher, vocab_size=29), vocab="common")
    want = reference_divergence(twin.real[..., :29], teacher_logits(False, vocab_size=29))
    assert_same(twin, got, want)


def test_divergence_of_logits_sees_a_log_softmax() -> None:
    twin = Twin()
    for kind in ("mse", "cosine"):
        got = divergence(twin.lazy.log_softmax(-1), teacher_logits(True), kind=kind)
        assert_same(twin, got, reference_divergence(twin.real.log_softmax(-1), teacher_logits(False), kind=kind))


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


def test_frozen_head_gets_no_gradient() -> None:
    twin = Twin()
    want = torch.autograd.grad(token_scores(twin.real, IGNORED).log_probs.sum(), twin.real_input)
    twin.lazy_head.requires_grad_(False)
    token_scores(twin.lazy, IGNORED).log_probs.sum().backward()
    torch.testing.assert_close(twin.lazy_input.grad, want[0], rtol=1e-5, atol=1e-6)
    assert twin.lazy_head.weight.grad is None


def test_without_any_wanted_token_the_loss_is_zero_and_differentiable() -> None:
    for name in ("lazy", "real"):
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


def test_autocast_of_the_head_is_that_of_the_scores() -> None:
    twin = Twin()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, real = (token_scores(x, LABELS).log_probs for x in (twin.lazy, twin.real))
    assert lazy.dtype == real.dtype == torch.float32
    torch.testing.assert_close(lazy, real, rtol=2**-6, atol=2**-6)
    lazy.sum().backward()
    assert twin.lazy_head.weight.grad.dtype == torch.float32


def test_cross_entropy_is_the_negative_log_probability() -> None:
    twin = Twin()
    losses = F.cross_entropy(twin.real.flatten(0, 1), IGNORED.flatten(), reduction="none").view(IGNORED.shape)
    assert_same(twin, -twin.lazy.log_probs(IGNORED), losses)
