"""Runs each kernel test compiled on the GPU, or under Triton's interpreter where there is none."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from liger_ops import backend
from tests.liger_ops.interpreter import CORRECTIONS
from tests.liger_ops.operators import OperatorLog

_DEVICE = pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter)
if torch.cuda.is_available():  # Triton chooses the interpreter when it is imported
    _DEVICE = pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Fills memory that PyTorch allocates with NaN, or the largest integer; deterministic algorithms do that."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.fixture(autouse=True)
def _new_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everywhere but in tests for GPUs only, which are of the algorithms that users run."""
    with contextlib.nullcontext() if request.node.get_closest_marker("gpu") else new_memory_is_nan():
        yield


@pytest.fixture(params=[_DEVICE])
def triton_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device on which the public functions take the Triton path; fresh memory there is filled with NaN."""
    device = torch.device(request.param)
    if device.type == "cpu":
        monkeypatch.setattr(backend, "use_triton", lambda tensor: True)
        for correction in CORRECTIONS:
            monkeypatch.setattr(*correction)
    with new_memory_is_nan():
        yield device


@pytest.fixture(params=["kernel", "reference"])
def device(
    request: pytest.FixtureRequest, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> torch.device:
    """Each test runs on the Triton path and on the PyTorch path of the same device."""
    if request.param == "reference":
        monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    return triton_device


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> OperatorLog:
    """Sees the operators inside of the ops, such as their products."""
    monkeypatch.setattr(backend, "is_traced", lambda: False)
    return OperatorLog()
