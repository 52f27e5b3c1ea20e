"""Bad arguments of the callbacks."""

import functools
import math
from typing import Any

import torch

from lightning_liger import LigerCallback, TrainingSummary
from tests.bad_inputs import BadInput

_SKIP_STEPS: list[tuple[str, Any, str]] = [
    ("negative", -1, "-1"),
    ("fraction", 1.5, "1.5"),
    ("whole_float", 2.0, "2.0"),
    ("nan", math.nan, "nan"),
    ("text", "2", "'2'"),
    ("none", None, "None"),
    ("bool", True, "True"),
    ("list", [2], "[2]"),
    ("tensor", torch.tensor(2), "a tensor of shape ()"),
]
_KERNELS: list[tuple[str, Any, str]] = [
    ("unknown", "foo", "'foo'"),
    ("unknown_in_list", ["rms_norm", "foo"], "'foo'"),
    ("unknown_in_dict", {"foo": False}, "'foo'"),
    ("typo", "rms_nrom", "'rms_nrom'"),
    ("option_of_no_kernel", {"rope": {"chunk_bytes": 1}}, "'chunk_bytes'"),
    ("unknown_option", {"linear_cross_entropy": {"chunk": 1}}, "'chunk'"),
    ("text_for_option", {"rope": "no"}, "'no'"),
    ("chunk_bytes", {"linear_cross_entropy": {"chunk_bytes": 0}}, "0"),
]

BAD_INPUTS: list[BadInput] = (
    [
        BadInput(
            f"TrainingSummary-skip_steps-{case}",
            functools.partial(TrainingSummary, skip_steps=value),
            ("skip_steps", shown, "an integer"),
        )
        for case, value, shown in _SKIP_STEPS
    ]
    + [
        BadInput(
            f"LigerCallback-kernels-{case}",
            functools.partial(LigerCallback, kernels=value),
            ("chunk_bytes" if case == "chunk_bytes" else "kernels", shown),
        )
        for case, value, shown in _KERNELS
    ]
    + [
        BadInput(
            f"LigerCallback-{argument}-{value!r}",
            functools.partial(LigerCallback, **{argument: value}),
            (argument, repr(value).strip("[]"), expected),
        )
        for argument, value, expected in (
            ("activation_checkpointing", -1, "a number of layers"),
            ("activation_checkpointing", "all", "'full'"),
            ("activation_checkpointing", [5], "a class or its name"),
            ("memory_budget", 0, "a share"),
            ("memory_budget", "80%", "'auto'"),
        )
    ]
)
