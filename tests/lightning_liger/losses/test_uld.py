"""Universal Logit Distillation by its definition, with gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger import ULDOptions, universal_logit_divergence


def pair(student_size: int, teacher_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(student_size)
    shapes = (2, 3, student_size), (2, 3, teacher_size)
    student, teacher = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("sizes", [(7, 7), (7, 11), (11, 7), (1, 5)], ids=str)
def test_distance_and_gradient_match_the_definition(sizes: tuple[int, int]) -> None:
    """Only the student's order depends on its values, so the gradient is the sign at each sorted place."""
    student, teacher = pair(*sizes)
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


def test_same_distribution_in_another_order_costs_nothing() -> None:
    student, _ = pair(9, 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert universal_logit_divergence(student, student.detach()[..., order]).abs().max() < 1e-12


def test_masked_columns_are_finite() -> None:
    student = torch.tensor([[1.0, -torch.inf, 0.0]], requires_grad=True)
    teacher = torch.tensor([[-torch.inf, -torch.inf, 0.0]])
    loss = universal_logit_divergence(student, teacher)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
