"""Fused operations for language models: tensors in, tensors out.

Each runs as Triton kernels on a GPU and as its plain PyTorch reference elsewhere. Functions named like one of
``torch.nn.functional`` are call-compatible with it.
"""

from liger_ops.cross_entropy import cross_entropy
from liger_ops.gated_linear_unit import silu_mul
from liger_ops.linear_cross_entropy import linear_cross_entropy
from liger_ops.rms_norm import rms_norm
from liger_ops.rope import apply_rotary
from liger_ops.token_loss import IGNORE_INDEX, TokenStats

__all__ = [
    "IGNORE_INDEX",
    "TokenStats",
    "apply_rotary",
    "cross_entropy",
    "linear_cross_entropy",
    "rms_norm",
    "silu_mul",
]
