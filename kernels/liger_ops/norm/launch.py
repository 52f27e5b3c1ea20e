"""The host side of the row norms: launch choices, launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from liger_ops import backend
from liger_ops.norm.kernels import backward_kernel, forward_kernel, long_forward_kernel, projections_kernel
from liger_ops.norm.reductions import sum_parts

# Offsets inside a row are int32, for one row and, in backward, for the two sums: longer rows run in PyTorch.
MAX_HIDDEN_SIZE = 2**30


@dataclass(frozen=True)
class RowLaunch:
    """Tile that a program holds at a time, how many programs share the rows, and how far ahead it loads."""

    block_rows: int
    block_size: int
    num_warps: int
    max_programs: int | None = None  # None: one a tile; in backward of rows in blocks, for each block of columns
    num_stages: int = 1
    reload_weight: bool = False  # load weight and bias when a tile needs them instead of keeping them in registers

    def num_programs(self, num_rows: int) -> int:
        """How many programs share ``num_rows`` rows."""
        num_tiles = -(-num_rows // self.block_rows)
        return num_tiles if self.max_programs is None else min(num_tiles, self.max_programs)


class _ForwardChoice(NamedTuple):
    """A row of ``_FORWARD``: tiles for rows that meet the conditions in its last columns (None: no condition)."""

    max_block_size: int
    tile_size: int  # elements, at least one row
    num_warps: int
    programs_per_multiprocessor: int | None = None  # each loads up to two tiles ahead; None: one program a tile
    is_centered: bool | None = None
    is_masked: bool | None = None
    element_size: int | None = None


# By the length of a row, rounded up to a power of two; the first that fits counts. On an H200 in bfloat16, RMSNorm of
# rows of 128 to 16384 columns: 3.5 to 4.0 TB/s where a copy reaches 3.9 to 4.2.
_FORWARD = (
    _ForwardChoice(2048, 2048, 4, is_centered=False),
    _ForwardChoice(2048, 4096, 4, is_centered=True),
    _ForwardChoice(4096, 4096, 8, is_centered=False),
    _ForwardChoice(4096, 8192, 8, is_centered=True),
    # Lengths that are no power of two are faster with rows loaded ahead.
    _ForwardChoice(8192, 8192, 8, programs_per_multiprocessor=2, is_centered=False, is_masked=True),
    _ForwardChoice(8192, 8192, 8),
    # A multiprocessor has registers for one program that centers so many columns: it loads rows ahead instead.
    _ForwardChoice(16384, 16384, 16, programs_per_multiprocessor=1, element_size=2),
    _ForwardChoice(16384, 16384, 8),
)
# Longer rows are read twice, block by block, by so few programs that all rows under way fit into the L2 cache.
_LONG_FORWARD_BLOCK_SIZE = 4096
_L2_BYTES_PER_MULTIPROCESSOR = 2**18


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
    """A whole row in one tile, several short ones, or blocks of a long one.

    Args:
        hidden_size: Length of a row.
        element_size: Bytes of x's elements.
        num_multiprocessors: How many programs run at once.
        centered: Whether the mean is subtracted.
        input_bytes: Bytes of one element of x and, if there is one, of the residual together.
        shared_bytes: Shared memory of a program, which holds the tiles that are loaded ahead.
    """
    block_size = triton.next_power_of_2(hidden_size)
    if block_size > _FORWARD[-1].max_block_size:
        programs = max(1, min(4, _L2_BYTES_PER_MULTIPROCESSOR // (hidden_size * element_size)))
        return RowLaunch(1, _LONG_FORWARD_BLOCK_SIZE, 8, max_programs=programs * num_multiprocessors)
    choice = _first_that_fits(
        _FORWARD, block_size,
        is_centered=centered, is_masked=block_size != hidden_size, element_size=element_size,
    )  # fmt: skip
    block_rows = max(1, choice.tile_size // block_size)
    if choice.programs_per_multiprocessor is None:
        return RowLaunch(block_rows, block_size, choice.num_warps, reload_weight=True)
    max_programs = choice.programs_per_multiprocessor * num_multiprocessors
    tiles_ahead = min(2, shared_bytes // (block_rows * block_size * input_bytes))
    return RowLaunch(block_rows, block_size, choice.num_warps, max_programs, num_stages=1 + tiles_ahead)


class _BackwardChoice(NamedTuple):
    """A row of ``_BACKWARD``: programs for rows that meet the conditions in its last columns (None: no condition)."""

    max_block_size: int
    num_warps: int
    tiles_ahead: int  # as far as shared memory holds them
    programs_per_multiprocessor: int = 1
    tile_size: int | None = None  # elements; None: _TILE_BYTES of them, at least one row
    num_sums: int | None = None
    is_masked: bool | None = None
    is_quarter_empty: bool | None = None


_TILE_BYTES = 16384
_LONG_ROW = 16384  # from here on registers are short
# By the length of a row, rounded up to a power of two; the first that fits counts. Rates are of RMSNorm on an H200 in
# bfloat16, 16384 rows, where a copy reaches 3.8 to 4.2 TB/s.
_BACKWARD = (
    # Short rows with both sums (LayerNorm's): two programs a multiprocessor.
    _BackwardChoice(1024, 4, 2, programs_per_multiprocessor=2, tile_size=4096, num_sums=2),
    _BackwardChoice(8192, 8, 3, is_quarter_empty=True),  # 5120 columns: 3.8 TB/s; 3.3 with two tiles ahead
    _BackwardChoice(8192, 8, 2),  # 2048, 4096, 8192 columns: 3.3, 3.7, 4.0 TB/s; 3.1, 3.5, 3.5 with none ahead
    # Registers are short: a mask or a second sum takes more warps.
    _BackwardChoice(32768, 32, 2, is_masked=True),
    _BackwardChoice(32768, 16, 2, num_sums=2),
    _BackwardChoice(32768, 8, 2),
)
# Rows that would overflow the registers are cut into blocks of columns, each with separate programs.
_REGISTER_BYTES = 192 * 1024
_BLOCK_ROWS, _BLOCK_COLUMNS = 4, 2048
_PROJECTION_BLOCK_SIZE = 2048


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
    """Tiles of 16 KB, or of one longer row; one program a multiprocessor, which loads tiles ahead while they fit.

    Args:
        hidden_size: Length of a row.
        element_size: Bytes of the widest tensor's elements.
        num_multiprocessors: How many programs run at once.
        num_inputs: How many tensors of the input's size are read: two, or three with the gradient of the sum.
        num_sums: How many sums over the rows are kept: of weight, of bias.
        shared_bytes: Shared memory of a program, which holds the tiles that are loaded ahead.
    """
    block_size = triton.next_power_of_2(hidden_size)
    is_masked = block_size != hidden_size
    overflows = block_size * (2 * element_size + 4 * num_sums) > _REGISTER_BYTES
    if overflows or (is_masked and block_size >= _LONG_ROW and num_sums == 2):
        programs = max(1, num_multiprocessors // triton.cdiv(hidden_size, _BLOCK_COLUMNS))
        tiles_ahead = min(2, shared_bytes // (_BLOCK_ROWS * _BLOCK_COLUMNS * element_size * num_inputs))
        return RowLaunch(_BLOCK_ROWS, _BLOCK_COLUMNS, 8, programs, 1 + tiles_ahead)
    choice = _first_that_fits(
        _BACKWARD, block_size,
        num_sums=num_sums, is_masked=is_masked, is_quarter_empty=4 * hidden_size <= 3 * block_size,
    )  # fmt: skip
    block_rows = max(1, (choice.tile_size or _TILE_BYTES // element_size) // block_size)
    tile_bytes = block_rows * block_size * element_size
    # Two sums of a row this long leave no registers for the weight, which is then loaded twice a tile.
    reload_weight = num_sums == 2 and tile_bytes > _TILE_BYTES
    tiles_ahead = min(choice.tiles_ahead, shared_bytes // (tile_bytes * (num_inputs + 2 * reload_weight)))
    return RowLaunch(
        block_rows=block_rows,
        block_size=block_size,
        num_warps=choice.num_warps,
        max_programs=choice.programs_per_multiprocessor * num_multiprocessors,
        num_stages=1 + tiles_ahead,
        reload_weight=reload_weight,
    )


_Choice = TypeVar("_Choice", _ForwardChoice, _BackwardChoice)


def _first_that_fits(table: Sequence[_Choice], block_size: int, **columns: int) -> _Choice:
    for choice in table:
        if block_size <= choice.max_block_size and all(
            getattr(choice, name) in (None, value) for name, value in columns.items()
        ):
            return choice
    raise AssertionError(f"no launch for blocks of {block_size}, {columns}")


def _as_rows(tensor: Tensor | None, num_columns: int) -> tuple[Tensor | None, int]:
    """``tensor`` as rows of unit column stride, and the stride between rows."""
    if tensor is None:
        return None, 0
    if tensor.is_contiguous():
        return tensor, num_columns
    rows = backend.as_rows(tensor, num_columns)
    return rows, rows.stride(0)


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden_size: int,
    *,
    y: Tensor,
    statistics: Tensor,
    centered: bool,
    eps: float,
    offset: float = 0.0,
    casting: str = "gemma",
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Normalises rows of ``hidden_size`` elements.

    Args:
        x: ``[*, hidden_size]`` or another shape of as many elements; so are ``residual``, ``total`` and ``y``.
        weight: ``hidden_size`` elements, or None.
        bias: ``hidden_size`` elements, or None.
        hidden_size: Length of a row.
        y: Contiguous, written.
        statistics: ``[1, num_rows]``, rstd, or ``[2, num_rows]``, rstd and mean, if ``centered``; written.
        centered: Whether the mean is subtracted: LayerNorm.
        eps: Added to the variance.
        offset: Added to the weight.
        casting: Where y is rounded, see ``rms_norm``.
        residual: Added to ``x`` first.
        total: Contiguous, written with that sum; None without a residual.
    """
    num_rows = statistics.shape[1]
    if num_rows == 0:
        return
    rows, row_stride = _as_rows(x, hidden_size)
    residual_rows, residual_row_stride = _as_rows(residual, hidden_size)
    num_multiprocessors = backend.num_multiprocessors(x.device)
    launch = choose_forward_launch(
        hidden_size,
        x.element_size(),
        num_multiprocessors,
        centered=centered,
        input_bytes=x.element_size() + (0 if residual is None else residual.element_size()),
        shared_bytes=backend.shared_memory(x.device),
    )
    arguments = {
        "x_ptr": rows,
        "residual_ptr": residual_rows,
        "weight_ptr": None if weight is None else weight.contiguous(),
        "bias_ptr": None if bias is None else bias.contiguous(),
        "y_ptr": y,
        "total_ptr": total,
        "statistics_ptr": statistics,
        "x_row_stride": row_stride,
        "residual_row_stride": residual_row_stride,
        "num_rows": num_rows,
        "hidden_size": hidden_size,
        "eps": eps,
        "offset": offset or None,
        "CENTERED": centered,
        "CASTING": casting,
        "BLOCK_SIZE": launch.block_size,
        "NUM_STAGES": launch.num_stages,
        "num_warps": launch.num_warps,
    }
    if launch.block_size < hidden_size:
        long_forward_kernel.launch(launch.num_programs(num_rows), **arguments)
    else:
        forward_kernel.launch(
            launch.num_programs(num_rows),
            EVEN_ROWS=num_rows % launch.block_rows == 0,
            EVEN_COLUMNS=hidden_size == launch.block_size,
            RELOAD_WEIGHT=launch.reload_weight,
            HOLD_PACKED=launch.block_size >= _LONG_ROW,
            BLOCK_ROWS=launch.block_rows,
            **arguments,
        )


