"""Callbacks: kernels for any strategy, and a summary of training."""

from lightning_liger.callbacks.kernels import LigerCallback

__all__ = ["LigerCallback"]
