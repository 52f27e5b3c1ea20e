"""Every test of scores runs with new memory full of NaN, which spreads where it is read."""

from tests.liger_ops.loss.conftest import _new_memory_is_nan

__all__ = ["_new_memory_is_nan"]
