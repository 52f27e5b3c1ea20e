"""Manifold-constrained hyper-connections: residual streams that a layer reads as one, and mixing matrices for them."""
