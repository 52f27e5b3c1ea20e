"""LightningModules of causal language models, their loss and their metrics."""
