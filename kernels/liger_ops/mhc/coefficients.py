"""Coefficients of manifold-constrained hyper-connections, of each token's n streams: h_pre, h_post and h_res.

    mix = (x @ phi) * r, r = 1 / sqrt(mean(x**2) + eps), of all streams of a token as one row of K numbers
    l = mix * scale + b, of which n columns are h_pre's, n h_post's, n * n h_res'
    h_pre = sigmoid(l) + pre_eps    h_post = post_mult * sigmoid(l)    h_res = sinkhorn(softmax(l) + sinkhorn_eps)

Sinkhorn divides columns, then rows and columns tmax - 1 times, by their sum + sinkhorn_eps. Backward computes these
divisors again, and finds each matrix from the one after it, times its divisors. With gl the gradient of l,

    db = sum of gl    dscale = sum of gl * mix    dmix = gl * scale, see projection.py

Saved: x, phi, b, scale, and mix and r in float32. Source: arXiv:2512.24880.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating_tensors, check_integer, check_number, check_shape, wrong_value
from liger_ops.autograd import differentiable
from liger_ops.mhc.projection import project, project_backward


def mhc_coeffs_reference(
    x: Tensor, phi: Tensor, b: Tensor, scale: Tensor,
    tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
) -> Tensor:  # fmt: skip
    """``[*, n * (n + 2)]``: h_pre, h_post and h_res in plain PyTorch, in float32 or wider."""
    dtype = torch.float32
    for each in (x, phi, b, scale):
        dtype = torch.promote_types(dtype, each.dtype)
    n, rows = x.shape[-2], x.to(dtype).flatten(-2)
    with backend.without_autocast(x.device.type):
        mix = (rows @ phi.to(dtype)) * torch.rsqrt(rows.square().mean(-1, keepdim=True) + rms_eps)
    pre, post, res = (mix * scale.to(dtype) + b.to(dtype)).split([n, n, n * n], dim=-1)
    matrix = res.unflatten(-1, (n, n)).softmax(-1) + sinkhorn_eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + sinkhorn_eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + sinkhorn_eps)
    return torch.cat((pre.sigmoid() + pre_eps, post_mult * post.sigmoid(), matrix.flatten(-2)), dim=-1)


MAX_STREAMS = 15
"""Whose columns fit tiles of 256: more run in PyTorch."""


@triton.jit
def _load_logits(mix_ptr, scale_ptr, b_ptr, row_offsets, columns, mask):
    """``mix * scale + b`` of some columns, and mix and scale."""
    mix = tl.load(mix_ptr + row_offsets + columns, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return mix * scale + tl.load(b_ptr + columns, mask=mask, other=0.0).to(tl.float32), mix, scale


@triton.jit
def _softmax(logits, i, j, n):
    """Over j, of the n * n first; 0 elsewhere."""
    logits = tl.where((i < n) & (j < n), logits, float("-inf"))
    numerator = tl.exp(logits - tl.where(i < n, tl.max(logits, axis=2, keep_dims=True), 0.0))
    return numerator / tl.where(i < n, tl.sum(numerator, axis=2, keep_dims=True), 1.0)


@backend.Kernel
def _coefficients_kernel(
    mix_ptr,  # [num_rows, n * (n + 2)], contiguous, as h
    scale_ptr,  # [n * (n + 2)], contiguous
    b_ptr,  # [n * (n + 2)], contiguous
    h_ptr,
    divisors_ptr,  # [num_rows, tmax, 2, n], of rows, 1 at first, and columns, or None
    num_rows,
    n,
    tmax,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STREAMS: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None, None]
    i, j = tl.arange(0, BLOCK_STREAMS)[None, :, None], tl.arange(0, BLOCK_STREAMS)[None, None, :]
    offsets = rows * (n * (n + 2))
    exists = (rows < num_rows) & (j < n)
    pre, _, _ = _load_logits(mix_ptr, scale_ptr, b_ptr, offsets, j, exists)
    tl.store(h_ptr + offsets + j, tl.sigmoid(pre) + pre_eps, mask=exists)
    post, _, _ = _load_logits(mix_ptr, scale_ptr, b_ptr, offsets, n + j, exists)
    tl.store(h_ptr + offsets + n + j, tl.sigmoid(post) * post_mult, mask=exists)
    columns = 2 * n + i * n + j
    logits, _, _ = _load_logits(mix_ptr, scale_ptr, b_ptr, offsets, columns, exists & (i < n))
    matrix = tl.where((i < n) & (j < n), _softmax(logits, i, j, n) + sinkhorn_eps, 0.0)
    for step in range(tmax):
        of_rows = tl.where((i < n) & (step > 0), tl.sum(matrix, axis=2, keep_dims=True) + sinkhorn_eps, 1.0)
        matrix = matrix / of_rows
        of_columns = tl.where(j < n, tl.sum(matrix, axis=1, keep_dims=True) + sinkhorn_eps, 1.0)
        matrix = matrix / of_columns
        if divisors_ptr is not None:
            divisors = divisors_ptr + (rows * tmax + step) * 2 * n
            tl.store(divisors + i, of_rows, mask=(rows < num_rows) & (i < n))
            tl.store(divisors + n + j, of_columns, mask=exists)
    tl.store(h_ptr + offsets + columns, matrix, mask=exists & (i < n))


@backend.Kernel
def _coefficients_backward_kernel(
    mix_ptr,  # [num_rows, n * (n + 2)], contiguous, as h, grad_h and grad_logits
    scale_ptr,  # [n * (n + 2)], contiguous
    b_ptr,  # [n * (n + 2)], contiguous
    h_ptr,
    divisors_ptr,  # [num_rows, tmax, 2, n]
    grad_h_ptr,
    grad_logits_ptr,
    slope_ptr,  # [num_rows]
    num_rows,
    n,
    tmax,
    post_mult,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STREAMS: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows: the gradient of the logits, and its sum with ``mix * scale``."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None, None]
    i, j = tl.arange(0, BLOCK_STREAMS)[None, :, None], tl.arange(0, BLOCK_STREAMS)[None, None, :]
    offsets = rows * (n * (n + 2))
    exists = (rows < num_rows) & (j < n)
    slope = tl.zeros([BLOCK_ROWS, 1, 1], dtype=tl.float32)
    for gate in tl.static_range(2):  # h_pre and h_post
        columns = gate * n + j
        logits, mix, scale = _load_logits(mix_ptr, scale_ptr, b_ptr, offsets, columns, exists)
        y = tl.sigmoid(logits)
        grad = tl.load(grad_h_ptr + offsets + columns, mask=exists, other=0.0) * y * (1.0 - y)
        if gate == 1:
            grad *= post_mult
        tl.store(grad_logits_ptr + offsets + columns, grad, mask=exists)
        slope += tl.sum(grad * mix * scale, axis=2, keep_dims=True)
    columns = 2 * n + i * n + j
    mask = exists & (i < n)
    logits, mix, scale = _load_logits(mix_ptr, scale_ptr, b_ptr, offsets, columns, mask)
    softmax = _softmax(logits, i, j, n)
    matrix = tl.load(h_ptr + offsets + columns, mask=mask, other=0.0)
    grad = tl.load(grad_h_ptr + offsets + columns, mask=mask, other=0.0)
    for reverse in range(tmax):
        step = tmax - 1 - reverse
        divisors = divisors_ptr + (rows * tmax + step) * 2 * n
        of_columns = tl.load(divisors + n + j, mask=exists, other=1.0)
        grad = (grad - tl.sum(grad * matrix, axis=1, keep_dims=True)) / of_columns
        matrix = matrix * of_columns
        of_rows = tl.load(divisors + i, mask=(rows < num_rows) & (i < n), other=1.0)
        product = tl.sum(grad * matrix, axis=2, keep_dims=True)
        grad = (grad - tl.where(step > 0, product, 0.0)) / of_rows
        matrix = matrix * of_rows
    grad = tl.where(mask, softmax * (grad - tl.sum(grad * softmax, axis=2, keep_dims=True)), 0.0)
    tl.store(grad_logits_ptr + offsets + columns, grad, mask=mask)
    slope += tl.sum(tl.sum(grad * mix * scale, axis=2, keep_dims=True), axis=1, keep_dims=True)
    tl.store(slope_ptr + rows, slope, mask=rows < num_rows)


def _launch(kernel: Any, mix: Tensor, scale: Tensor, b: Tensor, n: int, tmax: int, **others: Any) -> None:
    """Launches a kernel of the coefficients on all rows, in tiles of 1024 elements of matrices."""
    block_streams = backend.next_power_of_2(n)
    block_rows = max(1, 1024 // block_streams**2)
    kernel.launch(
        -(-mix.shape[0] // block_rows),
        mix_ptr=mix,
        scale_ptr=scale,
        b_ptr=b,
        num_rows=mix.shape[0],
        n=n,
        tmax=tmax,
        BLOCK_ROWS=block_rows,
        BLOCK_STREAMS=block_streams,
        num_warps=4,
        **others,
    )


def _empty(x: Tensor, phi: Tensor, *others: Any) -> list[Tensor]:
    """h, mix and rstd."""
    num_rows, num_columns = x.shape[:-2].numel(), phi.shape[1]
    shapes = (*x.shape[:-2], num_columns), (num_rows, num_columns), (num_rows,)
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes]


@backend.register_op("mhc_coeffs_forward", fake=_empty)
def _coeffs_forward(
    x: Tensor, phi: Tensor, b: Tensor, scale: Tensor,
    tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
) -> list[Tensor]:  # fmt: skip
    h, mix, rstd = _empty(x, phi)
    if mix.numel():
        project(x, phi, rms_eps, mix, rstd)
        _launch(
            _coefficients_kernel, mix, scale, b.contiguous(), x.shape[-2], tmax, h_ptr=h, divisors_ptr=None,
            pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
        )  # fmt: skip
    return [h, mix, rstd]


@backend.register_op(
    "mhc_coeffs_backward", fake=lambda grad_h, *others: backend.empty_gradients(others[:4], others[-1])
)
def _coeffs_backward(
    grad_h: Tensor, x: Tensor, phi: Tensor, b: Tensor, scale: Tensor, mix: Tensor, rstd: Tensor,
    tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns those gradients of x, phi, b and scale that are needed."""
    gradients = backend.empty_gradients((x, phi, b, scale), needs)
    if mix.numel() == 0:
        return [gradient.zero_() for gradient in gradients]
    grad_x, grad_phi, grad_b, grad_scale = backend.spread(gradients, needs)
    n, bias = x.shape[-2], b.contiguous()
    h, grad_logits = torch.empty_like(mix), torch.empty_like(mix)
    slope, divisors = torch.empty_like(rstd), mix.new_empty((mix.shape[0], tmax, 2, n))
    both = {"h_ptr": h, "divisors_ptr": divisors, "post_mult": post_mult}
    _launch(_coefficients_kernel, mix, scale, bias, n, tmax, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, **both)
    grads = {"grad_h_ptr": grad_h.contiguous(), "grad_logits_ptr": grad_logits, "slope_ptr": slope}
    _launch(_coefficients_backward_kernel, mix, scale, bias, n, tmax, **grads, **both)
    if grad_x is not None or grad_phi is not None:
        project_backward(grad_logits, x, phi, scale, rstd, slope, grad_x, grad_phi)
    if grad_b is not None:
        grad_b.copy_(grad_logits.sum(0))
    if grad_scale is not None:
        grad_scale.copy_((grad_logits * mix).sum(0))
    return gradients


