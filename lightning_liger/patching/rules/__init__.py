"""Rules that recognize modules by structure, not by name, and propose replacements for them."""

from lightning_liger.patching.rules.base import Rule
from lightning_liger.patching.rules.experts import ExpertsRule
from lightning_liger.patching.rules.gated_mlp import MLPRule
from lightning_liger.patching.rules.norm import NormRule
from lightning_liger.patching.rules.rotary import RotaryRule

RULES: tuple[Rule, ...] = (NormRule(), RotaryRule(), MLPRule(), ExpertsRule())
"""Rules for the modules inside a model; ``HeadRule`` applies to the model's output embeddings only, and
``AdapterRule`` needs to know what they replace."""
