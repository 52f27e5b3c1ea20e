"""Streams of each token, mixed by a matrix of the token: y[o] = sum over i of w[o, i] * x[i] + v[o] * f.

    dx[i] = sum over o of w[o, i] * dy[o]        df = sum over o of v[o] * dy[o]
    dw[o, i] = <dy[o], x[i]>                     dv[o] = <dy[o], f>

Arithmetic is float32, and each result is rounded once. One program takes one token in either direction, and reads x, f
and dy from memory once. Saved: the inputs. Source: arXiv:2512.24880.
"""

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor, nn

from liger_ops import backend
from liger_ops.arguments import (
    check_device,
    check_floating_dtype,
    check_floating_tensors,
    check_integer,
    check_shape,
    wrong_type,
)
from liger_ops.autograd import differentiable
from liger_ops.mhc.coefficients import MAX_STREAMS, check_options, check_streams, mhc_coeffs


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


@backend.Kernel
def _forward_kernel(
    x_ptr,  # [num_rows, num_in, num_channels], contiguous, as are all
    f_ptr,  # [num_rows, num_channels] or None
    w_ptr,  # [num_rows, NUM_OUT, num_in]
    v_ptr,  # [num_rows, NUM_OUT] or None
    y_ptr,  # [num_rows, NUM_OUT, num_channels]
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
        offsets = (row * num_in + streams[:, None]) * num_channels + columns[None, :]
        x_mask = (streams[:, None] < num_in) & mask[None, :]
        x = tl.load(x_ptr + offsets, mask=x_mask, other=0.0).to(tl.float32)
        for out in tl.static_range(NUM_OUT):
            place = row * NUM_OUT + out
            w = tl.load(w_ptr + place * num_in + streams, mask=streams < num_in, other=0.0)
            y = tl.sum(w.to(tl.float32)[:, None] * x, axis=0)
            if f_ptr is not None:
                f = tl.load(f_ptr + row * num_channels + columns, mask=mask, other=0.0).to(tl.float32)
                y += tl.load(v_ptr + place).to(tl.float32) * f
            tl.store(y_ptr + place * num_channels + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _backward_kernel(
    x_ptr,  # [num_rows, num_in, num_channels], contiguous, as are all
    f_ptr,  # [num_rows, num_channels] or None
    w_ptr,  # [num_rows, NUM_OUT, num_in]
    v_ptr,  # [num_rows, NUM_OUT] or None
    grad_y_ptr,  # [num_rows, NUM_OUT, num_channels]
    grad_x_ptr,  # gradients that are not needed are None
    grad_f_ptr,
    grad_w_ptr,
    grad_v_ptr,
    num_in,
    num_channels,
    NUM_OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes the gradients of one row."""
    row = tl.program_id(0).to(tl.int64)
    streams, outs = tl.arange(0, BLOCK_IN), tl.arange(0, BLOCK_OUT)
    grad_w = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_OUT], dtype=tl.float32)
    for start in range(0, num_channels, BLOCK_SIZE):
        columns = start + tl.arange(0, BLOCK_SIZE)
        mask = columns < num_channels
        offsets = (row * num_in + streams[:, None]) * num_channels + columns[None, :]
        x_mask = (streams[:, None] < num_in) & mask[None, :]
        x = tl.load(x_ptr + offsets, mask=x_mask, other=0.0).to(tl.float32)
        grad_x = tl.zeros([BLOCK_IN, BLOCK_SIZE], dtype=tl.float32)
        grad_f = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        for out in tl.static_range(NUM_OUT):
            place = row * NUM_OUT + out
            grad = tl.load(grad_y_ptr + place * num_channels + columns, mask=mask, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + place * num_in + streams, mask=streams < num_in, other=0.0).to(tl.float32)
            grad_x += w[:, None] * grad[None, :]
            grad_w += tl.where(outs[:, None] == out, tl.sum(grad[None, :] * x, axis=1)[None, :], 0.0)
            if f_ptr is not None:
                grad_f += tl.load(v_ptr + place).to(tl.float32) * grad
                f = tl.load(f_ptr + row * num_channels + columns, mask=mask, other=0.0).to(tl.float32)
                grad_v += tl.where(outs == out, tl.sum(grad * f, axis=0), 0.0)
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=x_mask)
        if grad_f_ptr is not None:
            tl.store(grad_f_ptr + row * num_channels + columns, grad_f.to(grad_f_ptr.dtype.element_ty), mask=mask)
    if grad_w_ptr is not None:
        offsets = (row * NUM_OUT + outs[:, None]) * num_in + streams[None, :]
        mask = (outs[:, None] < NUM_OUT) & (streams[None, :] < num_in)
        tl.store(grad_w_ptr + offsets, grad_w.to(grad_w_ptr.dtype.element_ty), mask=mask)
    if grad_v_ptr is not None:
        tl.store(grad_v_ptr + row * NUM_OUT + outs, grad_v.to(grad_v_ptr.dtype.element_ty), mask=outs < NUM_OUT)


def _launch(kernel: Any, tensors: dict[str, Tensor | None], **others: Any) -> None:
    """Launches a kernel on all rows, in tiles of all streams and at most 4096 elements."""
    pointers: dict[str, Any] = {
        f"{name}_ptr": None if each is None else each.contiguous() for name, each in tensors.items()
    }
    *shape, num_in, num_channels = pointers["x_ptr"].shape
    block_in = backend.next_power_of_2(num_in)
    kernel.launch(
        math.prod(shape),
        num_in=num_in,
        num_channels=num_channels,
        NUM_OUT=pointers["w_ptr"].shape[-2],
        BLOCK_IN=block_in,
        BLOCK_SIZE=min(4096 // block_in, max(16, backend.next_power_of_2(num_channels))),
        num_warps=4,
        **pointers,
        **others,
    )


def _allocate(x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-2], w.shape[-2], x.shape[-1]))]


def _forward(outputs: list[Tensor], x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None) -> None:
    _launch(_forward_kernel, {"x": x, "f": f, "w": w, "v": v}, y_ptr=outputs[0])


def _backward(gradients: Any, grad_y: Tensor, x: Tensor, f: Tensor | None, w: Tensor, v: Tensor | None) -> None:
    names = ("grad_x_ptr", "grad_f_ptr", "grad_w_ptr", "grad_v_ptr")
    tensors = {"x": x, "f": f, "w": w, "v": v, "grad_y": grad_y}
    block_out = backend.next_power_of_2(w.shape[-2])
    _launch(_backward_kernel, tensors, BLOCK_OUT=block_out, **dict(zip(names, gradients, strict=True)))


_mix = differentiable(
    "mhc_mix",
    mix_streams_reference,
    _forward,
    _backward,
    allocate=_allocate,
    fits=lambda x, *_: x.shape[-2] <= MAX_STREAMS,
)


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
    return _mix(x, None, h_pre.unsqueeze(-2), None, ()).squeeze(-2)


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
    return _mix(x, f_out, h_res, h_post, ())


class HyperConnection(nn.Module):
    """A layer with manifold-constrained hyper-connections: ``[*, num_streams, num_channels]`` to the same.

    The layer gets :func:`liger_ops.mhc_pre` of the streams, and :func:`liger_ops.mhc_post_res` adds its output to them,
    both with coefficients of :func:`liger_ops.mhc_coeffs`, whose parameters are ``phi``, ``b``, and ``alpha_pre``,
    ``alpha_post`` and ``alpha_res``, which begin at 0.01: at first, coefficients hardly depend on the input.

    Args:
        layer: ``[*, num_channels]`` to the same.
        num_streams, num_channels: Of input and output.
        tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult: As in :func:`liger_ops.mhc_coeffs`.
        device, dtype: Of the parameters, without the layer's.
    """

    def __init__(
        self,
        layer: nn.Module,
        num_streams: int,
        num_channels: int,
        *,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(layer, nn.Module):
            raise wrong_type("layer", "a torch.nn.Module", layer)
        check_integer("num_streams", num_streams, at_least=1)
        check_integer("num_channels", num_channels, at_least=1)
        options: dict[str, Any] = {
            "tmax": tmax, "rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps, "post_mult": post_mult
        }  # fmt: skip
        check_options(**options)
        check_device("device", device)
        check_floating_dtype("dtype", dtype)
        super().__init__()
        self.layer = layer
        self.options = options
        num_columns = num_streams * (num_streams + 2)
        self.phi = nn.Parameter(torch.empty(num_streams * num_channels, num_columns, device=device, dtype=dtype))
        self.b = nn.Parameter(torch.empty(num_columns, device=device, dtype=dtype))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.empty(1, device=device, dtype=dtype)) for _ in range(3)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Without the layer's."""
        nn.init.normal_(self.phi, std=0.02)
        nn.init.zeros_(self.b)
        for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res):
            nn.init.constant_(alpha, 0.01)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Passes further arguments on to the layer."""
        alphas = self.alpha_pre, self.alpha_post, self.alpha_res
        h_pre, h_post, h_res = mhc_coeffs(x, self.phi, self.b, *alphas, **self.options)
        return mhc_post_res(x, self.layer(mhc_pre(x, h_pre), *args, **kwargs), h_post, h_res)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
