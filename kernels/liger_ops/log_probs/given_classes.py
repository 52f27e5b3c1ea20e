"""Logits of a few given classes of each token, from their rows of a head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend

GATHERED_BYTES = 64 * 2**20
"""Default budget for the rows of the head that are gathered at once."""


def rows_sum(weight: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """``sum_k factors[:, k] * weight[ids[:, k]]``, ``[num_tokens, width]``, of which no row is copied.

    Args:
        weight: ``[vocab_size, width]``.
        ids, factors: ``[num_tokens, K]``.
    """
    return F.embedding_bag(ids, weight, per_sample_weights=factors.to(weight.dtype), mode="sum")


@backend.register_op(
    "given_logits(Tensor input, Tensor weight, Tensor ids, SymInt chunk_size) -> Tensor",
    fake=lambda input, weight, ids, chunk_size: torch.empty_like(
        ids, dtype=torch.promote_types(input.dtype, torch.float32)
    ),
)
def _given_logits(input: Tensor, weight: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
    logits = torch.empty_like(ids, dtype=torch.promote_types(input.dtype, torch.float32))
    for start in range(0, len(ids), chunk_size):
        chunk = slice(start, start + chunk_size)
        rows = weight.index_select(0, ids[chunk].flatten()).view(*ids[chunk].shape, weight.shape[1])
        logits[chunk] = torch.bmm(rows, input[chunk, :, None])[:, :, 0]
    return logits


@backend.register_op(
    "given_logits_grad_weight(Tensor grad_logits, Tensor input, Tensor ids, SymInt vocab_size, SymInt chunk_size)"
    " -> Tensor",
    fake=lambda grad_logits, input, ids, vocab_size, chunk_size: grad_logits.new_empty(vocab_size, input.shape[1]),
)
def _grad_weight(grad_logits: Tensor, input: Tensor, ids: Tensor, vocab_size: int, chunk_size: int) -> Tensor:
    """The gradient of the head, summed in ``grad_logits``' dtype."""
    total = grad_logits.new_zeros(vocab_size, input.shape[1])
    for start in range(0, len(ids), chunk_size):
        chunk = slice(start, start + chunk_size)
        rows = grad_logits[chunk, :, None] * input[chunk, None].to(total.dtype)
        total.index_add_(0, ids[chunk].flatten(), rows.flatten(0, 1))
    return total


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
        chunk_bytes: Budget for the rows of the weight that are copied at once.
    """
    row_bytes = max(1, ids.shape[1] * weight.shape[1] * weight.element_size())
    chunk_size = max(1, (GATHERED_BYTES if chunk_bytes is None else chunk_bytes) // row_bytes)
    if backend.needs_graph(input, weight):
        return _GivenLogitsFunction.apply(input, weight, ids, chunk_size)
    return _given_logits(input, weight, ids, chunk_size)
