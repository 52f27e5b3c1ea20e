"""Fixtures of the tests of kernels."""

from tests.liger_ops.conftest import triton_device

__all__ = ["triton_device"]
