"""Divergences of rows of logits and their gradients, in plain PyTorch.

With z the tempered logits of the student (s) and the teacher (t), lse their log-sum-exps, q = exp(z_s - lse_s) and
p = exp(z_t - lse_t), d = (z_t - lse_t) - (z_s - lse_s), and for the mixtures, with beta the teacher's share in m,

    m = (1 - beta) * q + beta * p,   r = log(q / m) = -log((1 - beta) + beta * exp(d)),   log(p / m) = d + r

the divergence D of a row and its gradient are

    kind              D                                       dD / dz_s
    forward_kl        KL(p || q) = sum(p * d)                 q - p
    reverse_kl        KL(q || p) = -sum(q * d)                q * (-d - D)
    mixed             beta * forward_kl + (1 - beta) * reverse_kl
    jsd               beta * KL(p || m) + (1 - beta) * K      (1 - beta) * q * (r - K),   K = KL(q || m) = sum(q * r)
    skew_kl           KL(p || m) = sum(p * (d + r))           (1 - beta) * (q * sum(p * e) - p * e),   e = exp(r)
    skew_reverse_kl   KL(q || m) = sum(q * r)                 q * (r - D - (1 - beta) * (e - sum(q * e)))
    total_variation   sum(abs(q - p)) / 2                     q * (h - sum(q * h)),   h = sign(q - p) / 2
    mse               mean((z_s - z_t)**2)                    2 * (z_s - z_t) / vocab_size
    cosine            1 - z_s.z_t / (|z_s| * |z_t|)           (z_s * z_s.z_t / |z_s|**2 - z_t) / (|z_s| * |z_t|)

d comes from differences of logits, each less the largest of its row, and a quotient of normalisers, never from two
rounded log-probabilities, so that equal models have divergence 0, and models of different sizes of logits no more
rounding. exp(d) is taken of d clamped to +-80: beyond, one of p and q is below e**-80 of the
other, and no term is left of what the clamp changes. No logarithm of a probability is taken. Sources: MiniLLM
(arXiv:2306.08543, reverse KL), GKD (arXiv:2306.13649, generalised JSD), DistiLLM (arXiv:2402.03898, skew KL).

A row takes three steps, of which each needs sums over the whole row from the one before: normalisers, then the sums
over mixtures, then the gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_ops.divergence.options import IGNORED, DivergenceOptions, Transform

CLAMP = 80.0
"""Of log(p / q)."""
ONE_STEP = frozenset(("forward_kl", "reverse_kl", "mixed", "mse", "cosine"))
"""Kinds whose first step has all sums."""
OF_LOGITS = frozenset(("mse", "cosine"))
"""Kinds that compare logits, not distributions."""


def transform_logits(logits: Tensor, transform: Transform, dtype: torch.dtype) -> Tensor:
    """Tempered logits in ``dtype``."""
    z = logits.to(dtype)
    if transform.scale != 1.0:
        z = z * transform.scale
    return z if transform.softcap is None else transform.softcap * torch.tanh(z / transform.softcap)


def row_dtype(student: Tensor, teacher: Tensor) -> torch.dtype:
    """The dtype of divergences of rows in plain PyTorch: at least float32, and float64 if either is."""
    return torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)


class RowSums(NamedTuple):
    """Sums over each row, ``[num_rows]``: of the first step, and then of the second."""

    student_max: Tensor
    student_sum: Tensor
    """Of exp(z_s - student_max); of z_s**2 for the kinds of logits."""
    teacher_max: Tensor
    teacher_sum: Tensor
    """Of exp(z_t - teacher_max); of z_t**2 for the kinds of logits."""
    first: Tensor
    """With c = z - max of each model, exp(c_t) * (c_t - c_s) for the KLs; exp(c_t) * log(p / m), or * e, for mixtures;
    abs(q - p) for the total variation; products or squared differences of logits."""
    second: Tensor
    """exp(c_s) * (c_s - c_t) for the KLs; exp(z_s - student_max) * r, or * e, or * sign(q - p)."""

    @property
    def delta(self) -> Tensor:
        """lse_t - lse_s of the logits less their maxima."""
        return (self.teacher_sum / self.student_sum).log()

    def centred(self, z_s: Tensor, z_t: Tensor) -> tuple[Tensor, Tensor]:
        """Both models' logits less their maxima."""
        return z_s - self.student_max[:, None], z_t - self.teacher_max[:, None]


