"""GroupNorm: each sample's channels are normalized in groups, y = (x - mean) * rstd * weight + bias.

Mean and rstd = 1 / sqrt(mean((x - mean)**2) + eps) go over a group: its channels and all their positions, adjacent in
memory. Weight and bias belong to channels. Arithmetic is float32 for every half-precision input, and y is rounded once.
With n = (x - mean) * rstd and means over the group,

    dx = rstd * (dy * weight - n * mean(dy * weight * n) - mean(dy * weight))
    dweight = sum over samples and positions of dy * n        dbias = sum over samples and positions of dy

A group may be of any size, so its program reads it twice, block by block: for the statistics (in backward, for each
channel's two sums, of which the means are made) and for the result; the second reading finds what the L2 cache kept.
Nothing is added atomically, so results repeat. Saved: x, weight, bias, rstd and mean (8 bytes per group).
Source: arXiv:1803.08494.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating_tensors, check_shape, wrong_value
from liger_ops.autograd import differentiable
from liger_ops.norm.checks import as_num_groups, as_number
from liger_ops.norm.reductions import moments, sum_parts


def group_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float) -> Tensor:
    """PyTorch's own GroupNorm in float32 or wider, rounded to x's dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (weight, bias))
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # of a bias alone, PyTorch's backward on the CPU fails
    return F.group_norm(x.to(dtype), num_groups, weight, bias, eps).to(x.dtype)


