"""RMSNorm: y = x * rstd * (offset + weight), rstd = 1 / sqrt(mean(x**2) + eps); x may be the sum of two tensors.

The mean of squares and the weight gradient are float32 for every half-precision input. ``casting`` says where rounding
happens: "gemma" computes in float32 and rounds the result once; "llama" rounds x * rstd to x's dtype before the weight
is applied; "none" rounds wherever ``x * rstd * (offset + weight)`` on tensors of those dtypes would: rstd, x * rstd,
offset + weight and the product. Backward treats rounding as the identity. With n = x * rstd and s = offset + weight,

    dx = rstd * (dy * s - n * mean(dy * s * n))        dweight = sum over rows of dy * n

Saved: x (the sum, if there was one), weight, rstd (4 bytes a row). The kernels are in :mod:`liger_ops.norm.kernels`.
Source: arXiv:1910.07467.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_choice, check_floating_tensors, check_shape, wrong_value
from liger_ops.norm.checks import as_number, check_row_norm
from liger_ops.norm.launch import MAX_HIDDEN_SIZE, launch_backward, launch_forward
from liger_ops.norm.residual import connect, take
from liger_ops.recipes import made

Casting = Literal["gemma", "llama", "none"]
CASTINGS: tuple[Casting, ...] = get_args(Casting)


class RMSNormOptions(NamedTuple):
    """Options of one call."""

    hidden_size: int
    eps: float
    offset: float
    casting: Casting


def rms_norm_reference(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *, eps: float, offset: float, casting: Casting
) -> Tensor:
    """RMSNorm over the last ``len(normalized_shape)`` dimensions in plain PyTorch, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = wide.square().mean(dim=tuple(range(-len(normalized_shape), 0)), keepdim=True)
    rstd = torch.rsqrt(mean_square + eps)
    if casting == "none":
        normalized = x * rstd.to(x.dtype)
        return normalized if weight is None else normalized * (offset + weight)
    normalized = wide * rstd
    if casting == "llama":
        normalized = normalized.to(x.dtype)
    if weight is None:
        return normalized.to(x.dtype)
    scale = offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (normalized * scale).to(_output_dtype(x.dtype, weight, casting))


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``x + residual``, and that sum, in plain PyTorch."""
    total = x + residual
    return rms_norm_reference(total, normalized_shape, weight, **options), total


def _output_dtype(x_dtype: torch.dtype, weight: Tensor | None, casting: Casting) -> torch.dtype:
    return x_dtype if casting == "gemma" or weight is None else torch.promote_types(x_dtype, weight.dtype)


def _rms_norm_forward_fake(
    x: Tensor, weight: Tensor | None, hidden_size: int, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_output_dtype(x.dtype, weight, casting))
    rstd = x.new_empty((1, x.numel() // hidden_size), dtype=torch.float32)
    return y, rstd


@backend.register_op(
    "rms_norm_forward(Tensor x, Tensor? weight, SymInt hidden_size, float eps, float offset, str casting)"
    " -> (Tensor, Tensor)",
    fake=_rms_norm_forward_fake,
)
def _rms_norm_forward(
    x: Tensor, weight: Tensor | None, hidden_size: int, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    """Returns y of x's shape and rstd, one float32 a row."""
    y, rstd = _rms_norm_forward_fake(x, weight, hidden_size, eps, offset, casting)
    launch_forward(
        x, weight, None, hidden_size,
        y=y, statistics=rstd, centered=False, eps=eps, offset=offset, casting=casting,
    )  # fmt: skip
    return y, rstd


def _add_rms_norm_forward_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, hidden_size: int, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return *_rms_norm_forward_fake(total, weight, hidden_size, eps, offset, casting), total


@backend.register_op(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, SymInt hidden_size, float eps, float offset,"
    " str casting) -> (Tensor, Tensor, Tensor)",
    fake=_add_rms_norm_forward_fake,
)
def _add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, hidden_size: int, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y and rstd of the sum, and the sum."""
    y, rstd, total = _add_rms_norm_forward_fake(x, residual, weight, hidden_size, eps, offset, casting)
    launch_forward(
        x, weight, None, hidden_size,
        y=y, statistics=rstd, centered=False, eps=eps, offset=offset, casting=casting, residual=residual, total=total,
    )  # fmt: skip
    return y, rstd, total


def _rms_norm_backward_fake(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    hidden_size: int,
    offset: float,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = x.new_empty(x.shape if needs_grad_x else 0)
    grad_weight = x.new_empty(0) if weight is None or not needs_grad_weight else weight.new_empty(weight.shape)
    return grad_x, grad_weight


@backend.register_op(
    "rms_norm_backward(Tensor grad_y, Tensor? grad_total, Tensor x, Tensor? weight, Tensor rstd, SymInt hidden_size,"
    " float offset, bool needs_grad_x, bool needs_grad_weight) -> (Tensor, Tensor)",
    fake=_rms_norm_backward_fake,
)
def _rms_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    hidden_size: int,
    offset: float,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x, with ``grad_total`` added, and weight; one that is not needed comes back empty."""
    grad_x, grad_weight = _rms_norm_backward_fake(
        grad_y, grad_total, x, weight, rstd, hidden_size, offset, needs_grad_x, needs_grad_weight
    )
    launch_backward(
        x, grad_y, weight, rstd, hidden_size,
        centered=False, offset=offset, grad_total=grad_total,
        grad_x=grad_x if needs_grad_x else None, grad_weight=grad_weight if needs_grad_weight else None,
    )  # fmt: skip
    return grad_x, grad_weight


