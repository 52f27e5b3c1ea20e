"""RMSNorm: y = x * rstd * (offset + weight), rstd = 1 / sqrt(mean(x**2) + eps); x may be the sum of two tensors.

The mean of squares and the weight gradient are float32 for every half-precision input. ``casting`` says where rounding
happens: "gemma" computes in float32 and rounds the result once; "llama" rounds x * rstd to x's dtype before the weight
is applied; "none" rounds wherever ``x * rstd * (offset + weight)`` on tensors of those dtypes would: rstd, x * rstd,
offset + weight and the product. Backward treats rounding as the identity.

Saved: x (the sum, if there was one), weight, rstd (4 bytes per row). Ops: :mod:`liger_ops.norm.row_norm`; gradients:
:mod:`liger_ops.norm.kernels`. Source: arXiv:1910.07467.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from liger_ops.arguments import check_choice, check_floating_tensors, check_shape, wrong_value
from liger_ops.norm.checks import as_number, check_row_norm
from liger_ops.norm.row_norm import RowNormOptions, run

Casting = Literal["gemma", "llama", "none"]
CASTINGS: tuple[Casting, ...] = get_args(Casting)


def check_options(eps: Any, offset: Any, casting: Any, *, has_weight: bool) -> tuple[float | None, float]:
    """Returns eps and offset as floats; raises if one of them or casting is wrong."""
    if eps is not None:
        eps = as_number("eps", eps, at_least=0)
    offset = as_number("offset", offset)
    if offset and not has_weight:
        raise wrong_value("offset", "0 without a weight, which it is added to", offset)
    check_choice("casting", casting, CASTINGS)
    return eps, offset


def _run(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    offset: float,
    casting: Casting,
) -> Any:
    shape = check_row_norm(input, normalized_shape, weight=weight)
    eps, offset = check_options(eps, offset, casting, has_weight=weight is not None)
    if eps is None:
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    options = RowNormOptions(math.prod(shape), eps, offset, casting, False)
    return run(input, residual, weight, None, shape, options)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: Casting = "gemma",
) -> Tensor:
    """Returns ``input * rstd * (offset + weight)``, ``rstd = 1 / sqrt(mean(input**2) + eps)``; by default `F.rms_norm`.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        normalized_shape: The trailing dimensions that the mean goes over.
        weight: Of ``normalized_shape``; None leaves the normalized input as it is.
        eps: At least 0; None means the machine epsilon of the arithmetic, as in ``F.rms_norm``: float32's for half
            precision.
        offset: Added to the weight; 1 for models whose weights are stored as deviations from one (Gemma).
        casting: "gemma" computes in float32, rounds once and returns input's dtype. "llama" rounds the normalized value
            to input's dtype, then applies the weight and returns the promoted dtype of both. "none" does so too and
            also rounds rstd to input's dtype and offset + weight to weight's, as plain PyTorch without casts would.

    Returns:
        A contiguous tensor of input's shape.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If the shapes or devices do not fit together, casting is unknown, eps is negative, a number is not
            finite, or offset is given without a weight.
    """
    return _run(input, None, normalized_shape, weight, eps, offset, casting)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: Casting = "gemma",
) -> tuple[Tensor, Tensor]:
    """Returns ``rms_norm(input + residual, ...)`` and the sum, as a layer that adds to the residual stream needs them.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        residual: Of input's shape.
        normalized_shape, weight, eps, offset, casting: As in :func:`rms_norm`; input there is the sum here.

    Returns:
        The normalized sum and the sum itself, rounded to the promoted dtype of input and residual; both contiguous and
        of input's shape.

    Raises:
        TypeError, ValueError: As :func:`rms_norm`.
    """
    check_floating_tensors("input", input, residual=residual, optional=False)
    check_shape("residual", residual, input.shape, "input's")
    return _run(input, residual, normalized_shape, weight, eps, offset, casting)
