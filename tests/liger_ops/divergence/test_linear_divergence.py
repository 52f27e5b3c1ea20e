"""linear_divergence and divergence against the definitions, in float64 on whole logits."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import divergence, linear_divergence
from tests.liger_ops.accuracy import few
from tests.liger_ops.divergence.cases import KINDS, OPTIONS, assert_same, reference, with_gradients
from tests.liger_ops.operators import OperatorLog

TOKENS, CLASSES, HIDDEN, TEACHER_HIDDEN, RANK = 11, 37, 9, 7, 2
CHUNK_BYTES = 3 * 2 * CLASSES * 4  # three tokens of both models


class Models(NamedTuple):
    """Both models' hidden states and heads."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    teacher_x: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor
    adapter_x: Tensor
    adapter_weight: Tensor
    teacher_adapter_x: Tensor
    teacher_adapter_weight: Tensor

    def logits(self, *, adapters: bool = True) -> tuple[Tensor, Tensor]:
        student = F.linear(self.x, self.weight, self.bias)
        teacher = F.linear(self.teacher_x, self.teacher_weight, self.teacher_bias)
        if adapters:
            student = student + self.adapter_x @ self.adapter_weight.T
            teacher = teacher + self.teacher_adapter_x @ self.teacher_adapter_weight.T
        return student, teacher

    def run(self, *, adapters: bool = True, **options: Any) -> Tensor:
        if adapters:
            options["adapter"] = self.adapter_x, self.adapter_weight
            options["teacher_adapter"] = self.teacher_adapter_x, self.teacher_adapter_weight
        return linear_divergence(
            self.x, self.weight, self.teacher_x, self.teacher_weight, linear_bias=self.bias,
            teacher_bias=self.teacher_bias, **{"chunk_bytes": CHUNK_BYTES, **options},
        )  # fmt: skip

    def to(self, *args: Any) -> "Models":
        return Models(*(each.detach().to(*args).requires_grad_(each.requires_grad) for each in self))


STUDENT = ("x", "weight", "bias", "adapter_x", "adapter_weight")


def make_models(
    *, trained: tuple[str, ...] = STUDENT, classes: int = CLASSES, teacher_classes: int = CLASSES, tokens: int = TOKENS
) -> Models:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    models = Models(
        normal(tokens, HIDDEN), normal(classes, HIDDEN), normal(classes), normal(tokens, TEACHER_HIDDEN),
        normal(teacher_classes, TEACHER_HIDDEN), normal(teacher_classes), normal(tokens, RANK), normal(classes, RANK),
        normal(tokens, RANK), normal(teacher_classes, RANK),
    )  # fmt: skip
    for name in trained:
        getattr(models, name).requires_grad_()
    return models


def make_tokens(tokens: int = TOKENS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "mask": torch.rand(tokens, generator=generator) > 0.4,
        "token_weight": torch.rand(tokens, generator=generator),
    }


def leaves_of(models: Models) -> list[Tensor]:
    return [each for each in models if each.requires_grad]


