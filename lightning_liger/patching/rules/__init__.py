"""Rules that recognize modules by structure, not by name, and propose replacements for them."""

from lightning_liger.patching.rules.adapters import AdapterRule
from lightning_liger.patching.rules.base import Patched, Replacement, Rule
from lightning_liger.patching.rules.experts import ExpertsReplacement, ExpertsRule, group_of, share_experts
from lightning_liger.patching.rules.gated_mlp import MLPReplacement, MLPRule
from lightning_liger.patching.rules.head import HeadRule
from lightning_liger.patching.rules.linear import convert, find_layers_of, gather_in_float8
from lightning_liger.patching.rules.norm import NormRule
from lightning_liger.patching.rules.rotary import RotaryRule

RULES: tuple[Rule, ...] = (NormRule(), RotaryRule(), MLPRule(), ExpertsRule())
"""Rules for the modules inside a model; :class:`HeadRule` applies to the model's output embeddings only, and
:class:`AdapterRule` needs to know what they replace."""

__all__ = [
    "RULES",
    "AdapterRule",
    "ExpertsReplacement",
    "HeadRule",
    "MLPReplacement",
    "Patched",
    "Replacement",
    "Rule",
    "convert",
    "find_layers_of",
    "gather_in_float8",
    "group_of",
    "share_experts",
]