def _finite(maximum: Tensor) -> Tensor:
    return maximum.where(maximum > -torch.inf, 0.0)


def sum_logits(z_s: Tensor, z_t: Tensor, kind: str) -> RowSums:
    """The first step."""
    zeros = z_s.new_zeros(len(z_s))
    if kind == "mse":
        return RowSums(zeros, zeros, zeros, zeros, (z_s - z_t).masked_fill_(z_s == z_t, 0.0).square().sum(-1), zeros)
    if kind == "cosine":
        return RowSums(zeros, z_s.square().sum(-1), zeros, z_t.square().sum(-1), (z_s * z_t).sum(-1), zeros)
    sums = RowSums(_finite(z_s.amax(-1)), zeros, _finite(z_t.amax(-1)), zeros, zeros, zeros)
    c_s, c_t = sums.centred(z_s, z_t)
    e_s, e_t = c_s.exp(), c_t.exp()
    first = second = zeros
    if kind in ("forward_kl", "mixed"):
        first = (e_t * (c_t - c_s)).where(e_t != 0, 0.0).sum(-1)
    if kind in ("reverse_kl", "mixed"):
        second = (e_s * (c_s - c_t)).where(e_s != 0, 0.0).sum(-1)
    return sums._replace(student_sum=e_s.sum(-1), teacher_sum=e_t.sum(-1), first=first, second=second)


class _Mixture(NamedTuple):
    """Columns of the mixtures' formulas; ``log_ratio`` is d."""

    log_ratio: Tensor
    of_student: Tensor
    """exp(z_s - student_max)."""
    of_teacher: Tensor
    excess: Tensor
    """r = log(q / m)."""


def _mix(z_s: Tensor, z_t: Tensor, sums: RowSums, beta: float) -> _Mixture:
    c_s, c_t = sums.centred(z_s, z_t)
    d = (c_t - c_s).sub_(sums.delta[:, None]).nan_to_num_(CLAMP, CLAMP, -CLAMP).clamp_(-CLAMP, CLAMP)
    r = d.exp().mul_(beta).add_(1.0 - beta).log_().neg_()
    return _Mixture(d, c_s.exp_(), c_t.exp_(), r)


def sum_mixtures(z_s: Tensor, z_t: Tensor, sums: RowSums, kind: str, beta: float) -> RowSums:
    """The second step, for kinds that are not in ``ONE_STEP``."""
    d, e_s, e_t, r = _mix(z_s, z_t, sums, beta)
    if kind == "jsd":
        first, second = e_t * (d + r), e_s * r
    elif kind == "skew_kl":
        first, second = e_t * (d + r), e_t * r.exp()
    elif kind == "skew_reverse_kl":
        first, second = e_s * r, e_s * r.exp()
    else:
        p, q = e_t / sums.teacher_sum[:, None], e_s / sums.student_sum[:, None]
        first, second = (q - p).abs(), e_s * -d.sign()
    return sums._replace(first=first.sum(-1), second=second.sum(-1))


def divergence_of(sums: RowSums, kind: str, beta: float, vocab_size: int) -> Tensor:
    """Each row's divergence, ``[num_rows]``."""
    forward, reverse = sums.first / sums.teacher_sum, sums.second / sums.student_sum
    if kind == "forward_kl":
        return forward - sums.delta
    if kind == "reverse_kl":
        return reverse + sums.delta
    if kind == "mixed":
        return beta * (forward - sums.delta) + (1.0 - beta) * (reverse + sums.delta)
    if kind == "jsd":
        return beta * forward + (1.0 - beta) * reverse
    if kind == "skew_kl":
        return forward
    if kind == "skew_reverse_kl":
        return sums.first / sums.student_sum
    if kind == "total_variation":
        return 0.5 * sums.first
    if kind == "mse":
        return sums.first / vocab_size
    return 1.0 - sums.first * _cosine_norm(sums)


