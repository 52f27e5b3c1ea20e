"""Checks of arguments, and the dtype of results, that all norms share."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from liger_ops.arguments import (
    as_integers,
    check_floating_tensors,
    check_integer,
    check_number,
    check_shape,
    wrong_value,
)


def as_number(name: str, value: Any, *, at_least: Literal[0] | None = None) -> float:
    """``value`` as a float; raises unless it is a finite number, with ``at_least`` of at least 0."""
    if type(value) is float and 0.0 <= value < math.inf:  # as almost always, without the time of three calls
        return value
    check_number(name, value, at_least=at_least)
    return float(value)


def as_num_groups(value: Any, num_channels: int) -> int:
    """``value`` as an integer; raises unless it divides ``num_channels``."""
    check_integer("num_groups", value)
    if value < 1 or num_channels % value:
        raise wrong_value("num_groups", f"a divisor of num_channels = {num_channels}", value)
    return value


def check_columns(input: Tensor, shape: str = "[*, hidden_size]") -> int:
    """The number of columns; raises if there are none, and names the ``shape`` that input should have."""
    hidden_size = input.shape[-1] if input.dim() else 0
    if hidden_size == 0:
        raise wrong_value("input", f"a tensor of shape {shape}, hidden_size positive", input)
    return hidden_size


def check_row_norm(input: Tensor, normalized_shape: Sequence[int], **parameters: Any) -> tuple[int, ...]:
    """``normalized_shape`` as a tuple; raises unless it has the trailing sizes of input and all sizes of parameters."""
    check_floating_tensors("input", input, **parameters)
    sizes = as_integers("normalized_shape", normalized_shape)
    if not sizes or 0 in sizes or input.shape[-len(sizes) :] != sizes:
        raise ValueError(
            "normalized_shape must be input's trailing sizes, positive and at least one, got"
            f" {sizes} for input of shape {tuple(input.shape)}"
        )
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != sizes:
            check_shape(name, parameter, sizes, "normalized_shape")
    return sizes


def output_dtype(x_dtype: torch.dtype, weight: Tensor | None, casting: str) -> torch.dtype:
    """Of a norm of x by a casting of :func:`liger_ops.rms_norm`."""
    return x_dtype if casting == "gemma" or weight is None else torch.promote_types(x_dtype, weight.dtype)
