"""Rotary position embedding, for queries and keys at once: y = x * cos + rotated(x) * sin.

With (x1, x2) the two entries of a pair of columns, and cos, sin split in the same way:

    y1 = x1 * cos1 - x2 * sin1        dx1 = dy1 * cos1 + dy2 * sin2
    y2 = x2 * cos2 + x1 * sin2        dx2 = dy2 * cos2 - dy1 * sin1

Pairs are the same columns of both halves (Llama), or neighbors (``interleaved``, GPT-J). Nothing assumes that a pair's
two cosines or sines are equal. Columns past cos' are copied (partial rotation). Computed in float32 and rounded once.
One launch serves queries and keys: a program owns one token, loads its cos and sin once and rotates every head. Tensors
are read and written by strides, so projections viewed as heads need no copy. Saved: cos, sin and position_ids.
Sources: arXiv:2104.09864; the multimodal variant's sections: arXiv:2409.12191.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    as_integers,
    check_bool,
    check_floating_tensors,
    check_integer,
    check_same_device,
    check_shape,
    wrong_value,
)
from liger_ops.recipes import made


class RotaryOptions(NamedTuple):
    """Options of one call."""

    heads_dim: int
    interleaved: bool
    keep_dtype: bool = False


def _output_dtype(x: Tensor, cos: Tensor, sin: Tensor, keep_dtype: bool = False) -> torch.dtype:
    return x.dtype if keep_dtype else torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)


def _join_tables(table: Tensor, mrope_sections: Any, interleaved: bool) -> Tensor:
    """``[batch_size or 1, seq_len, rotary_dim]`` of three such tables of the multimodal variant."""
    sections, num_pairs = as_integers("mrope_sections", mrope_sections), table.shape[-1] // 2
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != num_pairs:
        expected = f"three numbers that add up to rotary_dim / 2 = {num_pairs}, none negative"
        raise wrong_value("mrope_sections", expected, mrope_sections)
    pairs = torch.arange(num_pairs, device=table.device)
    table_of_pair = (pairs >= sections[0]).long() + (pairs >= sections[0] + sections[1]).long()
    table_of_column = table_of_pair.repeat_interleave(2) if interleaved else table_of_pair.repeat(2)
    return table.gather(0, table_of_column.expand(1, *table.shape[1:]))[0]


def apply_rotary_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, options: RotaryOptions
) -> tuple[Tensor, Tensor]:
    """The same rotation in plain PyTorch, in float32 or wider, rounded once."""
    tables = (table if position_ids is None else table[position_ids] for table in (cos, sin))
    cos, sin = (table.unsqueeze(options.heads_dim - 4) for table in tables)
    rotary_dim = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        output_dtype = _output_dtype(x, cos, sin, options.keep_dtype)
        compute_dtype = torch.promote_types(_output_dtype(x, cos, sin), torch.float32)
        rotary, rest = x[..., :rotary_dim].to(compute_dtype), x[..., rotary_dim:]
        if options.interleaved:
            swapped = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
        else:
            first, second = rotary.chunk(2, dim=-1)
            swapped = torch.cat((-second, first), dim=-1)
        rotary = (rotary * cos.to(compute_dtype) + swapped * sin.to(compute_dtype)).to(output_dtype)
        return torch.cat((rotary, rest.to(output_dtype)), dim=-1) if rest.shape[-1] else rotary

    return rotate(q), rotate(k)


# Largest half of rotary_dim, padded to a power of two, and how many pairs to rotate at a time: the fastest of 256 to
# 4096 pairs on 1 to 8 warps, bfloat16, 16384 tokens, on an H200. In TB/s where a copy reaches 3.8 to 4.1: 3.7 for 32
# heads of 64, 3.8 for 32 of 128, 3.5 for 8 of 256 (2.8 with 1024 pairs).
_TILE_PAIRS = ((32, 512), (64, 1024), (math.inf, 256))


@backend.launch_cache
def choose_launch(max_num_heads: int, rotary_dim: int) -> tuple[int, int, int]:
    """Heads and pairs of columns that a program rotates at a time, and its warps; eight pairs per thread."""
    block_half = triton.next_power_of_2(rotary_dim // 2)
    tile_pairs = next(pairs for limit, pairs in _TILE_PAIRS if block_half <= limit)
    block_heads = min(triton.next_power_of_2(max_num_heads), max(1, tile_pairs // block_half))
    return block_heads, block_half, max(1, block_heads * block_half // 256)


@triton.jit
def _load_pairs(
    row_ptr,  # [rotary_dim] of one token
    is_known,
    INTERLEAVED: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """A token's cosines or sines, [BLOCK_HALF] for the first and the second entry of each pair; NaN if unknown."""
    pairs = tl.arange(0, BLOCK_HALF)
    mask = (pairs < HALF_DIM) & is_known
    other = tl.where(is_known, 0.0, float("nan"))
    if INTERLEAVED:
        first_ptrs, distance = row_ptr + 2 * pairs, 1
    else:
        first_ptrs, distance = row_ptr + pairs, HALF_DIM
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptrs + distance, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_known, first, other), tl.where(is_known, second, other)


