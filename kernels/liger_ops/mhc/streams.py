"""Streams of each token, mixed by a matrix of the token: y[o] = sum over i of w[o, i] * x[i] + v[o] * f.

    dx[i] = sum over o of w[o, i] * dy[o]        df = sum over o of v[o] * dy[o]
    dw[o, i] = <dy[o], x[i]>                     dv[o] = <dy[o], f>

Arithmetic is float32, and each result is rounded once. One program takes one token in either direction, and reads x, f
and dy from memory once. Saved: the inputs. Source: arXiv:2512.24880.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating_tensors, check_shape
from liger_ops.autograd import differentiable
from liger_ops.backend import RowLaunch
from liger_ops.mhc.coefficients import check_streams


def mix_streams_reference(x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None) -> Tensor:
    """The mixture in plain PyTorch, in float32 or wider, rounded once."""
    dtype = torch.float32
    for each in (x, f, w, v):
        dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
    with backend.without_autocast(x.device.type):
        y = w.to(dtype) @ x.to(dtype)
        if f is not None and v is not None:
            y = y + v.to(dtype).unsqueeze(-1) * f.to(dtype).unsqueeze(-2)
    return y.to(x.dtype)


MAX_STREAMS = 32
"""Of which registers hold a tile: more run in PyTorch."""


@backend.launch_cache
def choose_launch(num_streams: int, num_channels: int) -> RowLaunch:
    """A tile of all streams and 4096 elements, or fewer channels if there are."""
    padded = backend.next_power_of_2(num_streams)
    return RowLaunch(min(4096 // padded, max(16, backend.next_power_of_2(num_channels))), 4, block_rows=padded)


@backend.Kernel
def _forward_kernel(
    x_ptr,  # [num_rows, num_in * num_channels]
    f_ptr,  # [num_rows, num_channels] or None
    w_ptr,  # [num_rows, num_out * num_in]
    v_ptr,  # [num_rows, num_out] or None
    y_ptr,  # [num_rows, num_out * num_channels], contiguous
    x_row_stride,
    f_row_stride,
    w_row_stride,
    v_row_stride,
    num_in,
    num_channels,
    NUM_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    streams = tl.arange(0, BLOCK_IN)
    for start in range(0, num_channels, BLOCK_SIZE):
        columns = start + tl.arange(0, BLOCK_SIZE)
        mask = columns < num_channels
        offsets = streams[:, None] * num_channels + columns[None, :]
        x_mask = (streams[:, None] < num_in) & mask[None, :]
        x = tl.load(x_ptr + row * x_row_stride + offsets, mask=x_mask, other=0.0).to(tl.float32)
        for out in tl.static_range(NUM_OUT):
            w = tl.load(w_ptr + row * w_row_stride + out * num_in + streams, mask=streams < num_in, other=0.0)
            y = tl.sum(w.to(tl.float32)[:, None] * x, axis=0)
            if f_ptr is not None:
                f = tl.load(f_ptr + row * f_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
                y += tl.load(v_ptr + row * v_row_stride + out).to(tl.float32) * f
            y_offsets = (row * NUM_OUT + out) * num_channels + columns
            tl.store(y_ptr + y_offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _backward_kernel(
    x_ptr,  # [num_rows, num_in * num_channels]
    f_ptr,  # [num_rows, num_channels] or None
    w_ptr,  # [num_rows, num_out * num_in]
    v_ptr,  # [num_rows, num_out] or None
    grad_y_ptr,  # [num_rows, num_out * num_channels]
    grad_x_ptr,  # [num_rows, num_in * num_channels], contiguous, or None
    grad_f_ptr,  # [num_rows, num_channels], contiguous, or None
    grad_w_ptr,  # [num_rows, num_out * num_in], contiguous, or None
    grad_v_ptr,  # [num_rows, num_out], contiguous, or None
    x_row_stride,
    f_row_stride,
    w_row_stride,
    v_row_stride,
    grad_y_row_stride,
    num_in,
    num_channels,
    NUM_OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes the gradients of one row."""
    row = tl.program_id(0).to(tl.int64)
    streams = tl.arange(0, BLOCK_IN)
    outs = tl.arange(0, BLOCK_OUT)
    grad_w = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_OUT], dtype=tl.float32)
    for start in range(0, num_channels, BLOCK_SIZE):
        columns = start + tl.arange(0, BLOCK_SIZE)
        mask = columns < num_channels
        offsets = streams[:, None] * num_channels + columns[None, :]
        x_mask = (streams[:, None] < num_in) & mask[None, :]
        x = tl.load(x_ptr + row * x_row_stride + offsets, mask=x_mask, other=0.0).to(tl.float32)
        grad_x = tl.zeros([BLOCK_IN, BLOCK_SIZE], dtype=tl.float32)
        grad_f = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        for out in tl.static_range(NUM_OUT):
            grad = tl.load(grad_y_ptr + row * grad_y_row_stride + out * num_channels + columns, mask=mask, other=0.0)
            grad = grad.to(tl.float32)
            if grad_x_ptr is not None:
                w = tl.load(w_ptr + row * w_row_stride + out * num_in + streams, mask=streams < num_in, other=0.0)
                grad_x += w.to(tl.float32)[:, None] * grad[None, :]
            if grad_w_ptr is not None:
                grad_w += tl.where(outs[:, None] == out, tl.sum(grad[None, :] * x, axis=1)[None, :], 0.0)
            if grad_f_ptr is not None:
                grad_f += tl.load(v_ptr + row * v_row_stride + out).to(tl.float32) * grad
            if grad_v_ptr is not None:
                f = tl.load(f_ptr + row * f_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
                grad_v += tl.where(outs == out, tl.sum(grad * f, axis=0), 0.0)
        if grad_x_ptr is not None:
            x_offsets = row * num_in * num_channels + offsets
            tl.store(grad_x_ptr + x_offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=x_mask)
        if grad_f_ptr is not None:
            tl.store(grad_f_ptr + row * num_channels + columns, grad_f.to(grad_f_ptr.dtype.element_ty), mask=mask)
    if grad_w_ptr is not None:
        offsets = (row * NUM_OUT + outs[:, None]) * num_in + streams[None, :]
        mask = (outs[:, None] < NUM_OUT) & (streams[None, :] < num_in)
        tl.store(grad_w_ptr + offsets, grad_w.to(grad_w_ptr.dtype.element_ty), mask=mask)
    if grad_v_ptr is not None:
        tl.store(grad_v_ptr + row * NUM_OUT + outs, grad_v.to(grad_v_ptr.dtype.element_ty), mask=outs < NUM_OUT)


def _launch(kernel: Any, x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None, **others: Any) -> None:
    """Launches a kernel on all rows; tensors need not be contiguous."""
    *_, num_in, num_channels = x.shape
    named = {"x": (x, num_in * num_channels), "f": (f, num_channels), "w": (w, num_in * w.shape[-2])}
    named["v"] = (v, w.shape[-2])
    if "grad_y" in others:
        named["grad_y"] = (others.pop("grad_y"), w.shape[-2] * num_channels)
    for name, (tensor, num_columns) in named.items():
        rows = None if tensor is None else backend.as_rows(tensor, num_columns)
        others |= {f"{name}_ptr": rows, f"{name}_row_stride": 0 if rows is None else rows.stride(0)}
    launch = choose_launch(num_in, num_channels)
    kernel.launch(
        others["x_ptr"].shape[0],
        num_in=num_in,
        num_channels=num_channels,
        NUM_OUT=w.shape[-2],
        BLOCK_IN=launch.block_rows,
        BLOCK_SIZE=launch.block_size,
        num_warps=launch.num_warps,
        **others,
    )


def _empty(x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-2], w.shape[-2], x.shape[-1]))]


