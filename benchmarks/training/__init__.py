"""Whole models in training: speed, memory, the longest context, and losses, next to Hugging Face and liger-kernel."""
