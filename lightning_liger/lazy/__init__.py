"""Logits that are not computed until an operation needs all of them at once."""

from lightning_liger.lazy import operations as operations  # registers them, whichever module is imported
