"""Every test of the losses runs with new memory full of NaN, which spreads where it is read."""

from collections.abc import Iterator

import pytest
import torch

from tests.liger_ops.memory import new_memory_is_nan


@pytest.fixture(autouse=True)
def _new_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    # Tests on GPUs only are of the algorithms that users run; those that run everywhere have ``triton_device``.
    if request.node.get_closest_marker("gpu") is not None:
        yield
        return
    with new_memory_is_nan():
        assert torch.empty(1).isnan()
        yield