@backend.launch_cache
def choose_launch(
    channels_per_group: int, num_positions: int, element_size: int, shared_bytes: int
) -> tuple[dict[str, int], int]:
    """How both kernels are launched, and forward's ``BLOCK_SIZE``: 8192 elements; 2048 where groups are small.

    A block is channels of few positions rather than few channels, since only blocks of the same channels are loaded
    ahead. On an H200, 16 samples of 512 channels of 4096 positions in 32 groups, time over the bound: 1.5 forward and
    backward, 2.1 and 2.5 in blocks of 4096 elements of one channel.
    """
    group_size = channels_per_group * num_positions
    most_elements, num_warps = (2048, 4) if group_size < 32768 else (8192, 8)
    most_channels = min(16, triton.next_power_of_2(channels_per_group))
    block_positions = min(triton.next_power_of_2(num_positions), most_elements // most_channels)
    launch = {
        "BLOCK_CHANNELS": min(triton.next_power_of_2(channels_per_group), most_elements // block_positions),
        "BLOCK_POSITIONS": block_positions,
        "NUM_STAGES": 1 + min(3, shared_bytes // (2 * most_elements * element_size)),
        "num_warps": num_warps,
    }
    return launch, min(triton.next_power_of_2(group_size), most_elements)


# Above, offsets inside a group may overflow int32; blocks end up to a few million elements past the last one.
_MAX_INT32_ELEMENTS = 2**31 - 2**24


@triton.jit
def _load_parameter(ptr, channels, mask, DEFAULT: tl.constexpr):
    """A weight or bias of some channels in float32, or DEFAULT if there is none."""
    if ptr is None:
        return DEFAULT
    else:
        return tl.load(ptr + channels, mask=mask, other=0.0).to(tl.float32)


@backend.Kernel
def _forward_kernel(
    x_ptr,  # [num_rows, channels_per_group, num_positions], contiguous; a row is one group of one sample
    weight_ptr,  # [num_groups, channels_per_group] or None
    bias_ptr,  # [num_groups, channels_per_group] or None
    y_ptr,  # as x_ptr
    statistics_ptr,  # [2, num_rows], rstd and mean
    num_rows,
    num_groups,
    channels_per_group,
    num_positions,
    eps,
    WIDE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program normalizes one row."""
    if WIDE:  # all that is computed from it then is int64
        num_positions = tl.cast(num_positions, tl.int64)
    row = tl.program_id(0).to(tl.int64)
    group_size = channels_per_group * num_positions
    row_start = row * group_size
    mean, deviation = moments(x_ptr + row_start, group_size, BLOCK_SIZE, NUM_STAGES)
    rstd = tl.rsqrt(deviation / group_size + eps)
    tl.store(statistics_ptr + row, rstd)
    tl.store(statistics_ptr + num_rows + row, mean)
    first_of_group = row % num_groups * channels_per_group
    for first_channel in range(0, channels_per_group, BLOCK_CHANNELS):
        channels = first_channel + tl.arange(0, BLOCK_CHANNELS)[:, None]
        channel_mask = channels < channels_per_group
        scale = rstd * _load_parameter(weight_ptr, first_of_group + channels, channel_mask, 1.0)
        shift = _load_parameter(bias_ptr, first_of_group + channels, channel_mask, 0.0)
        for first_position in tl.range(0, num_positions, BLOCK_POSITIONS, num_stages=NUM_STAGES):
            positions = first_position + tl.arange(0, BLOCK_POSITIONS)[None, :]
            mask = channel_mask & (positions < num_positions)
            offsets = row_start + channels * num_positions + positions
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            y = (x - mean) * scale + shift
            tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _backward_kernel(
    x_ptr,  # [num_rows, channels_per_group, num_positions], contiguous
    grad_y_ptr,  # as x_ptr
    weight_ptr,  # [num_groups, channels_per_group] or None
    statistics_ptr,  # [2, num_rows], rstd and mean
    grad_x_ptr,  # as x_ptr; None where it is not computed
    parts_ptr,  # [2, num_samples, num_groups, channels_per_group], sums of dy * n and of dy; or None
    num_rows,
    num_groups,
    channels_per_group,
    num_positions,
    WIDE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program takes each channel's sums over one row, and computes grad_x."""
    if WIDE:
        num_positions = tl.cast(num_positions, tl.int64)
        num_rows = tl.cast(num_rows, tl.int64)
    row = tl.program_id(0).to(tl.int64)
    row_start = row * channels_per_group * num_positions
    first_of_group = row % num_groups * channels_per_group
    rstd = tl.load(statistics_ptr + row)
    mean = tl.load(statistics_ptr + num_rows + row)

    projection = tl.zeros([BLOCK_CHANNELS, 1], dtype=tl.float32)
    grad_mean = tl.zeros([BLOCK_CHANNELS, 1], dtype=tl.float32)
    for first_channel in range(0, channels_per_group, BLOCK_CHANNELS):
        channels = first_channel + tl.arange(0, BLOCK_CHANNELS)[:, None]
        channel_mask = channels < channels_per_group
        products = tl.zeros([BLOCK_CHANNELS, BLOCK_POSITIONS], dtype=tl.float32)
        gradients = tl.zeros([BLOCK_CHANNELS, BLOCK_POSITIONS], dtype=tl.float32)
        for first_position in tl.range(0, num_positions, BLOCK_POSITIONS, num_stages=NUM_STAGES):
            positions = first_position + tl.arange(0, BLOCK_POSITIONS)[None, :]
            mask = channel_mask & (positions < num_positions)
            offsets = row_start + channels * num_positions + positions
            grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            products += grad_y * (x - mean)
            gradients += grad_y
        product = tl.sum(products, axis=1)[:, None] * rstd
        gradient = tl.sum(gradients, axis=1)[:, None]
        if parts_ptr is not None:
            part_ptrs = parts_ptr + row * channels_per_group + channels
            tl.store(part_ptrs, product, mask=channel_mask)
            tl.store(part_ptrs + num_rows * channels_per_group, gradient, mask=channel_mask)
        scale = _load_parameter(weight_ptr, first_of_group + channels, channel_mask, 1.0)
        projection += product * scale
        grad_mean += gradient * scale

    if grad_x_ptr is not None:
        group_size = channels_per_group * num_positions
        mean_projection = tl.sum(projection) * rstd / group_size
        mean_gradient = tl.sum(grad_mean) / group_size
        for first_channel in range(0, channels_per_group, BLOCK_CHANNELS):
            channels = first_channel + tl.arange(0, BLOCK_CHANNELS)[:, None]
            channel_mask = channels < channels_per_group
            scale = _load_parameter(weight_ptr, first_of_group + channels, channel_mask, 1.0)
            for first_position in tl.range(0, num_positions, BLOCK_POSITIONS, num_stages=NUM_STAGES):
                positions = first_position + tl.arange(0, BLOCK_POSITIONS)[None, :]
                mask = channel_mask & (positions < num_positions)
                offsets = row_start + channels * num_positions + positions
                grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                grad_x = rstd * (grad_y * scale - (x - mean) * mean_projection - mean_gradient)
                tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)


def _allocate(x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float) -> list[Tensor]:
    """y, and rstd and mean of each sample's groups."""
    return [x.new_empty(x.shape), x.new_empty((2, x.shape[0] * num_groups), dtype=torch.float32)]


def _shared_arguments(
    x: Tensor, weight: Tensor | None, statistics: Tensor, num_groups: int
) -> tuple[dict[str, Any], int]:
    """Arguments of both kernels, and forward's ``BLOCK_SIZE``."""
    num_rows = statistics.shape[1]
    channels_per_group, num_positions = x.shape[1] // num_groups, math.prod(x.shape[2:])
    launch, block_size = choose_launch(
        channels_per_group, num_positions, x.element_size(), backend.hardware(x.device).ahead_bytes
    )
    return {
        "x_ptr": x.contiguous(),
        "weight_ptr": None if weight is None else weight.contiguous(),
        "statistics_ptr": statistics,
        "num_rows": num_rows,
        "num_groups": num_groups,
        "channels_per_group": channels_per_group,
        "num_positions": num_positions,
        "WIDE": x.numel() > _MAX_INT32_ELEMENTS,
        **launch,
    }, block_size


def _forward(
    outputs: list[Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float
) -> None:
    y, statistics = outputs
    arguments, block_size = _shared_arguments(x, weight, statistics, num_groups)
    _forward_kernel.launch(
        statistics.shape[1],
        bias_ptr=None if bias is None else bias.contiguous(),
        y_ptr=y,
        eps=eps,
        BLOCK_SIZE=block_size,
        **arguments,
    )


def _backward(gradients: Any, grad_y: Tensor, x: Tensor, weight: Tensor | None, *others: Any) -> None:
    _, statistics, num_groups, _ = others
    grad_x, grad_weight, grad_bias = gradients
    arguments, _ = _shared_arguments(x, weight, statistics, num_groups)
    parts = None if grad_weight is None and grad_bias is None else statistics.new_empty(2, x.shape[0], x.shape[1])
    _backward_kernel.launch(
        statistics.shape[1], grad_y_ptr=grad_y.contiguous(), grad_x_ptr=grad_x, parts_ptr=parts, **arguments
    )
    if parts is not None:
        # The weight's parts come first; of one gradient alone, take only its own.
        wanted = parts[:1] if grad_bias is None else parts[1:] if grad_weight is None else parts
        sum_parts(wanted, grad_weight, grad_bias)


_compute = differentiable(
    "group_norm", group_norm_reference, _forward, _backward, allocate=_allocate, others=("statistics",)
)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalizes each sample's channels in groups, as ``F.group_norm`` does.

    Args:
        input: ``[batch_size, num_channels, *]``.
        num_groups: A divisor of num_channels.
        weight: ``[num_channels]``, in any floating dtype; None for 1.
        bias: ``[num_channels]``, in any floating dtype; None for 0.
        eps: Added to the variance, at least 0.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If the shapes or devices do not fit together, or eps is negative or not finite.
    """
    check_floating_tensors("input", input, weight=weight, bias=bias)
    if input.dim() < 2:
        raise wrong_value("input", "a tensor of shape [batch_size, num_channels, *]", input)
    num_channels = input.shape[1]
    num_groups = as_num_groups(num_groups, num_channels)
    check_shape("weight", weight, (num_channels,), "num_channels")
    check_shape("bias", bias, (num_channels,), "num_channels")
    eps = as_number("eps", eps, at_least=0)
    return _compute(input, weight, bias, (num_groups, eps))
