"""Options of losses that exclude each other, and tensors that do not fit them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_liger import (
    CPOOptions,
    DPOOptions,
    PolicyOptions,
    SparseDistillationOptions,
    group_advantages,
    leave_one_out_advantages,
    multi_token_loss,
    sparse_divergence,
    targets_ahead,
)
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.multi_head import scheduled_coefficient
from lightning_liger.losses.policy_batch import PolicyBatch, check_policy_batch
from tests.bad_inputs import row

V, R, Z = torch.zeros(3), torch.zeros(6), torch.zeros(2, 3)
IDS, MASK = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 3, dtype=torch.bool)
CLIP = "vllm_importance_sampling_clip_max"
SCHEDULE: dict[str, Any] = {"step": 0, "num_steps": 3, "schedule": "linear"}
GROUPS = partial(group_advantages, R, 3)
LEAVE_ONE_OUT = partial(leave_one_out_advantages, R, 3)


def batch(options: dict[str, Any] | None = None, **changes: Any) -> Any:
    rows = PolicyBatch(Completions(MASK), torch.zeros(2), Z)._replace(**changes)
    return lambda: check_policy_batch(rows, PolicyOptions(**(options or {})))


# Calls, their keywords, and what messages say.
WRONG: list[tuple[Any, ...]] = [
    (DPOOptions, {"loss_weights": (1.0, 2.0)}, "loss_weights", "(1.0, 2.0)", "one weight"),
    (DPOOptions, {"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "f_divergence_type", "'forward_kl'"),
    (DPOOptions, {"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing", "0.5", "below 0.5 for loss_type="),
    (DPOOptions, {"loss_type": "exo_pair"}, "label_smoothing", "0.0", "above 0 and below 1"),
    (DPOOptions, {"label_smoothing": 0.1}, "label_smoothing", "0.1", "0 for loss types other than"),
    (DPOOptions, {"loss_type": "aot", "use_weighting": True}, "use_weighting", "True", "False for aot"),
    (CPOOptions, {"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing", "0.1", "0 for loss_type='hinge'"),
    (PolicyOptions, {"loss_type": "cispo"}, "epsilon_high", "None", "5.0"),
    (PolicyOptions, {"loss_type": "dr_grpo"}, "max_completion_length", "None", "'dr_grpo'"),
    (PolicyOptions, {"delta": 1.1}, "delta", "1.1"),
    (PolicyOptions, {"loss_type": "sapo", "delta": 4.0}, "delta", "4.0", "'sapo'"),
    (PolicyOptions, {"loss_type": "vespo", "importance_sampling_level": "sequence"}, "'token'", "'sequence'"),
    (PolicyOptions, {"loss_type": "rloo", "beta": 0.05}, "beta", "0.05", "reward"),
    (PolicyOptions, {"loss_type": "rloo", "top_entropy_quantile": 0.2}, "top_entropy_quantile", "0.2"),
    (PolicyOptions, {"vllm_importance_sampling_clip_min": 3.0}, "vllm_importance_sampling_clip_min", "3.0"),
    (PolicyOptions, {"vllm_importance_sampling_mode": "token_truncate", CLIP: None}, CLIP, "None", "'token_truncate'"),
    (SparseDistillationOptions, {"support_mode": "ignore", "beta": 0.5}, "beta", "0.5", "support_mode='ignore'"),
    (SparseDistillationOptions, {"support_mode": "zero", "beta": 1.0}, "beta", "1.0", "infinite"),
    (batch({"loss_type": "rloo"}, advantages=Z), {}, "advantages", "(2, 3)", "[num_sequences]"),
    (batch({"beta": 0.1}), {}, "ref_log_probs", "None", "beta=0.1"),
    (batch({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, sampling_log_probs=Z), {}, "vespo",
     "vllm_importance_sampling_mode", "'sequence_mask'"),
    (partial(group_advantages, R, 4), {}, "rewards", "(6,)", "num_generations=4"),
    (partial(leave_one_out_advantages, R.view(1, 2, 3), 1), {}, "rewards", "(1, 2, 3)", "[num_completions]"),
    (GROUPS, {"reward_weights": V[:2]}, "reward_weights", "(2,)", "(1,)"),
    (LEAVE_ONE_OUT, {"kl": V}, "kl", "(3,)", "(6,)"),
    (LEAVE_ONE_OUT, {"reward_clip_range": (2.0, 1.0)}, "reward_clip_range[1]", "1.0", "at least 2.0"),
    (partial(sparse_divergence, Z[:, :0], Z[:, :0]), {}, "student_log_probs", "(2, 0)", "at least one id"),
    (scheduled_coefficient, SCHEDULE | {"num_steps": 0}, "num_steps", "0", "at least 1"),
    (scheduled_coefficient, SCHEDULE | {"schedule": "cosine"}, "schedule", "'cosine'", "'sine'"),
    (partial(targets_ahead, Z, 1), {}, "targets", "torch.float32", "class indices"),
    (partial(targets_ahead, IDS, 1, IDS[:, :2]), {}, "position_ids", "(2, 3)", "(2, 2)"),
    (partial(targets_ahead, IDS, 1, [0, 1]), {}, "position_ids", "[0, 1]", "a tensor"),
    (partial(multi_token_loss, torch.zeros(2, 3, 4), [1], [1.0, 1.0]), {}, "targets", "[1]", "[num_heads, ...]"),
    (partial(multi_token_loss, torch.zeros(2, 3, 4), IDS, [1.0, -1.0]), {}, "weights[1]", "-1.0"),
]  # fmt: skip

BAD_INPUTS = [row(partial(call, **keywords), *mentions) for call, keywords, *mentions in WRONG]
