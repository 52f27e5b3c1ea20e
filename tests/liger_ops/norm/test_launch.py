"""Launch choices of the row norms."""

import itertools

from liger_ops.norm.row_norm import choose_backward_launch, choose_forward_launch

SIZES = [1, 64, 1000, 2048, 4096, 5120, 12288, 16384]
SHARED_BYTES = [32 * 1024, 83 * 1024, 211 * 1024]


def test_forward_launches_cover_rows() -> None:
    for hidden_size, is_centered, input_bytes, shared_bytes in itertools.product(
        SIZES, (False, True), (2, 8), SHARED_BYTES
    ):
        launch = choose_forward_launch(
            hidden_size, 2, 132, centered=is_centered, input_bytes=input_bytes, shared_bytes=shared_bytes
        )
        assert all(1 <= launch.num_programs(num_rows) <= num_rows for num_rows in (1, 1000))
        assert launch.block_size >= hidden_size
        tile = launch.block_rows * launch.block_size
        assert tile <= 16384
        assert (launch.num_stages - 1) * tile * input_bytes <= shared_bytes


def test_backward_launches_fit() -> None:
    for hidden_size, element_size, (num_inputs, num_sums), shared_bytes in itertools.product(
        SIZES, (2, 4), ((2, 0), (2, 1), (2, 2), (3, 1)), SHARED_BYTES
    ):
        launch = choose_backward_launch(
            hidden_size, element_size, 132, num_inputs=num_inputs, num_sums=num_sums, shared_bytes=shared_bytes
        )
        num_blocks = -(-hidden_size // launch.block_size)
        tile = launch.block_rows * launch.block_size
        for num_rows in (0, 1, 1000):
            assert min(1, num_rows) <= launch.num_programs(num_rows) <= num_rows
            assert launch.num_programs(num_rows) * num_blocks <= max(4 * 132, num_blocks)
        assert tile * (2 * element_size + 4 * num_sums) <= 192 * 1024
        assert (launch.num_stages - 1) * tile * element_size * num_inputs <= shared_bytes