def _cosine_norm(sums: RowSums) -> Tensor:
    """1 / (|z_s| * |z_t|), 0 if either is 0: the cosine is 0 then, and so is its gradient."""
    product = sums.student_sum.sqrt() * sums.teacher_sum.sqrt()
    return product.reciprocal().masked_fill(product == 0, 0.0)


def gradient_of(z_s: Tensor, z_t: Tensor, sums: RowSums, kind: str, beta: float, vocab_size: int) -> Tensor:
    """The third step: dD / dz_s, like ``z_s``; ``vocab_size`` may be more than its columns."""
    if kind == "mse":
        return (z_s - z_t).masked_fill_(z_s == z_t, 0.0).mul_(2.0 / vocab_size)
    if kind == "cosine":
        norm = _cosine_norm(sums)
        of_student = (sums.first * norm / sums.student_sum).masked_fill(norm == 0, 0.0)
        return z_s * of_student[:, None] - z_t * norm[:, None]
    c_s, c_t = sums.centred(z_s, z_t)
    q, p = c_s.exp().div_(sums.student_sum[:, None]), c_t.exp().div_(sums.teacher_sum[:, None])
    if kind in ("forward_kl", "reverse_kl", "mixed"):
        of_forward = {"forward_kl": 1.0, "reverse_kl": 0.0}.get(kind, beta)
        grad = torch.zeros_like(q) if of_forward == 0 else (q - p) * of_forward
        if of_forward != 1:
            reverse = (sums.second / sums.student_sum)[:, None]  # -d - D is a difference of logits and of their mean
            grad += (1.0 - of_forward) * (q * ((c_s - c_t) - reverse)).where(q != 0, 0.0)
        return grad
    d, _, _, r = _mix(z_s, z_t, sums, beta)
    first, second = sums.first / sums.student_sum, sums.second / sums.student_sum
    if kind == "jsd":
        return (1.0 - beta) * q * (r - second[:, None])
    if kind == "skew_kl":
        weights = r.exp()
        return (1.0 - beta) * (q * (sums.second / sums.teacher_sum)[:, None] - p * weights)
    if kind == "skew_reverse_kl":
        return q * (r - first[:, None] - (1.0 - beta) * (r.exp() - second[:, None]))
    return 0.5 * q * (-d.sign() - second[:, None])


def unless_nan(factor: Tensor, sums: RowSums, kind: str) -> Tensor:
    """``factor``, NaN where logits are: the clamp of the log-ratio would hide them."""
    return factor if kind in OF_LOGITS else factor.masked_fill(sums.delta.isnan(), torch.nan)


def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    grad_scale: Tensor | None,
    options: DivergenceOptions,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Each row's weighted divergence, and the gradient of its product with ``grad_scale``.

    Args:
        student, teacher: Raw logits, ``[num_rows, vocab_size]``.
        labels, token_weight: ``[num_rows]``; see :func:`~liger_ops.divergence.options.flat_tokens`.
        grad_scale: ``[]`` or ``[num_rows]``, or None for 1.
        options: Of the divergence.
        with_gradient: Whether the gradient is wanted, in at least float32.
    """
    kind, beta = options.resolved_kind, float(options.beta)
    dtype = row_dtype(student, teacher)
    z_s = transform_logits(student, options.of_student, dtype)
    z_t = transform_logits(teacher, options.of_teacher, dtype)
    sums = sum_logits(z_s, z_t, kind)
    if kind not in ONE_STEP:
        sums = sum_mixtures(z_s, z_t, sums, kind, beta)
    factor = unless_nan(torch.full_like(sums.first, options.factor), sums, kind)
    if token_weight is not None:
        factor = factor * token_weight.to(factor.dtype)
    ignored = labels == IGNORED
    losses = (divergence_of(sums, kind, beta, z_s.shape[1]) * factor).masked_fill_(ignored, 0.0)
    if not with_gradient:
        return losses, None
    if grad_scale is not None:
        factor = factor * grad_scale.to(factor.dtype)
    grad = gradient_of(z_s, z_t, sums, kind, beta, z_s.shape[1])
    grad *= (factor * options.of_student.scale)[:, None]
    if options.of_student.softcap is not None:
        grad *= 1.0 - (z_s / options.of_student.softcap) ** 2
    return losses, grad.masked_fill_(ignored[:, None], 0.0)
