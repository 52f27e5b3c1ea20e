"""LayerNorm: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)**2) + eps).

Statistics, products and the gradients of weight and bias are float32 for every half-precision input, and y is rounded
once; squares are taken of centered values, so a large mean costs no accuracy. Saved: x, weight, bias, rstd and mean (8
bytes per row). Ops: :mod:`liger_ops.norm.row_norm`; gradients: :mod:`liger_ops.norm.kernels`. Source: arXiv:1607.06450.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from liger_ops.norm.checks import as_number, check_row_norm
from liger_ops.norm.row_norm import RowNormOptions, run


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Returns ``(input - mean) / sqrt(variance + eps) * weight + bias``, as ``F.layer_norm`` does.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        normalized_shape: The trailing dimensions that mean and variance go over.
        weight: Of ``normalized_shape``, in any floating dtype; None for 1.
        bias: Of ``normalized_shape``, in any floating dtype; None for 0.
        eps: Added to the variance, at least 0.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If the shapes or devices do not fit together, or eps is negative or not finite.
    """
    shape = check_row_norm(input, normalized_shape, weight=weight, bias=bias)
    eps = as_number("eps", eps, at_least=0)
    options = RowNormOptions(math.prod(shape), eps, 0.0, "gemma", True)
    return run(input, None, weight, bias, shape, options)
