"""Rows sorted by expert, in the order of their pairs, and tiles that hold rows of one expert each."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_ops.moe.index import make_index
from tests.liger_ops.accuracy import few


@given(
    st.integers(1, 600), st.sampled_from([1, 2, 5, 16, 17, 64]), st.sampled_from([16, 128]), st.integers(0, 99),
    st.sampled_from([1.0, 6.0]), st.booleans(),
)  # fmt: skip
@few(30)
def test_pairs_have_the_rows_of_their_experts_in_order(
    triton_device: torch.device, num_pairs: int, num_experts: int, block_rows: int, seed: int, power: float,
    is_exact: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(num_experts + 2, generator=generator).pow(power) + 1e-6
    experts = torch.multinomial(chances, num_pairs, True, generator=generator) - 1  # with some outside
    is_used = (experts >= 0) & (experts < num_experts)
    num_rows = max(1, int(is_used.sum())) if is_exact else num_pairs
    index = make_index(experts.to(triton_device), num_experts, block_rows, num_rows)
    assert len(index.pair_of_row) == num_rows
    assert index.max_tiles(block_rows) <= len(index.tile_experts)
    counts = experts[is_used].bincount(minlength=num_experts)
    rows = torch.where(is_used, experts, num_experts).argsort(stable=True)[: int(is_used.sum())]
    expected = torch.full((num_pairs,), -1)
    expected[rows] = torch.arange(len(rows))
    num_tiles = -(-counts // block_rows)
    assert index.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    assert index.pair_of_row[: len(rows)].tolist() == rows.tolist()
    assert index.row_of_pair.tolist() == expected.tolist()
    assert index.tile_starts.tolist() == [0, *num_tiles.cumsum(0).tolist()]
    tiles = torch.arange(num_experts).repeat_interleave(num_tiles)
    assert index.tile_experts[: len(tiles)].tolist() == tiles.tolist()
