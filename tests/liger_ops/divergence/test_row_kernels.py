"""The divergence kernel alone, with blocks so small that short rows cross their borders."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops.divergence import launch as launch_module
from liger_ops.divergence.launch import choose_divergence_launch, launch_divergence
from liger_ops.divergence.options import IGNORED, KEPT, DivergenceOptions
from liger_ops.divergence.rows import divergence_rows
from liger_ops.loss.launch import CrossEntropyLaunch
from tests.liger_ops.divergence.cases import EVERYTHING, KINDS, OPTIONS, divergence_and_gradient

BLOCK = 32
PROGRAMS = 2  # fewer than rows, so that each takes several


@pytest.fixture
def device(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernel is launched with small blocks and few programs."""

    def small(*arguments: int) -> CrossEntropyLaunch:
        launch = choose_divergence_launch(*arguments)
        return dataclasses.replace(launch, block_size=BLOCK, num_warps=2, max_programs=PROGRAMS)

    monkeypatch.setattr(launch_module, "choose_divergence_launch", small)
    return triton_device


def run(
    student: Tensor, teacher: Tensor, upstream: Tensor | None, kind: str, beta: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient that overwrites the student's logits; the second row is ignored."""
    labels = torch.full((len(student),), KEPT, device=student.device)
    labels[1:2] = IGNORED
    losses = torch.full((len(student),), torch.nan, device=student.device)
    gradient = student.clone()
    launch_divergence(
        gradient, teacher, labels, None, upstream, DivergenceOptions(kind, beta, **options),
        token_index=None, losses=losses, grad_logits=gradient,
    )  # fmt: skip
    return losses, gradient


def assert_matches_definition(
    student: Tensor, teacher: Tensor, kind: str, beta: float, tolerance: float = 3e-6, **options: Any
) -> None:
    upstream = torch.linspace(-1, 2, len(student), device=student.device)
    losses, gradient = run(student, teacher, upstream, kind, beta, **options)
    true = divergence_and_gradient(student.double(), teacher.double(), upstream, kind, beta, **options)
    rounding = torch.finfo(student.dtype).eps if student.dtype != torch.float32 else 0.0
    for name, found, expected, relative in (("losses", losses, true[0], 0), ("gradient", gradient, true[1], rounding)):
        expected = expected.clone()
        expected[1:2] = 0.0
        error = (found.double() - expected).abs()
        allowed = tolerance * max(1.0, expected.abs().max().item()) + relative * expected.abs()
        assert (error <= allowed).all(), (kind, beta, options, name, error.max().item())


def make_rows(vocab_size: int, device: torch.device, rows: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    student, teacher = 3 * torch.randn(2, rows, vocab_size, generator=generator)
    return student.to(device), teacher.to(device)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_divergence_and_gradient_are_those_of_the_definition(kind: str, beta: float, device: torch.device) -> None:
    for options in OPTIONS:
        assert_matches_definition(*make_rows(75, device), kind, beta, **options)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd", "total_variation", "cosine"])
def test_every_border_of_blocks_is_right(kind: str, device: torch.device) -> None:
    for vocab_size in (1, 31, 32, 33, 64, 97):
        if (kind, vocab_size) != ("cosine", 1):  # whose gradient is rounding
            assert_matches_definition(*make_rows(vocab_size, device), kind, 0.4, **EVERYTHING)


@pytest.mark.parametrize("kind", dict(KINDS))
def test_half_precision_and_mixed_dtypes_are_rounded_once(kind: str, device: torch.device) -> None:
    student, teacher = make_rows(75, device)
    beta = 0.3
    assert_matches_definition(student.bfloat16(), teacher.bfloat16(), kind, beta)
    assert_matches_definition(student.half(), teacher.half(), kind, beta, **EVERYTHING)
    assert_matches_definition(student, teacher.bfloat16(), kind, beta)


@pytest.mark.parametrize("kind", ["reverse_kl", "mixed"])
def test_saturated_models_of_float32_are_as_exact_as_eager_code(kind: str, device: torch.device) -> None:
    """Errors as multiples of those of log-softmax, medians over seeds; one token of both models has nearly all mass."""
    beta, ratios = 0.3, []
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        student, teacher = 3 * torch.randn(2, 1, 200, generator=generator).to(device)
        peaks = 12 + 12 * torch.rand(2, generator=generator)
        student[0, seed], teacher[0, seed] = (float(peak) + 9 for peak in peaks)
        student += float(60 * torch.rand((), generator=generator) - 30)  # which no probability depends on

        def eager(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
            student = student.clone().requires_grad_()
            log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
            forward, reverse = ((left.exp() * (left - right)).sum() for left, right in ((log_p, log_q), (log_q, log_p)))
            loss = reverse if kind == "reverse_kl" else beta * forward + (1 - beta) * reverse
            return loss.detach(), torch.autograd.grad(loss, student)[0]

        true, rounded = eager(student.double(), teacher.double()), eager(student, teacher)
        labels = torch.full((1,), KEPT, device=device)
        options = DivergenceOptions(kind, beta)
        by_rows = divergence_rows(student, teacher, labels, None, None, options, with_gradient=True)
        errors = [
            [float((each - exact).abs().max()) for each, exact in zip(found, true, strict=True)]
            for found in (run(student, teacher, None, kind, beta), by_rows, rounded)
        ]
        smallest = [torch.finfo(torch.float32).eps * float(each.abs().max()) for each in true]
        ratios.append(
            [
                error / max(least, of_eager)
                for found in errors[:2]
                for error, of_eager, least in zip(found, errors[2], smallest, strict=True)
            ]
        )
    medians = torch.tensor(ratios).median(0).values
    assert medians.max() <= (2 if device.type == "cpu" else 3), medians  # exp of GPUs is an approximate instruction


@pytest.mark.parametrize("kind", dict(KINDS))
def test_equal_models_have_divergence_and_gradient_zero(kind: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = (20 * make_rows(75, device)[0] + 50).to(dtype)
        losses, gradient = run(logits, logits.clone(), None, kind, 0.1)
        tolerance = 1e-6 if kind == "cosine" else 2e-7
        assert losses.abs().max() <= tolerance
        # Of logits in half precision exponents are rounded at the size of the logits, here up to 150.
        of_gradient = tolerance if dtype == torch.float32 else max(tolerance, 1e-5)
        assert gradient.abs().max() <= of_gradient


def test_rows_are_read_by_index_weight_and_scale(device: torch.device) -> None:
    student, teacher = make_rows(75, device, rows=4)
    index = torch.tensor([5, 0, 3, 2], device=device)
    labels = torch.full((6,), KEPT, device=device)
    labels[3] = IGNORED
    weight = torch.arange(6.0, device=device).bfloat16()
    upstream = torch.linspace(-1, 2, 12, device=device)[::2]
    losses = torch.full((6,), 7.0, device=device)
    gradient = torch.full_like(student, torch.nan)
    padded = torch.full((4, 80), torch.nan, device=device)[:, :75].copy_(teacher)
    launch_divergence(
        student, padded, labels, weight, upstream, DivergenceOptions("jsd", 0.3),
        token_index=index, losses=losses, grad_logits=gradient,
    )  # fmt: skip
    factor = (labels == KEPT)[index] * weight[index]
    expected, true = divergence_and_gradient(student, teacher, factor * upstream[index], "jsd", 0.3)
    torch.testing.assert_close(losses[index], expected * factor)
    torch.testing.assert_close(gradient, true)
    assert (losses[[1, 4]] == 7.0).all()


def test_nothing_is_read_of_rows_that_are_ignored(device: torch.device) -> None:
    student, teacher = make_rows(75, device)
    student[1], teacher[1] = torch.nan, torch.inf
    losses, gradient = run(student, teacher, None, "mixed", 0.5)
    assert losses[1] == 0
    assert not gradient[1].any()
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", dict(KINDS))
def test_nan_spreads_over_its_row_and_no_further(kind: str, device: torch.device) -> None:
    for place in (0, 1):
        student, teacher = make_rows(75, device)
        (student, teacher)[place][2, 40] = torch.nan
        losses, gradient = run(student, teacher, None, kind, 0.3)
        assert losses.isnan().tolist() == [False, False, True]
        assert gradient.isnan().any(1).tolist() == [False, False, True]
        assert gradient[2, 40].isnan()
