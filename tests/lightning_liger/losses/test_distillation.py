"""Sparse, sampled and sorted distillation against float64 autograd over the whole vocabulary."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.losses.distillation import (
    SampledDistillationOptions,
    SparseDistillationOptions,
    ULDOptions,
    first_occurrences,
    importance_weighted_log_probs,
    log_tail_mass,
    sample_support,
    sampled_divergence,
    sparse_divergence,
    universal_logit_divergence,
)

VOCAB_SIZE, K = 23, 5
BETAS = (0.0, 0.3, 1.0)


def logits(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB_SIZE, generator=generator, dtype=torch.float64) * scale


def divergence(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The definition, of probabilities whose categories have p = 0 or p > 0, and q > 0."""
    m = beta * p + (1 - beta) * q
    if beta == 0:
        return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)
    if beta == 1:
        return (q * (q.log() - p.log())).sum(-1)
    to_teacher = torch.special.xlogy(p, p) - torch.special.xlogy(p, m)
    return (beta * to_teacher + (1 - beta) * q * (q.log() - m.log())).sum(-1)


def on_support(mode: str, p: Tensor, q: Tensor, ids: Tensor, beta: float) -> Tensor:
    """Each mode by its definition on whole distributions."""
    p_on, q_on = p.gather(-1, ids), q.gather(-1, ids)
    mass = p_on.sum(-1, keepdim=True)
    if mode == "tail":
        p_all = torch.cat((p_on, 1 - mass), -1)
        return divergence(p_all, torch.cat((q_on, 1 - q_on.sum(-1, keepdim=True)), -1), beta)
    if mode == "renormalize":
        return divergence(p_on / mass, q_on / q_on.sum(-1, keepdim=True), beta)
    if mode == "zero":
        return divergence(torch.zeros_like(p).scatter(-1, ids, p_on / mass), q, beta)
    return (p_on * (p_on.log() - q_on.log())).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_modes_match_whole_distributions_with_gradients(temperature: float) -> None:
    teacher, grad = logits(1, 2, 3), torch.rand(2, 3, dtype=torch.float64)
    p = (teacher / temperature).softmax(-1)
    ids = teacher.topk(K).indices
    for mode in ("tail", "renormalize", "zero", "ignore"):
        for beta in BETAS:
            if (mode, beta) == ("zero", 1.0) or (mode == "ignore" and beta):
                continue
            students = [logits(2, 2, 3).requires_grad_() for _ in range(2)]
            options = SparseDistillationOptions(beta, mode, temperature, temperature, t_squared=True)
            stored = p.log().gather(-1, ids)
            loss, metrics = sparse_divergence(
                (students[0] / temperature).log_softmax(-1).gather(-1, ids), stored, options
            )
            expected = temperature**2 * on_support(mode, p, (students[1] / temperature).softmax(-1), ids, beta)
            torch.testing.assert_close(loss, expected, msg=lambda text, case=(mode, beta): f"{case}: {text}")
            for each in (loss, expected):
                each.backward(grad)
            torch.testing.assert_close(students[0].grad, students[1].grad)
            assert not any(value.requires_grad for value in metrics.values())
            torch.testing.assert_close(metrics["teacher_mass"], p.gather(-1, ids).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_edges_are_finite(dtype: torch.dtype) -> None:
    """Rows: all of the mass, more than that by rounding, one id of none, ids that are absent, no id at all."""
    inf = math.inf
    teacher = torch.tensor([[-0.7, -0.7], [0.001, -inf], [-0.01, -50.0], [-1.0, -inf], [-inf, -inf]]).to(dtype)
    student = torch.tensor([[-0.69314, -0.69316], [-1e-9, -40.0], [-60.0, -0.5], [-90.0, -0.1], [-1.0, -2.0]]).to(dtype)
    for mode, beta in [(m, b) for m in ("tail", "renormalize", "zero") for b in BETAS] + [("ignore", 0.0)]:
        if (mode, beta) == ("zero", 1.0):
            continue
        for temperature in (1.0, 2.0):
            leaf = student.clone().requires_grad_()
            options = SparseDistillationOptions(beta, mode, temperature)
            loss, metrics = sparse_divergence(leaf, teacher, options)
            loss.sum().backward()
            case = (mode, beta, temperature)
            assert loss.dtype == torch.promote_types(dtype, torch.float32)
            assert leaf.grad is not None
            assert torch.cat((loss, leaf.grad.flatten())).isfinite().all(), (case, loss)
            assert not torch.cat((loss[-1:], leaf.grad[-1], leaf.grad[3, 1:])).any(), case
            assert all(value.isfinite().all() for value in metrics.values())


def test_masked_ids_count_as_absent_and_order_does_not_matter() -> None:
    log_p, log_q = logits(6, 3).log_softmax(-1)[..., :K], logits(7, 3).log_softmax(-1)[..., :K]
    mask = torch.tensor([True, True, False, True, False])
    order = torch.tensor([3, 0, 1])
    for mode in ("tail", "renormalize", "zero"):
        options = SparseDistillationOptions(0.5, mode)
        masked = sparse_divergence(log_q, log_p, options, support_mask=mask.expand(3, K))[0]
        absent = sparse_divergence(log_q, log_p.masked_fill(~mask, -math.inf), options)[0]
        cut = sparse_divergence(log_q[..., order], log_p[..., order], options)[0]
        torch.testing.assert_close(masked, cut)
        torch.testing.assert_close(absent, cut)


def test_tail_is_stable_and_duplicates_are_found() -> None:
    log_probs = torch.tensor([[0.0, -30.0], [-1.0, -1.0], [-200.0, -300.0]], requires_grad=True)
    tail = log_tail_mass(log_probs)
    torch.testing.assert_close(tail.exp(), torch.tensor([1e-6, 1 - 2 / math.e, 1.0]), rtol=1e-3, atol=0)
    tail.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert not log_probs.grad[0].any()
    ids = torch.tensor([[4, 2, 4, 7], [1, 1, 1, 1], [1, 2, 3, 4]])
    assert first_occurrences(ids).tolist() == [[True, True, False, True], [True, False, False, False], [True] * 4]
    merged = importance_weighted_log_probs(ids, torch.zeros(3, 4), torch.zeros(3, 4))
    torch.testing.assert_close(merged.exp(), torch.tensor([[0.5, 0.25, 0, 0.25], [1, 0, 0, 0], [0.25] * 4]))


def test_sampled_support_is_unbiased_unlike_the_likeliest_ids() -> None:
    """The mean gradient over many samples is that of the whole teacher, q - p."""
    teacher = logits(9, scale=1.0).log_softmax(-1)
    q = logits(10, scale=1.0).softmax(-1)
    num_samples, repeats = 6, 4000
    generator = torch.Generator().manual_seed(0)
    ids, log_probs = sample_support(teacher.expand(repeats, -1), num_samples, generator=generator)
    assert ids.shape == log_probs.shape == (repeats, num_samples)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(repeats, dtype=torch.float64))
    student = q.log().expand(repeats, -1).clone().requires_grad_()
    options = SparseDistillationOptions(support_mode="zero")
    loss, _ = sparse_divergence(student.log_softmax(-1).gather(-1, ids), log_probs, options)
    loss.sum().backward()
    assert student.grad is not None
    error = (student.grad.mean(0) - (q - teacher.exp())).abs().max()
    top = torch.zeros(VOCAB_SIZE, dtype=torch.float64).scatter(0, teacher.topk(num_samples).indices, 1) * teacher.exp()
    bias = (teacher.exp() - top / top.sum()).abs().max()
    assert error < 0.01 < bias
    # Samples of another proposal are weighted by p / r.
    weighted = importance_weighted_log_probs(torch.tensor([0, 1]), torch.tensor([0.2, 0.6]).log(), torch.zeros(2))
    torch.testing.assert_close(weighted.exp(), torch.tensor([0.25, 0.75]))


