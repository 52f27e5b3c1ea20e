"""Where each pair of a token and one of its experts lies, if rows are sorted by expert: without waiting for the device.

A pair ``n = token * top_k + slot`` has one row. Rows of one expert are neighbors, in the order of their pairs, so that
results do not depend on the order in which programs run. Pairs of an expert outside of ``[0, num_experts)`` have none.
Products take rows in tiles, each of rows of one expert.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from liger_ops import backend

_BLOCK = 256  # pairs of a program; ranks in it are found by comparing each with each
_EXPERT_BLOCK = 16
MIN_TILE_ROWS = 16


class Index(NamedTuple):
    """Rows by expert, all int32. Rows after the last expert's are never used."""

    offsets: Tensor
    """``[num_experts + 1]``: the first row of each expert, and the number of rows in use."""
    pair_of_row: Tensor
    """``[num_rows]``"""
    row_of_pair: Tensor
    """``[num_pairs]``, -1 for pairs without a row"""
    tile_starts: Tensor
    """``[num_experts + 1]``: the first tile of each expert, and the number of tiles."""
    tile_experts: Tensor
    """The expert of each tile. There is space for the most tiles of the fewest rows, however the pairs are spread."""

    @staticmethod
    def sizes(num_pairs: int, num_experts: int, num_rows: int) -> tuple[int, ...]:
        return num_experts + 1, num_rows, num_pairs, num_experts + 1, num_rows // MIN_TILE_ROWS + num_experts

    def max_tiles(self, block_rows: int) -> int:
        """The most tiles of so many rows."""
        num_rows, num_experts = self.pair_of_row.numel(), self.offsets.numel() - 1
        return num_rows // block_rows + min(num_rows, num_experts)


@backend.Kernel
def _count_kernel(
    experts_ptr,  # [num_pairs], int64
    counts_ptr,  # [num_blocks, num_experts], int32
    totals_ptr,  # [num_experts], int32, zeros
    num_pairs,
    num_experts,
    NUM_BINS: tl.constexpr,  # a power of two above num_experts
    BLOCK: tl.constexpr,
):
    """One program counts the pairs of each expert in a block. Sums of integers do not depend on their order."""
    block = tl.program_id(0)
    pairs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1)
    is_used = (experts >= 0) & (experts < num_experts)
    counts = tl.histogram(tl.where(is_used, experts, NUM_BINS - 1).to(tl.int32), NUM_BINS)
    bins = tl.arange(0, NUM_BINS)
    tl.store(counts_ptr + block.to(tl.int64) * num_experts + bins, counts, mask=bins < num_experts)
    tl.atomic_add(totals_ptr + bins, counts, mask=(bins < num_experts) & (counts > 0), sem="relaxed")


