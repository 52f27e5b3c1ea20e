"""Callbacks: kernels for any strategy, and a summary of training."""

from lightning_liger.callbacks.kernels import LigerCallback
from lightning_liger.callbacks.summary import TrainingSummary

__all__ = ["LigerCallback", "TrainingSummary"]