def test_sampled_estimators_have_the_gradients_that_they_name() -> None:
    """Their expectation over all tokens of the student's distribution, in closed form."""
    student = logits(11).requires_grad_()
    log_p = logits(12).log_softmax(-1)
    q = student.detach().softmax(-1)
    reverse = torch.autograd.grad((student.softmax(-1) * (student.log_softmax(-1) - log_p)).sum(), student)[0]
    expected = {"policy_gradient": reverse, "k1": torch.zeros_like(q), "k2": reverse, "k3": q - log_p.exp()}
    for estimator, gradient in expected.items():
        options = SampledDistillationOptions(estimator)
        losses, metrics = sampled_divergence(student.log_softmax(-1), log_p, options)
        torch.testing.assert_close(torch.autograd.grad((q * losses).sum(), student)[0], gradient)
        torch.testing.assert_close(metrics["log_ratio"], q.log() - log_p)
    for name in ("k1", "k3"):
        value = (q * sampled_divergence(q.log(), log_p, SampledDistillationOptions(name))[0]).sum()
        torch.testing.assert_close(value, (q * (q.log() - log_p)).sum())
    extreme = torch.tensor([-500.0, 0.0], requires_grad=True)
    losses, _ = sampled_divergence(extreme, torch.tensor([0.0, -500.0]), SampledDistillationOptions("k3"))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert extreme.grad is not None
    assert extreme.grad.isfinite().all()


