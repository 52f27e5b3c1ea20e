"""The memory of training a model, without the model's weights and without a GPU."""

from lightning_liger.estimate.memory import Fit, Inspection, Row, Settings, inspect_model

__all__ = ["Fit", "Inspection", "Row", "Settings", "inspect_model"]