_compute = differentiable("MHCCoeffsFunction", mhc_coeffs_reference, _coeffs_forward, _coeffs_backward)


def check_streams(x: Tensor) -> None:
    """Raises unless x is ``[*, num_streams, num_channels]``."""
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise wrong_value("x", "a tensor of shape [*, num_streams, num_channels], the last two positive", x)


def mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the coefficients of hyper-connections, from which :func:`mhc_pre` and :func:`mhc_post_res` compute.

    Args:
        x: ``[*, n, num_channels]``, n streams.
        phi: ``[n * num_channels, n * (n + 2)]``, whose columns are those of h_pre, h_post and h_res, row by row.
        b: ``[n * (n + 2)]``.
        alpha_pre, alpha_post, alpha_res: One number each, ``[1]`` or ``[]``, a factor of its columns.
        tmax: How often rows and columns of h_res are normalized, at least 1.
        rms_eps: Added to the mean squares, at least 0.
        pre_eps: Added to h_pre, at least 0.
        sinkhorn_eps: Added to the softmax and to sums of rows and columns, at least 0.
        post_mult: The largest h_post.

    Returns:
        h_pre ``[*, n]``, h_post ``[*, n]`` and h_res ``[*, n, n]``, whose rows and columns nearly sum to 1, in the
        widest of all tensors' dtypes and float32. They are views of one tensor.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or an option no number.
        ValueError: If shapes or devices do not fit together, or an option is out of range.
    """
    alphas = {"alpha_pre": alpha_pre, "alpha_post": alpha_post, "alpha_res": alpha_res}
    check_floating_tensors("x", x, optional=False, phi=phi, b=b, **alphas)
    check_streams(x)
    n, num_channels = x.shape[-2:]
    check_shape("phi", phi, (n * num_channels, n * (n + 2)), "[n * num_channels, n * (n + 2)]")
    check_shape("b", b, (n * (n + 2),), "[n * (n + 2)]")
    for name, alpha in alphas.items():
        if alpha.dim() > 1 or alpha.numel() != 1:
            raise wrong_value(name, "a tensor of shape [1] or []", alpha)
    check_integer("tmax", tmax, at_least=1)
    check_number("post_mult", post_mult)
    for name, eps in {"rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps}.items():
        check_number(name, eps, at_least=0)
    scale = torch.cat([alpha.expand(size) for alpha, size in zip(alphas.values(), (n, n, n * n), strict=True)])
    tensors = x, phi, b, scale
    options: Any = tmax, float(rms_eps), float(pre_eps), float(sinkhorn_eps), float(post_mult)
    h = mhc_coeffs_reference(*tensors, *options) if n > MAX_STREAMS else _compute(*tensors, options)
    h_pre, h_post, h_res = h.split([n, n, n * n], dim=-1)
    return h_pre, h_post, h_res.unflatten(-1, (n, n))
