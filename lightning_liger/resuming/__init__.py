"""Resuming interrupted runs: atomic and safe checkpoints, data loaders, random states, graceful shutdown."""
