"""Bad inputs of the norms, the gated units and the rotary embedding."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import liger_ops
from liger_ops.arguments import shown
from tests.bad_inputs import BadInput

NAN, INFINITY = float("nan"), float("inf")
FLOATING = "floating-point tensor"

X = torch.ones(2, 4, 8)
W = torch.ones(8)
HEADS = torch.ones(2, 3, 5, 8)
TABLE = torch.ones(2, 5, 8)

# Each function's valid call, its tensors by whether they may be None.
CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "rms_norm": ({"input": X, "normalized_shape": (8,), "weight": W}, ("input",), ("weight",)),
    "add_rms_norm": (
        {"input": X, "residual": X, "normalized_shape": (8,), "weight": W},
        ("input", "residual"),
        ("weight",),
    ),
    "layer_norm": ({"input": X, "normalized_shape": (8,), "weight": W, "bias": W}, ("input",), ("weight", "bias")),
    "group_norm": (
        {"input": X, "num_groups": 2, "weight": torch.ones(4), "bias": torch.ones(4)},
        ("input",),
        ("weight", "bias"),
    ),
    "silu_mul": ({"gate": X, "up": X}, ("gate",), ("up",)),
    "gelu_mul": ({"gate": X, "up": X}, ("gate",), ("up",)),
    "relu_squared_mul": ({"gate": X, "up": X}, ("gate",), ("up",)),
    "relu_squared": ({"input": X}, ("input",), ()),
    "apply_rotary": ({"q": HEADS, "k": HEADS, "cos": TABLE, "sin": TABLE}, ("q", "k", "cos", "sin"), ()),
}
NOT_TENSORS = ("x", [1.0], 2.0)
NOT_FLOATING = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def rows() -> Iterator[BadInput]:
    for function, (arguments, required, optional) in CALLS.items():
        for name in (*required, *optional):
            for value in (*NOT_TENSORS, *((None,) if name in required else ())):
                yield row(function, name, value, FLOATING)
            for dtype in NOT_FLOATING:
                yield row(function, name, arguments[name].to(dtype), FLOATING, kind=str(dtype))
            if name != required[0]:
                value = arguments[name].to("meta")
                yield row(function, name, value, f"on {required[0]}'s device cpu", kind="meta")
    for function, name, values, expected in OPTIONS:
        for value in values:
            yield row(function, name, value, expected)
    for function, name, shape, expected in SHAPES:
        yield row(function, name, torch.ones(shape), expected, kind=f"shape {shape}")
    for name, value, expected in ROTARY_POSITIONS:
        positions = {"cos": torch.ones(11, 8), "sin": torch.ones(11, 8)}
        yield row("apply_rotary", name, value, expected, kind=shown(value), **positions)
    sections = {"cos": torch.ones(3, 2, 5, 8), "sin": torch.ones(3, 2, 5, 8)}
    for value in ([1, 2], [1, 2, 2], [5, -2, 1], [1.0, 2.0, 1.0], "121", 4, ["1", "2", "1"], 1.5):
        expected = "sequence of integers" if not isinstance(value, list) or type(value[0]) is not int else "add up to"
        yield row("apply_rotary", "mrope_sections", value, expected, **sections)


def row(function: str, name: str, value: Any, expected: str, *, kind: str | None = None, **others: Any) -> BadInput:
    arguments = {**CALLS[function][0], **others, name: value}
    call: Callable[..., Any] = getattr(liger_ops, function)
    return BadInput(
        id=f"{function}-{name}-{shown(value) if kind is None else kind}",
        call=partial(call, **arguments),
        mentions=(f"{name} must be", shown(value), expected),
    )


NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "group_norm")
BAD_EPS = (-1e-5, NAN, INFINITY, "1e-5", [1e-5], 1j, True, torch.tensor([1e-5]), torch.tensor(1e-5, requires_grad=True))
BAD_BOOLS = ("no", 1, None)
# Function, argument, wrong values, what was expected.
OPTIONS: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    *((norm, "eps", BAD_EPS, "a finite number of at least 0") for norm in NORMS),
    ("layer_norm", "eps", (None,), "a finite number of at least 0"),
    ("group_norm", "eps", (None,), "a finite number of at least 0"),
    *((norm, "normalized_shape", (8, "8", (8.0,), None, 8.0, ("8",)), "sequence of integers") for norm in NORMS[:3]),
    *((norm, "normalized_shape", ((), (0,), (5,), (4,), (-8,), (1, 4, 8)), "trailing sizes") for norm in NORMS[:3]),
    ("group_norm", "num_groups", (2.0, "2", None, True, [2], torch.tensor([2])), "an integer"),
    ("group_norm", "num_groups", (0, -2, 3, 8), "a divisor of num_channels = 4"),
    *((norm, "offset", (NAN, -INFINITY, "1", None, [1.0], True), "a finite number") for norm in NORMS[:2]),
    *((norm, "casting", ("bert", None, 1, ["llama"], W), "one of 'gemma', 'llama', 'none'") for norm in NORMS[:2]),
    ("gelu_mul", "approximate", ("erf", None, True, ["tanh"], X), "one of 'none', 'tanh'"),
    ("apply_rotary", "heads_dim", (0, 3, -1, 1.0, "1", None, True), "an integer of at least 1 and at most 2"),
    ("apply_rotary", "interleaved", BAD_BOOLS, "True or False"),
    ("apply_rotary", "keep_dtype", BAD_BOOLS, "True or False"),
)
# Function, argument, wrong shape, what was expected.
SHAPES: tuple[tuple[str, str, tuple[int, ...], str], ...] = (
    *((norm, "weight", (7,), "(8,)") for norm in NORMS[:3]),
    *((norm, "weight", (1, 8), "(8,)") for norm in NORMS[:3]),
    ("layer_norm", "bias", (1,), "(8,)"),
    ("add_rms_norm", "residual", (8,), "(2, 4, 8)"),
    ("group_norm", "input", (4,), "[batch_size, num_channels, *]"),
    ("group_norm", "weight", (8,), "(4,)"),
    ("group_norm", "bias", (4, 1), "(4,)"),
    ("silu_mul", "up", (8,), "(2, 4, 8)"),
    ("gelu_mul", "up", (2, 4, 1), "(2, 4, 8)"),
    ("relu_squared_mul", "up", (), "(2, 4, 8)"),
    ("apply_rotary", "q", (3, 5, 8), "4 dimensions"),
    ("apply_rotary", "k", (2, 5, 8), "(2, 3, 5, 8)"),
    ("apply_rotary", "k", (2, 1, 4, 8), "(2, 3, 5, 8)"),
    ("apply_rotary", "cos", (), "at most head_dim = 8"),
    ("apply_rotary", "cos", (2, 5, 7), "even"),
    ("apply_rotary", "cos", (2, 5, 10), "at most head_dim = 8"),
    ("apply_rotary", "cos", (3, 5, 8), "[batch_size or 1, seq_len, rotary_dim]"),
    ("apply_rotary", "cos", (2, 6, 8), "[batch_size or 1, seq_len, rotary_dim]"),
    ("apply_rotary", "sin", (1, 5, 8), "(2, 5, 8)"),
)
# Argument, wrong value beside tables [11, 8], what was expected.
ROTARY_POSITIONS: tuple[tuple[str, Any, str], ...] = (
    *(("position_ids", torch.zeros(5, dtype=dtype), "int64 or int32") for dtype in (torch.float32, torch.int16)),
    ("position_ids", torch.zeros(5, dtype=torch.bool), "int64 or int32"),
    *(("position_ids", value, "a tensor or None") for value in ("x", [0, 1, 2, 3, 4], 3)),
    ("position_ids", torch.zeros(4, dtype=torch.int64), "seq_len = 5"),
    ("position_ids", torch.zeros((3, 5), dtype=torch.int64), "batch_size = 2"),
    ("position_ids", torch.zeros((), dtype=torch.int64), "seq_len = 5"),
    ("position_ids", torch.zeros(5, dtype=torch.int64, device="meta"), "on q's device cpu"),
)

BAD_INPUTS: list[BadInput] = [
    *rows(),
    BadInput(
        "apply_rotary-position_ids-out of range",
        partial(liger_ops.apply_rotary, HEADS, HEADS, TABLE[0], TABLE[0], position_ids=torch.tensor([0, 1, 5, 2, -1])),
        ("position_ids must be between 0 and", "got -1 to 5", "= 4"),
    ),
    row("apply_rotary", "cos", torch.ones(2, 11, 8), "[max_positions, rotary_dim]", position_ids=torch.arange(5)),
    BadInput(
        "apply_rotary-position_ids-with mrope_sections",
        partial(
            liger_ops.apply_rotary, HEADS, HEADS, TABLE, TABLE, position_ids=torch.arange(5), mrope_sections=(1, 2, 1)
        ),
        ("position_ids must be None with mrope_sections", "got a tensor of shape (5,)"),
    ),
    *(
        BadInput(
            f"{name}-gate-packed, shape {tuple(gate.shape)}",
            partial(getattr(liger_ops, name), gate),
            ("gate must be packed", shown(gate), "even number of columns"),
        )
        for name in ("silu_mul", "gelu_mul", "relu_squared_mul")
        for gate in (torch.ones(2, 3), torch.ones(()))
    ),
    *(
        BadInput(
            f"{name}-offset-without weight",
            partial(getattr(liger_ops, name), *inputs, (8,), offset=1.0),
            ("offset must be 0 without a weight", "got 1.0"),
        )
        for name, inputs in (("rms_norm", (X,)), ("add_rms_norm", (X, X)))
    ),
]
