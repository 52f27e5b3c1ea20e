"""Activations between forward and backward: cheap ones and layers are recomputed, or offloaded, as planned."""
