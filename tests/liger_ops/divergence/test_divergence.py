"""divergence of logits against the definition in float64, and its rows with blocks that short rows cross."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import divergence
from liger_ops.backend import RowLaunch
from liger_ops.divergence import kernels
from liger_ops.divergence.kernels import choose_divergence_launch
from liger_ops.divergence.options import DivergenceOptions
from liger_ops.divergence.rows import Rows, write_rows
from liger_ops.loss.options import IGNORED, KEPT
from tests.liger_ops.accuracy import assert_as_accurate, few
from tests.liger_ops.divergence.cases import KINDS, OF_DISTRIBUTIONS, OPTIONS, assert_same, reference, with_gradients

CLASSES = 37


@pytest.fixture(autouse=True)
def _blocks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 columns, and fewer programs than rows, so that each takes several."""

    def small(*arguments: Any) -> RowLaunch:
        return dataclasses.replace(choose_divergence_launch(*arguments), block_size=32, num_warps=2, max_programs=2)

    monkeypatch.setattr(kernels, "choose_divergence_launch", small)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(student: Tensor, teacher: Tensor, **options: Any) -> list[Tensor]:
    """Each row's divergence, and the gradient."""
    student = student.detach().requires_grad_()
    return with_gradients(divergence(student, teacher, reduction="none", **options), [student])


def truth(student: Tensor, teacher: Tensor, **options: Any) -> list[Tensor]:
    student = student.detach().double().requires_grad_()
    return with_gradients(reference(student, teacher.double(), reduction="none", **options), [student])