class RMSNormFunction(torch.autograd.Function):
    """Ties forward and backward together for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, options: RMSNormOptions) -> Tensor:
        y, rstd = _rms_norm_forward(x, weight, *options)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = options
        return y

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_grad_x, needs_grad_weight, _ = ctx.needs_input_grad
        hidden_size, _, offset, _ = ctx.options
        grad_x, grad_weight = _rms_norm_backward(
            grad_y, take(ctx), *ctx.saved_tensors, hidden_size, offset, needs_grad_x, needs_grad_weight
        )
        return grad_x if needs_grad_x else None, grad_weight if needs_grad_weight else None, None


class AddRMSNormFunction(torch.autograd.Function):
    """The same with the sum as a second output; both summands get its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, options: RMSNormOptions
    ) -> tuple[Tensor, Tensor]:
        y, rstd, total = _add_rms_norm_forward(x, residual, weight, *options)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.dtypes = x.dtype, residual.dtype
        return y, total

    @staticmethod
    @backend.once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        needs_grad_x, needs_grad_residual, needs_grad_weight, _ = ctx.needs_input_grad
        needs_grad_total = needs_grad_x or needs_grad_residual
        grad_weight = None
        if grad_y is not None:
            hidden_size, _, offset, _ = ctx.options
            grad_total, grad_weight = _rms_norm_backward(
                grad_y, grad_total, *ctx.saved_tensors, hidden_size, offset, needs_grad_total, needs_grad_weight
            )
        x_dtype, residual_dtype = ctx.dtypes
        return (
            grad_total.to(x_dtype) if needs_grad_x and grad_total is not None else None,
            grad_total.to(residual_dtype) if needs_grad_residual and grad_total is not None else None,
            grad_weight if needs_grad_weight else None,
            None,
        )


def check_options(eps: Any, offset: Any, casting: Any, *, has_weight: bool) -> tuple[float | None, float]:
    """Returns eps and offset as floats; raises if one of them or casting is wrong."""
    if eps is not None:
        eps = as_number("eps", eps, at_least=0)
    offset = as_number("offset", offset)
    if offset and not has_weight:
        raise wrong_value("offset", "0 without a weight, which it is added to", offset)
    check_choice("casting", casting, CASTINGS)
    return eps, offset


def _check(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    offset: float,
    casting: Casting,
) -> tuple[tuple[int, ...], RMSNormOptions]:
    shape = check_row_norm(input, normalized_shape, weight=weight)
    eps, offset = check_options(eps, offset, casting, has_weight=weight is not None)
    if eps is None:
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    return shape, RMSNormOptions(math.prod(shape), eps, offset, casting)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: Casting = "gemma",
) -> Tensor:
    """Returns ``input * rstd * (offset + weight)``, ``rstd = 1 / sqrt(mean(input**2) + eps)``; by default `F.rms_norm`.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        normalized_shape: The trailing dimensions that the mean goes over.
        weight: Of ``normalized_shape``; None leaves the normalised input as it is.
        eps: At least 0; None means the machine epsilon of the arithmetic, as in ``F.rms_norm``: float32's for half
            precision.
        offset: Added to the weight; 1 for models whose weights are stored as deviations from one (Gemma).
        casting: "gemma" computes in float32, rounds once and returns input's dtype. "llama" rounds the normalised value
            to input's dtype, then applies the weight and returns the promoted dtype of both. "none" does so too and
            also rounds rstd to input's dtype and offset + weight to weight's, as plain PyTorch without casts would.

    Returns:
        A contiguous tensor of input's shape.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If the shapes or devices do not fit together, casting is unknown, eps is negative, a number is not
            finite, or offset is given without a weight.
    """
    shape, options = _check(input, normalized_shape, weight, eps, offset, casting)
    return _compute(input, weight, shape, options)


def _compute(input: Tensor, weight: Tensor | None, shape: tuple[int, ...], options: RMSNormOptions) -> Tensor:
    if not backend.runs_on_triton(input, weight) or options.hidden_size > MAX_HIDDEN_SIZE:
        _, eps, offset, casting = options
        return rms_norm_reference(input, shape, weight, eps=eps, offset=offset, casting=casting)
    if not backend.needs_graph(input, weight):
        return _rms_norm_forward(input, weight, *options)[0]
    y = connect(RMSNormFunction.apply(input, weight, options), input)
    return made(y, _compute, input, weight, shape, options)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: Casting = "gemma",
) -> tuple[Tensor, Tensor]:
    """Returns ``rms_norm(input + residual, ...)`` and the sum, as a layer that adds to the residual stream needs them.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        residual: Of input's shape.
        normalized_shape: As in :func:`rms_norm`, as are the arguments after it; input there is the sum here.
        weight: Of ``normalized_shape``, or None.
        eps: None means the machine epsilon of the arithmetic.
        offset: Added to the weight.
        casting: Where y is rounded.

    Returns:
        The normalised sum and the sum itself, rounded to the promoted dtype of input and residual; both contiguous and
        of input's shape.

    Raises:
        TypeError, ValueError: As :func:`rms_norm`.
    """
    check_floating_tensors("input", input, residual=residual, optional=False)
    check_shape("residual", residual, input.shape, "input's")
    shape, options = _check(input, normalized_shape, weight, eps, offset, casting)
    if not backend.runs_on_triton(input, residual, weight) or options.hidden_size > MAX_HIDDEN_SIZE:
        _, eps, offset, casting = options
        return add_rms_norm_reference(input, residual, shape, weight, eps=eps, offset=offset, casting=casting)
    if not backend.needs_graph(input, residual, weight):
        normalized, _, total = _add_rms_norm_forward(input, residual, weight, *options)
        return normalized, total
    normalized, total = AddRMSNormFunction.apply(input, residual, weight, options)
    return made(normalized, _compute, total, weight, shape, options), total
