"""Weights from and to Hugging Face folders, also for models that no rank holds whole."""
