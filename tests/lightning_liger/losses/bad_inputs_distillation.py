"""Bad arguments of distillation losses and of losses of several heads."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_liger import (
    SampledDistillationOptions,
    SparseDistillationOptions,
    ULDOptions,
    deepseek_mtp_weights,
    medusa_weights,
    multi_token_loss,
    multi_token_weights,
    sampled_divergence,
    sparse_divergence,
    targets_ahead,
    universal_logit_divergence,
)
from lightning_liger.losses.distillation import (
    first_occurrences,
    importance_weighted_log_probs,
    log_tail_mass,
    merge_duplicates,
    sample_support,
)
from lightning_liger.losses.multi_head import scheduled_coefficient
from tests.bad_inputs import BadInput

NUMBER, INTEGER, FLOATING, BOOL = "a finite number", "an integer", "a floating-point tensor", "True or False"
LOG_PROBS, IDS, TARGETS = torch.full((2, 3), -2.0), torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 5).long()
MASK = torch.ones(2, 3, dtype=torch.bool)
PAIR = {"student_log_probs": LOG_PROBS, "teacher_log_probs": LOG_PROBS}
LOGITS = {"student_logits": torch.zeros(2, 5), "teacher_logits": torch.zeros(2, 7)}
IDS_AND = {"ids": IDS, "log_probs": LOG_PROBS}
STACK = {"logits": torch.zeros(2, 3, 4), "targets": torch.zeros(2, 3).long(), "weights": [1.0, 1.0]}

# Function, its good arguments, and by argument the bad values with what their messages mention.
_ROWS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, list[tuple[Any, tuple[str, ...]]]]]] = [
    (
        SparseDistillationOptions,
        {},
        {
            "beta": [(-0.1, ("-0.1", "at least 0")), (1.1, ("1.1", "at most 1")), ("0", ("'0'", NUMBER))],
            "support_mode": [("tails", ("'tails'", "'renormalize'")), (None, ("None", "'tail'"))],
            "temperature": [(0, ("0", "above 0")), (True, ("True", NUMBER))],
            "teacher_temperature": [(-1.0, ("-1.0", "above 0")), (None, ("None", NUMBER))],
            "t_squared": [(1, ("1", BOOL))],
        },
    ),
    (SparseDistillationOptions, {"support_mode": "ignore"}, {"beta": [(0.5, ("0.5", "support_mode='ignore'"))]}),
    (SparseDistillationOptions, {"support_mode": "zero"}, {"beta": [(1.0, ("1.0", "infinite"))]}),
    (
        SampledDistillationOptions,
        {},
        {
            "estimator": [("k4", ("'k4'", "'policy_gradient'"))],
            "distillation_is_clip": [(0.0, ("0.0", "above 0")), ("2", ("'2'", "or None"))],
        },
    ),
    (
        sparse_divergence,
        PAIR,
        {
            "student_log_probs": [([1.0], ("[1.0]", FLOATING)), (IDS, ("torch.int64", FLOATING))],
            "teacher_log_probs": [(LOG_PROBS[:1], ("(2, 3)", "(1, 3)")), (None, ("None", FLOATING))],
            "support_mask": [(IDS, ("torch.bool", "torch.int64")), (MASK[:, :1], ("(2, 3)", "(2, 1)"))],
        },
    ),
    (
        sparse_divergence,
        {"teacher_log_probs": LOG_PROBS[:, :0]},
        {"student_log_probs": [(LOG_PROBS[:, :0], ("(2, 0)", "at least one id"))]},
    ),
    (
        sampled_divergence,
        PAIR,
        {
            "teacher_log_probs": [(LOG_PROBS[0], ("(2, 3)", "(3,)"))],
            "old_log_probs": [(LOG_PROBS[0], ("(2, 3)", "(3,)")), (1.0, ("1.0", FLOATING))],
        },
    ),
    (log_tail_mass, {}, {"log_probs": [(IDS, ("torch.int64", FLOATING))]}),
    (first_occurrences, {}, {"ids": [(LOG_PROBS, ("torch.int64", "torch.float32")), (IDS[0, 0], ("()", "[..., K]"))]}),
    (merge_duplicates, IDS_AND, {"log_probs": [(LOG_PROBS[0], ("(2, 3)", "(3,)")), (IDS, ("int64", FLOATING))]}),
    (
        importance_weighted_log_probs,
        {**IDS_AND, "proposal_log_probs": LOG_PROBS},
        {"ids": [([1], ("[1]", "torch.int64"))], "proposal_log_probs": [(LOG_PROBS[:1], ("(2, 3)", "(1, 3)"))]},
    ),
    (
        sample_support,
        {"log_probs": LOG_PROBS, "num_samples": 2},
        {
            "num_samples": [(0, ("0", "at least 1")), (1.5, ("1.5", INTEGER))],
            "proposal_temperature": [(0, ("0", "above 0"))],
        },
    ),
    (
        ULDOptions,
        {},
        {
            "uld_student_temperature": [(0, ("0", "above 0"))],
            "uld_teacher_temperature": [("1", ("'1'", NUMBER))],
        },
    ),
    (
        universal_logit_divergence,
        LOGITS,
        {
            "student_logits": [(None, ("None", FLOATING))],
            "teacher_logits": [(torch.zeros(3, 7), ("(3, 7)", "(2,)")), (IDS, ("torch.int64", FLOATING))],
        },
    ),
    (medusa_weights, {}, {"num_heads": [(0, ("0", "at least 1")), (2.0, ("2.0", INTEGER))]}),
    (medusa_weights, {"num_heads": 2}, {"decay": [(0, ("0", "above 0"))]}),
    (multi_token_weights, {"num_heads": 2}, {"weight": [(-1, ("-1", "at least 0"))]}),
    (deepseek_mtp_weights, {"num_depths": 1}, {"num_depths": [(0, ("0", "at least 1"))], "weight": [("a", ("'a'",))]}),
    (
        scheduled_coefficient,
        {"step": 0, "num_steps": 3, "schedule": "linear"},
        {
            "step": [(-1, ("-1", "at least 0"))],
            "num_steps": [(None, ("None", INTEGER)), (0, ("0", "at least 1"))],
            "coefficient": [(-0.1, ("-0.1", "at least 0"))],
            "schedule": [("cosine", ("'cosine'", "'sine'"))],
        },
    ),
    (
        targets_ahead,
        {"targets": TARGETS, "num_ahead": 1},
        {
            "targets": [(LOG_PROBS, ("torch.float32", "class indices")), ([1], ("[1]", "class indices"))],
            "num_ahead": [(-1, ("-1", "at least 0"))],
            "position_ids": [(TARGETS[:, :3], ("(2, 5)", "(2, 3)")), ([0, 1], ("[0, 1]", "a tensor"))],
        },
    ),
    (
        multi_token_loss,
        STACK,
        {
            "targets": [([1], ("[1]", "[num_heads, ...]"))],
            "weights": [([1.0], ("[1.0]", "(2, 3)")), (0.5, ("0.5", "a list")), ([1.0, -1.0], ("-1.0", "weights[1]"))],
        },
    ),
]  # fmt: skip


def _rows() -> Iterator[BadInput]:
    for index, (function, good, bad) in enumerate(_ROWS):
        for name, cases in bad.items():
            for case, (value, mentions) in enumerate(cases):
                call = functools.partial(function, **{**good, name: value})
                yield BadInput(f"{function.__name__}-{name}-{index}.{case}", call, (name, *mentions))


BAD_INPUTS: list[BadInput] = list(_rows())
