"""Random programs behave on a patched head as on a stock one."""

import pytest

from tests.lightning_liger.lazy.programs import run_program

NUM_PROGRAMS, PER_TEST = 400, 50


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, PER_TEST))
def test_no_program_differs_silently(first: int) -> None:
    outcomes = [run_program(seed) for seed in range(first, first + PER_TEST)]
    assert outcomes.count("same") > 0.75 * PER_TEST