def launch_backward(
    x: Tensor,
    grad_y: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    hidden_size: int,
    *,
    centered: bool,
    offset: float = 0.0,
    grad_total: Tensor | None = None,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None = None,
) -> None:
    """Computes the gradients that are not None.

    Args:
        x: The normalised tensor: with a residual, the sum.
        grad_y: Of as many elements as ``x``.
        weight: ``hidden_size`` elements, or None.
        statistics: As written by :func:`launch_forward`.
        hidden_size: Length of a row.
        centered: As in forward.
        offset: As in forward.
        grad_total: The sum's gradient from elsewhere, which ``grad_x`` then includes.
        grad_x: Contiguous, of as many elements as ``x``, written.
        grad_weight: ``hidden_size`` elements, written.
        grad_bias: ``hidden_size`` elements, written.
    """
    num_rows = statistics.shape[1]
    num_sums = (grad_weight is not None) + (grad_bias is not None)
    rows, row_stride = _as_rows(x, hidden_size)
    grad_y_rows, grad_y_row_stride = _as_rows(grad_y, hidden_size)
    grad_total_rows, grad_total_row_stride = _as_rows(grad_total, hidden_size)
    weight = None if weight is None else weight.contiguous()
    num_multiprocessors = backend.num_multiprocessors(x.device)
    launch = choose_backward_launch(
        hidden_size,
        max(x.element_size(), grad_y.element_size()),
        num_multiprocessors,
        num_inputs=2 if grad_total is None else 3,
        num_sums=num_sums,
        shared_bytes=backend.shared_memory(x.device),
    )
    shared = {
        "x_ptr": rows,
        "grad_y_ptr": grad_y_rows,
        "weight_ptr": weight,
        "statistics_ptr": statistics,
        "x_row_stride": row_stride,
        "grad_y_row_stride": grad_y_row_stride,
        "num_rows": num_rows,
        "hidden_size": hidden_size,
        "offset": offset or None,
        "CENTERED": centered,
    }
    projections = None
    num_blocks = -(-hidden_size // launch.block_size)  # triton.cdiv takes microseconds
    if num_blocks > 1 and grad_x is not None and num_rows > 0:
        projections = torch.empty_like(statistics)
        projections_kernel.launch(
            num_rows,
            projections_ptr=projections,
            BLOCK_SIZE=_PROJECTION_BLOCK_SIZE,
            NUM_STAGES=3,
            num_warps=8,
            **shared,
        )
    num_parts = launch.num_programs(num_rows)
    parts = statistics.new_empty(num_sums, num_parts, hidden_size) if num_sums else None
    if num_rows > 0:
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
            HOLD_PACKED=launch.block_size >= _LONG_ROW,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_SIZE=launch.block_size,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            **shared,
        )
    if parts is not None:
        sum_parts(parts, grad_weight, grad_bias)
