"""Text for language models: sources, tokenizers, and a data module."""

from lightning_liger.data.text import TextDataModule

__all__ = ["TextDataModule"]
