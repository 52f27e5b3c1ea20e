"""RMSNorm, RMSNorm of a sum and LayerNorm: norms over rows, y = (x - mean) * rstd * (offset + weight) + bias.

:mod:`liger_ops.norm.kernels` has the maths and the kernels. Statistics and the gradients of weight and bias are float32
for every half-precision input; squares are taken of centered values, so a large mean costs no accuracy. Backward treats
rounding as the identity. Saved: x (the sum, if there was one), weight, bias, rstd and, of LayerNorm, mean (4 or 8 bytes
a row). Sources: arXiv:1910.07467 (RMSNorm), arXiv:1607.06450 (LayerNorm).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_choice, check_floating_tensors, check_shape, wrong_value
from liger_ops.backend import RowLaunch
from liger_ops.norm.checks import as_number, check_row_norm, output_dtype
from liger_ops.norm.kernels import backward_kernel, forward_kernel, projections_kernel
from liger_ops.norm.reductions import sum_parts
from liger_ops.recipes import made

Casting = Literal["gemma", "llama", "none"]
CASTINGS: tuple[Casting, ...] = get_args(Casting)

MAX_HIDDEN_SIZE = 16384
"""That registers hold: longer rows run in PyTorch."""
LONG_ROW = 16384
"""From here on registers are short: kernels convert a tile again instead of holding it in float32."""
PROJECTION_BLOCK_SIZE = 2048
_TILE_BYTES = 16384
# In backward, rows that would overflow the registers are cut into blocks of columns, each with separate programs.
_REGISTER_BYTES = 192 * 1024
_BLOCK_ROWS, _BLOCK_COLUMNS = 4, 2048


@backend.launch_cache
def choose_forward_launch(
    hidden_size: int,
    element_size: int,
    num_multiprocessors: int,
    *,
    centered: bool,
    input_bytes: int,
    shared_bytes: int,
) -> RowLaunch:
    """A whole row in one tile, or several short ones.

    On an H200 in bfloat16, RMSNorm of rows of 128 to 16384 columns: 3.5 to 4.0 TB/s where a copy reaches 3.9 to 4.2.
    ``input_bytes`` are those of one element of x and, if there is one, of the residual together.
    """
    block_size = triton.next_power_of_2(hidden_size)
    programs, num_warps = 0, 8  # programs per multiprocessor, which load up to two tiles ahead; 0: one per tile
    if block_size <= 2048:
        tile_size, num_warps = 4096 if centered else 2048, 4
    elif block_size <= 4096:
        tile_size = 8192 if centered else 4096
    elif block_size <= 8192:
        tile_size = 8192
        # Lengths that are no power of two are faster with rows loaded ahead.
        programs = 0 if centered or hidden_size == block_size else 2
    else:
        tile_size = 16384
        # A multiprocessor has registers for one program that centers so many columns: it loads rows ahead instead.
        programs, num_warps = (1, 16) if element_size == 2 else (0, 8)
    block_rows = tile_size // block_size
    if not programs:
        return RowLaunch(block_size, num_warps, block_rows=block_rows, reload_weight=True)
    tiles_ahead = min(2, shared_bytes // (tile_size * input_bytes))
    return RowLaunch(block_size, num_warps, programs * num_multiprocessors, 1 + tiles_ahead, block_rows)


@backend.launch_cache
def choose_backward_launch(
    hidden_size: int,
    element_size: int,
    num_multiprocessors: int,
    *,
    num_inputs: int,
    num_sums: int,
    shared_bytes: int,
) -> RowLaunch:
    """Tiles of 16 KB, or of one longer row; one program per multiprocessor, which loads tiles ahead while they fit.

    ``element_size`` is the widest tensor's; ``num_inputs`` tensors of the input's size are read, two, or three with the
    gradient of the sum, and ``num_sums`` sums over the rows kept, of weight and bias.
    """
    block_size = triton.next_power_of_2(hidden_size)
    is_masked = block_size != hidden_size
    overflows = block_size * (2 * element_size + 4 * num_sums) > _REGISTER_BYTES
    if overflows or (is_masked and block_size >= LONG_ROW and num_sums == 2):
        programs = max(1, num_multiprocessors // triton.cdiv(hidden_size, _BLOCK_COLUMNS))
        tiles_ahead = min(2, shared_bytes // (_BLOCK_ROWS * _BLOCK_COLUMNS * element_size * num_inputs))
        return RowLaunch(_BLOCK_COLUMNS, 8, programs, 1 + tiles_ahead, _BLOCK_ROWS)
    tile_size, num_warps, tiles_ahead, programs = _TILE_BYTES // element_size, 8, 2, 1
    if block_size <= 1024 and num_sums == 2:
        tile_size, num_warps, programs = 4096, 4, 2
    elif block_size <= 8192:
        # RMSNorm of 16384 rows on an H200 in bfloat16, where a copy reaches 3.8 to 4.2 TB/s: 5120 columns 3.8 TB/s (3.3
        # with two tiles ahead); 2048, 4096, 8192 columns 3.3, 3.7, 4.0 (3.1, 3.5, 3.5 with none ahead).
        tiles_ahead = 3 if 4 * hidden_size <= 3 * block_size else 2
    elif is_masked or num_sums == 2:  # either takes more warps where registers are short
        num_warps = 32 if is_masked else 16
    block_rows = max(1, tile_size // block_size)
    tile_bytes = block_rows * block_size * element_size
    # Two sums of a row this long leave no registers for the weight, which is then loaded twice a tile.
    reload_weight = num_sums == 2 and tile_bytes > _TILE_BYTES
    tiles_ahead = min(tiles_ahead, shared_bytes // (tile_bytes * (num_inputs + 2 * reload_weight)))
    return RowLaunch(block_size, num_warps, programs * num_multiprocessors, 1 + tiles_ahead, block_rows, reload_weight)


class RowNormOptions(NamedTuple):
    """Options of one call."""

    hidden_size: int
    eps: float
    offset: float  # added to the weight
    casting: str  # where y is rounded, see rms_norm; "gemma" for LayerNorm
    centered: bool  # whether the mean is subtracted: LayerNorm


def row_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, shape: Any, options: RowNormOptions
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


def _allocate(x: Tensor, residual: Tensor | None, weight: Tensor | None, _: Any, *options: Any) -> list[Tensor]:
    """y of x's shape; rstd and, if ``centered``, mean of each row; x plus residual if there is one."""
    hidden_size, _, _, casting, centered = options
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    # Not new_empty, which takes twice as long.
    y = torch.empty_like(x, dtype=output_dtype(dtype, weight, casting), memory_format=torch.contiguous_format)
    statistics = torch.empty((1 + centered, x.numel() // hidden_size), dtype=torch.float32, device=x.device)
    if residual is None:
        return [y, statistics]
    return [y, statistics, torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)]


@backend.register_op(
    "row_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias,"
    f" {backend.schema_of(RowNormOptions)}) -> Tensor[]",
    fake=_allocate,
)
def _row_norm_forward(x: Tensor, *others: Any) -> list[Tensor]:
    residual, weight, bias, hidden_size, eps, offset, casting, centered = others
    results = _allocate(x, *others)
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
    """y, and with a residual the sum, whose gradient both get."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor | tuple[Tensor, Tensor]:
        x, residual, weight, bias, options = args
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


def _compute(*args: Any) -> Any:
    """y and, with a residual, the sum, of the reference's arguments: by kernels where there are some."""
    tensors, options = args[:4], args[-1]
    if not backend.runs_on_triton(*tensors) or options.hidden_size > MAX_HIDDEN_SIZE:
        return row_norm_reference(*args)
    if not backend.needs_graph(*tensors):
        y, _, *total = _row_norm_forward(*tensors, *options)
        return (y, total[0]) if total else y
    outputs = RowNormFunction.apply(*tensors, options)
    if isinstance(outputs, Tensor):
        return made(outputs, _compute, *args)
    y, total = outputs
    return made(y, _compute, total, None, *args[2:]), total


def check_options(eps: Any, offset: Any, casting: Any, *, has_weight: bool) -> tuple[float | None, float]:
    """Returns eps and offset as floats; raises if one of them or casting is wrong."""
    if eps is not None:
        eps = as_number("eps", eps, at_least=0)
    offset = as_number("offset", offset)
    if offset and not has_weight:
        raise wrong_value("offset", "0 without a weight, which it is added to", offset)
    check_choice("casting", casting, CASTINGS)
    return eps, offset


def _run(
    input: Tensor, residual: Tensor | None, normalized_shape: Any, weight: Tensor | None, eps: Any, *options: Any
) -> Any:
    offset, casting = options
    shape = check_row_norm(input, normalized_shape, weight=weight)
    eps, offset = check_options(eps, offset, casting, has_weight=weight is not None)
    if eps is None:
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    options = RowNormOptions(math.prod(shape), eps, offset, casting, False)
    return _compute(input, residual, weight, None, shape, options)


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
        weight: Of ``normalized_shape``; None leaves the normalized input as it is.
        eps: At least 0; None means the machine epsilon of the arithmetic, as in ``F.rms_norm``: float32's for half
            precision.
        offset: Added to the weight; 1 for models whose weights are stored as deviations from one (Gemma).
        casting: "gemma" computes in float32, rounds once and returns input's dtype. "llama" rounds the normalized value
            to input's dtype, then applies the weight and returns the promoted dtype of both. "none" does so too and
            also rounds rstd to input's dtype and offset + weight to weight's, as plain PyTorch without casts would.

    Returns:
        A contiguous tensor of input's shape.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If the shapes or devices do not fit together, casting is unknown, eps is negative, a number is not
            finite, or offset is given without a weight.
    """
    return _run(input, None, normalized_shape, weight, eps, offset, casting)


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
        normalized_shape, weight, eps, offset, casting: As in :func:`rms_norm`; input there is the sum here.

    Returns:
        The normalized sum and the sum itself, rounded to the promoted dtype of input and residual; both contiguous and
        of input's shape.

    Raises:
        TypeError, ValueError: As :func:`rms_norm`.
    """
    check_floating_tensors("input", input, residual=residual, optional=False)
    check_shape("residual", residual, input.shape, "input's")
    return _run(input, residual, normalized_shape, weight, eps, offset, casting)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Returns ``(input - mean) / sqrt(variance + eps) * weight + bias``, as ``F.layer_norm`` does.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        normalized_shape: The trailing dimensions that mean and variance go over.
        weight: Of ``normalized_shape``, in any floating dtype; None for 1.
        bias: Of ``normalized_shape``, in any floating dtype; None for 0.
        eps: Added to the variance, at least 0.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If the shapes or devices do not fit together, or eps is negative or not finite.
    """
    shape = check_row_norm(input, normalized_shape, weight=weight, bias=bias)
    eps = as_number("eps", eps, at_least=0)
    options = RowNormOptions(math.prod(shape), eps, 0.0, "gemma", True)
    return _compute(input, None, weight, bias, shape, options)
