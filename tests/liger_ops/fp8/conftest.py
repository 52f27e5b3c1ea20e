"""What Triton's interpreter lacks for float8."""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float


def _convert_nan_too(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """``_convert_float``, which reads the NaN of e4m3 as 480."""
    converted = _convert(data, source, target, rounding_mode)
    if source == tl.float8e4nv and target == tl.float32:
        converted = np.where(data.view(np.uint8) & 127 == 127, np.uint32(0x7FC00000), converted)
    return converted


@pytest.fixture(autouse=True)
def _nan_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_convert_float", _convert_nan_too)
