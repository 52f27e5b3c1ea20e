"""Launch parameters of the row norms."""

import triton

from liger_ops import backend
from liger_ops.backend import RowLaunch

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
    programs, num_warps = 0, 8  # programs a multiprocessor, which load up to two tiles ahead; 0: one program a tile
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
    """Tiles of 16 KB, or of one longer row; one program a multiprocessor, which loads tiles ahead while they fit.

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