@few(30)
@given(data=st.data())
def test_results_are_as_accurate_as_those_of_eager_code(data: st.DataObject, device: torch.device) -> None:
    """Any kind, options, dtypes, chunks, reductions, masks and weights, trained tensors, adapters and vocabularies."""
    draw = data.draw
    kind, beta = draw(st.sampled_from(KINDS))
    trained = draw(st.sampled_from([STUDENT, ("x",), ("weight",), ("x", "adapter_x"), ("adapter_weight", "bias")]))
    adapters = draw(st.booleans()) or "adapter" in trained[-1]
    if not adapters:
        trained = tuple(each for each in trained if "adapter" not in each)
    sizes = draw(st.sampled_from([(CLASSES, CLASSES), (CLASSES, CLASSES - 5), (CLASSES - 5, CLASSES)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    models = make_models(trained=trained, classes=sizes[0], teacher_classes=sizes[1]).to(device, dtype)
    options = {"kind": kind, "beta": beta, "reduction": draw(st.sampled_from(["mean", "sum", "none"]))}
    options |= draw(st.sampled_from(OPTIONS))
    for name, tensor in make_tokens().items():
        if draw(st.booleans()):
            options[name] = tensor.to(device)
    loss = models.run(
        adapters=adapters, chunk_bytes=draw(st.sampled_from([1, CHUNK_BYTES, 2**20, None])), vocab="common",
        logits_dtype=draw(st.sampled_from([None, torch.float32])), **options,
    )  # fmt: skip
    found = with_gradients(loss, leaves_of(models))
    eager, exact = (
        with_gradients(
            reference(*(each[:, : min(sizes)].to(wide) for each in some.logits(adapters=adapters)), **options),
            leaves_of(some),
        )
        for some, wide in ((models, torch.float32), (models.to(torch.float64), torch.float64))
    )
    assert [each.dtype for each in found] == [torch.float32] + len(trained) * [dtype]
    for name, one, other, true in zip(("loss", *trained), found, eager, exact, strict=True):
        errors = [(each - true).abs().max().item() for each in (one, other)]
        rounding = 8 * torch.finfo(dtype).eps * max(1.0, true.abs().max().item())
        assert errors[0] <= 2 * errors[1] + rounding, (name, options, errors)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_but_masked_tokens_give_a_differentiable_zero(reduction: str, device: torch.device) -> None:
    models = make_models().to(device)
    mask = torch.zeros(TOKENS, dtype=torch.bool, device=device)
    for trained in (models, models._replace(weight=models.weight.detach(), bias=models.bias.detach())):
        result = with_gradients(trained.run(kind="reverse_kl", mask=mask, reduction=reduction), leaves_of(trained))
        assert not any(each.any() for each in result)
    student, teacher = (each.detach() for each in models.logits())
    result = with_gradients(divergence(student.requires_grad_(), teacher, mask=mask, reduction=reduction), [student])
    assert not any(each.any() for each in result)


def test_logits_in_float32_make_divergences_of_close_models_accurate(device: torch.device) -> None:
    models = make_models(trained=("x", "weight", "bias")).to(device, torch.bfloat16)
    close = models._replace(
        teacher_x=models.x.detach(), teacher_weight=models.weight.detach() * 1.01, teacher_bias=models.bias.detach()
    )
    truth = close.to(torch.float64)
    true = with_gradients(reference(*truth.logits(adapters=False)), leaves_of(truth))
    errors = {}
    for logits_dtype in (None, torch.float32):
        found = with_gradients(close.run(adapters=False, logits_dtype=logits_dtype), leaves_of(close))
        errors[logits_dtype] = [
            (one.double() - other).abs().max().item() for one, other in zip(found, true, strict=True)
        ]
        assert [each.dtype for each in found] == [torch.float32] + 3 * [torch.bfloat16]
    assert errors[torch.float32][0] < 2e-6 < errors[None][0]
    assert all(wide < 0.3 * narrow for wide, narrow in zip(errors[torch.float32], errors[None], strict=True))


def test_masked_tokens_are_not_computed(log: OperatorLog) -> None:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[[2, 3, 5, 9]] = True
    models = make_models()
    with log:
        models.run(adapters=False, mask=mask)
    assert sum(rows for rows, inner, _ in log.products if inner == TEACHER_HIDDEN) <= 6  # whole chunks of three
    whole = torch.ones(TOKENS, dtype=torch.bool)
    torch.testing.assert_close(models.run(), models.run(mask=whole))


def test_upstream_gradients_of_masked_tokens_may_be_nan() -> None:
    mask = make_tokens()["mask"]
    for trained in (("x",), ("x", "weight")):
        models = make_models(trained=trained)
        student, teacher = (each.detach() for each in models.logits())
        student.requires_grad_()
        for losses, leaves in (
            (models.run(mask=mask, reduction="none"), leaves_of(models)),
            (divergence(student, teacher, mask=mask, reduction="none"), [student]),
        ):
            ones, one_or_nan = torch.ones(TOKENS), torch.ones(TOKENS).masked_fill(~mask, torch.nan)
            want, got = (torch.autograd.grad(losses, leaves, each, retain_graph=True) for each in (ones, one_or_nan))
            assert_same(got, want, trained, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", dict(KINDS))
def test_large_heads_on_the_gpu(kind: str) -> None:
    """8192 tokens of two heads of 4096 x 128256: as accurate as whole logits, in less than 3000 MiB."""
    torch.manual_seed(0)
    tokens, hidden, classes = 8192, 4096, 128256
    x, teacher_x = torch.randn(2, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight, teacher_weight = 0.02 * torch.randn(2, classes, hidden, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_divergence(x, weight, teacher_x, teacher_weight, kind=kind, beta=0.3)
    found = torch.autograd.grad(loss, (x, weight))
    assert torch.cuda.max_memory_allocated() - before < 3000 * 2**20
    some = slice(100, 164)
    part = x.detach()[some].requires_grad_()
    logits = part.float() @ weight.detach().float().T, teacher_x[some].float() @ teacher_weight.float().T
    losses = reference(*logits, kind=kind, beta=0.3, reduction="none")
    (expected,) = torch.autograd.grad(losses.sum() / tokens, part)
    # Where two probabilities are nearly equal, rounded logits change the sign in the total variation's gradient.
    bound = 0.05 if kind == "total_variation" else 0.02
    assert (found[0][some] - expected).norm() <= bound * expected.norm()
    alone = linear_divergence(x[some], weight, teacher_x[some], teacher_weight, kind=kind, beta=0.3, reduction="none")
    torch.testing.assert_close(alone.detach(), losses.detach(), rtol=0.02, atol=1e-3)


@pytest.mark.gpu
def test_logits_in_float32_on_the_gpu() -> None:
    test_logits_in_float32_make_divergences_of_close_models_accurate(torch.device("cuda"))
    models = make_models(classes=1003, teacher_classes=1003).to("cuda", torch.bfloat16)
    truth = models.to(torch.float64)
    found = with_gradients(models.run(kind="jsd", logits_dtype=torch.float32), leaves_of(models))
    expected = with_gradients(reference(*truth.logits(), kind="jsd"), leaves_of(truth))
    assert_same(found, expected, "unaligned", 2e-2)
