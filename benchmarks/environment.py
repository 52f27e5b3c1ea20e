"""Where a result was measured."""

import datetime
import os
import platform
from typing import Any

import lightning
import torch
import transformers
import triton


def environment() -> dict[str, Any]:
    """Device, versions and date, to be kept with every result."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "num_devices": torch.cuda.device_count() if cuda else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "lightning": lightning.__version__,
    }
