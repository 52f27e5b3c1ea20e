"""The one loop behind every loss of a linear head: project, turn logits into loss and gradient, accumulate.

Token chunks are projected one at a time into one buffer, so logits never exist for more than a chunk. Ignored tokens
are sorted behind the others and left out of the matrix products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend

DEFAULT_CHUNK_BYTES = {"cuda": 512 * 2**20, "cpu": 8 * 2**20}
"""Bytes of one chunk of logits by device type. GPU: 2048 rows of 128k bfloat16 logits. Each chunk reads and writes
the head's gradient once, which smaller chunks do more often; with 1 GiB the loss, not the backward pass, became the
peak of training Llama 3 8B on 4 H200, by 0.4 GiB. CPU: about its cache, and few fresh pages."""

_MAX_ROUNDED_ACCUMULATIONS = 8
_ROW_MULTIPLE = 128


def default_chunk_bytes(device: torch.device) -> int:
    """The byte budget of one chunk of logits where none is given."""
    return DEFAULT_CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES["cpu"])


def choose_chunk_size(num_tokens: int, vocab_size: int, element_size: int, chunk_bytes: int) -> int:
    """Tokens a chunk: as many as fit ``chunk_bytes``, evenly spread, and never all of them at once.

    Args:
        num_tokens: Rows of the hidden states.
        vocab_size: Columns of the logits.
        element_size: Bytes of one logit.
        chunk_bytes: Budget for one chunk of logits.
    """
    budget_rows = max(1, chunk_bytes // (vocab_size * element_size))
    if budget_rows > _ROW_MULTIPLE:
        budget_rows -= budget_rows % _ROW_MULTIPLE
    num_chunks = max(2, -(-num_tokens // budget_rows))
    rows = -(-num_tokens // num_chunks)
    if rows > _ROW_MULTIPLE:  # whole tiles for the matrix products
        rows += -rows % _ROW_MULTIPLE
    return max(1, rows)


def choose_accumulate_dtype(weight_dtype: torch.dtype, num_chunks: int) -> torch.dtype:
    """The dtype that the weight gradient is summed in: the weight's while few chunks round, then float32."""
    if weight_dtype == torch.bfloat16 and num_chunks <= _MAX_ROUNDED_ACCUMULATIONS:
        return weight_dtype
    return torch.promote_types(weight_dtype, torch.float32)


class Gradients(NamedTuple):
    """Gradients of the hidden states, the head's weight and its bias; empty tensors where not asked for."""

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor


