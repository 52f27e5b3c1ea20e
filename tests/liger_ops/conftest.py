"""Runs each kernel test compiled on the GPU, or under Triton's interpreter where there is none."""

import pytest
import torch
from triton.runtime import interpreter

from liger_ops import backend
from tests.liger_ops.interpreter import patch_builtins_found_once, splat_that_keeps_booleans
from tests.liger_ops.memory import new_memory_is_nan

_DEVICE = pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter)
if torch.cuda.is_available():  # Triton chooses the interpreter when it is imported
    _DEVICE = pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[_DEVICE])
def triton_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device on which the public functions take the Triton path; fresh memory there is filled with NaN."""
    device = torch.device(request.param)
    if device.type == "cpu":
        monkeypatch.setattr(backend, "use_triton", lambda tensor: True)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splat_that_keeps_booleans)
        monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtins_found_once)
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
