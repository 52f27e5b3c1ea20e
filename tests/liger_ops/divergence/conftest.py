"""Every test of the divergences runs with new memory full of NaN, which spreads where it is read."""

from collections.abc import Iterator

import pytest

from tests.liger_ops.memory import new_memory_is_nan


@pytest.fixture(autouse=True)
def _new_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is not None:  # what users run
        yield
        return
    with new_memory_is_nan():
        yield