@triton.jit
def _rotate_heads(
    x_ptr,  # [num_heads, head_dim], one token
    y_ptr,  # [num_heads, head_dim], one token
    x_head_stride,
    y_head_stride,
    num_heads,
    cos1,  # [BLOCK_HALF], as are the next three
    cos2,
    sin1,
    sin2,
    INTERLEAVED: tl.constexpr,
    HALF_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,  # columns after the rotated ones
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Writes (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2) for every head of one token, and copies the rest."""
    for start in range(0, num_heads, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)[:, None]
        head_mask = heads < num_heads
        x_heads = x_ptr + heads.to(tl.int64) * x_head_stride
        y_heads = y_ptr + heads.to(tl.int64) * y_head_stride
        if INTERLEAVED:
            columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
            mask = head_mask & (columns < 2 * HALF_DIM)
            pairs = tl.load(x_heads + columns, mask=mask, other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(pairs, [BLOCK_HEADS, BLOCK_HALF, 2]))
            y1 = x1 * cos1[None, :] - x2 * sin1[None, :]
            y2 = x2 * cos2[None, :] + x1 * sin2[None, :]
            y = tl.reshape(tl.join(y1, y2), [BLOCK_HEADS, 2 * BLOCK_HALF])
            tl.store(y_heads + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            columns = tl.arange(0, BLOCK_HALF)[None, :]
            mask = head_mask & (columns < HALF_DIM)
            x1 = tl.load(x_heads + columns, mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(x_heads + HALF_DIM + columns, mask=mask, other=0.0).to(tl.float32)
            y1 = x1 * cos1[None, :] - x2 * sin1[None, :]
            y2 = x2 * cos2[None, :] + x1 * sin2[None, :]
            tl.store(y_heads + columns, y1.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_heads + HALF_DIM + columns, y2.to(y_ptr.dtype.element_ty), mask=mask)
        if REST_DIM > 0:
            columns = tl.arange(0, BLOCK_REST)[None, :]
            mask = head_mask & (columns < REST_DIM)
            rest = tl.load(x_heads + 2 * HALF_DIM + columns, mask=mask, other=0.0)
            tl.store(y_heads + 2 * HALF_DIM + columns, rest.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _rotary_kernel(
    q_ptr,  # [batch_size, num_heads, seq_len, head_dim]; this and its output may be permuted in memory
    k_ptr,  # [batch_size, num_kv_heads, seq_len, head_dim], as q
    cos_ptr,  # [batch_size, seq_len or max_positions, rotary_dim], stride 0 where all share one table
    sin_ptr,  # as cos_ptr
    position_ids_ptr,  # [batch_size, seq_len], batch stride 0 if all share them, or None
    q_out_ptr,
    k_out_ptr,
    q_strides,  # (batch, token, head), as are the next three
    k_strides,
    q_out_strides,
    k_out_strides,
    cos_strides,  # (batch, token or position)
    sin_strides,  # as cos_strides
    position_ids_strides,  # (batch, token)
    num_heads,
    num_kv_heads,
    seq_len,
    max_positions,
    INVERSE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One program rotates every head of one token, backwards (the transposed matrix) if INVERSE."""
    batch = (tl.program_id(0) // seq_len).to(tl.int64)
    token = (tl.program_id(0) % seq_len).to(tl.int64)
    position = token
    if position_ids_ptr is not None:
        offset = batch * position_ids_strides[0] + token * position_ids_strides[1]
        position = tl.load(position_ids_ptr + offset).to(tl.int64)
    is_known = (position >= 0) & (position < max_positions)
    cos_row = cos_ptr + batch * cos_strides[0] + position * cos_strides[1]
    sin_row = sin_ptr + batch * sin_strides[0] + position * sin_strides[1]
    cos1, cos2 = _load_pairs(cos_row, is_known, INTERLEAVED, HALF_DIM, BLOCK_HALF)
    sin1, sin2 = _load_pairs(sin_row, is_known, INTERLEAVED, HALF_DIM, BLOCK_HALF)
    if INVERSE:
        sin1, sin2 = -sin2, -sin1
    _rotate_heads(
        q_ptr + batch * q_strides[0] + token * q_strides[1],
        q_out_ptr + batch * q_out_strides[0] + token * q_out_strides[1],
        q_strides[2], q_out_strides[2], num_heads, cos1, cos2, sin1, sin2,
        INTERLEAVED, HALF_DIM, REST_DIM, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + batch * k_strides[0] + token * k_strides[1],
        k_out_ptr + batch * k_out_strides[0] + token * k_out_strides[1],
        k_strides[2], k_out_strides[2], num_kv_heads, cos1, cos2, sin1, sin2,
        INTERLEAVED, HALF_DIM, REST_DIM, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Of x's shape and order of dimensions in memory, without the gaps of a slice, and with unit stride."""
    x_out = torch.empty_like(x, dtype=dtype)
    return x_out if x_out.stride(-1) == 1 else torch.empty_like(x_out, memory_format=torch.contiguous_format)


def _allocate(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, q_dtype, k_dtype, q_stride, k_stride = others
    q_out = _empty_like(q, q_dtype) if q_stride is None else q.new_empty_strided(q.shape, q_stride, dtype=q_dtype)
    k_out = _empty_like(k, k_dtype) if k_stride is None else k.new_empty_strided(k.shape, k_stride, dtype=k_dtype)
    return q_out, k_out


@backend.register_op("rotary", fake=_allocate)
def _rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    heads_dim: int,
    interleaved: bool,
    inverse: bool,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    q_stride: list[int] | None,
    k_stride: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Returns q and k, which may have no heads, rotated, with these dtypes and strides; by default laid out as given.

    If ``inverse``, it rotates back (the transposed matrix), as a rotation's gradient is.
    """
    q_out, k_out = _allocate(q, k, q_dtype, k_dtype, q_stride, k_stride)
    if q.numel() == 0 and k.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = _with_unit_stride(q), _with_unit_stride(k), _with_unit_stride(cos), _with_unit_stride(sin)
    token_dim = 3 - heads_dim
    shape = q.shape
    batch_size, seq_len, head_dim = shape[0], shape[token_dim], shape[3]
    num_heads, num_kv_heads = shape[heads_dim], k.shape[heads_dim]
    max_positions, rotary_dim = cos.shape[-2:]
    block_heads, block_half, num_warps = choose_launch(max(num_heads, num_kv_heads), rotary_dim)

    def strides(x: Tensor) -> tuple[int, int, int]:
        found = x.stride()
        return found[0], found[token_dim], found[heads_dim]

    def table_strides(x: Tensor) -> tuple[int, int]:
        found = x.stride()
        return found[0] if len(found) > 2 and x.shape[0] > 1 else 0, found[-2]

    position_ids_strides = (0, 0)
    if position_ids is not None:
        shared = position_ids.dim() == 1 or position_ids.shape[0] == 1
        position_ids_strides = (0 if shared else position_ids.stride(0), position_ids.stride(-1))
    _rotary_kernel.launch(
        batch_size * seq_len,
        q_ptr=q,
        k_ptr=k,
        cos_ptr=cos,
        sin_ptr=sin,
        position_ids_ptr=position_ids,
        q_out_ptr=q_out,
        k_out_ptr=k_out,
        q_strides=strides(q),
        k_strides=strides(k),
        q_out_strides=strides(q_out),
        k_out_strides=strides(k_out),
        cos_strides=table_strides(cos),
        sin_strides=table_strides(sin),
        position_ids_strides=position_ids_strides,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seq_len=seq_len,
        max_positions=max_positions,
        INVERSE=inverse,
        INTERLEAVED=interleaved,
        HALF_DIM=rotary_dim // 2,
        REST_DIM=head_dim - rotary_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=backend.next_power_of_2(max(head_dim - rotary_dim, 1)),
        num_warps=num_warps,
    )
    return q_out, k_out


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    position_ids, (heads_dim, interleaved, keep_dtype) = others
    q_dtype, k_dtype = _output_dtype(q, cos, sin, keep_dtype), _output_dtype(k, cos, sin, keep_dtype)
    return _rotary(q, k, cos, sin, position_ids, heads_dim, interleaved, False, q_dtype, k_dtype, None, None)


class RotaryFunction(torch.autograd.Function):
    """Rotation, and rotation back of gradients; cos and sin get none."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        q_out, k_out = _rotate(q, k, *others)
        *tensors, options = others
        ctx.save_for_backward(*tensors)
        ctx.settings = options[:-1]
        ctx.strides = q_out.stride(), k_out.stride()  # those of q and k with gaps closed
        ctx.dtypes = q.dtype, k.dtype
        return q_out, k_out

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        needs_q, needs_k = ctx.needs_input_grad[:2]
        heads_dim = ctx.settings[0]
        if not needs_q:
            grad_q = grad_q.narrow(heads_dim, 0, 0)
        if not needs_k:
            grad_k = grad_k.narrow(heads_dim, 0, 0)
        grad_q, grad_k = _rotary(grad_q, grad_k, *ctx.saved_tensors, *ctx.settings, True, *ctx.dtypes, *ctx.strides)
        return grad_q if needs_q else None, grad_k if needs_k else None, None, None, None, None


def check_positions_shape(position_ids: Tensor, q: Tensor, heads_dim: int) -> None:
    """Raises a ValueError unless ``position_ids`` has a position for each token of ``q``."""
    batch_size, seq_len = q.shape[0], q.shape[3 - heads_dim]
    if tuple(position_ids.shape) not in ((seq_len,), (1, seq_len), (batch_size, seq_len)):
        expected = f"[seq_len] or [batch_size or 1, seq_len] with batch_size = {batch_size} and seq_len = {seq_len}"
        raise wrong_value("position_ids", expected, position_ids)


def _check_positions(position_ids: Tensor, q: Tensor, heads_dim: int, max_positions: int) -> None:
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise wrong_value("position_ids", "a tensor of int64 or int32", position_ids)
    check_positions_shape(position_ids, q, heads_dim)
    if position_ids.device.type == "cpu" and not torch.compiler.is_compiling() and position_ids.numel():
        low, high = position_ids.min().item(), position_ids.max().item()
        if low < 0 or high >= max_positions:
            raise ValueError(
                f"position_ids must be between 0 and cos' max_positions - 1 = {max_positions - 1}, got {low} to {high}"
            )


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads_dim: int = 1,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    mrope_sections: Sequence[int] | None = None,
    keep_dtype: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions: ``x * cos + rotated(x) * sin``.

    Args:
        q: Queries ``[batch_size, num_heads, seq_len, head_dim]``, or ``[batch_size, seq_len, num_heads, head_dim]`` if
            ``heads_dim=2``. May be a transposed or sliced view; it is read in place.
        k: Keys, the same with ``num_kv_heads``.
        cos: Cosines ``[batch_size or 1, seq_len, rotary_dim]`` or ``[seq_len, rotary_dim]``. If rotary_dim is less than
            head_dim, the remaining columns are copied.
        sin: Sines, of cos' shape. If cos or sin require a gradient, plain PyTorch computes it.
        heads_dim: The dimension of q and k that counts heads, 1 or 2.
        interleaved: Whether pairs are neighboring columns, as GPT-J's; else the same columns of both halves.
        position_ids: ``[seq_len]`` or ``[batch_size or 1, seq_len]``, int64 or int32: which row of cos and sin, then
            tables ``[max_positions, rotary_dim]``, each token takes.
        mrope_sections: Three numbers that add up to rotary_dim / 2, for cos and sin of shape ``[3, batch_size or 1,
            seq_len, rotary_dim]``: how many pairs take their angle from the first (time), the second (height) and the
            third (width) table, as Qwen2-VL's ``mrope_section``.
        keep_dtype: Whether the results have the dtypes of q and k whatever cos and sin have.

    Returns:
        The rotated q and k, laid out in memory as they came, in the promoted dtype of each with cos and sin unless
        ``keep_dtype``.

    Raises:
        TypeError: If a tensor is none, q, k, cos or sin not real and floating-point, or an option of a wrong type.
        ValueError: If heads_dim is neither 1 nor 2, or shapes, sections, dtypes or devices do not fit together; for
            positions out of range if they are on the CPU (on the GPU their tokens become NaN instead).
    """
    check_floating_tensors("q", q, k=k, cos=cos, sin=sin, optional=False)
    check_integer("heads_dim", heads_dim, at_least=1, at_most=2)
    check_bool("interleaved", interleaved)
    check_bool("keep_dtype", keep_dtype)
    if position_ids is not None:
        check_same_device("q", q, position_ids=position_ids)
        if mrope_sections is not None:
            expected = "None with mrope_sections, whose cos and sin have a row for each token"
            raise wrong_value("position_ids", expected, position_ids)
    if q.dim() != 4:
        raise wrong_value("q", "a tensor of 4 dimensions", q)
    batch_size, seq_len, head_dim = q.shape[0], q.shape[3 - heads_dim], q.shape[3]
    if k.dim() != 4 or (k.shape[0], k.shape[3 - heads_dim], k.shape[3]) != (batch_size, seq_len, head_dim):
        expected = f"a tensor of q's shape {tuple(q.shape)} except for its number of heads, dimension {heads_dim}"
        raise wrong_value("k", expected, k)
    rotary_dim = cos.shape[-1] if cos.dim() else 0
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        expected = f"a tensor whose last dimension, rotary_dim, is even and at most head_dim = {head_dim}"
        raise wrong_value("cos", expected, cos)
    if position_ids is not None:
        fits, expected = cos.dim() == 2, "[max_positions, rotary_dim], as position_ids are given"
    elif mrope_sections is not None:
        fits = cos.dim() == 4 and cos.shape[0] == 3 and cos.shape[1] in (1, batch_size) and cos.shape[2] == seq_len
        expected = "[3, batch_size or 1, seq_len, rotary_dim], as mrope_sections are given"
    else:
        fits = cos.dim() in (2, 3) and cos.shape[-2] == seq_len and cos.shape[:-2] in ((), (1,), (batch_size,))
        expected = "[batch_size or 1, seq_len, rotary_dim] or [seq_len, rotary_dim]"
    if not fits:
        raise wrong_value("cos", f"{expected}, for q of shape {tuple(q.shape)} with heads_dim={heads_dim}", cos)
    if sin.shape != cos.shape:
        check_shape("sin", sin, cos.shape, "cos'")
    if position_ids is not None:
        _check_positions(position_ids, q, heads_dim, cos.shape[0])
    if mrope_sections is not None:
        cos, sin = (_join_tables(table, mrope_sections, interleaved) for table in (cos, sin))
    return _run(q, k, cos, sin, position_ids, RotaryOptions(heads_dim, interleaved, keep_dtype))


def _run(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, cos, sin, *_ = args
    if not backend.runs_on_triton(q, k, cos, sin) or backend.needs_graph(cos, sin):
        return apply_rotary_reference(*args)
    if backend.needs_graph(q, k):
        return made(RotaryFunction.apply(*args), _run, *args, keeps_inputs=False)  # backward needs neither q nor k
    return _rotate(*args)
