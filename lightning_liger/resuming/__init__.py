"""What an interrupted run needs to resume: atomic checkpoints, data loaders, random states, graceful shutdown."""
