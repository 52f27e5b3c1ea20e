"""Logits of a few given classes of each token, from their rows of a head.

    logits[t, k] = sum(input[t] * weight[ids[t, k]])
    grad_input[t] = sum_k(grad_logits[t, k] * weight[ids[t, k]])
    grad_weight[v] = sum over all t, k with ids[t, k] = v of grad_logits[t, k] * input[t]

Both gradients are sums of rows with factors, of each token and of each class. No row is copied, sums are taken in
float32 and in a fixed order, and rounded once.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from liger_ops import backend

GATHERED_BYTES = 64 * 2**20
"""Default budget for the rows of the head that are gathered at once, in plain PyTorch."""
_PLACES, _DOT_COLUMNS = 16, 256  # of a block that a program multiplies
_ENTRIES, _SUM_COLUMNS = 8, 1024  # of a block that a program adds up; a thread has all entries of its columns
_NUM_WARPS = 4


class GivenIds(NamedTuple):
    """Ids of some tokens, ``[num_tokens, K]``, and which of them are what."""

    safe: Tensor  # classes: in the place of others one of the token's, or 0 if it has none
    is_class: Tensor
    is_wrong: Tensor  # neither a class nor padding
    kept: Tensor  # [num_tokens]: whether the token counts
    has_class: Tensor  # [num_tokens]: whether it also has a class

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int, kept: Tensor) -> "GivenIds":
        """Of negative ids, which are padding, and others."""
        is_class = (ids >= 0) & (ids < vocab_size)
        safe = ids.where(is_class, -1)
        safe = safe.where(is_class, safe.amax(1, keepdim=True).clamp(min=0))
        return cls(safe, is_class, (ids >= vocab_size) & kept[:, None], kept, is_class.any(1) & kept)

    def show(self, log_probs: Tensor) -> Tensor:
        """``log_probs`` of the safe ids, with -inf for padding, NaN for wrong ids and 0 at tokens that do not count."""
        shown = log_probs.where(self.is_class, -torch.inf).masked_fill(self.is_wrong, torch.nan)
        return shown.masked_fill(~self.kept[:, None], 0.0)

    def is_first(self) -> Tensor:
        """Whether a class occurs for the first time."""
        ordered, order = self.safe.where(self.is_class, -1).sort(dim=1, stable=True)
        changes = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
        return torch.zeros_like(changes).scatter_(1, order, changes) & self.is_class


def add_at(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """``logits[row, ids] += values``, in a fixed order; rows may be padded, of which no copy is made."""
    if not len(logits):
        return
    stride = logits.stride(0)
    flat = logits.as_strided(((len(logits) - 1) * stride + logits.shape[1],), (1,))
    rows = torch.arange(len(logits), device=logits.device)[:, None] * stride
    flat.index_put_(((rows + ids).flatten(),), values.flatten(), accumulate=True)


@backend.Kernel
def _given_logits_kernel(
    input_ptr,  # [num_tokens, width]
    weight_ptr,  # [vocab_size, width]
    ids_ptr,  # [num_tokens, num_ids], contiguous
    logits_ptr,  # [num_tokens, num_ids], float32, contiguous
    input_row_stride,
    weight_row_stride,
    num_ids,
    width,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program computes PLACES of a token's logits."""
    blocks_per_token = (num_ids - 1) // PLACES + 1
    token = (tl.program_id(0) // blocks_per_token).to(tl.int64)
    places = tl.program_id(0) % blocks_per_token * PLACES + tl.arange(0, PLACES)
    exists = places < num_ids
    classes = tl.load(ids_ptr + token * num_ids + places, mask=exists, other=0)
    products = tl.zeros([PLACES, COLUMNS], dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        in_row = columns < width
        x = tl.load(input_ptr + token * input_row_stride + columns, mask=in_row, other=0.0).to(tl.float32)
        rows = tl.load(
            weight_ptr + classes[:, None] * weight_row_stride + columns[None, :],
            mask=exists[:, None] & in_row[None, :],
            other=0.0,
        ).to(tl.float32)
        products += rows * x[None, :]
    tl.store(logits_ptr + token * num_ids + places, tl.sum(products, axis=1), mask=exists)


@backend.Kernel
def _sum_rows_kernel(
    rows_ptr,  # [num_rows, width]
    index_ptr,  # [num_entries], int64: a row of each entry
    factors_ptr,  # [num_entries], float32
    starts_ptr,  # [num_sums + 1], int64: where the entries of each sum start
    sums_ptr,  # [num_sums, width], contiguous
    row_stride,
    width,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program computes COLUMNS of one sum."""
    blocks_per_sum = (width - 1) // COLUMNS + 1
    place = (tl.program_id(0) // blocks_per_sum).to(tl.int64)
    columns = tl.program_id(0) % blocks_per_sum * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < width
    start, end = tl.load(starts_ptr + place), tl.load(starts_ptr + place + 1)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(start, end, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        exists = entries < end
        factors = tl.load(factors_ptr + entries, mask=exists, other=0.0)
        index = tl.load(index_ptr + entries, mask=exists, other=0)
        rows = tl.load(
            rows_ptr + index[:, None] * row_stride + columns[None, :],
            mask=exists[:, None] & in_row[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(rows * factors[:, None], axis=0)
    tl.store(sums_ptr + place * width + columns, total.to(sums_ptr.dtype.element_ty), mask=in_row)


def _launch_sums(rows: Tensor, index: Tensor, factors: Tensor, starts: Tensor) -> Tensor:
    """``sums[i]`` of ``factors[e] * rows[index[e]]`` over the entries from ``starts[i]`` to ``starts[i + 1]``."""
    rows = backend.as_rows(rows, rows.shape[1])
    sums = rows.new_empty(len(starts) - 1, rows.shape[1])
    if sums.numel():
        _sum_rows_kernel.launch(
            len(sums) * -(-sums.shape[1] // _SUM_COLUMNS),
            rows_ptr=rows,
            index_ptr=index.contiguous(),
            factors_ptr=factors.float().contiguous(),
            starts_ptr=starts,
            sums_ptr=sums,
            row_stride=rows.stride(0),
            width=sums.shape[1],
            ENTRIES=_ENTRIES,
            COLUMNS=_SUM_COLUMNS,
            num_warps=_NUM_WARPS,
        )
    return sums


@backend.register_op("given_rows_sum", fake=lambda weight, ids, factors: weight.new_empty(len(ids), weight.shape[1]))
def rows_sum(weight: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """``sum_k factors[:, k] * weight[ids[:, k]]``, ``[num_tokens, width]``, of which no row is copied.

    Args:
        weight: ``[vocab_size, width]``.
        ids, factors: ``[num_tokens, K]``.
    """
    if not backend.runs_on_triton(weight, factors):
        return F.embedding_bag(ids, weight, per_sample_weights=factors.to(weight.dtype), mode="sum")
    starts = torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device)
    return _launch_sums(weight, ids.flatten(), factors.flatten(), starts)


def _empty_logits(input: Tensor, weight: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
    return torch.empty_like(ids, dtype=torch.promote_types(input.dtype, torch.float32))


@backend.register_op("given_logits", fake=_empty_logits)
def _given_logits(input: Tensor, weight: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
    logits = _empty_logits(input, weight, ids, chunk_size)
    if backend.runs_on_triton(input, weight) and logits.numel():
        input, weight = backend.as_rows(input, input.shape[1]), backend.as_rows(weight, weight.shape[1])
        _given_logits_kernel.launch(
            len(ids) * -(-ids.shape[1] // _PLACES),
            input_ptr=input,
            weight_ptr=weight,
            ids_ptr=ids.contiguous(),
            logits_ptr=logits,
            input_row_stride=input.stride(0),
            weight_row_stride=weight.stride(0),
            num_ids=ids.shape[1],
            width=input.shape[1],
            PLACES=_PLACES,
            COLUMNS=_DOT_COLUMNS,
            num_warps=_NUM_WARPS,
        )
        return logits
    for start in range(0, len(ids), chunk_size):
        chunk = slice(start, start + chunk_size)
        rows = weight.index_select(0, ids[chunk].flatten()).view(*ids[chunk].shape, weight.shape[1])
        logits[chunk] = torch.bmm(rows, input[chunk, :, None])[:, :, 0]
    return logits


@backend.register_op(
    "given_logits_grad_weight",
    fake=lambda grad_logits, input, ids, vocab_size, chunk_size: input.new_empty(vocab_size, input.shape[1]),
)
def _grad_weight(grad_logits: Tensor, input: Tensor, ids: Tensor, vocab_size: int, chunk_size: int) -> Tensor:
    """The gradient of the head, summed in ``grad_logits``' dtype, in the input's."""
    if backend.runs_on_triton(input, grad_logits):
        classes, order = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(classes, torch.arange(vocab_size + 1, device=ids.device))
        return _launch_sums(input, order // ids.shape[1], grad_logits.flatten()[order], starts)
    total = grad_logits.new_zeros(vocab_size, input.shape[1])
    for start in range(0, len(ids), chunk_size):
        chunk = slice(start, start + chunk_size)
        rows = grad_logits[chunk, :, None] * input[chunk, None].to(total.dtype)
        total.index_add_(0, ids[chunk].flatten(), rows.flatten(0, 1))
    return total.to(input.dtype)


class _GivenLogitsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
        ctx.save_for_backward(input, weight, ids)
        ctx.chunk_size = chunk_size
        return _given_logits(input, weight, ids, chunk_size)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, ids = ctx.saved_tensors
        grad_input = rows_sum(weight, ids, grad_logits) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(grad_logits, input, ids, weight.shape[0], ctx.chunk_size).to(weight.dtype)
        return grad_input, grad_weight, None, None


def given_logits(input: Tensor, weight: Tensor, ids: Tensor, chunk_bytes: int | None = None) -> Tensor:
    """``sum(input * weight[ids], -1)``: ``[num_tokens, K]`` logits in at least float32, differentiable.

    Args:
        input: ``[num_tokens, width]``.
        weight: ``[vocab_size, width]``.
        ids: Classes, ``[num_tokens, K]``; a gradient of the weight is summed in float32.
        chunk_bytes: Budget for the rows of the weight that are copied at once, in plain PyTorch.
    """
    row_bytes = max(1, ids.shape[1] * weight.shape[1] * weight.element_size())
    chunk_size = max(1, (GATHERED_BYTES if chunk_bytes is None else chunk_bytes) // row_bytes)
    if backend.needs_graph(input, weight):
        return _GivenLogitsFunction.apply(input, weight, ids, chunk_size)
    return _given_logits(input, weight, ids, chunk_size)