@few(60)
@given(data=st.data())
def test_results_are_as_accurate_as_those_of_eager_code(data: st.DataObject, device: torch.device) -> None:
    """Any kind, options, sizes, dtypes, spread of logits, masks with NaN behind them, weights and reductions."""
    draw = data.draw
    kind, beta = draw(st.sampled_from(KINDS))
    vocab_size, num_rows = draw(st.sampled_from([1, 2, 31, 32, 33, 64, 75, 97])), draw(st.integers(1, 4))
    assume((kind, vocab_size) != ("cosine", 1))  # a constant, whose gradient is rounding
    dtypes = (
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    options = {"kind": kind, "beta": beta, **draw(st.sampled_from(OPTIONS))}
    reduction = options["reduction"] = draw(st.sampled_from(["mean", "sum", "none"]))
    seed, spread = draw(st.integers(0, 99)), draw(st.sampled_from([0.3, 3.0, 12.0]))
    logits = spread * normal(2, num_rows, vocab_size, seed=seed) + draw(st.sampled_from([0.0, -20.0]))
    student, teacher = (each.to(device, dtype) for each, dtype in zip(logits, dtypes, strict=True))
    if draw(st.booleans()):
        options["token_weight"] = normal(num_rows, seed=seed).abs().to(device)
    inputs = [student, teacher]
    if draw(st.booleans()):
        mask = options["mask"] = (normal(num_rows, seed=seed + 1) > -0.5).to(device)
        mask[:1] = True
        inputs = [each.masked_fill(~mask[:, None], torch.nan) for each in inputs]
    results = []
    for function, dtype, pair in (
        (divergence, None, inputs),
        (reference, torch.float32, (student, teacher)),
        (reference, torch.float64, (student, teacher)),
    ):
        leaf, other = pair if dtype is None else (each.to(dtype) for each in pair)
        leaf = leaf.detach().requires_grad_()
        results.append(with_gradients(function(leaf, other, **options), [leaf]))
    found, eager, exact = results
    assert found[1].dtype == dtypes[0]
    for place, name in enumerate(("losses", "gradient")):
        size = max(1.0, float(options.get("t_squared", False)), *(float(each.abs().max()) for each in exact))
        what = f"{name} of {reduction} {options}"
        assert_as_accurate(what, found[place], eager[place], exact[place], magnitude=size)


@pytest.mark.parametrize("kind", ["reverse_kl", "mixed", "jsd", "skew_reverse_kl"])
def test_saturated_models_are_as_exact_as_eager_code(kind: str, device: torch.device) -> None:
    """Errors as multiples of those of log-softmax, medians over seeds; one token of both models has nearly all mass."""
    ratios = []
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        student, teacher = 3 * torch.randn(2, 1, 200, generator=generator).to(device)
        peaks = 12 + 12 * torch.rand(2, generator=generator)
        student[0, seed], teacher[0, seed] = (float(peak) + 9 for peak in peaks)
        student += float(60 * torch.rand((), generator=generator) - 30)  # which no probability depends on
        leaf = student.clone().requires_grad_()
        eager = with_gradients(reference(leaf, teacher, kind=kind, beta=0.3, reduction="none"), [leaf])
        seed_ratios = []
        for one, other, exact in zip(
            run(student, teacher, kind=kind, beta=0.3), eager, truth(student, teacher, kind=kind, beta=0.3), strict=True
        ):
            errors = [float((each - exact).abs().max()) for each in (one, other)]
            seed_ratios.append(errors[0] / max(errors[1], torch.finfo(torch.float32).eps * float(exact.abs().max())))
        ratios.append(seed_ratios)
    medians = torch.tensor(ratios).median(0).values
    assert medians.max() <= (2 if device.type == "cpu" else 3), medians  # exp of GPUs is an approximate instruction


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_equal_models_have_divergence_zero_and_close_ones_an_accurate_one(
    kind: str, beta: float, device: torch.device
) -> None:
    """No noise of two rounded log-probabilities, which forward KLs of others have."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = (60 * normal(3, 75) + 50).to(device, dtype)
        losses, gradient = run(logits, logits.clone(), kind=kind, beta=beta)
        tolerance = 1e-6 if kind == "cosine" else 2e-7
        assert losses.abs().max() <= tolerance
        # Of logits in half precision exponents are rounded at the size of the logits, here up to 200.
        assert gradient.abs().max() <= (tolerance if dtype == torch.float32 else max(tolerance, 2e-5))
    if kind in OF_DISTRIBUTIONS:
        student = (4 * normal(4, 200)).to(device)
        teacher = student + 0.01 * normal(4, 200, seed=2).to(device)
        found = run(student, teacher, kind=kind, beta=beta)
        assert_same(found[:1], truth(student, teacher, kind=kind, beta=beta)[:1], kind, 3e-7)


# Classes without probability.


@pytest.mark.parametrize("kind", OF_DISTRIBUTIONS)
def test_classes_that_both_models_exclude_do_not_count(kind: str, device: torch.device) -> None:
    student, teacher = normal(2, 4, CLASSES).to(device)
    left = torch.arange(CLASSES, device=device) % 5 > 0
    student[:, ~left] = teacher[:, ~left] = -torch.inf
    losses, gradient = run(student, teacher, kind=kind, beta=0.3)
    expected = run(student[:, left], teacher[:, left], kind=kind, beta=0.3)
    assert not gradient[:, ~left].any()
    assert_same([losses, gradient[:, left]], expected, kind, 1e-6)


@pytest.mark.parametrize("kind", OF_DISTRIBUTIONS)
def test_classes_that_one_model_excludes_have_probability_zero_in_it(kind: str, device: torch.device) -> None:
    for whose in (0, 1):
        pair = list((3 * normal(2, 4, CLASSES)).to(device))
        pair[whose][:, ::5] = -torch.inf
        if (kind, whose) in (("forward_kl", 0), ("reverse_kl", 1), ("mixed", 0), ("mixed", 1)):
            pair[0][0, 35] = pair[1][0, 35] = 500.0  # beyond which every other class's term underflows
            losses = divergence(*pair, kind=kind, beta=0.3, reduction="none")
            assert (losses[1:] == torch.inf).all()
            assert not losses.isnan().any()
            continue
        low = [each.double().masked_fill(each == -torch.inf, -300.0) for each in pair]
        assert_same(run(*pair, kind=kind, beta=0.3), truth(*low, kind=kind, beta=0.3), (kind, whose))


@pytest.mark.parametrize("kind", OF_DISTRIBUTIONS)
def test_probabilities_that_underflow_leave_everything_finite(kind: str, device: torch.device) -> None:
    """Logits 200 nats apart, as temperatures below 1 make them: the mixture of two underflown ones has no logarithm."""
    student = torch.tensor([[0.0, -200.0, -150.0, -600.0], [0.0, -300.0, 90.0, -20.0]], device=device)
    teacher = torch.tensor([[0.0, -210.0, -400.0, -650.0], [0.0, -20.0, -300.0, 90.0]], device=device)
    found = run(student, teacher, kind=kind, beta=0.4)
    assert_same(found, truth(student, teacher, kind=kind, beta=0.4), kind)


@pytest.mark.parametrize("kind", dict(KINDS))
def test_nan_spreads_over_its_row_and_no_further(kind: str, device: torch.device) -> None:
    for place in (0, 1):
        pair = normal(2, 3, 75).to(device)
        pair[place, 1, 40] = torch.nan
        losses, gradient = run(*pair, kind=kind, beta=0.3)
        assert losses.isnan().tolist() == gradient.isnan().any(1).tolist() == [False, True, False]
        assert gradient[1, 40].isnan()


def test_cosine_of_no_logits_at_all_is_zero() -> None:
    for student, teacher in (torch.zeros(1, 5), normal(1, 5)), (normal(1, 5), torch.zeros(1, 5)):
        losses, gradient = run(student, teacher, kind="cosine")
        assert losses == 1
        assert not gradient.any()


# Tokens and vocabularies.


@pytest.mark.parametrize("kind", ["jsd", "cosine"])
def test_rows_are_read_by_index_weight_and_scale(kind: str, device: torch.device) -> None:
    """As chunks of a linear head are: some tokens of all, padded rows, the gradient over the student's logits."""
    student, teacher = normal(2, 4, 75).to(device)
    index = torch.tensor([5, 0, 3, 2], device=device)
    labels = torch.full((6,), KEPT, device=device)
    labels[3] = IGNORED
    weight = torch.arange(6.0, device=device).bfloat16()
    upstream = torch.linspace(-1, 2, 12, device=device)[::2]
    losses = torch.full((6,), 7.0, device=device)
    gradient = student.clone()
    padded = torch.full((4, 80), torch.nan, device=device)[:, :75].copy_(teacher)
    options = DivergenceOptions(kind, 0.3)
    write_rows(Rows(gradient, padded, labels, weight, upstream, options, index, losses, gradient), None)
    leaf = student.double().requires_grad_()
    expected = reference(leaf, teacher.double(), kind=kind, beta=0.3, reduction="none")
    expected = expected * (labels == KEPT)[index] * weight[index]
    (true,) = torch.autograd.grad(expected, leaf, upstream[index].double())
    assert_same([losses[index], gradient], [expected.detach(), true], kind, 1e-6)
    assert (losses[[1, 4]] == 7.0).all()


def test_padding_of_one_vocabulary_adds_no_divergence(device: torch.device) -> None:
    """Padding logits with 0, as others do, gives mass to classes that do not exist."""
    logits = normal(3, CLASSES).to(device)
    padded = F.pad(logits, (0, 20), value=1.0).requires_grad_()
    assert divergence(logits, padded, vocab="common").abs() <= 2e-7
    loss, gradient = with_gradients(divergence(padded, logits.flip(-1), vocab="common", kind="jsd"), [padded])
    expected = truth(logits, logits.flip(-1), kind="jsd")[0].mean()
    assert_same([loss], [expected], "common")
    assert gradient[:, :CLASSES].all()
    assert not gradient[:, CLASSES:].any()


def test_the_teacher_is_a_constant() -> None:
    student, teacher = normal(2, 3, 5).unbind()
    divergence(student.requires_grad_(), teacher.requires_grad_()).backward()
    assert student.grad is not None
    assert teacher.grad is None
