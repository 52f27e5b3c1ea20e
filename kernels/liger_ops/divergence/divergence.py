"""Divergence of a student's logits from a teacher's, and what it shares with that of linear heads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_choice, check_floating_tensors, check_shape, wrong_value
from liger_ops.divergence.options import (
    IGNORED,
    DivergenceOptions,
    check_tokens,
    flat_tokens,
    num_common_columns,
)
from liger_ops.divergence.rows import Rows, row_dtype, write_rows
from liger_ops.loss.options import REDUCTIONS, Targets
from liger_ops.loss.scale_gradient import scale_gradient
from liger_ops.loss.token_plan import mean_scale_of


def reduce_rows(losses: Tensor, reduction: str, mean_scale: Tensor) -> Tensor:
    """``losses`` by ``reduction``; 0 without tokens."""
    if reduction == "none":
        return losses
    return losses.sum() * mean_scale if reduction == "mean" else losses.sum()


def scale_in_forward(reduction: str, dtype: torch.dtype) -> bool:
    """Whether gradients have the mean's factor from where they are computed; in float16 it might underflow."""
    return reduction == "mean" and dtype != torch.float16


def empty_results(
    labels: Tensor, reduction: str, dtype: torch.dtype, gradients: Sequence[tuple[Tensor | None, bool, torch.dtype]]
) -> list[Tensor]:
    """What the ops return, without values: the divergence, the mean's factor, and gradients where wanted.

    ``gradients`` has each tensor, whether its gradient is wanted and in which dtype.
    """
    loss = labels.new_empty(labels.shape if reduction == "none" else (), dtype=dtype)
    empty = [
        labels.new_empty(tensor.shape if tensor is not None and needed else 0, dtype=dtype)
        for tensor, needed, dtype in gradients
    ]
    return [loss, loss.new_empty(()), *empty]


@backend.register_op(
    "divergence(Tensor student, Tensor teacher, Tensor labels, Tensor? token_weight, str reduction,"
    f" bool with_gradient, {backend.schema_of(DivergenceOptions)}) -> Tensor[]",
    fake=lambda student, teacher, labels, token_weight, reduction, with_gradient, *scalars: empty_results(
        labels, reduction, row_dtype(student, teacher), [(student, with_gradient, student.dtype)]
    ),
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
    """The divergence, the mean's factor, and the gradient, of the mean where :func:`scale_in_forward`."""
    mean_scale = mean_scale_of(Targets(labels, None, token_weight), 1, IGNORED, student.dtype)
    losses = torch.zeros_like(labels, dtype=row_dtype(student, teacher))
    gradient = student.new_empty(student.shape if with_gradient else 0)
    grad_scale = mean_scale if scale_in_forward(reduction, student.dtype) else None
    buffer = gradient if with_gradient else None
    write_rows(
        Rows(student, teacher, labels, token_weight, grad_scale, DivergenceOptions(*scalars), None, losses, buffer),
        None,
    )
    return [reduce_rows(losses, reduction, mean_scale), mean_scale.to(losses.dtype), gradient]


class DivergenceFunction(torch.autograd.Function):
    """The divergence, given what computes it: ``compute(tensors, needs_gradient, grad_losses)`` as the ops do.

    A sum or a mean has its gradients from forward and only scales them in backward. So has each token's divergence
    where gradients have a row for each token. Otherwise (``waits``) backward brings each token's factor,
    ``grad_losses`` of ``[num_tokens]``, and computes again. Gradients are those of the first tensors; the
    last two are the tokens' labels and weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[Sequence[Tensor | None], list[bool], Tensor | None], list[Tensor]],
        reduction: str,
        waits: bool,
        needs_gradient: list[bool],
        *tensors: Tensor | None,
    ) -> Tensor:
        wanted = [False] * len(needs_gradient) if waits else needs_gradient
        loss, mean_scale, *gradients = compute(tensors, wanted, None)
        ctx.save_for_backward(*(tensors if waits else (tensors[-2], mean_scale, *gradients)))
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors[: len(needs_gradient)]]
        ctx.compute, ctx.reduction, ctx.waits, ctx.needs_gradient = compute, reduction, waits, needs_gradient
        ctx.num_constants = len(tensors) - len(needs_gradient)
        return loss

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.waits:
            gradients = ctx.compute(ctx.saved_tensors, ctx.needs_gradient, grad_loss)[2:]
        else:
            labels, mean_scale, *gradients = ctx.saved_tensors
            if ctx.reduction == "mean" and not scale_in_forward(ctx.reduction, ctx.dtypes[0]):
                grad_loss = grad_loss * mean_scale
            factor = grad_loss.where(labels != IGNORED, 0.0)[:, None] if ctx.reduction == "none" else grad_loss
        in_place = backend.graph_ends()  # no second buffer of the head's size
        scaled: list[Tensor | None] = []
        for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs_gradient, strict=True):
            if not needed:
                scaled.append(None)
            elif ctx.waits:
                scaled.append(gradient.to(dtype))
            elif ctx.reduction == "none":
                scaled.append(gradient.mul_(factor) if in_place else (gradient * factor).to(dtype))
            else:
                scaled.append(scale_gradient(gradient, factor, dtype, in_place=in_place))
        return None, None, None, None, *scaled, *[None] * ctx.num_constants


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
    check_floating_tensors("student_logits", student_logits, optional=False, teacher_logits=teacher_logits)
    check_choice("reduction", reduction, REDUCTIONS)
    options = DivergenceOptions.checked(
        kind, beta, temperature, t_squared, softcap, logit_scale, teacher_softcap, teacher_logit_scale
    )
    if student_logits.dim() == 0:
        raise wrong_value("student_logits", "[..., vocab_size]", student_logits)
    tokens = student_logits.shape[:-1]
    vocab_size = teacher_logits.shape[-1:] or student_logits.shape[-1:]
    check_shape("teacher_logits", teacher_logits, (*tokens, *vocab_size), "student_logits' tokens")
    check_tokens(mask, token_weight, student_logits, tokens, "student_logits")
    num_columns = num_common_columns(student_logits.shape[-1], teacher_logits.shape[-1], vocab)
    student, teacher = (
        backend.as_rows(each, each.shape[-1])[:, :num_columns] for each in (student_logits, teacher_logits.detach())
    )
    labels, weight = flat_tokens(mask, token_weight, student_logits, tokens.numel())

    def compute(tensors: Sequence[Tensor | None], needs_gradient: list[bool], _: Tensor | None) -> list[Tensor]:
        return _divergence(*tensors, reduction, *needs_gradient, *options)

    tensors = student, teacher, labels, weight
    if backend.needs_graph(student_logits):
        loss = DivergenceFunction.apply(compute, reduction, False, [True], *tensors)
    else:
        loss = compute(tensors, [False], None)[0]
    return loss.view(tokens) if reduction == "none" else loss
