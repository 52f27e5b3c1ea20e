"""RMSNorm with a gate, in groups of columns, or with a scale and a shift of each sample, as adaptive norms have them.

:mod:`liger_ops.norm.sliced_kernels` has the maths, the precision and the kernels. Saved: inputs and rstd (4 bytes a
group of a row). Sources: arXiv:2405.21060 (Mamba 2), arXiv:2212.09748 (adaLN), arXiv:1910.07467.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_floating_tensors,
    check_integer,
    check_shape,
    wrong_value,
)
from liger_ops.autograd import differentiable
from liger_ops.norm.checks import as_number, check_columns, output_dtype
from liger_ops.norm.sliced_kernels import MAX_GROUP_SIZE, backward_kernel, choose_launch, forward_kernel

GatedCasting = Literal["gemma", "llama"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def sliced_norm_reference(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    num_groups: int,
    eps: float,
    offset: float,  # added to the weight
    gating: str,  # "first", "last" or, without a gate, "none"
    activation: str,  # of the gate
    casting: str,  # "gemma" or "llama", see gated_rms_norm
) -> Tensor:
    """The norm in plain PyTorch, in float32 or wider; scale and shift have x's dimensions, or 1 in their place."""
    factor = 1.0 if gate is None else ACTIVATIONS[activation](backend.wide(gate))
    z = (backend.wide(x) * (factor if gating == "first" else 1.0)).unflatten(-1, (num_groups, -1))
    y = (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if casting == "llama":
        y = backend.wide(y.to(x.dtype))
    if weight is not None:
        y = y * (offset + backend.wide(weight))
    if scale is not None:
        y = y * (1.0 + backend.wide(scale))
    if shift is not None:
        y = y + backend.wide(shift)
    return (y * factor if gating == "last" else y).to(output_dtype(x.dtype, weight, casting))


def _allocate(x: Tensor, gate: Tensor | None, weight: Tensor | None, *others: Any) -> list[Tensor]:
    """y, and rstd of each group of each row."""
    num_groups, *_, casting = others[2:]
    y = x.new_empty(x.shape, dtype=output_dtype(x.dtype, weight, casting))
    return [y, x.new_empty((x.numel() // x.shape[-1], num_groups), dtype=torch.float32)]


def _shared_arguments(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, scale: Tensor | None, other: Tensor | None, *options: Any
) -> tuple[int, int, dict[str, Any]]:
    """Samples, tiles of a slice, and the arguments that both kernels have; ``other`` is what one reads in its loop."""
    num_groups, _, offset, gating, activation, _ = options
    hidden_size = x.shape[-1]
    num_samples = 1 if scale is None else scale.numel() // hidden_size
    rows_per_sample = x.numel() // hidden_size // num_samples
    input_bytes = sum(each.element_size() for each in (x, gate, other) if each is not None)
    launch = choose_launch(hidden_size // num_groups, input_bytes, backend.hardware(x.device).ahead_bytes)
    rows = backend.as_rows(x, hidden_size)
    gate_rows = None if gate is None else backend.as_rows(gate, hidden_size)
    arguments = {
        "x_ptr": rows,
        "gate_ptr": gate_rows,
        "weight_ptr": None if weight is None else weight.contiguous(),
        "scale_ptr": None if scale is None else scale.contiguous(),
        "x_row_stride": rows.stride(0),
        "gate_row_stride": 0 if gate_rows is None else gate_rows.stride(0),
        "rows_per_sample": rows_per_sample,
        "num_groups": num_groups,
        "group_size": hidden_size // num_groups,
        "offset": offset,
        "GATING": gating,
        "ACTIVATION": activation,
        "BLOCK_ROWS": launch.block_rows,
        "BLOCK_SIZE": launch.block_size,
        "NUM_STAGES": launch.num_stages,
        "num_warps": launch.num_warps,
    }
    return num_samples, launch.num_programs(rows_per_sample), arguments


def _forward(outputs: list[Tensor], *args: Any) -> None:
    shift, num_groups, eps, *_, casting = args[4:]
    num_samples, num_parts, arguments = _shared_arguments(*args)
    forward_kernel.launch(
        num_samples * num_groups * num_parts,
        shift_ptr=None if shift is None else shift.contiguous(),
        y_ptr=outputs[0],
        rstd_ptr=outputs[1],
        num_parts=num_parts,
        eps=eps,
        CASTING=casting,
        **arguments,
    )


def _backward(gradients: Any, grad_y: Tensor, x: Tensor, *others: Any) -> None:
    gate, weight, scale, _, rstd, *options = others
    grad_x, grad_gate, grad_weight, grad_scale, grad_shift = gradients
    num_samples, num_tiles, arguments = _shared_arguments(x, gate, weight, scale, grad_y, *options)
    num_slices, offset = num_samples * arguments["num_groups"], arguments["offset"]
    num_parts = min(num_tiles, max(1, 2 * backend.hardware(x.device).multiprocessors // num_slices))
    has_sums = grad_weight is not None or grad_scale is not None, grad_shift is not None
    parts = rstd.new_empty((sum(has_sums), num_samples, num_parts, x.shape[-1])) if any(has_sums) else None
    grad_rows = backend.as_rows(grad_y, x.shape[-1])
    backward_kernel.launch(
        num_slices * num_parts,
        grad_y_ptr=grad_rows,
        rstd_ptr=rstd,
        grad_x_ptr=grad_x,
        grad_gate_ptr=grad_gate,
        parts_ptr=parts,
        grad_y_row_stride=grad_rows.stride(0),
        num_parts=num_parts,
        GRAD_SCALE=has_sums[0],
        GRAD_SHIFT=has_sums[1],
        **arguments,
    )
    if parts is not None:
        sums = parts.sum(dim=2)
        if grad_shift is not None:
            grad_shift.copy_(sums[-1].view(grad_shift.shape))
        if grad_weight is not None:
            factor = 1.0 if scale is None else 1.0 + scale.reshape(sums.shape[1:]).float()
            grad_weight.copy_((sums[0] * factor).sum(dim=0))
        if grad_scale is not None:
            grad_scale.copy_((sums[0] * (1.0 if weight is None else offset + weight.float())).view(grad_scale.shape))


_compute = differentiable(
    "sliced_norm",
    sliced_norm_reference,
    _forward,
    _backward,
    allocate=_allocate,
    others=("rstd",),
    fits=lambda *args: args[0].shape[-1] // args[5] <= MAX_GROUP_SIZE,
)


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
    return _compute(input, gate, weight, None, None, (num_groups, eps, 0.0, gating, activation, casting))


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
    scale, shift = scale.reshape(shape), None if shift is None else shift.reshape(shape)
    return _compute(input, None, weight, scale, shift, (1, eps, offset, "none", "silu", "gemma"))