def test_old_tokens_are_weighted_up_to_the_bound() -> None:
    student, old = torch.full((3,), -1.0), torch.tensor([-1.0, -1.5, -9.0])
    for clip, weight in ((2.0, torch.tensor([1.0, math.exp(0.5), 2.0])), (None, torch.ones(3))):
        options = SampledDistillationOptions(distillation_is_clip=clip)
        losses, metrics = sampled_divergence(student, student - 1, options, old_log_probs=old)
        torch.testing.assert_close(losses, -weight)
        assert clip is None or torch.equal(metrics["importance_weight"], weight)


@pytest.mark.parametrize("sizes", [(7, 7), (7, 11), (11, 7), (1, 5)], ids=str)
def test_distance_and_gradient_match_the_definition(sizes: tuple[int, int]) -> None:
    """Only the student's order depends on its values, so the gradient is the sign at each sorted place."""
    generator = torch.Generator().manual_seed(sizes[0])
    student, teacher = (torch.randn(2, 3, size, generator=generator, dtype=torch.float64) for size in sizes)
    student.requires_grad_()
    options = ULDOptions(uld_student_temperature=1.3, uld_teacher_temperature=0.7)
    found = universal_logit_divergence(student, teacher, options)
    q, p = (student / 1.3).softmax(-1), (teacher / 0.7).softmax(-1)
    order, size = q.argsort(dim=-1, descending=True), max(sizes)
    sorted_p = F.pad(p.sort(dim=-1, descending=True).values, (0, size - sizes[1]))
    sorted_q = F.pad(q.gather(-1, order), (0, size - sizes[0]))
    expected = (sorted_q - sorted_p).abs().sum(-1)
    torch.testing.assert_close(found, expected)
    sign = torch.zeros_like(q).scatter(-1, order, (sorted_q - sorted_p).detach().sign()[..., : sizes[0]])
    gradients = [torch.autograd.grad(each.sum(), student, retain_graph=True)[0] for each in (found, (q * sign).sum(-1))]
    torch.testing.assert_close(*gradients)
    order = torch.randperm(sizes[0], generator=generator)
    assert universal_logit_divergence(student, student.detach()[..., order]).abs().max() < 1e-12


def test_masked_columns_are_finite() -> None:
    student = torch.tensor([[1.0, -torch.inf, 0.0]], requires_grad=True)
    teacher = torch.tensor([[-torch.inf, -torch.inf, 0.0]])
    loss = universal_logit_divergence(student, teacher)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
