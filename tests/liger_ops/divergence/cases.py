"""Kinds, options and the definition of the divergences, as tests write them: straight from log-softmaxes."""

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
OF_DISTRIBUTIONS = [kind for kind in dict(KINDS) if kind not in ("mse", "cosine")]

EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "t_squared": True, "softcap": 3.0, "logit_scale": 0.8, "teacher_softcap": 2.0,
    "teacher_logit_scale": 1.3,
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.3}, EVERYTHING]


def reference(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    t_squared: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """``liger_ops.divergence`` of finite logits, which autograd differentiates."""

    def temper(logits: Tensor, scale: float, cap: float | None) -> Tensor:
        z = logits * scale
        return (z if cap is None else cap * torch.tanh(z / cap)) / temperature

    def kl(left: Tensor, right: Tensor) -> Tensor:
        return (left.exp() * (left - right)).sum(-1)

    z_s, z_t = temper(student, logit_scale, softcap), temper(teacher, teacher_logit_scale, teacher_softcap)
    s, t = z_s.log_softmax(-1), z_t.log_softmax(-1)
    shares = s.new_tensor([1.0 - beta, beta]).log()
    m = torch.logaddexp(shares[0] + s, shares[1] + t)
    if kind == "jsd" and beta in (0, 1):
        kind = "reverse_kl" if beta else "forward_kl"
    losses = {
        "forward_kl": lambda: kl(t, s),
        "reverse_kl": lambda: kl(s, t),
        "mixed": lambda: beta * kl(t, s) + (1 - beta) * kl(s, t),
        "jsd": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
        "skew_kl": lambda: kl(t, m),
        "skew_reverse_kl": lambda: kl(s, m),
        "total_variation": lambda: (s.exp() - t.exp()).abs().sum(-1) / 2,
        "mse": lambda: (z_s - z_t).pow(2).mean(-1),
        "cosine": lambda: 1 - (z_s * z_t).sum(-1) / (z_s.norm(dim=-1) * z_t.norm(dim=-1)),
    }[kind]()
    losses = losses * temperature**2 if t_squared else losses
    weight = torch.ones_like(losses) if token_weight is None else token_weight.to(losses)
    if mask is not None:
        losses, weight = losses.where(mask, 0), weight.where(mask, 0)
    losses = losses * weight
    return losses if reduction == "none" else losses.sum() / (weight.sum() if reduction == "mean" else 1)


def with_gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """A loss and the gradients of its product with an upstream gradient."""
    upstream = torch.linspace(-1, 2, loss.numel()) if loss.dim() else torch.tensor(1.7)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss).view(loss.shape))]


def assert_same(found: list[Tensor], expected: list[Tensor], what: Any, tolerance: float = 2e-5) -> None:
    """Fails if a tensor differs by more than so much of the largest number, or of 1."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = (one.double() - other.double()).abs().max().item()
        assert error <= tolerance * max(1.0, other.abs().max().item()), (what, place, error)
