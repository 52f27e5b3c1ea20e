"""Fused operations for language models: tensors in, tensors out.

Each runs as Triton kernels on a GPU and as its plain PyTorch reference elsewhere. Functions named like one of
``torch.nn.functional`` are call-compatible with it; ``liger_ops.nn`` has modules to match.
"""

from liger_ops.divergence.divergence import divergence, linear_divergence
from liger_ops.gated_linear_unit import gelu_mul, relu_squared, relu_squared_mul, silu_mul
from liger_ops.log_probs.linear_log_probs import linear_log_probs
from liger_ops.log_probs.linear_token_loss import linear_token_loss
from liger_ops.log_probs.scores import TokenScores
from liger_ops.log_probs.token_log_probs import token_log_probs
from liger_ops.log_probs.topk import linear_topk_log_probs
from liger_ops.loss.cross_entropy import cross_entropy
from liger_ops.loss.linear_cross_entropy import linear_cross_entropy
from liger_ops.loss.options import IGNORE_INDEX, TokenStats
from liger_ops.loss.vocab_parallel import VocabShard
from liger_ops.mhc.coefficients import mhc_coeffs
from liger_ops.mhc.streams import mhc_post_res, mhc_pre
from liger_ops.moe.experts import moe_experts
from liger_ops.moe.router import moe_router
from liger_ops.multi_token_attention import multi_token_attention
from liger_ops.norm.dyt import dyt
from liger_ops.norm.group_norm import group_norm
from liger_ops.norm.poly_norm import poly_norm
from liger_ops.norm.row_norm import add_rms_norm, layer_norm, rms_norm
from liger_ops.norm.sliced_norm import gated_rms_norm, modulated_rms_norm
from liger_ops.rope import apply_rotary
from liger_ops.softmax import softmax, sparsemax

__all__ = [
    "IGNORE_INDEX",
    "TokenScores",
    "TokenStats",
    "VocabShard",
    "add_rms_norm",
    "apply_rotary",
    "cross_entropy",
    "divergence",
    "dyt",
    "gated_rms_norm",
    "gelu_mul",
    "group_norm",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_token_loss",
    "linear_topk_log_probs",
    "mhc_coeffs",
    "mhc_post_res",
    "mhc_pre",
    "modulated_rms_norm",
    "moe_experts",
    "moe_router",
    "multi_token_attention",
    "poly_norm",
    "relu_squared",
    "relu_squared_mul",
    "rms_norm",
    "silu_mul",
    "softmax",
    "sparsemax",
    "token_log_probs",
]
