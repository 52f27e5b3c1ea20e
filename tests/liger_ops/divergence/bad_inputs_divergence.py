"""Wrong arguments of linear_divergence, divergence and linear_topk_log_probs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from liger_ops import divergence, linear_divergence, linear_topk_log_probs
from tests.bad_inputs import BadInput
from tests.liger_ops.loss.bad_inputs_losses import (
    BOOL,
    FLOAT,
    INTEGER_TENSOR,
    LINEAR,
    LOST,
    NOT_FLOAT,
    OPTIONS,
    Value,
    learnable,
    no_tensors,
    number,
    of_dtypes,
    on_meta,
    rows,
    shaped,
    values,
)

FLAG = [*BOOL, *values("True or False", None)]
KINDS = "one of 'forward_kl', 'reverse_kl', 'mixed', 'jsd', 'skew_kl'"
MASK: list[Value] = [
    *no_tensors("a tensor or None"),
    *of_dtypes("a bool tensor, True at tokens", (4,), "int64", "float32"),
    ("meta", shaped(4, dtype=torch.bool, device="meta"), ("device cpu", "on meta")),
    ("shape", shaped(3, dtype=torch.bool), ("shape (4,)", "without its last dimension", "(3,)")),
]
TRANSFORM: dict[str, list[Value]] = {
    "temperature": number(" above 0", 0.0, -1.0),
    "softcap": OPTIONS["softcap"],
    "logit_scale": number(""),
}
DIVERGENCE: dict[str, list[Value]] = {
    "kind": values(KINDS, "kl", "FORWARD_KL", "", None, 0, True, ["jsd"]),
    "beta": number(" of at least 0 and at most 1", -0.1, 1.5),
    "t_squared": FLAG,
    **TRANSFORM,
    "teacher_softcap": OPTIONS["softcap"],
    "teacher_logit_scale": number(""),
    "mask": MASK,
    "token_weight": [
        *no_tensors("a tensor or None"),
        *of_dtypes("a tensor of real numbers", (4,), "complex64"),
        ("meta", shaped(4, device="meta"), ("device cpu", "on meta")),
        ("shape", shaped(3), ("shape (4,)", "without its last dimension", "(3,)")),
        (LOST[0], learnable(4), LOST[1]),
    ],
    "reduction": values("one of 'none', 'mean', 'sum'", "batchmean", None, True, ["mean"]),
    "vocab": values("one of 'equal', 'common'", "prefix", None, 1, True),
}
STUDENT: dict[str, list[Value]] = {
    **{name: LINEAR[name] for name in ("linear_weight", "linear_bias", "adapter", "chunk_bytes")},
    "input": [
        *no_tensors(FLOAT, none=True),
        *of_dtypes(FLOAT, (4, 3), *NOT_FLOAT),
        ("shape", shaped(4, 5), ("(4, 5)",)),
    ],
}
TEACHER: dict[str, list[Value]] = {
    "teacher_input": [
        *no_tensors(FLOAT, none=True),
        *of_dtypes(FLOAT, (4, 5), *NOT_FLOAT),
        *on_meta((4, 5)),
        ("tokens", shaped(3, 5), ("input's tokens", "(4, 3)", "(3, 5)")),
        ("hidden size", shaped(4, 6), ("teacher_weight's hidden_size = 5", "(4, 6)")),
    ],
    "teacher_weight": [
        *no_tensors(FLOAT, none=True),
        *of_dtypes(FLOAT, (11, 5), *NOT_FLOAT),
        *of_dtypes("teacher_input's dtype torch.float32", (11, 5), "bfloat16"),
        *on_meta((11, 5)),
        ("vector", shaped(5), ("[vocab_size, hidden_size]", "(5,)")),
    ],
    "teacher_bias": [
        *no_tensors(FLOAT),
        *of_dtypes("teacher_input's dtype torch.float32", (11,), "float64"),
        *on_meta((11,)),
        ("shape", shaped(3), ("shape (11,)", "got (3,)")),
    ],
    "teacher_adapter": [
        *values("a pair of tensors or None", "xy", 3, []),
        ("rank", lambda: (torch.ones(4, 2), torch.ones(11, 3)), ("shapes (4, 2) and (11, 2)", "(11, 3)")),
        ("dtype", lambda: (torch.ones(4, 2), torch.ones(11, 2).half()), ("[1]", "teacher_input's dtype", "float16")),
    ],
    "logits_dtype": values("torch.float32 or None", "float32", torch.float64, torch.bfloat16, 32, True),
}
LOGITS: dict[str, list[Value]] = {
    "student_logits": [
        *no_tensors(FLOAT, none=True),
        *of_dtypes(FLOAT, (4, 11), *NOT_FLOAT),
        ("scalar", shaped(), ("tokens", "()")),
    ],
    "teacher_logits": [
        *no_tensors(FLOAT, none=True),
        *of_dtypes(FLOAT, (4, 11), *NOT_FLOAT),
        ("meta", shaped(4, 11, device="meta"), ("student_logits's device cpu", "on meta")),
        ("tokens", shaped(3, 11), ("student_logits' tokens", "(4, 11)", "(3, 11)")),
        ("scalar", shaped(), ("student_logits' tokens", "()")),
    ],
}
VOCABULARIES = ("vocab must be 'common'", "got 'equal'", "11 classes of the student", "12 of the teacher")
TOPK: dict[str, list[Value]] = {
    **STUDENT,
    **TRANSFORM,
    "mask": MASK,
    "renormalize": FLAG,
    "with_lse": FLAG,
    "saved_logits_bytes": [*values("an integer of at least 0", -1, 2.0**20, "1GB", True, None), INTEGER_TENSOR],
    "vocab_shard": values("None", "x", 5, True),
    "ids": [
        *no_tensors("a tensor", none=True),
        *of_dtypes("class indices of dtype torch.int64", (4, 2), "int32", "float32", "bool"),
        *on_meta((4, 2), torch.int64),
        ("tokens", shaped(3, 2, dtype=torch.int64), ("(4, 'K')", "a tensor of shape (3, 2)")),
        ("no classes", shaped(4, 0, dtype=torch.int64), ("at least one class", "a tensor of shape (4, 0)")),
        ("vector", shaped(4, dtype=torch.int64), ("(4, 'K')", "a tensor of shape (4,)")),
        ("too large", partial(torch.full, (4, 2), 11), ("between 0 and vocab_size - 1 = 10", "got 11", "8 of 8")),
    ],
}


def call_linear(**changes: Any) -> Any:
    tensors = {
        "input": torch.ones(4, 3), "linear_weight": torch.ones(11, 3), "teacher_input": torch.ones(4, 5),
        "teacher_weight": torch.ones(11, 5),
    }  # fmt: skip
    return linear_divergence(**{**tensors, **changes})


def call_logits(**changes: Any) -> Any:
    return divergence(**{"student_logits": torch.ones(4, 11), "teacher_logits": torch.ones(4, 11), **changes})


def call_topk(**changes: Any) -> Any:
    tensors = {
        "input": torch.ones(4, 3), "linear_weight": torch.ones(11, 3), "ids": torch.zeros(4, 2, dtype=torch.int64),
    }  # fmt: skip
    return linear_topk_log_probs(**{**tensors, **changes})


def second_derivative(call: Any, name: str, size: int, **options: Any) -> None:
    x = torch.ones(4, size, requires_grad=True)
    torch.autograd.grad(call(**{name: x}, **options).sum(), x, create_graph=True)


BAD_INPUTS = [
    *rows("linear_divergence", call_linear, {**DIVERGENCE, **STUDENT, **TEACHER}),
    *rows("linear_divergence", call_linear, {"vocab_shard": values("None", "x", 5, True)}),
    *rows("divergence", call_logits, {**DIVERGENCE, **LOGITS}),
    *rows("linear_topk_log_probs", call_topk, TOPK),
    BadInput("linear_divergence-vocab-equal", lambda: call_linear(teacher_weight=torch.ones(12, 5)), VOCABULARIES),
    BadInput("divergence-vocab-equal", lambda: call_logits(teacher_logits=torch.ones(4, 12)), VOCABULARIES),
    *(
        BadInput(
            f"{name}-create_graph", partial(second_derivative, *arguments, **options),
            ("no second derivative", "create_graph must be False, got True"), RuntimeError,
        )
        for name, arguments, options in (
            ("linear_divergence", (call_linear, "input", 3), {}),
            ("divergence", (call_logits, "student_logits", 11), {}),
            ("linear_topk_log_probs", (call_topk, "input", 3), {}),
            ("linear_topk_log_probs-renormalize", (call_topk, "input", 3), {"renormalize": True}),
        )
    ),
]  # fmt: skip
