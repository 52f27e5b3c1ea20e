"""RMSNorm, LayerNorm and GroupNorm."""
