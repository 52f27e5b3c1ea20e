"""RMSNorm, with a gate or modulated too, LayerNorm, GroupNorm and what takes the place of a norm."""
