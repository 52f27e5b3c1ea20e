"""Optimizers at memory bandwidth."""

from liger_ops.optim.adamw import AdamW

__all__ = ["AdamW"]
