"""What is recognised in a model, by structure and not by name, and what it is replaced by."""

from lightning_liger.patching.rules.base import Patched, Replacement, Rule
from lightning_liger.patching.rules.gated_mlp import ExpertsRule, MLPRule
from lightning_liger.patching.rules.head import HeadRule
from lightning_liger.patching.rules.norm import NormRule
from lightning_liger.patching.rules.rotary import RotaryRule

RULES: tuple[Rule, ...] = (NormRule(), RotaryRule(), MLPRule(), ExpertsRule())
"""Rules for the modules inside a model; the head's is applied to what the model itself calls its output embeddings."""

__all__ = ["RULES", "HeadRule", "Patched", "Replacement", "Rule"]
