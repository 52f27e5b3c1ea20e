"""Text for language models: where it comes from, how it becomes tokens, and the data module that serves them."""

from lightning_liger.data.text import TextDataModule

__all__ = ["TextDataModule"]
