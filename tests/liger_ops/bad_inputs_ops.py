"""Wrong arguments of the ops that signatures do not tell: shapes, values of tensors, combinations."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import liger_ops
from liger_ops import VocabShard, nn
from liger_ops.optim import AdamW
from tests.bad_inputs import row
from tests.valid_calls import HEADS, VALID

ONES, NAN = torch.ones, math.nan
SHARD = partial(VocabShard, dist.ProcessGroup(0, 1), vocab_size=11)
HALF = VocabShard(dist.ProcessGroup(0, 1), start=11, vocab_size=22)
LEARNED = ONES(4, 3, requires_grad=True)
NORMS = "rms_norm add_rms_norm layer_norm"
UNITS = "silu_mul gelu_mul relu_squared_mul"
HEAD_SCORES = "linear_log_probs linear_token_loss"
SCORES = f"{HEAD_SCORES} token_log_probs"
LABELS = f"linear_cross_entropy {HEAD_SCORES}"
LINEAR = f"{LABELS} linear_divergence linear_topk_log_probs"
ENTROPIES = "cross_entropy linear_cross_entropy"
OUTPUTS = "a sequence of names out of 'log_probs'"
VOCABULARIES = ("vocab must be 'common'", "got 'equal'", "11 classes of the student", "12 of the teacher")
DETACH = ("must not require a gradient", "detach()")
ROTARY = {"cos": ONES(11, 8), "sin": ONES(11, 8)}
SECTIONS = {"cos": ONES(3, 2, 5, 8), "sin": ONES(3, 2, 5, 8)}
PROBABILITIES = {"target": torch.full((4, 11), 1 / 11), "token_weight": None}


def integers(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


TWO = integers(2)
GROUPS = [ONES(2, 3), ONES(3, 3)]
GROUPED = {"input": GROUPS, "target": [TWO, integers(3)]}


def returns(value: Any) -> Any:
    return lambda scores, index: value


def detached(scores: Any, index: Any) -> Any:
    return scores.log_probs.detach()


def learned(scores: Any, index: Any) -> Any:
    return scores.log_probs * LEARNED[index, 0]


def pytorchs(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"batch_chunk_size": 4, "acc_dtype": None, **changes})


# Ops, what their right calls are changed by, and what messages say; of several changes the first is wrong.
WRONG: list[tuple[Any, ...]] = [
    (NORMS, {"normalized_shape": (5,)}, "trailing sizes", "(5,)"),
    (NORMS, {"normalized_shape": ()}, "trailing sizes", "()"),
    (NORMS, {"normalized_shape": (1, 4, 8)}, "trailing sizes", "(1, 4, 8)"),
    (NORMS, {"normalized_shape": (8.0,)}, "a sequence of integers", "(8.0,)"),
    ("rms_norm add_rms_norm modulated_rms_norm", {"offset": 1.0, "weight": None}, "0 without a weight", "got 1.0"),
    ("gated_rms_norm", {"group_size": 3}, "a divisor of hidden_size = 8", "got 3"),
    ("gated_rms_norm", {"input": ONES(())}, "[*, hidden_size]", "()"),
    ("modulated_rms_norm", {"input": ONES(())}, "[batch_size, *, hidden_size]", "()"),
    ("modulated_rms_norm", {"scale": ONES(1, 4, 8)}, "[batch_size, hidden_size]", "(1, 4, 8)"),
    ("group_norm", {"num_groups": 3}, "a divisor of num_channels", "got 3"),
    ("group_norm", {"input": ONES(4)}, "[batch_size, num_channels, *]", "(4,)"),
    ("dyt", {"input": ONES(())}, "[*, hidden_size]", "()"),
    ("poly_norm", {"input": ONES(())}, "[*, hidden_size]", "()"),
    ("mhc_pre mhc_post_res mhc_coeffs", {"x": ONES(4)}, "[*, num_streams, num_channels]", "(4,)"),
    ("multi_token_attention", {"scores": ONES(2, 4, 5, 6)}, "seq_len, seq_len]", "(2, 4, 5, 6)"),
    ("multi_token_attention", {"weight": ONES(6, 3, 3, 3)}, "[out_channels, 4 / groups", "(6, 3, 3, 3)"),
    ("multi_token_attention", {"groups": 2}, "weight must be", "groups = 2", "(6, 4, 3, 3)"),
    ("multi_token_attention", {"weight": ONES(6, 4, 3, 1)}, "output is square", "(6, 4, 3, 1)"),
    ("multi_token_attention", {"padding": 0, "dilation": 3}, "not empty", "(6, 4, 3, 3)"),
    ("multi_token_attention", {"stride": (1, 2, 3)}, "at least 1", "or two", "(1, 2, 3)"),
    ("softmax sparsemax", {"input": ONES(2, 0)}, "the last not empty", "(2, 0)"),
    ("softmax sparsemax", {"input": ONES(())}, "at least one dimension", "()"),
    ("softmax sparsemax", {"dim": 1}, "the last one, -1 or 2", "got 1"),
    (UNITS, {"gate": ONES(2, 3), "up": None}, "packed", "even number of columns"),
    (UNITS, {"gate": ONES(()), "up": None}, "packed", "even number of columns"),
    ("apply_rotary", {"cos": ONES(2, 5, 8), "mrope_sections": (1, 2, 1)}, "[3, batch_size or 1, seq_len", "(2, 5, 8)"),
    ("apply_rotary", {"q": ONES(3, 5, 8)}, "4 dimensions", "(3, 5, 8)"),
    ("apply_rotary", {"cos": ONES(())}, "at most head_dim = 8", "()"),
    ("apply_rotary", {"cos": ONES(2, 5, 7)}, "even", "(2, 5, 7)"),
    ("apply_rotary", {"cos": ONES(2, 5, 10)}, "at most head_dim = 8", "(2, 5, 10)"),
    ("apply_rotary", {"cos": ONES(2, 6, 8)}, "[batch_size or 1, seq_len, rotary_dim]", "(2, 6, 8)"),
    ("apply_rotary", {"cos": ONES(2, 11, 8), "position_ids": torch.arange(5)}, "[max_positions, rotary_dim]"),
    ("apply_rotary", {"position_ids": integers(5), "mrope_sections": (1, 2, 1)}, "None with mrope_sections", "(5,)"),
    ("apply_rotary", {"position_ids": ONES(5), **ROTARY}, "int64 or int32", "float32"),
    ("apply_rotary", {"position_ids": integers(4), **ROTARY}, "seq_len = 5", "(4,)"),
    ("apply_rotary", {"position_ids": integers(3, 5), **ROTARY}, "batch_size = 2", "(3, 5)"),
    ("apply_rotary", {"position_ids": integers(5).to("meta"), **ROTARY}, "on q's device cpu", "on meta"),
    ("apply_rotary", {"position_ids": torch.tensor([0, 1, 11, 2, -1]), **ROTARY}, "between 0 and", "-1 to 11", "= 10"),
    ("apply_rotary", {"mrope_sections": [1, 2], **SECTIONS}, "add up to", "[1, 2]"),
    ("apply_rotary", {"mrope_sections": [5, -2, 1], **SECTIONS}, "add up to", "[5, -2, 1]"),
    ("apply_rotary", {"mrope_sections": "121", **SECTIONS}, "sequence of integers", "'121'"),
    ("moe_experts", {"gate_up_adapter": (ONES(3, 2, 8), None)}, "gate_up_adapter[1]", "floating-point", "None"),
    (
        "moe_experts",
        {"gate_up_adapter": (ONES(3, 2, 6), ONES(3, 12, 2))},
        "gate_up_adapter[0]",
        "(3, 2, 8)",
        "(3, 2, 6)",
    ),
    ("moe_experts", {"down_adapter": (ONES(3, 0, 6), ONES(3, 8, 0))}, "down_adapter[0]", "(3, 1, 6)", "(3, 0, 6)"),
    ("moe_experts", {"down_adapter": (ONES(3, 2, 6), ONES(3, 8, 3))}, "down_adapter[1]", "(3, 8, 2)", "(3, 8, 3)"),
    ("cross_entropy", {"input": ONES(())}, "()"),
    ("cross_entropy", {"input": ONES(4, 0)}, "at least one class", "(4, 0)"),
    ("cross_entropy", {"target": ONES(4, 10), "token_weight": None}, "(4, 11)", "class probabilities", "(4, 10)"),
    ("cross_entropy", {"z_loss_weight": 0.1, **PROBABILITIES}, "target must be class indices", "float32"),
    (ENTROPIES, {"token_weight": torch.full((4,), NAN)}, "no NaN except at ignored tokens", "got 4"),
    (ENTROPIES, {"weight": torch.full((11,), NAN)}, "no NaN", "got 11"),
    (ENTROPIES, {"weight": ONES(11, requires_grad=True)}, *DETACH),
    (ENTROPIES, {"z_loss_weight": 0.1, "weight": ONES(11)}, "0 with class weights in a mean", "got 0.1"),
    (f"{ENTROPIES} divergence linear_divergence", {"token_weight": ONES(4, requires_grad=True)}, *DETACH),
    ("token_log_probs", {"logits": ONES(4, 0)}, "at least one class", "(4, 0)"),
    (
        f"{LABELS} cross_entropy token_log_probs",
        {"target": torch.full((4,), 11)},
        "between 0 and vocab_size - 1 = 10",
        "got 11",
    ),
    (f"{LABELS} cross_entropy", {"target": torch.full((4,), -1)}, "between 0 and", "ignore_index = -100", "got -1"),
    (f"{LABELS} cross_entropy", {"logit_scale": ONES((), requires_grad=True)}, "a number", "multiply the hidden"),
    (LABELS, {"input": ONES(4, 5)}, "hidden_size = 3", "(4, 5)"),
    (LABELS, {"input": ONES(())}, "hidden_size = 3", "()"),
    (LINEAR, {"linear_weight": ONES(3)}, "[vocab_size, hidden_size]", "(3,)"),
    (LINEAR, {"linear_weight": ONES(11, 3).double()}, "torch.float32"),
    (LINEAR, {"adapter": (None, ONES(11, 2))}, "adapter[0]", "a floating-point tensor", "got None"),
    (LINEAR, {"adapter": (ONES(4, 2), ONES(11, 2).int())}, "adapter[1]", "a floating-point tensor", "torch.int32"),
    (LINEAR, {"adapter": (ONES(4, 2), ONES(11, 2).half())}, "adapter[1]", "torch.float32", "float16"),
    (LINEAR, {"adapter": (ONES(4, 2), ONES(11, 3))}, "shapes (4, 2) and (11, 2)", "(11, 3)"),
    (LINEAR, {"adapter": (ONES(3, 2), ONES(11, 2))}, "shapes (4, 2) and (11, 2)", "(3, 2)"),
    (LINEAR, {"adapter": (ONES(()), ONES(()))}, "shapes", "() and ()"),
    (LINEAR, {"adapter": (ONES(4, 2), ONES(11, 2, device="meta"))}, "adapter[1]", "device cpu", "on meta"),
    (LABELS, {"vocab_shard": SHARD(start=6)}, "vocab_size = 11", "11 rows", "start = 6"),
    (LABELS, {"vocab_shard": SHARD(start=-1)}, "vocab_size = 11", "start = -1"),
    ("linear_cross_entropy", {"adapter": (ONES(4, 2), ONES(11, 2)), **PROBABILITIES}, "None for class probabilities"),
    ("linear_cross_entropy", {"vocab_shard": HALF, **PROBABILITIES}, "None for class probabilities"),
    ("linear_cross_entropy", {"weight": ONES(11), "vocab_shard": HALF}, "shape (22,)", "shape (11,)"),
    ("linear_cross_entropy", {"target": integers(4) * 22, "vocab_shard": HALF, "weight": None}, "- 1 = 21", "got 22"),
    ("linear_cross_entropy", {"linear_weight": ONES(11, 0), "input": ONES(4, 0)}, "at least 1", "(11, 0)"),
    ("linear_cross_entropy", {"linear_weight": ONES(0, 3), "linear_bias": None}, "at least one class", "(0, 3)"),
    ("linear_cross_entropy", {"accumulate_dtype": torch.int32}, "torch.float32, torch.float64", "torch.int32"),
    ("linear_cross_entropy", {"accumulate_dtype": torch.bfloat16}, "at least as wide", "torch.bfloat16"),
    ("linear_cross_entropy", {"options": {"batch_chunk_size": 2}}, "LinearCrossEntropyOptions or None", "{'batch_"),
    ("linear_cross_entropy", {"options": pytorchs(batch_chunk_size=0)}, "batch_chunk_size", "at least 1", "0"),
    ("linear_cross_entropy", {"options": pytorchs(acc_dtype="float32")}, "acc_dtype", "a torch.dtype", "'float32'"),
    (SCORES, {"temperature": ONES(4, 1)}, "one for each token", "(4, 1)"),
    (SCORES, {"temperature": integers(4)}, "a floating-point tensor", "torch.int64"),
    (SCORES, {"temperature": ONES(4, device="meta")}, "target's device cpu", "on meta"),
    (SCORES, {"temperature": torch.full((4,), -0.5)}, "positive", "got -0.5"),
    (SCORES, {"temperature": torch.full((4,), NAN)}, "positive", "got nan"),
    (SCORES, {"temperature": ONES(4, requires_grad=True)}, *DETACH),
    ("linear_log_probs token_log_probs", {"outputs": ("log_prob",)}, OUTPUTS, "('log_prob',)"),
    ("linear_log_probs token_log_probs", {"detach": ("correct",)}, OUTPUTS, "('correct',)"),
    ("linear_token_loss", {"token_loss": returns(None)}, "a floating-point tensor", "got None"),
    ("linear_token_loss", {"token_loss": returns(integers(4))}, "a floating-point tensor", "shape (4,), torch.int64"),
    ("linear_token_loss", {"token_loss": returns(ONES(()))}, "one loss for each", "got a tensor of shape ()"),
    ("linear_token_loss", {"token_loss": returns(ONES(4, 1))}, "one loss for each", "got a tensor of shape (4, 1)"),
    ("linear_token_loss", {"token_loss": detached, "input": LEARNED}, "differentiable scores", "requires no gradient"),
    ("linear_token_loss", {"token_loss": learned, "input": LEARNED}, "a gradient, except the scores", "(4, 3)"),
    (LABELS, {"target": TWO, "input": GROUPS}, "a sequence of tensors, one for each group", "shape (2,)"),
    (LABELS, {"target": [TWO], "input": GROUPS}, "a sequence of 2 tensors", "got [tensor"),
    (LABELS, {"target": [TWO, 3], "input": GROUPS}, "target[1] must be a tensor", "got 3"),
    (LABELS, {"input": GROUPS, "target": [TWO, TWO]}, "input[1] must hold hidden states of", "(3, 3)"),
    (LABELS, {"adapter": (ONES(5, 2), ONES(11, 2)), **GROUPED}, "adapter[0] must be a sequence of tensors", "(5, 2)"),
    (
        LABELS,
        {"adapter": ([ONES(2, 2)] * 2, ONES(11, 2)), **GROUPED},
        "[0][1] must be a tensor of shape (3, 2)",
        "(2, 2)",
    ),
    ("linear_cross_entropy", {"token_weight": ONES(5), **GROUPED}, "a sequence of numbers or tensors", "shape (5,)"),
    ("linear_cross_entropy", {"token_weight": [1.0], **GROUPED}, "one number or tensor for each of 2", "got [1.0]"),
    ("linear_cross_entropy", {"token_weight": [1.0, "x"], **GROUPED}, "token_weight[1] must be a finite number", "'x'"),
    ("linear_cross_entropy", {"token_weight": [1.0, ONES(2)], **GROUPED}, "shape (3,) (its target's)", "shape (2,)"),
    ("linear_divergence", {"teacher_input": ONES(4, 6)}, "teacher_weight's hidden_size = 5", "(4, 6)"),
    ("linear_divergence", {"teacher_weight": ONES(5)}, "[vocab_size, hidden_size]", "(5,)"),
    ("linear_divergence", {"teacher_adapter": (ONES(4, 2), ONES(11, 3))}, "shapes (4, 2) and (11, 2)", "(11, 3)"),
    ("linear_divergence", {"vocab_shard": SHARD(start=0), "vocab": "common"}, "vocab='equal'", "'common'"),
    ("linear_divergence", {"vocab": "equal", "teacher_weight": ONES(12, 5), "teacher_bias": None}, *VOCABULARIES),
    ("divergence", {"vocab": "equal", "teacher_logits": ONES(4, 12)}, *VOCABULARIES),
    ("moe_router", {"num_groups": 3}, "num_groups must be", "a divisor of num_experts=8", "got 3"),
    ("moe_router", {"num_groups": 8, "group_score": "best_two"}, "num_groups must be", "fits group_score", "got 8"),
    ("moe_router", {"top_k": 3, "num_groups": 4}, "top_k must be", "at most 2", "got 3"),
    ("moe_router", {"top_groups": 3}, "top_groups must be", "at most 2", "got 3"),
    ("linear_topk_log_probs", {"ids": integers(4, 0)}, "at least one class", "(4, 0)"),
    ("linear_topk_log_probs", {"ids": 11 * integers(4, 2)}, "between 0 and vocab_size - 1 = 10", "got 11", "8 of 8"),
]
# Modules, their inputs, and what messages say.
MODULES: list[tuple[Any, ...]] = [
    (nn.SwiGLU(4, 6), (integers(2, 4),), "input must be", "floating-point tensor", "int64"),
    (nn.SwiGLU(4, 6), (ONES(2, 5),), "hidden_size = 4", "(2, 5)"),
    (nn.SparseMoE(4, 6, 3, 2), (ONES(2, 5),), "hidden_size = 4", "(2, 5)"),
    (nn.MultiTokenAttention, (4, 6, 3, 1, 0, 1, 4), "groups must be", "out_channels = 6", "got 4"),
    (nn.SparseMoE, (4, 6, 3, 4), "top_k must be", "at most num_experts = 3", "got 4"),
    (nn.RotaryEmbedding(8), (HEADS[..., :6],) * 2, "q must be", "the last head_dim = 8", "(2, 3, 5, 6)"),
    (nn.RotaryEmbedding(8), (HEADS, HEADS, "x"), "position_ids must be", "a tensor or None", "'x'"),
    (nn.RotaryEmbedding(8), (HEADS, HEADS, ONES(5).bool()), "position_ids", "integers or floating-point", "bool"),
    (nn.RotaryEmbedding(8), (HEADS, HEADS, integers(3)), "position_ids", "seq_len = 5", "(3,)"),
    (nn.RotaryEmbedding(8), (HEADS.to("meta"),) * 2, "inv_freq must be on q's device meta", "on cpu"),
    (nn.RotaryEmbedding(8), (HEADS.long(), HEADS), "q must be", "a floating-point tensor", "torch.int64"),
    (partial(nn.RotaryEmbedding(8), heads_dim=3), (HEADS, HEADS), "heads_dim must be", "at most 2", "3"),
    (nn.RMSNorm, ((8, 0),), "normalized_shape", "(8, 0)", "positive"),
    (partial(nn.LinearCrossEntropyLoss, options="auto"), (4, 7), "options must be", "or None", "'auto'"),
    (partial(nn.LinearCrossEntropyLoss, out_features=(0,)), (4, 7), "out_features", "positive integers", "(0,)"),
    (nn.LayerNorm, ([],), "normalized_shape", "[]", "positive"),
    (partial(AdamW, betas=(0.9, 1.0)), ([LEARNED],), "betas[1] must be", "below 1.0", "got 1.0"),
    (partial(AdamW, betas=(NAN, 0.9)), ([LEARNED],), "betas[0] must be", "a finite number", "got nan"),
    (partial(AdamW, state_dtype="8bit"), ([{"params": [LEARNED], "seed": -1}],), "seed must be", "of at least 0", "-1"),
    (partial(AdamW, state_dtype="bfloat16", lr=ONES(())), ([LEARNED],), "options of a group with", "numbers", "'lr'"),
    (
        partial(AdamW, state_dtype="8bit"),
        ([ONES(2, 3, dtype=torch.complex64, requires_grad=True)],),
        "params",
        "complex",
    ),
    (nn.RotaryEmbedding, (7,), "rotary_dim must be even", "got 7"),
    (partial(nn.RotaryEmbedding, rotary_dim=10), (8,), "rotary_dim", "at most head_dim = 8", "10"),
    (partial(nn.LinearCrossEntropyLoss, weight=ONES(6)), (4, 7), "weight must be", "(7,) (num_classes)", "(6,)"),
]


BAD_INPUTS = [
    *(
        row(partial(getattr(liger_ops, op), **{**VALID[f"liger_ops.{op}"], **changes}), next(iter(changes)), *mentions)
        for ops, changes, *mentions in WRONG
        for op in ops.split()
    ),
    *(row(partial(module, *inputs), *mentions) for module, inputs, *mentions in MODULES),
]
