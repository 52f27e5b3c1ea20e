"""Kinds, options and formulas of the divergences, as tests write them: straight from their definitions."""

from typing import Any

import torch
from torch import Tensor

KINDS = [
    ("forward_kl", 0.5),
    ("reverse_kl", 0.5),
    ("mixed", 0.3),
    ("mixed", 1.0),
    ("jsd", 0.1),
    ("jsd", 0.5),
    ("jsd", 0.0),
    ("jsd", 1.0),
    ("skew_kl", 0.2),
    ("skew_kl", 0.0),
    ("skew_kl", 1.0),
    ("skew_reverse_kl", 0.2),
    ("skew_reverse_kl", 0.0),
    ("skew_reverse_kl", 1.0),
    ("total_variation", 0.5),
    ("mse", 0.5),
    ("cosine", 0.5),
]
"""Each kind with a beta, and with those at which it is a simpler one."""

EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "t_squared": True, "softcap": 3.0, "logit_scale": 0.8, "teacher_softcap": 2.0,
    "teacher_logit_scale": 1.3,
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.3}, EVERYTHING]


def temper(logits: Tensor, scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0) -> Tensor:
    z = logits * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def plain_divergence(
    student: Tensor,
    teacher: Tensor,
    kind: str,
    beta: float = 0.5,
    *,
    temperature: float = 1.0,
    t_squared: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
) -> Tensor:
    """The divergence of each row from its definition, with probabilities and logarithms of them."""
    z_s = temper(student, logit_scale, softcap, temperature)
    z_t = temper(teacher, teacher_logit_scale, teacher_softcap, temperature)
    q, p = z_s.softmax(-1), z_t.softmax(-1)

    def kl(left: Tensor, right: Tensor) -> Tensor:
        return (torch.xlogy(left, left) - torch.xlogy(left, right)).sum(-1)

    m = (1 - beta) * q + beta * p
    if kind == "jsd" and beta in (0, 1):
        kind = "reverse_kl" if beta else "forward_kl"
    losses = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "mixed": lambda: beta * kl(p, q) + (1 - beta) * kl(q, p),
        "jsd": lambda: beta * kl(p, m) + (1 - beta) * kl(q, m),
        "skew_kl": lambda: kl(p, m),
        "skew_reverse_kl": lambda: kl(q, m),
        "total_variation": lambda: (q - p).abs().sum(-1) / 2,
        "mse": lambda: (z_s - z_t).pow(2).mean(-1),
        "cosine": lambda: 1 - (z_s * z_t).sum(-1) / (z_s.norm(dim=-1) * z_t.norm(dim=-1)),
    }[kind]()
    return losses * temperature**2 if t_squared else losses


def divergence_and_gradient(
    student: Tensor, teacher: Tensor, upstream: Tensor, kind: str, beta: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Of each row, and the gradient of their sum by ``upstream``."""
    student = student.detach().requires_grad_()
    losses = plain_divergence(student, teacher, kind, beta, **options)
    (gradient,) = torch.autograd.grad(losses, student, upstream.to(losses.dtype))
    return losses.detach(), gradient
