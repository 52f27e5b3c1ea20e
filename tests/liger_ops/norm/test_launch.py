"""Launch choices of the row norms."""

import pytest

from liger_ops.norm.launch import choose_backward_launch, choose_forward_launch

SIZES = [1, 64, 1000, 2048, 4096, 5120, 16384, 20000, 65536, 10**6]


@pytest.mark.parametrize("shared_bytes", [32 * 1024, 83 * 1024, 211 * 1024])
@pytest.mark.parametrize("input_bytes", [2, 8])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("hidden_size", SIZES)
def test_forward_launches_cover_rows(hidden_size: int, centered: bool, input_bytes: int, shared_bytes: int) -> None:
    for num_rows in (1, 1000):
        launch = choose_forward_launch(
            hidden_size, 2, 132, centered=centered, input_bytes=input_bytes, shared_bytes=shared_bytes
        )
        assert 1 <= launch.num_programs(num_rows) <= num_rows
        assert launch.block_size >= hidden_size or launch.block_rows == 1
        tile = launch.block_rows * launch.block_size
        assert tile <= 16384
        assert (launch.num_stages - 1) * tile * input_bytes <= shared_bytes


@pytest.mark.parametrize("shared_bytes", [32 * 1024, 80 * 1024, 211 * 1024])
@pytest.mark.parametrize(("num_inputs", "num_sums"), [(2, 0), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("hidden_size", SIZES)
def test_backward_launches_fit(
    hidden_size: int, element_size: int, num_inputs: int, num_sums: int, shared_bytes: int
) -> None:
    for num_rows in (0, 1, 1000):
        launch = choose_backward_launch(
            hidden_size, element_size, 132,
            num_inputs=num_inputs, num_sums=num_sums, shared_bytes=shared_bytes,
        )  # fmt: skip
        num_blocks = -(-hidden_size // launch.block_size)
        assert min(1, num_rows) <= launch.num_programs(num_rows) <= num_rows
        assert launch.num_programs(num_rows) * num_blocks <= max(4 * 132, num_blocks)
        tile = launch.block_rows * launch.block_size
        assert tile * (2 * element_size + 4 * num_sums) <= 192 * 1024
        assert (launch.num_stages - 1) * tile * element_size * num_inputs <= shared_bytes
