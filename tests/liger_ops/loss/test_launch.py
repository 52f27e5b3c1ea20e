"""Launch choices of the loss kernels."""

import pytest

from liger_ops.loss.launch import (
    _GROUP,
    MAX_ROW_IN_REGISTERS,
    choose_block_launch,
    choose_gradient_launch,
    choose_whole_row_launch,
)


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("num_rows", [1, 131, 10_000])
@pytest.mark.parametrize("vocab_size", [1, 123, 128, 4096, 4097, 32768, 50257, 262144, 2**20])
def test_launches_fit_rows_and_kernels(vocab_size: int, num_rows: int) -> None:
    row_size = min(vocab_size, MAX_ROW_IN_REGISTERS // 2)
    whole_row = choose_whole_row_launch(row_size, 132, 2 * row_size, 80 * 1024)
    blockwise = choose_block_launch(vocab_size, 132, 2, 80 * 1024)
    gradient = choose_gradient_launch(vocab_size)
    for launch in (whole_row, blockwise, gradient):
        assert is_power_of_two(launch.block_size)
        assert is_power_of_two(launch.num_warps)
        assert launch.num_warps <= 32
        assert 1 <= launch.num_programs(num_rows) <= num_rows
        assert launch.num_stages >= 1
    assert whole_row.block_size >= row_size
    assert (whole_row.num_stages - 1) * 2 * row_size <= 80 * 1024 or row_size <= 8192  # rows loaded ahead fit
    assert blockwise.block_size % _GROUP == 0
    assert 2 * (blockwise.num_stages - 1) * 2 * blockwise.block_size <= 80 * 1024  # of two programs
    assert gradient.num_programs(num_rows) == num_rows  # each program takes one
