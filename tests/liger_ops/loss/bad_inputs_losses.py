"""Wrong arguments of the losses that no signature tells, and what makes rows of other tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import VocabShard, cross_entropy, linear_cross_entropy
from tests.bad_inputs import BadInput

Value = tuple[str, Callable[[], Any], tuple[str, ...]]
"""A name, what makes the value, and what the message says of it."""

ONE_RANK = dist.ProcessGroup(0, 1)  # does nothing: errors come before any rank speaks


def shaped(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Callable[[], Tensor]:
    return partial(torch.ones, shape, dtype=dtype, device=device)


def learnable(*shape: int) -> Callable[[], Tensor]:
    return partial(torch.ones, shape, requires_grad=True)


def values(expected: str, *some: Any) -> list[Value]:
    """Values that messages show as Python does."""
    return [(repr(value), partial(lambda value: value, value), (expected, f"got {value!r}")) for value in some]


def no_tensors(expected: str, *, none: bool = False) -> list[Value]:
    some = values(expected, "x", [1.0, 2.0], 3.5, np.float32(2.0), *([None] if none else []))
    return [*some, ("array", partial(np.ones, 3), (expected, "got array"))]


def of_dtypes(expected: str, shape: tuple[int, ...], *names: str) -> list[Value]:
    dtypes = [getattr(torch, name) for name in names]
    return [(str(dtype), shaped(*shape, dtype=dtype), (expected, f"{dtype}")) for dtype in dtypes]


def on_meta(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Value]:
    return [("meta", shaped(*shape, dtype=dtype, device="meta"), ("on input's device cpu", "on meta"))]


FLOAT = "a floating-point tensor"
NOT_FLOAT = ("int64", "bool", "complex64", "float8_e4m3fn")
TENSOR = ("scalar tensor", partial(torch.tensor, 0.5), ("a finite number", "got a tensor of shape ()"))
INTEGER_TENSOR = ("scalar tensor", partial(torch.tensor, 3), ("an integer", "got a tensor of shape ()"))
BOOL = values("True or False", "no", 1, 0.0)
LOST = ("requires_grad", ("must not require a gradient", "a tensor of shape", "detach()"))


def number(bounds: str, *out_of_range: float, none: bool = False) -> list[Value]:
    some = (*out_of_range, math.nan, math.inf, -math.inf, "0.1", [0.1], 1j, True, *(() if none else (None,)))
    return [*values(f"a finite number{bounds}", *some), TENSOR]


OPTIONS: dict[str, list[Value]] = {
    "softcap": number(" above 0 or None", 0.0, -30.0, none=True),
    "logit_scale": [
        ("learnable", learnable(), ("must be a number", "a tensor of shape ()", "multiply the hidden states")),
        ("tensor", shaped(1), ("must be a number", "a tensor of shape (1,)", "its gradient would be lost")),
    ],
    "reduction": [
        ("function", lambda: torch.mean, ("one of 'none', 'mean', 'sum'", "got <built-in method mean")),
        ("array", partial(np.ones, 2), ("one of 'none', 'mean', 'sum'", "got array")),
    ],
}
WEIGHTS: dict[str, list[Value]] = {
    "target": [
        *of_dtypes("class indices of dtype torch.int64", (4,), "int32", "bool"),
        ("shape", shaped(4, 1, dtype=torch.int64), ("(4, 1)",)),
        ("label too large", partial(torch.full, (4,), 11), ("between 0 and vocab_size - 1 = 10", "got 11")),
        ("negative label", partial(torch.full, (4,), -1), ("between 0 and", "ignore_index = -100", "got -1 (4 of 4")),
    ],
    "weight": [
        ("nan", partial(torch.full, (11,), math.nan), ("no NaN", "got 11")),
        ("scalar", shaped(), ("shape (11,)", "got ()")),
        (LOST[0], learnable(11), LOST[1]),
    ],
    "token_weight": [
        *of_dtypes("a tensor of real numbers", (4,), "complex64"),
        ("nan", partial(torch.full, (4,), math.nan), ("no NaN but at ignored tokens", "got 4")),
        ("scalar", shaped(), ("target's shape (4,)", "got ()")),
        (LOST[0], learnable(4), LOST[1]),
    ],
}
CROSS_ENTROPY: dict[str, list[Value]] = {
    "input": [
        ("shape", shaped(5, 11), ("input's shape", "(5, 11)")),
        ("scalar", shaped(), ("input's shape", "()")),
        ("no classes", shaped(4, 0), ("at least one class", "(4, 0)")),
    ],
}
LINEAR: dict[str, list[Value]] = {
    "input": [
        ("shape", shaped(4, 5), ("hidden_size = 3", "(4, 5)")),
        ("scalar", shaped(), ("hidden_size = 3", "()")),
    ],
    "linear_weight": [
        *of_dtypes("input's dtype torch.float32", (11, 3), "bfloat16", "float64"),
        ("vector", shaped(3), ("[vocab_size, hidden_size]", "(3,)")),
        ("no classes", shaped(0, 3), ("at least one class", "(0, 3)")),
    ],
    "linear_bias": [
        *of_dtypes("input's dtype torch.float32", (11,), "bfloat16", "float64"),
        ("shape", shaped(3), ("shape (11,)", "got (3,)")),
    ],
    "adapter": [
        ("three", lambda: (None, None, None), ("a pair of tensors or None", "got (None, None, None)")),
        ("none", lambda: (None, torch.ones(11, 2)), ("adapter[0]", FLOAT, "got None")),
        ("dtype", lambda: (torch.ones(4, 2), torch.ones(11, 2).half()), ("adapter[1]", "torch.float32", "float16")),
        ("rank", lambda: (torch.ones(4, 2), torch.ones(11, 3)), ("shapes (4, 2) and (11, 2)", "(11, 3)")),
        ("tokens", lambda: (torch.ones(3, 2), torch.ones(11, 2)), ("shapes (4, 2) and (11, 2)", "(3, 2)")),
        ("scalars", lambda: (torch.tensor(1.0), torch.tensor(1.0)), ("shapes", "() and ()")),
        ("meta", lambda: (torch.ones(4, 2), torch.ones(11, 2, device="meta")), ("adapter[1]", "device cpu", "on meta")),
    ],
    "chunk_bytes": values("an integer of at least 1 or None", 0),
    "accumulate_dtype": [
        *values("torch.float32, torch.float64", torch.int32, torch.complex64),
        *values("at least as wide as the products' torch.float32", torch.bfloat16, torch.float16),
    ],
    "options": values("LinearCrossEntropyOptions or None", "auto", {"batch_chunk_size": 4}),
}
OPTIONS_OF_PYTORCH: dict[str, list[Value]] = {
    "batch_chunk_size": values("an integer of at least 1 or None", 0, 2.5, "4"),
    "acc_dtype": [*values("a torch.dtype or None", "float32"), *values("torch.float32", torch.int32)],
}


def call_cross_entropy(**changes: Any) -> Any:
    return cross_entropy(**{"input": torch.ones(4, 11), "target": torch.zeros(4, dtype=torch.int64), **changes})


def call_linear(**changes: Any) -> Any:
    tensors = {
        "input": torch.ones(4, 3),
        "linear_weight": torch.ones(11, 3),
        "target": torch.zeros(4, dtype=torch.int64),
    }
    return linear_cross_entropy(**{**tensors, **changes})


def call_with_pytorchs_options(**changes: Any) -> Any:
    return call_linear(options=SimpleNamespace(**{"batch_chunk_size": 4, "acc_dtype": None, **changes}))


def make_shard(**changes: Any) -> VocabShard:
    return VocabShard(**{"group": ONE_RANK, "start": 0, "vocab_size": 11, **changes})


def rows(function: str, call: Callable[..., Any], table: dict[str, list[Value]]) -> list[BadInput]:
    """One row for each argument and value of ``table``."""
    return [
        BadInput(f"{function}-{argument}-{name}", lambda a=argument, m=make: call(**{a: m()}), (argument, *mentions))
        for argument, wrong in table.items()
        for name, make, mentions in wrong
    ]


PROBABILITIES = partial(torch.full, (4, 11), 1 / 11)
BAD_INPUTS = [
    *rows("cross_entropy", call_cross_entropy, {**CROSS_ENTROPY, **WEIGHTS, **OPTIONS}),
    *rows("linear_cross_entropy", call_linear, {**LINEAR, **WEIGHTS, **OPTIONS}),
    *rows("linear_cross_entropy-options", call_with_pytorchs_options, OPTIONS_OF_PYTORCH),
    BadInput(
        "cross_entropy-target-probabilities of another shape",
        lambda: call_cross_entropy(target=torch.ones(4, 10)),
        ("target", "shape (4, 11)", "class probabilities", "shape (4, 10)"),
    ),
    BadInput(
        "cross_entropy-z_loss_weight-probabilities",
        lambda: call_cross_entropy(target=PROBABILITIES(), z_loss_weight=0.1),
        ("target must be class indices", "z_loss_weight", "torch.float32"),
    ),
    BadInput(
        "cross_entropy-weight-probabilities and meta",
        lambda: call_cross_entropy(target=PROBABILITIES(), weight=torch.ones(11, device="meta")),
        ("weight", "on input's device cpu", "on meta"),
    ),
    BadInput(
        "linear_cross_entropy-linear_weight-no features",
        lambda: call_linear(input=torch.ones(4, 0), linear_weight=torch.ones(11, 0)),
        ("linear_weight", "hidden_size of at least 1", "(11, 0)"),
    ),
    BadInput(
        "linear_cross_entropy-adapter-probabilities",
        lambda: call_linear(target=PROBABILITIES(), adapter=(torch.ones(4, 2), torch.ones(11, 2))),
        ("adapter must be None for class probabilities", "got tuple"),
    ),
    BadInput(
        "linear_cross_entropy-vocab_shard-past the vocabulary",
        lambda: call_linear(vocab_shard=make_shard(start=6)),
        ("vocab_shard", "vocab_size = 11", "11 rows", "start = 6"),
    ),
    BadInput(
        "linear_cross_entropy-vocab_shard-negative start",
        lambda: call_linear(vocab_shard=make_shard(start=-1)),
        ("vocab_shard", "vocab_size = 11", "start = -1"),
    ),
]
