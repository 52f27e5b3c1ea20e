"""A correction of Triton's interpreter, for tests that run kernels on CPUs."""

from typing import Any

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_splat = InterpreterBuilder.create_splat


def splat_that_keeps_booleans(builder: Any, block_type: Any, scalar: TensorHandle) -> TensorHandle:
    """Replaces ``InterpreterBuilder.create_splat``, which makes integers of booleans; Triton 3.9 refuses such masks."""
    splat = _create_splat(builder, block_type, scalar)
    if scalar.data.dtype == bool:
        splat.data = splat.data.astype(bool)
    return splat
