"""Post-training losses over an LM head: time and memory of each implementation, checked against plain PyTorch."""
