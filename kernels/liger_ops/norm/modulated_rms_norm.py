"""RMSNorm with a scale and a shift of each sample, as adaptive norms have them: y = n * s + shift.

With n = x * rstd, rstd = 1 / sqrt(mean(x**2) + eps) and s = (offset + weight) * (1 + scale). Arithmetic is float32, and
y is rounded once. Gradients and kernels: :mod:`liger_ops.norm.sliced_kernels`. Saved: x, weight, scale, shift and rstd
(4 bytes per row). Sources: arXiv:2212.09748 (adaLN), arXiv:1910.07467.
"""

from torch import Tensor

from liger_ops.arguments import check_floating_tensors, check_shape, wrong_value
from liger_ops.norm.checks import as_number, check_columns
from liger_ops.norm.sliced_norm import SlicedNormOptions, run


def modulated_rms_norm(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
) -> Tensor:
    """Returns ``rms_norm(input) * (offset + weight) * (1 + scale) + shift`` with one scale and shift for each sample.

    Args:
        input: ``[batch_size, *, hidden_size]``.
        weight: ``[hidden_size]``; None for 1.
        scale: ``[batch_size, hidden_size]``, or with more of input's leading dimensions, those that follow being 1 or
            left out.
        shift: Of scale's shape; None for 0.
        eps: Added to the mean square, at least 0.
        offset: Added to the weight; 1 for weights that are stored as deviations from one.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If shapes or devices do not fit together, eps is negative, a number is not finite, or offset is
            given without a weight.
    """
    check_floating_tensors("input", input, optional=False, scale=scale)
    check_floating_tensors("input", input, weight=weight, shift=shift)
    hidden_size = check_columns(input, "[batch_size, *, hidden_size]")
    missing = input.dim() - scale.dim()
    shape = (*scale.shape[:-1], *[1] * missing, *scale.shape[-1:])
    num_leading = max([0, *[index + 1 for index, size in enumerate(shape[:-1]) if size != 1]])
    sizes = (*input.shape[:num_leading], hidden_size)
    if scale.dim() == 0 or missing < 0 or (*shape[:num_leading], shape[-1]) != sizes:
        expected = f"[batch_size, hidden_size] or with more leading dimensions of input's shape {tuple(input.shape)}"
        raise wrong_value("scale", expected, scale)
    check_shape("weight", weight, (hidden_size,), "hidden_size")
    check_shape("shift", shift, scale.shape, "scale's")
    eps, offset = as_number("eps", eps, at_least=0), as_number("offset", offset)
    if offset and weight is None:
        raise wrong_value("offset", "0 without a weight, which it is added to", offset)
    options = SlicedNormOptions(1, eps, offset, "none", "silu", "gemma")
    scale, shift = scale.reshape(shape), None if shift is None else shift.reshape(shape)
    return run(input, None, weight, scale, shift, options=options)
