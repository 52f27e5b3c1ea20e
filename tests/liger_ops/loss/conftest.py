"""Every test of the losses runs with new memory full of NaN, which spreads where it is read."""

from collections.abc import Iterator

import pytest
import torch

from liger_ops.loss import column_launch
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


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of logits that are stored by columns run in tiles that few tokens and classes fill."""
    for name, value in (("_TOKENS", 16), ("_LANES", 4), ("_COLUMNS", 2), ("_MERGED_TOKENS", 16)):
        monkeypatch.setattr(column_launch, name, value)
    column_launch.choose_column_launch.cache_clear()
    yield
    column_launch.choose_column_launch.cache_clear()