@dataclass
class KeptTokens:
    """The order in which tokens are visited, kept ones first, and how many of them there are.

    On a GPU the count is copied to the host in the background: :meth:`count` waits for it, which the loop does only
    once the first chunk's work is queued, so that the device never runs dry.
    """

    order: Tensor
    _count: Tensor
    _ready: torch.cuda.Event | None

    @classmethod
    def of(cls, labels: Tensor, ignore_index: int) -> "KeptTokens":
        kept = labels != ignore_index
        order = torch.argsort(kept, descending=True, stable=True)
        count = kept.sum()
        if not labels.is_cuda:
            return cls(order, count, None)
        host_count = torch.empty((), dtype=count.dtype, pin_memory=True)
        host_count.copy_(count, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(order, host_count, ready)

    def count(self) -> int:
        """The number of kept tokens, waiting for the device if it has not counted yet."""
        if self._ready is not None:
            self._ready.synchronize()
        return int(self._count)


ChunkLoss = Callable[[Tensor, Tensor], None]
"""Called with one chunk's logits ``[chunk_size, vocab_size]`` and its tokens' indices; makes them their gradient."""


def chunked_linear_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: KeptTokens,
    chunk_loss: ChunkLoss,
    *,
    chunk_size: int,
    accumulate_dtype: torch.dtype,
    needs_gradient: tuple[bool, bool, bool],
) -> Gradients:
    """Runs ``chunk_loss`` over the logits of a linear head, chunk by chunk, and collects the gradients.

    Args:
        hidden_states: ``[num_tokens, hidden_size]``.
        weight: ``[vocab_size, hidden_size]``.
        bias: ``[vocab_size]`` or None.
        tokens: The order of visiting; tokens behind its count are only seen if they share the first chunk.
        chunk_loss: What the loss is; its side effects keep the losses.
        chunk_size: Tokens a chunk.
        accumulate_dtype: Dtype of the weight's and the bias's gradient.
        needs_gradient: Whether the gradient of the hidden states, the weight and the bias is wanted.
    """
    num_tokens, vocab_size = hidden_states.shape[0], weight.shape[0]
    needs_hidden, needs_weight, needs_bias = needs_gradient
    grad_hidden = hidden_states.new_zeros(hidden_states.shape if needs_hidden else 0)
    # The first chunk writes the weight's gradient, the others add to it.
    allocate = weight.new_empty if num_tokens else weight.new_zeros
    grad_weight = allocate(weight.shape if needs_weight else 0, dtype=accumulate_dtype)
    grad_bias = weight.new_zeros(vocab_size if needs_bias else 0, dtype=accumulate_dtype)
    buffer = hidden_states.new_empty(min(chunk_size, num_tokens), vocab_size)

    for start in range(0, num_tokens, chunk_size):
        stop = min(start + chunk_size, tokens.count() if start > 0 else num_tokens)
        if start >= stop:
            break
        index = tokens.order[start:stop]
        chunk = hidden_states.index_select(0, index)
        logits = buffer[: stop - start]
        if bias is None:
            torch.mm(chunk, weight.t(), out=logits)
        else:
            torch.addmm(bias, chunk, weight.t(), out=logits)
        chunk_loss(logits, index)
        if needs_hidden:
            grad_hidden.index_copy_(0, index, logits @ weight)
        if needs_weight:
            _accumulate_product(grad_weight, logits.t(), chunk, keep=0 if start == 0 else 1)
        if needs_bias:
            grad_bias += logits.sum(0, dtype=accumulate_dtype)
    return Gradients(grad_hidden, grad_weight, grad_bias)


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor, keep: int) -> None:
    """``total = keep * total + left @ right`` without a temporary of ``total``'s size where the device can."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=keep, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=keep, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=keep, out=total)


@triton.jit
def _scale_kernel(
    gradient_ptr,  # [numel]
    factor_ptr,  # [1], float32
    scaled_ptr,  # [numel], may be gradient_ptr
    numel,
    BLOCK_SIZE: tl.constexpr,
):
    """One program multiplies one block in float32 and rounds once."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < numel
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    scaled = gradient * tl.load(factor_ptr).to(tl.float32)
    tl.store(scaled_ptr + offsets, scaled.to(scaled_ptr.dtype.element_ty), mask=mask)


def scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """``gradient * factor`` in ``dtype``, multiplied in float32 (or float64) and rounded once.

    Args:
        gradient: Contiguous; overwritten if ``in_place`` and already of ``dtype``.
        factor: A scalar, at least float32.
        dtype: Of the result.
        in_place: Whether nobody will ask for ``gradient`` again.
    """
    scaled = gradient if in_place and gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    if gradient.dtype in (torch.float32, torch.float64):
        return torch.mul(gradient, factor, out=scaled)
    if not backend.use_triton(gradient):
        # With a dimension, or PyTorch would cast the factor to the gradient's dtype before it multiplies.
        return torch.mul(gradient, factor.reshape(1), out=scaled)
    if gradient.numel():
        _scale_kernel[(triton.cdiv(gradient.numel(), 4096),)](
            gradient_ptr=gradient,
            factor_ptr=factor,
            scaled_ptr=scaled,
            numel=gradient.numel(),
            BLOCK_SIZE=4096,
            num_warps=8,
        )
    return scaled