@backend.Kernel
def _scan_kernel(
    totals_ptr,  # [num_experts], int32
    counts_ptr,  # [num_blocks, num_experts], int32, replaced by each block's first row of each expert
    offsets_ptr,  # [num_experts + 1]
    tile_starts_ptr,  # [num_experts + 1]
    tile_experts_ptr,  # [max_tiles]
    num_blocks,
    num_experts,
    block_rows,
    NUM_BINS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program finds the rows and tiles of EXPERT_BLOCK experts."""
    first = tl.program_id(0) * EXPERT_BLOCK
    bins = tl.arange(0, NUM_BINS)
    totals = tl.load(totals_ptr + bins, mask=bins < num_experts, other=0)
    tiles = (totals + block_rows - 1) // block_rows
    experts = first + tl.arange(0, EXPERT_BLOCK)
    mask = experts < num_experts
    before = bins[None, :] < experts[:, None]
    offsets = tl.sum(tl.where(before, totals[None, :], 0), axis=1)
    starts = tl.sum(tl.where(before, tiles[None, :], 0), axis=1)
    # With the end of the last expert.
    tl.store(offsets_ptr + experts, offsets, mask=experts <= num_experts)
    tl.store(tile_starts_ptr + experts, starts, mask=experts <= num_experts)
    own_tiles = (tl.load(totals_ptr + experts, mask=mask, other=0) + block_rows - 1) // block_rows
    places = tl.arange(0, BLOCK)
    for begin in tl.range(0, tl.max(own_tiles), BLOCK):
        number = begin + places[None, :]
        ptrs = tile_experts_ptr + starts[:, None] + number
        tl.store(ptrs, experts[:, None] + tl.zeros_like(number), mask=number < own_tiles[:, None])
    running = offsets
    for begin in tl.range(0, num_blocks, BLOCK):
        blocks = begin + places
        ptrs = counts_ptr + blocks[:, None].to(tl.int64) * num_experts + experts[None, :]
        inside = (blocks < num_blocks)[:, None] & mask[None, :]
        counts = tl.load(ptrs, mask=inside, other=0)
        tl.store(ptrs, running[None, :] + tl.cumsum(counts, axis=0) - counts, mask=inside)
        running += tl.sum(counts, axis=0)


@backend.Kernel
def _place_kernel(
    experts_ptr,  # [num_pairs], int64
    first_rows_ptr,  # [num_blocks, num_experts]
    pair_of_row_ptr,  # [num_rows]
    row_of_pair_ptr,  # [num_pairs]
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,
):
    """One program gives the pairs of a block their rows, in the order of the pairs."""
    block = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    pairs = block.to(tl.int64) * BLOCK + places
    inside = pairs < num_pairs
    experts = tl.load(experts_ptr + pairs, mask=inside, other=-1)
    ranks = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.static_range(0, BLOCK, 32):  # at once they would not fit into the registers
        others = begin + tl.arange(0, 32)
        other_pairs = block.to(tl.int64) * BLOCK + others
        other_experts = tl.load(experts_ptr + other_pairs, mask=other_pairs < num_pairs, other=-1)
        is_before = (experts[:, None] == other_experts[None, :]) & (places[:, None] > others[None, :])
        ranks += tl.sum(is_before.to(tl.int32), axis=1)
    is_used = (experts >= 0) & (experts < num_experts)
    first = tl.load(first_rows_ptr + block.to(tl.int64) * num_experts + experts, mask=is_used, other=0)
    rows = tl.where(is_used, first + ranks, -1)
    tl.store(row_of_pair_ptr + pairs, rows, mask=inside)
    tl.store(pair_of_row_ptr + rows, pairs.to(tl.int32), mask=is_used)


def make_index(experts: Tensor, num_experts: int, block_rows: int, num_rows: int | None = None) -> Index:
    """The rows of pairs whose experts are ``experts``, ``[num_pairs]`` in int64, in tiles of ``block_rows`` rows.

    There are at most ``num_rows`` of them, by default as many as pairs.
    """
    shapes = Index.sizes(experts.numel(), num_experts, experts.numel() if num_rows is None else num_rows)
    outputs = Index(*(experts.new_empty(size, dtype=torch.int32) for size in shapes))
    offsets, pair_of_row, row_of_pair, tile_starts, tile_experts = outputs
    num_pairs = experts.numel()
    num_blocks = -(-num_pairs // _BLOCK)
    totals = experts.new_zeros(num_experts, dtype=torch.int32)
    counts = experts.new_empty((num_blocks, num_experts), dtype=torch.int32)
    num_bins = backend.next_power_of_2(num_experts + 1)
    sizes = {"num_pairs": num_pairs, "num_experts": num_experts, "BLOCK": _BLOCK, "num_warps": 4}
    _count_kernel.launch(
        num_blocks, experts_ptr=experts, counts_ptr=counts, totals_ptr=totals, NUM_BINS=num_bins, **sizes
    )
    _scan_kernel.launch(
        num_experts // _EXPERT_BLOCK + 1,
        totals_ptr=totals,
        counts_ptr=counts,
        offsets_ptr=offsets,
        tile_starts_ptr=tile_starts,
        tile_experts_ptr=tile_experts,
        num_blocks=num_blocks,
        num_experts=num_experts,
        block_rows=block_rows,
        NUM_BINS=num_bins,
        EXPERT_BLOCK=_EXPERT_BLOCK,
        BLOCK=64,
        num_warps=4,
    )
    _place_kernel.launch(
        num_blocks,
        experts_ptr=experts,
        first_rows_ptr=counts,
        pair_of_row_ptr=pair_of_row,
        row_of_pair_ptr=row_of_pair,
        **sizes,
    )
    return outputs
