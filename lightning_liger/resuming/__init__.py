"""Resuming interrupted runs: atomic checkpoints, data loaders, random states, graceful shutdown."""
