"""Bad inputs of the modules of ``liger_ops.nn``: arguments of constructors, and inputs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from liger_ops import nn as fused
from liger_ops.arguments import shown
from tests.bad_inputs import BadInput

NAN, INFINITY = float("nan"), float("inf")
POSITIVE = "an integer of at least 1"
EPS = ("eps", (-1e-5, NAN, INFINITY, "x", [1e-5], True), "a finite number of at least 0")
FACTORY = (
    ("device", ("foo", 5.5, ["cpu"]), "a device"),
    ("dtype", ("float32", torch.int64, torch.complex64, torch.float8_e4m3fn, int), "float32, bfloat16"),
)
NORMALIZED_SHAPE = (
    ("normalized_shape", (8.5, "8", None, (8.0,), torch.float32), "a sequence of integers"),
    ("normalized_shape", (-1, 0, (8, 0), []), "a positive integer or several"),
    ("elementwise_affine", ("no", 0, None), "True or False"),
    EPS,
    *FACTORY,
)
SIZES = (-1, 0, 8.5, "8", None, True, [8])
LOSS = (
    ("reduction", ("median", None, 1), "one of 'none', 'mean', 'sum'"),
    ("weight", ([1.0] * 7, "x", torch.ones(7, dtype=torch.int64)), "floating-point tensor"),
    ("label_smoothing", (1.5, -0.1, NAN, "x"), "label_smoothing must be"),
    ("softcap", (0.0, -1.0, NAN), "softcap must be"),
    ("z_loss_weight", (-1.0, NAN), "z_loss_weight must be"),
)
# Arguments that make the module, then rows of argument, wrong values, what was expected.
CONSTRUCTORS: dict[str, tuple[dict[str, Any], tuple[tuple[str, tuple[Any, ...], str], ...]]] = {
    "RMSNorm": (
        {"normalized_shape": 8},
        (
            *NORMALIZED_SHAPE,
            ("offset", (NAN, "1", None, [1.0]), "a finite number"),
            ("casting", ("bert", None, 1), "one of 'gemma', 'llama', 'none'"),
        ),
    ),
    "LayerNorm": ({"normalized_shape": 8}, (*NORMALIZED_SHAPE, ("bias", ("no", 0, None), "True or False"))),
    "GroupNorm": (
        {"num_groups": 2, "num_channels": 4},
        (
            ("num_groups", (0, -2, 3, 8), "a divisor of num_channels = 4"),
            ("num_groups", (2.0, "2", None, True), "an integer"),
            ("num_channels", (0, -4, 4.0, "4", None, True), POSITIVE),
            ("affine", ("no", 0, None), "True or False"),
            EPS,
            *FACTORY,
        ),
    ),
    "RotaryEmbedding": (
        {"head_dim": 8},
        (
            ("head_dim", SIZES, POSITIVE),
            ("rotary_dim", (3, 0, -2, 10), "even, positive and at most head_dim = 8"),
            ("rotary_dim", (4.0, "4", True), "an integer"),
            ("base", (0.0, -1.0, NAN, INFINITY, "x", None, torch.tensor(1e4)), "a finite number above 0"),
            ("interleaved", ("no", 0, None), "True or False"),
            ("device", ("foo", 5.5), "a device"),
        ),
    ),
    **{
        name: (
            {"hidden_size": 4, "intermediate_size": 6},
            (
                ("hidden_size", SIZES, POSITIVE),
                ("intermediate_size", SIZES, POSITIVE),
                ("bias", ("no", 0, None), "True or False"),
                *FACTORY,
                *((("approximate", ("erf", None, True), "one of 'none', 'tanh'"),) if name == "GeGLU" else ()),
            ),
        )
        for name in ("SwiGLU", "GeGLU")
    },
    "CrossEntropyLoss": (
        {},
        (
            *LOSS,
            ("size_average", ("no", 2), "True or False, or None"),
            ("reduce", ("no", 2), "True or False, or None"),
            ("inplace_backward", ("no", 1, None), "True or False"),
        ),
    ),
    "LinearCrossEntropyLoss": (
        {"in_features": 4, "num_classes": 7},
        (
            *LOSS,
            ("in_features", SIZES, POSITIVE),
            ("num_classes", SIZES, POSITIVE),
            ("out_features", (3, "3", (2.0,), None), "a sequence of integers"),
            ("out_features", ((0,), (2, -1)), "positive integers"),
            ("bias", ("no", 0, None), "True or False"),
            *FACTORY,
            ("ignore_index", (1.5, "x", [1]), "an integer or None"),
            ("options", ("x", 5, {"batch_chunk_size": 2}), "LinearCrossEntropyOptions or None"),
            ("chunk_bytes", (0, -1, 1.5, "1GB"), "an integer of at least 1 or None"),
            ("saved_logits_bytes", (-1, 1.5, "1GB", True), "an integer of at least 0 or None"),
            ("accumulate_dtype", ("float32", torch.int64, torch.complex64), "float32, bfloat16"),
        ),
    ),
}


def constructor_rows() -> Iterator[BadInput]:
    for module, (arguments, table) in CONSTRUCTORS.items():
        for name, values, expected in table:
            for value in values:
                yield BadInput(
                    id=f"{module}-{name}-{shown(value)}",
                    call=partial(getattr(fused, module), **{**arguments, name: value}),
                    mentions=(f"{name} must be", shown(value), expected),
                )


HEADS = torch.ones(2, 3, 5, 8)
FLOATING = "floating-point tensor"
ONE_INPUT = {
    "RMSNorm": torch.ones(2, 8),
    "LayerNorm": torch.ones(2, 8),
    "GroupNorm": torch.ones(2, 4, 3),
    "SwiGLU": torch.ones(2, 4),
    "GeGLU": torch.ones(2, 4),
}


def input_rows() -> Iterator[BadInput]:
    for module, x in ONE_INPUT.items():
        wrong = (*(x.to(dtype) for dtype in (torch.int64, torch.bool, torch.complex64)), None, "x", [1.0], 2.0)
        for value in wrong:
            yield input_row(module, "input", (value,), value, FLOATING)
        wide = torch.ones(2, 5)
        trailing = {"RMSNorm": "trailing sizes", "LayerNorm": "trailing sizes"}
        if module != "GroupNorm":
            expected = trailing.get(module, "hidden_size = 4")
            yield input_row(module, "input", (wide,), wide, expected, mentions=(expected, "(2, 5)"))
    for module in ("RMSNorm", "LayerNorm", "GroupNorm"):
        x = ONE_INPUT[module].to("meta")
        yield input_row(module, "input", (x,), x, "", mentions=("weight must be on input's device meta", "on cpu"))
    for value in (HEADS.long(), None, "x", HEADS.to(torch.complex64)):
        yield input_row("RotaryEmbedding", "q", (value, HEADS), value, FLOATING)
        yield input_row("RotaryEmbedding", "k", (HEADS, value), value, FLOATING)
    for value in (HEADS[0], HEADS[..., :6]):
        yield input_row("RotaryEmbedding", "q", (value, value), value, "the last head_dim = 8")
    value = HEADS[:, :, :2]
    yield input_row("RotaryEmbedding", "k", (HEADS, value), value, "q's shape (2, 3, 5, 8)")
    value = HEADS.to("meta")
    yield input_row("RotaryEmbedding", "k", (HEADS, value), value, "on q's device cpu")
    yield input_row(
        "RotaryEmbedding", "q", (value, value), value, "", mentions=("inv_freq must be on q's device meta", "on cpu")
    )
    for value in ("x", [0, 1, 2, 3, 4], 3):
        yield input_row("RotaryEmbedding", "position_ids", (HEADS, HEADS, value), value, "a tensor or None")
    for dtype in (torch.bool, torch.complex64):
        value = torch.zeros(5, dtype=dtype)
        yield input_row("RotaryEmbedding", "position_ids", (HEADS, HEADS, value), value, "integers or floating-point")
    for shape in ((3,), (3, 5), ()):
        value = torch.zeros(shape, dtype=torch.int64)
        yield input_row("RotaryEmbedding", "position_ids", (HEADS, HEADS, value), value, "seq_len = 5")
    for value in (0, 3, 1.0, "1", None, True):
        expected = "an integer of at least 1 and at most 2"
        yield input_row("RotaryEmbedding", "heads_dim", (HEADS, HEADS), value, expected, heads_dim=value)


def input_row(
    module: str,
    name: str,
    inputs: tuple[Any, ...],
    value: Any,
    expected: str,
    *,
    mentions: tuple[str, ...] | None = None,
    **keywords: Any,
) -> BadInput:
    made = getattr(fused, module)(**CONSTRUCTORS[module][0])
    return BadInput(
        id=f"{module}()-{name}-{shown(value)}",
        call=partial(made, *inputs, **keywords),
        mentions=mentions or (f"{name} must be", shown(value), expected),
    )


BAD_INPUTS: list[BadInput] = [
    *constructor_rows(),
    *input_rows(),
    BadInput(
        "RMSNorm-offset-without weight",
        partial(fused.RMSNorm, 8, elementwise_affine=False, offset=1.0),
        ("offset must be 0 without a weight", "got 1.0"),
    ),
    BadInput("RotaryEmbedding-head_dim-odd", partial(fused.RotaryEmbedding, 7), ("rotary_dim must be even", "got 7")),
    BadInput(
        "LinearCrossEntropyLoss-weight-shape",
        partial(fused.LinearCrossEntropyLoss, 4, 7, weight=torch.ones(6)),
        ("weight must be", "(7,) (num_classes)", "a tensor of shape (6,)"),
    ),
]