@backend.register_op("mhc_mix_forward", fake=_empty)
def _mix_forward(x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None) -> list[Tensor]:
    (y,) = _empty(x, f, w, v)
    if y.numel():
        _launch(_forward_kernel, x, f, w, v, y_ptr=y)
    return [y]


@backend.register_op("mhc_mix_backward", fake=lambda grad_y, *others: backend.empty_gradients(others[:4], others[-1]))
def _mix_backward(
    grad_y: Tensor, x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None, needs: list[bool]
) -> list[Tensor]:
    """Returns those gradients of x, f, w and v that are needed."""
    gradients = backend.empty_gradients((x, f, w, v), needs)
    if grad_y.numel():
        names = ("grad_x_ptr", "grad_f_ptr", "grad_w_ptr", "grad_v_ptr")
        pointers = dict(zip(names, backend.spread(gradients, needs), strict=True))
        block_out = backend.next_power_of_2(w.shape[-2])
        _launch(_backward_kernel, x, f, w, v, grad_y=grad_y, BLOCK_OUT=block_out, **pointers)
    return gradients


_mix = differentiable("MixStreamsFunction", mix_streams_reference, _mix_forward, _mix_backward)


def _mix_streams(x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None) -> Tensor:
    if x.shape[-2] > MAX_STREAMS:
        return mix_streams_reference(x, f, w, v)
    return _mix(x, f, w, v, ())


def mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """Returns what a layer reads of its streams: the sum of ``h_pre[..., i] * x[..., i, :]`` over all streams i.

    Args:
        x: ``[*, num_streams, num_channels]``.
        h_pre: ``[*, num_streams]`` in any floating dtype, as of :func:`mhc_coeffs`.

    Returns:
        ``[*, num_channels]`` in x's dtype, contiguous.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point.
        ValueError: If shapes or devices do not fit together.
    """
    check_floating_tensors("x", x, optional=False, h_pre=h_pre)
    check_streams(x)
    check_shape("h_pre", h_pre, x.shape[:-1], "[*, num_streams]")
    return _mix_streams(x, None, h_pre.unsqueeze(-2), None).squeeze(-2)


def mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Returns the streams after a layer: ``h_res @ x``, plus ``h_post[..., o] * f_out`` in each stream o.

    Args:
        x: ``[*, num_streams, num_channels]``, the streams before the layer.
        f_out: ``[*, num_channels]``, the layer's output.
        h_post: ``[*, num_streams]``, as of :func:`mhc_coeffs`.
        h_res: ``[*, num_streams, num_streams]``, of streams after and before.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError, ValueError: As :func:`mhc_pre`.
    """
    check_floating_tensors("x", x, optional=False, f_out=f_out, h_post=h_post, h_res=h_res)
    check_streams(x)
    *shape, num_streams, num_channels = x.shape
    check_shape("f_out", f_out, (*shape, num_channels), "[*, num_channels]")
    check_shape("h_post", h_post, (*shape, num_streams), "[*, num_streams]")
    check_shape("h_res", h_res, (*shape, num_streams, num_streams), "[*, num_streams, num_streams]")
    return _mix_streams(x, f_out, h_res, h_post)
