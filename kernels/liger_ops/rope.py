"""Rotary position embedding in the half-split layout: y = x * cos + rotate_half(x) * sin, for queries and keys at once.

With x = (x1, x2), the halves of head_dim, and cos, sin split likewise:

    y1 = x1 * cos1 - x2 * sin1        dx1 = dy1 * cos1 + dy2 * sin2
    y2 = x2 * cos2 + x1 * sin2        dx2 = dy2 * cos2 - dy1 * sin1

Nothing assumes that the halves of cos or of sin are equal. Computed in float32 and rounded once. One launch serves
queries and keys: a program owns one token, loads its cos and sin once and rotates every head. Tensors are read and
written by strides, so projections viewed as heads need no copy. Saved: cos and sin.
Source: arXiv:2104.09864.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_ops import backend


def _output_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)


def apply_rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """The same rotation in plain PyTorch, in float32 or wider, rounded once."""
    cos, sin = cos.unsqueeze(heads_dim - 4), sin.unsqueeze(heads_dim - 4)

    def rotate(x: Tensor) -> Tensor:
        output_dtype = _output_dtype(x, cos, sin)
        compute_dtype = torch.promote_types(output_dtype, torch.float32)
        x = x.to(compute_dtype)
        first, second = x.chunk(2, dim=-1)
        rotated_half = torch.cat((-second, first), dim=-1)
        return (x * cos.to(compute_dtype) + rotated_half * sin.to(compute_dtype)).to(output_dtype)

    return rotate(q), rotate(k)


@dataclass(frozen=True)
class RotaryLaunch:
    """Tile of heads and half-columns that a program rotates at a time."""

    block_heads: int
    block_half: int
    num_warps: int


# Largest half of head_dim, padded to a power of two, and how many pairs to rotate at a time: the fastest of 256 to 4096
# pairs on 1 to 8 warps, bfloat16, 16384 tokens, on an H200. In TB/s where a copy reaches 3.8 to 4.1: 3.7 for 32 heads
# of 64, 3.8 for 32 of 128, 3.5 for 8 of 256 (2.8 with 1024 pairs).
_TILE_PAIRS = ((32, 512), (64, 1024), (math.inf, 256))


def choose_launch(max_num_heads: int, head_dim: int) -> RotaryLaunch:
    """As many heads at a time as ``_TILE_PAIRS`` says, eight pairs a thread: 16 bytes a load in bfloat16."""
    block_half = triton.next_power_of_2(head_dim // 2)
    tile_pairs = next(pairs for limit, pairs in _TILE_PAIRS if block_half <= limit)
    block_heads = min(triton.next_power_of_2(max_num_heads), max(1, tile_pairs // block_half))
    return RotaryLaunch(block_heads, block_half, num_warps=max(1, block_heads * block_half // 256))


@triton.jit
def _rotate_heads(
    x_ptr,  # [num_heads, 2 * HALF_DIM], one token
    y_ptr,  # [num_heads, 2 * HALF_DIM], one token
    x_head_stride,
    y_head_stride,
    num_heads,
    cos1,  # [BLOCK_HALF], as are the next three
    cos2,
    sin1,
    sin2,
    HALF_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Writes (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2) for every head of one token."""
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    for start in range(0, num_heads, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)[:, None]
        mask = (heads < num_heads) & (columns < HALF_DIM)
        heads = heads.to(tl.int64)
        x_ptrs = x_ptr + heads * x_head_stride + columns
        y_ptrs = y_ptr + heads * y_head_stride + columns
        x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptrs + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
        y1 = x1 * cos1[None, :] - x2 * sin1[None, :]
        y2 = x2 * cos2[None, :] + x1 * sin2[None, :]
        tl.store(y_ptrs, y1.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptrs + HALF_DIM, y2.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr,  # [batch_size, num_heads, seq_len, head_dim]; this and its output may be permuted in memory
    k_ptr,  # [batch_size, num_kv_heads, seq_len, head_dim], likewise
    cos_ptr,  # [batch_size, seq_len, head_dim], batch stride 0 if all share one table
    sin_ptr,  # likewise
    q_out_ptr,
    k_out_ptr,
    q_strides,  # (batch, token, head), as are the next three
    k_strides,
    q_out_strides,
    k_out_strides,
    cos_strides,  # (batch, token)
    sin_strides,  # (batch, token)
    num_heads,
    num_kv_heads,
    seq_len,
    INVERSE: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program rotates every head of one token, backwards (the transposed matrix) if INVERSE."""
    batch = (tl.program_id(0) // seq_len).to(tl.int64)
    token = (tl.program_id(0) % seq_len).to(tl.int64)
    columns = tl.arange(0, BLOCK_HALF)
    mask = columns < HALF_DIM
    cos_ptrs = cos_ptr + batch * cos_strides[0] + token * cos_strides[1] + columns
    sin_ptrs = sin_ptr + batch * sin_strides[0] + token * sin_strides[1] + columns
    cos1 = tl.load(cos_ptrs, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptrs + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptrs, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptrs + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        sin1, sin2 = -sin2, -sin1
    _rotate_heads(
        x_ptr=q_ptr + batch * q_strides[0] + token * q_strides[1],
        y_ptr=q_out_ptr + batch * q_out_strides[0] + token * q_out_strides[1],
        x_head_stride=q_strides[2],
        y_head_stride=q_out_strides[2],
        num_heads=num_heads,
        cos1=cos1,
        cos2=cos2,
        sin1=sin1,
        sin2=sin2,
        HALF_DIM=HALF_DIM,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=BLOCK_HALF,
    )
    _rotate_heads(
        x_ptr=k_ptr + batch * k_strides[0] + token * k_strides[1],
        y_ptr=k_out_ptr + batch * k_out_strides[0] + token * k_out_strides[1],
        x_head_stride=k_strides[2],
        y_head_stride=k_out_strides[2],
        num_heads=num_kv_heads,
        cos1=cos1,
        cos2=cos2,
        sin1=sin1,
        sin2=sin2,
        HALF_DIM=HALF_DIM,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=BLOCK_HALF,
    )


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, heads_dim: int, inverse: bool
) -> None:
    """Rotates q into q_out and k into k_out, which may have no heads."""
    if q.numel() == 0 and k.numel() == 0:
        return
    q, k, cos, sin = (_with_unit_stride(tensor) for tensor in (q, k, cos, sin))
    token_dim = 3 - heads_dim
    batch_size, seq_len, head_dim = q.shape[0], q.shape[token_dim], q.shape[3]
    num_heads, num_kv_heads = q.shape[heads_dim], k.shape[heads_dim]
    launch = choose_launch(max(num_heads, num_kv_heads), head_dim)

    def strides(x: Tensor) -> tuple[int, int, int]:
        return x.stride(0), x.stride(token_dim), x.stride(heads_dim)

    def table_strides(x: Tensor) -> tuple[int, int]:
        return x.stride(0) if x.dim() == 3 and x.shape[0] > 1 else 0, x.stride(-2)

    _rotary_kernel[(batch_size * seq_len,)](
        q_ptr=q,
        k_ptr=k,
        cos_ptr=cos,
        sin_ptr=sin,
        q_out_ptr=q_out,
        k_out_ptr=k_out,
        q_strides=strides(q),
        k_strides=strides(k),
        q_out_strides=strides(q_out),
        k_out_strides=strides(k_out),
        cos_strides=table_strides(cos),
        sin_strides=table_strides(sin),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seq_len=seq_len,
        INVERSE=inverse,
        HALF_DIM=head_dim // 2,
        BLOCK_HEADS=launch.block_heads,
        BLOCK_HALF=launch.block_half,
        num_warps=launch.num_warps,
    )


def _rotary_forward_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    # empty_like keeps the order of the dimensions in memory and closes the gaps of a slice.
    q_out = torch.empty_like(q, dtype=_output_dtype(q, cos, sin))
    k_out = torch.empty_like(k, dtype=_output_dtype(k, cos, sin))
    return q_out, k_out


@backend.register_op(
    "rotary_forward(Tensor q, Tensor k, Tensor cos, Tensor sin, int heads_dim) -> (Tensor, Tensor)",
    fake=_rotary_forward_fake,
)
def _rotary_forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    q_out, k_out = _rotary_forward_fake(q, k, cos, sin, heads_dim)
    _launch_rotary(q, k, cos, sin, q_out, k_out, heads_dim, inverse=False)
    return q_out, k_out


def _rotary_backward_fake(
    grad_q_out: Tensor,
    grad_k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int,
    q_stride: list[int],
    k_stride: list[int],
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    grad_q = grad_q_out.new_empty_strided(grad_q_out.shape, q_stride, dtype=q_dtype)
    grad_k = grad_k_out.new_empty_strided(grad_k_out.shape, k_stride, dtype=k_dtype)
    return grad_q, grad_k


@backend.register_op(
    "rotary_backward(Tensor grad_q_out, Tensor grad_k_out, Tensor cos, Tensor sin, int heads_dim, SymInt[] q_stride,"
    " SymInt[] k_stride, ScalarType q_dtype, ScalarType k_dtype) -> (Tensor, Tensor)",
    fake=_rotary_backward_fake,
)
def _rotary_backward(
    grad_q_out: Tensor,
    grad_k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int,
    q_stride: list[int],
    k_stride: list[int],
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of q and k with the given strides and dtypes."""
    grad_q, grad_k = _rotary_backward_fake(
        grad_q_out, grad_k_out, cos, sin, heads_dim, q_stride, k_stride, q_dtype, k_dtype
    )
    _launch_rotary(grad_q_out, grad_k_out, cos, sin, grad_q, grad_k, heads_dim, inverse=True)
    return grad_q, grad_k


class RotaryFunction(torch.autograd.Function):
    """Ties the two ops together for autograd; cos and sin get no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
        q_out, k_out = _rotary_forward(q, k, cos, sin, heads_dim)
        ctx.save_for_backward(cos, sin)
        ctx.heads_dim = heads_dim
        ctx.strides = q_out.stride(), k_out.stride()  # those of q and k with gaps closed
        ctx.dtypes = q.dtype, k.dtype
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q_out: Tensor, grad_k_out: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        cos, sin = ctx.saved_tensors
        needs_grad_q, needs_grad_k = ctx.needs_input_grad[:2]
        if not needs_grad_q:
            grad_q_out = grad_q_out.narrow(ctx.heads_dim, 0, 0)
        if not needs_grad_k:
            grad_k_out = grad_k_out.narrow(ctx.heads_dim, 0, 0)
        grad_q, grad_k = _rotary_backward(grad_q_out, grad_k_out, cos, sin, ctx.heads_dim, *ctx.strides, *ctx.dtypes)
        return grad_q if needs_grad_q else None, grad_k if needs_grad_k else None, None, None, None


def _check_shapes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> None:
    if heads_dim not in (1, 2):
        raise ValueError(f"heads_dim must be 1 or 2, got {heads_dim}")
    if q.dim() != 4 or q.shape[3] % 2:
        raise ValueError(f"q must have 4 dimensions, the last of even size, got shape {tuple(q.shape)}")
    if k.dim() != 4 or any(q.shape[dim] != k.shape[dim] for dim in range(4) if dim != heads_dim):
        raise ValueError(
            f"k must have q's shape {tuple(q.shape)} except in dimension {heads_dim}, got {tuple(k.shape)}"
        )
    batch_size, seq_len, head_dim = q.shape[0], q.shape[3 - heads_dim], q.shape[3]
    table = (seq_len, head_dim)
    if tuple(cos.shape) not in (table, (1, *table), (batch_size, *table)):
        raise ValueError(
            f"cos must be [seq_len, head_dim] or [batch_size or 1, seq_len, head_dim] for q of shape {tuple(q.shape)}"
            f" with heads_dim={heads_dim}, got {tuple(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have cos' shape {tuple(cos.shape)}, got {tuple(sin.shape)}")


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions: ``x * cos + rotate_half(x) * sin``, halves of head_dim paired.

    Args:
        q: Queries ``[batch_size, num_heads, seq_len, head_dim]``, or ``[batch_size, seq_len, num_heads, head_dim]`` if
            ``heads_dim=2``. May be a transposed or sliced view; it is read in place.
        k: Keys, the same with ``num_kv_heads``.
        cos: Cosines ``[batch_size or 1, seq_len, head_dim]`` or ``[seq_len, head_dim]``.
        sin: Sines, of cos' shape. If cos or sin require a gradient, plain PyTorch computes it.
        heads_dim: The dimension of q and k that counts heads, 1 or 2.

    Returns:
        The rotated q and k, laid out in memory as they came, in the promoted dtype of each with cos and sin.

    Raises:
        ValueError: If heads_dim is neither 1 nor 2, head_dim is odd, or the shapes do not fit together.
    """
    _check_shapes(q, k, cos, sin, heads_dim)
    dtypes = (q.dtype, k.dtype, cos.dtype, sin.dtype)
    if not backend.use_triton(q) or torch.float64 in dtypes or cos.requires_grad or sin.requires_grad:
        return apply_rotary_reference(q, k, cos, sin, heads_dim)
    return RotaryFunction.apply(q, k, cos, sin, heads_dim)
