"""The environment that a result was measured in."""

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import torch
import triton

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # settings of PyTorch's allocator change peak memory


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Device, versions and date, which are saved with every result."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "num_devices": torch.cuda.device_count() if cuda else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **{name: _version(name) for name in ("transformers", "lightning", "liger-kernel", "trl")},
        **{name: os.environ[name] for name in _ALLOCATOR if name in os.environ},
    }
