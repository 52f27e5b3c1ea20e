"""Functions of logits over one chunk of tokens after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_ops.loss.chunked_loss import choose_chunk_size, default_chunk_size


def choose_tokens(
    num_tokens: int, vocab_size: int, size: int, chunk_bytes: int | None, device: torch.device, hidden_size: int = 0
) -> int:
    """Tokens of a chunk of logits of ``size`` bytes each, within a budget; by default as ``default_chunk_size``."""
    if chunk_bytes is None:
        return default_chunk_size(num_tokens, vocab_size, size, device, hidden_size)
    return choose_chunk_size(num_tokens, vocab_size, size, chunk_bytes)


class Rows(NamedTuple):
    """Logits whose values are computed, or read, for one chunk of tokens at a time."""

    tensor: Tensor
    """``[num_tokens, any]``: what the values of a token are computed from."""
    values: Callable[[Tensor], Tensor]
    """Gets some of its rows; returns their values, ``[chunk_size, vocab_size]``."""
    requires_grad: bool


def over_chunks(
    function: Callable[..., Any], sources: Sequence[Rows], token_tensors: Sequence[Tensor], chunk_size: int
) -> Any:
    """``function`` of the values of each chunk of tokens, joined and differentiable; backward computes it again.

    It gets the values of each source, ``[chunk_size, vocab_size]``, then the same rows of ``token_tensors``,
    ``[num_tokens, any]``, and returns a tensor whose first dimension is chunk_size, or a tuple of them.
    """

    def per_chunk(*chunk: Tensor) -> Any:
        rows = [normal(each) for each in chunk]
        values = [source.values(each) for source, each in zip(sources, rows, strict=False)]
        return function(*values, *rows[len(sources) :])

    leaves: list[Any] = [*sources, *token_tensors]
    requires_grad = torch.is_grad_enabled() and any(each.requires_grad for each in leaves)
    tensors = (*(source.tensor for source in sources), *token_tensors)
    parts = []
    for chunk in zip(*(tensor.split(chunk_size) for tensor in tensors), strict=True):
        # No arguments of checkpoint, which would save them: those of inference mode may not be saved.
        compute = partial(per_chunk, *chunk)
        parts.append(checkpoint(compute, use_reentrant=False, preserve_rng_state=False) if requires_grad else compute())
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    return tuple(joined) if type(parts[0]) is tuple else type(parts[0])(joined)


def normal(tensor: Tensor) -> Tensor:
    """A tensor that autograd may save, which those of ``torch.inference_mode`` may not be."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor
