"""RMSNorm and a gate, y = n * weight * act(gate), or of the product with the gate, z = x * act(gate).

With n = z * rstd, rstd = 1 / sqrt(mean(z**2) + eps), where z = x if the norm comes before the gate, and y = n * weight
if it comes after. Means go over groups of columns. Gradients, precision and kernels:
:mod:`liger_ops.norm.sliced_kernels`. Saved: x, gate, weight, rstd (4 bytes a group of a row).
Sources: arXiv:2405.21060 (Mamba 2), arXiv:1910.07467.
"""

from typing import Literal, get_args

from torch import Tensor

from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_floating_tensors,
    check_integer,
    check_shape,
    wrong_value,
)
from liger_ops.norm.checks import as_number, check_columns
from liger_ops.norm.sliced_norm import ACTIVATIONS, SlicedNormOptions, run

GatedCasting = Literal["gemma", "llama"]


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    casting: GatedCasting = "gemma",
) -> Tensor:
    """Returns ``rms_norm(input) * weight * silu(gate)``, or ``rms_norm(input * silu(gate)) * weight``.

    Args:
        input: ``[*, hidden_size]``. Rows may lie apart in memory; they are read in place.
        gate: Of input's shape.
        weight: ``[hidden_size]``, in any floating dtype; None for 1.
        eps: Added to the mean square, at least 0.
        group_size: A divisor of hidden_size, the columns that a mean goes over, as in Mamba 2; None for all.
        norm_before_gate: Whether the gate multiplies the normalized input (Qwen3-Next) or the input (Mamba 2).
        activation: Of the gate, "silu" or "sigmoid".
        casting: "gemma" computes in float32, rounds once and returns input's dtype. "llama" rounds the normalized value
            to input's dtype before the weight is applied, and returns the promoted dtype of input and weight.

    Returns:
        A contiguous tensor of input's shape.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If shapes or devices do not fit together, group_size does not divide hidden_size, eps is negative or
            not finite, or activation or casting is unknown.
    """
    check_floating_tensors("input", input, optional=False, gate=gate)
    check_floating_tensors("input", input, weight=weight)
    hidden_size = check_columns(input)
    check_shape("gate", gate, input.shape, "input's")
    check_shape("weight", weight, (hidden_size,), "hidden_size")
    eps = as_number("eps", eps, at_least=0)
    check_integer("group_size", group_size, at_least=1, optional=True)
    if group_size is not None and hidden_size % group_size:
        raise wrong_value("group_size", f"a divisor of hidden_size = {hidden_size}", group_size)
    check_bool("norm_before_gate", norm_before_gate)
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_choice("casting", casting, get_args(GatedCasting))
    num_groups, gating = hidden_size // (group_size or hidden_size), "last" if norm_before_gate else "first"
    options = SlicedNormOptions(num_groups, eps, 0.0, gating, activation, casting)
    return run(input, gate, weight, None, None, options=options)
