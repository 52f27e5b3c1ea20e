"""Activations between forward and backward: cheap ones are made again, layers recomputed or offloaded as planned."""
