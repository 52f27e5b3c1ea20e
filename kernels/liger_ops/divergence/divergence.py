"""Divergence of a student's logits from a teacher's, and of rows of both within the loop of a linear head."""

from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_choice, check_floating, check_same_device
from liger_ops.divergence.launch import launch_divergence
from liger_ops.divergence.options import (
    IGNORED,
    OPTIONS_SCHEMA,
    DivergenceOptions,
    check_tokens,
    flat_tokens,
    num_common_columns,
)
from liger_ops.divergence.rows import divergence_rows, row_dtype
from liger_ops.loss.chunked_loss import CPU_CHUNK_BYTES
from liger_ops.loss.options import REDUCTIONS, Targets
from liger_ops.loss.scale_gradient import scale_gradient
from liger_ops.loss.token_plan import plan_tokens

_TEMPORARIES = 6  # of a row's size, in plain PyTorch


def write_rows(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    grad_scale: Tensor | None,
    options: DivergenceOptions,
    *,
    token_index: Tensor | None,
    losses: Tensor,
    grad_logits: Tensor | None,
) -> None:
    """Writes the divergences of some tokens, and the gradient of the student's logits.

    Args:
        student, teacher: Raw logits of these tokens, ``[num_rows, vocab_size]``, unit stride in the last dimension.
        labels, token_weight: Of all tokens, ``[num_tokens]``; see
            :func:`~liger_ops.divergence.options.flat_tokens`.
        grad_scale: Factor of the gradient, ``[]`` or ``[num_tokens]``; None for 1.
        options: Of the divergence.
        token_index: The token of each row, ``[num_rows]``; None if rows are all tokens in order.
        losses: ``[num_tokens]``, at least float32, written at these tokens.
        grad_logits: Like ``student``, which it may be: output buffer for the gradient; or None.
    """
    if backend.runs_on_triton(student, teacher):
        launch_divergence(
            student, teacher, labels, token_weight, grad_scale, options,
            token_index=token_index, losses=losses, grad_logits=grad_logits,
        )  # fmt: skip
        return
    num_rows = student.shape[0]
    size = max(1, CPU_CHUNK_BYTES // (_TEMPORARIES * student.shape[1] * losses.element_size()))
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        index = torch.arange(rows.start, rows.stop, device=labels.device) if token_index is None else token_index[rows]
        weight = None if token_weight is None else token_weight[index]
        scale = grad_scale[index] if grad_scale is not None and grad_scale.dim() else grad_scale
        values, gradient = divergence_rows(
            student[rows], teacher[rows], labels[index], weight, scale, options, with_gradient=grad_logits is not None
        )
        losses.index_copy_(0, index, values.to(losses.dtype))
        if grad_logits is not None and gradient is not None:
            grad_logits[rows].copy_(gradient)


def divergence_reference(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """:func:`divergence` from log-softmaxes, in plain PyTorch that autograd differentiates; for finite logits."""
    settings = DivergenceOptions(kind, beta, **options)
    dtype = row_dtype(student_logits, teacher_logits)

    def temper(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
        z = logits.to(dtype) * scale
        return (z if softcap is None else softcap * torch.tanh(z / softcap)) / settings.temperature

    z_s = temper(student_logits, settings.logit_scale, settings.softcap)
    z_t = temper(teacher_logits.detach(), settings.teacher_logit_scale, settings.teacher_softcap)
    s, t = z_s.log_softmax(-1), z_t.log_softmax(-1)

    def kl(left: Tensor, right: Tensor) -> Tensor:
        return (left.exp() * (left - right)).sum(-1)

    def mixture(share: float) -> Tensor:
        shares = s.new_tensor([1.0 - share, share]).log()
        return torch.logaddexp(shares[0] + s, shares[1] + t)

    if kind == "forward_kl":
        losses = kl(t, s)
    elif kind == "reverse_kl":
        losses = kl(s, t)
    elif kind == "mixed":
        losses = beta * kl(t, s) + (1.0 - beta) * kl(s, t)
    elif kind == "jsd":
        ends = {0.0: kl(t, s), 1.0: kl(s, t)}
        m = mixture(beta)
        losses = ends.get(beta, beta * kl(t, m) + (1.0 - beta) * kl(s, m))
    elif kind == "skew_kl":
        losses = kl(t, mixture(beta))
    elif kind == "skew_reverse_kl":
        losses = kl(s, mixture(beta))
    elif kind == "total_variation":
        losses = 0.5 * (s.exp() - t.exp()).abs().sum(-1)
    elif kind == "mse":
        losses = (z_s - z_t).square().mean(-1)
    else:
        losses = 1.0 - torch.cosine_similarity(z_s, z_t, dim=-1, eps=0.0)
    losses = losses * settings.factor
    weights = torch.ones_like(losses) if token_weight is None else token_weight.to(losses.dtype)
    if mask is not None:
        weights, losses = weights.where(mask, 0.0), losses.where(mask, 0.0)
    losses = losses * weights
    if reduction == "none":
        return losses
    total = weights.sum()
    return losses.sum() if reduction == "sum" else losses.sum() / total.where(total != 0, 1.0)


def reduce_rows(losses: Tensor, reduction: str, mean_scale: Tensor) -> Tensor:
    """``losses`` by ``reduction``; 0 without tokens."""
    if reduction == "none":
        return losses
    return losses.sum() * mean_scale if reduction == "mean" else losses.sum()


def _fake_divergence(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    reduction: str,
    with_gradient: bool,
    *_: Any,
) -> list[Tensor]:
    loss = student.new_empty(labels.shape if reduction == "none" else (), dtype=row_dtype(student, teacher))
    return [
        loss,
        torch.empty_like(student, memory_format=torch.contiguous_format) if with_gradient else loss.new_empty(0),
    ]


@backend.register_op(
    "divergence(Tensor student, Tensor teacher, Tensor labels, Tensor? token_weight, str reduction,"
    f" bool with_gradient, {OPTIONS_SCHEMA}) -> Tensor[]",
    fake=_fake_divergence,
)
def _divergence(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    reduction: str,
    with_gradient: bool,
    *scalars: Any,
) -> list[Tensor]:
    """The divergence and the gradient of what it reduces, with the mean's factor."""
    options = DivergenceOptions.from_scalars(*scalars)
    losses = labels.new_zeros(labels.shape, dtype=row_dtype(student, teacher))
    plan = plan_tokens(Targets(labels, None, token_weight), 1, IGNORED, student, with_order=False)
    grad_logits = torch.empty_like(student, memory_format=torch.contiguous_format) if with_gradient else None
    write_rows(
        student, teacher, labels, token_weight, plan.mean_scale if reduction == "mean" else None, options,
        token_index=None, losses=losses, grad_logits=grad_logits,
    )  # fmt: skip
    loss = reduce_rows(losses, reduction, plan.mean_scale)
    return [loss, losses.new_empty(0) if grad_logits is None else grad_logits]


class _DivergenceFunction(torch.autograd.Function):
    """The divergence of logits, whose gradient is that of forward times the upstream gradient of each token."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor, *arguments: Any) -> Tensor:
        loss, gradient = _divergence(student, teacher, labels, *arguments)
        ctx.save_for_backward(gradient, labels)
        ctx.num_arguments = len(arguments)
        return loss

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradient, labels = ctx.saved_tensors
        in_place = backend.graph_ends()
        return scale_rows(gradient, grad_loss, labels, in_place=in_place), None, None, *[None] * ctx.num_arguments


def scale_rows(gradient: Tensor, factor: Tensor, labels: Tensor, *, in_place: bool) -> Tensor:
    """``[num_rows, ...]`` times a factor, ``[]`` or ``[num_rows]``, multiplied in the factor's dtype.

    The factors of ignored rows, which ``labels`` tells, may be NaN.
    """
    if factor.dim() == 0:
        return scale_gradient(gradient, factor, gradient.dtype, in_place=in_place)
    factor = factor.where(labels != IGNORED, 0.0)[:, None]
    return gradient.mul_(factor) if in_place else (gradient * factor).to(gradient.dtype)


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
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
    vocab: str = "equal",
) -> Tensor:
    """Divergence of the student's distributions from the teacher's; :func:`~liger_ops.linear_divergence` of logits.

    Args:
        student_logits: ``[..., vocab_size]``; the only argument with a gradient.
        teacher_logits: ``[..., vocab_size]``, of the same tokens.
        kind, beta, temperature, t_squared, softcap, logit_scale: As for :func:`~liger_ops.linear_divergence`.
        teacher_softcap, teacher_logit_scale, mask, token_weight, reduction, vocab: As for it, too.

    Returns:
        In at least float32: ``[...]`` for ``reduction="none"``, else a scalar. Beyond the gradient only rows that fit
        a few MiB are held in float32.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For shapes, devices or options that do not fit.
    """
    check_floating("student_logits", student_logits)
    check_floating("teacher_logits", teacher_logits)
    check_same_device("student_logits", student_logits, teacher_logits=teacher_logits)
    check_choice("reduction", reduction, REDUCTIONS)
    options = DivergenceOptions(
        kind, beta, temperature, t_squared, softcap, logit_scale, teacher_softcap, teacher_logit_scale
    )
    if student_logits.dim() == 0 or teacher_logits.shape[:-1] != student_logits.shape[:-1] or not teacher_logits.dim():
        raise ValueError(
            "teacher_logits must have student_logits' tokens: student_logits has shape"
            f" {tuple(student_logits.shape)}, teacher_logits {tuple(teacher_logits.shape)}"
        )
    tokens = student_logits.shape[:-1]
    check_tokens(mask, token_weight, student_logits, tokens, "student_logits")
    num_columns = num_common_columns(student_logits.shape[-1], teacher_logits.shape[-1], vocab)
    rows = []
    for logits in (student_logits, teacher_logits.detach()):
        whole = backend.as_rows(logits, logits.shape[-1])
        rows.append(whole if whole.shape[1] == num_columns else whole[:, :num_columns])
    labels, weight = flat_tokens(mask, token_weight, student_logits, tokens.numel())
    arguments = rows[1], labels, weight, reduction
    if backend.needs_graph(student_logits):
        loss = _DivergenceFunction.apply(rows[0], *arguments, True, *options.as_scalars())
    else:
        loss = _divergence(rows[0], *arguments, False, *options.as_scalars())[0]
    return loss.view(tokens) if reduction == "none" else loss
