"""The ops of the norms over rows, RMSNorm, RMSNorm of a sum and LayerNorm, and their autograd function.

:mod:`liger_ops.norm.kernels` has the maths and the kernels, :mod:`liger_ops.norm.launch` their launch parameters.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.norm.checks import output_dtype
from liger_ops.norm.kernels import backward_kernel, forward_kernel, projections_kernel
from liger_ops.norm.launch import (
    LONG_ROW,
    MAX_HIDDEN_SIZE,
    PROJECTION_BLOCK_SIZE,
    choose_backward_launch,
    choose_forward_launch,
)
from liger_ops.norm.reductions import sum_parts
from liger_ops.recipes import made


class RowNormOptions(NamedTuple):
    """Options of one call."""

    hidden_size: int
    eps: float
    offset: float  # added to the weight
    casting: str  # where y is rounded, see rms_norm; "gemma" for LayerNorm
    centered: bool  # whether the mean is subtracted: LayerNorm


def row_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    options: RowNormOptions,
) -> Any:
    """The norm over the dimensions ``shape`` in plain PyTorch, in float32 or wider; with a residual, also the sum."""
    if residual is not None:
        total = x + residual
        return row_norm_reference(total, None, weight, bias, shape, options), total
    _, eps, offset, casting, centered = options
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if centered:
        weight, bias = (None if tensor is None else tensor.to(wide.dtype) for tensor in (weight, bias))
        return F.layer_norm(wide, shape, weight, bias, eps).to(x.dtype)
    rstd = torch.rsqrt(wide.square().mean(dim=tuple(range(-len(shape), 0)), keepdim=True) + eps)
    if casting == "none":
        normalized = x * rstd.to(x.dtype)
        return normalized if weight is None else normalized * (offset + weight)
    normalized = wide * rstd
    if casting == "llama":
        normalized = normalized.to(x.dtype)
    if weight is None:
        return normalized.to(x.dtype)
    scale = offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (normalized * scale).to(output_dtype(x.dtype, weight, casting))


def _as_rows(tensor: Tensor | None, num_columns: int) -> tuple[Tensor | None, int]:
    """``tensor`` as rows of unit column stride, and the stride between rows."""
    if tensor is None:
        return None, 0
    if tensor.is_contiguous():
        return tensor, num_columns
    rows = backend.as_rows(tensor, num_columns)
    return rows, rows.stride(0)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _allocate(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, hidden_size: int, casting: str, centered: bool
) -> list[Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    # Not new_empty, which takes twice as long.
    y = torch.empty_like(x, dtype=output_dtype(dtype, weight, casting), memory_format=torch.contiguous_format)
    statistics = torch.empty((1 + centered, x.numel() // hidden_size), dtype=torch.float32, device=x.device)
    if residual is None:
        return [y, statistics]
    return [y, statistics, torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)]


@backend.register_op(
    "row_norm_forward",
    fake=lambda x, residual, weight, bias, hidden_size, eps, offset, *others: _allocate(
        x, residual, weight, hidden_size, *others
    ),
)
def _row_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden_size: int,
    eps: float,
    offset: float,
    casting: str,
    centered: bool,
) -> list[Tensor]:
    """Returns y of x's shape; rstd and, if ``centered``, mean of each row; x plus residual if there is one."""
    results = _allocate(x, residual, weight, hidden_size, casting, centered)
    y, statistics, *total = results
    num_rows = statistics.shape[1]
    if num_rows == 0:
        return results
    rows, row_stride = _as_rows(x, hidden_size)
    residual_rows, residual_row_stride = _as_rows(residual, hidden_size)
    element_size, hardware = x.element_size(), backend.hardware(x.device)
    launch = choose_forward_launch(
        hidden_size,
        element_size,
        hardware.multiprocessors,
        centered=centered,
        input_bytes=element_size + (0 if residual is None else residual.element_size()),
        shared_bytes=hardware.ahead_bytes,
    )
    forward_kernel.launch(
        launch.num_programs(num_rows),
        x_ptr=rows,
        residual_ptr=residual_rows,
        weight_ptr=_contiguous(weight),
        bias_ptr=_contiguous(bias),
        y_ptr=y,
        total_ptr=total[0] if total else None,
        statistics_ptr=statistics,
        x_row_stride=row_stride,
        residual_row_stride=residual_row_stride,
        num_rows=num_rows,
        hidden_size=hidden_size,
        eps=eps,
        offset=offset or None,
        CENTERED=centered,
        CASTING=casting,
        EVEN_ROWS=num_rows % launch.block_rows == 0,
        EVEN_COLUMNS=hidden_size == launch.block_size,
        RELOAD_WEIGHT=launch.reload_weight,
        HOLD_PACKED=launch.block_size >= LONG_ROW,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_SIZE=launch.block_size,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
    return results


@backend.register_op(
    "row_norm_backward",
    fake=lambda grad_y, grad_total, x, weight, bias, *others: backend.empty_gradients((x, weight, bias), others[-1]),
)
def _row_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    hidden_size: int,
    offset: float,
    centered: bool,
    needs: list[bool],
) -> list[Tensor]:
    """Returns those gradients of x, with ``grad_total`` added, weight and bias that are needed."""
    gradients = backend.empty_gradients((x, weight, bias), needs)
    grad_x, grad_weight, grad_bias = backend.spread(gradients, needs)
    num_rows = statistics.shape[1]
    num_sums = (grad_weight is not None) + (grad_bias is not None)
    rows, row_stride = _as_rows(x, hidden_size)
    grad_y_rows, grad_y_row_stride = _as_rows(grad_y, hidden_size)
    grad_total_rows, grad_total_row_stride = _as_rows(grad_total, hidden_size)
    hardware = backend.hardware(x.device)
    launch = choose_backward_launch(
        hidden_size,
        max(x.element_size(), grad_y.element_size()),
        hardware.multiprocessors,
        num_inputs=2 if grad_total is None else 3,
        num_sums=num_sums,
        shared_bytes=hardware.ahead_bytes,
    )
    num_blocks = -(-hidden_size // launch.block_size)  # triton.cdiv takes microseconds
    num_parts = launch.num_programs(num_rows)
    parts = statistics.new_empty(num_sums, num_parts, hidden_size) if num_sums else None
    if num_rows > 0:
        shared = {
            "x_ptr": rows,
            "grad_y_ptr": grad_y_rows,
            "weight_ptr": _contiguous(weight),
            "statistics_ptr": statistics,
            "x_row_stride": row_stride,
            "grad_y_row_stride": grad_y_row_stride,
            "num_rows": num_rows,
            "hidden_size": hidden_size,
            "offset": offset or None,
            "CENTERED": centered,
        }
        projections = None
        if num_blocks > 1 and grad_x is not None:
            projections = torch.empty_like(statistics)
            projections_kernel.launch(
                num_rows,
                projections_ptr=projections,
                BLOCK_SIZE=PROJECTION_BLOCK_SIZE,
                NUM_STAGES=3,
                num_warps=8,
                **shared,
            )
        backward_kernel.launch(
            num_parts * num_blocks,
            grad_total_ptr=grad_total_rows,
            projections_ptr=projections,
            grad_x_ptr=grad_x,
            parts_ptr=parts,
            grad_total_row_stride=grad_total_row_stride,
            num_parts=num_parts,
            GRAD_WEIGHT=grad_weight is not None,
            GRAD_BIAS=grad_bias is not None,
            EVEN_ROWS=num_rows % launch.block_rows == 0,
            EVEN_COLUMNS=hidden_size % launch.block_size == 0,
            RELOAD_WEIGHT=launch.reload_weight,
            HOLD_PACKED=launch.block_size >= LONG_ROW,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_SIZE=launch.block_size,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            **shared,
        )
    if parts is not None:
        sum_parts(parts, grad_weight, grad_bias)
    return gradients


class RowNormFunction(torch.autograd.Function):
    """Ties forward and backward together for autograd: y, and with a residual the sum, whose gradient both get."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: RowNormOptions,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, statistics, *total = _row_norm_forward(x, residual, weight, bias, *options)
        ctx.save_for_backward(total[0] if total else x, weight, bias, statistics)
        ctx.options = options
        ctx.dtypes = None
        if residual is None:
            return y
        ctx.dtypes = x.dtype, residual.dtype
        ctx.set_materialize_grads(False)
        return y, total[0]

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needs_x, needs_residual, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_weight = grad_bias = None
        if grad_y is not None:
            hidden_size, _, offset, _, centered = ctx.options
            needs = [needs_x or needs_residual, needs_weight, needs_bias]
            gradients = _row_norm_backward(grad_y, grad_total, *ctx.saved_tensors, hidden_size, offset, centered, needs)
            grad_total, grad_weight, grad_bias = backend.spread(gradients, needs)
        if ctx.dtypes is None:
            return grad_total, None, grad_weight, grad_bias, None
        if grad_total is None:
            return None, None, grad_weight, grad_bias, None
        x_dtype, residual_dtype = ctx.dtypes
        grad_x = grad_total.to(x_dtype) if needs_x else None
        return grad_x, grad_total.to(residual_dtype) if needs_residual else None, grad_weight, grad_bias, None


def run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    options: RowNormOptions,
) -> Any:
    """Returns y and, with a residual, the sum: by kernels where there are some, recorded by autograd if need be."""
    tensors = x, residual, weight, bias
    if not backend.runs_on_triton(*tensors) or options.hidden_size > MAX_HIDDEN_SIZE:
        return row_norm_reference(*tensors, shape, options)
    if not backend.needs_graph(*tensors):
        y, _, *total = _row_norm_forward(*tensors, *options)
        return (y, total[0]) if total else y
    outputs = RowNormFunction.apply(*tensors, options)
    if residual is None:
        return made(outputs, run, *tensors, shape, options)
    y, total = outputs
    return made(y, run, total, None, weight, bias, shape, options), total
