"""Functions of logits over one chunk of tokens after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Rows(NamedTuple):
    """Logits whose values are computed, or read, for one chunk of tokens at a time."""

    tensors: tuple[Tensor, ...]
    """``[num_tokens, any]`` each: what the values of a token are computed from."""
    values: Callable[..., Tensor]
    """Gets the same rows of all tensors; returns their values, ``[chunk_size, vocab_size]``."""
    requires_grad: bool


def real_rows(logits: Tensor) -> Rows:
    """The rows of materialized logits, ``[..., vocab_size]``."""
    return Rows((logits.reshape(-1, logits.shape[-1]),), lambda rows: rows, logits.requires_grad)


def over_chunks(
    function: Callable[..., Any], sources: Sequence[Rows], token_tensors: Sequence[Tensor], chunk_size: int
) -> Any:
    """``function`` of the values of each chunk of tokens, differentiably; backward computes the values again.

    Args:
        function: Gets the values of each source, ``[chunk_size, vocab_size]``, then the same rows of ``token_tensors``.
            Returns a tensor whose first dimension is chunk_size, or a tuple of them. It runs twice with gradients.
        sources: Logits of the same tokens.
        token_tensors: ``[num_tokens, any]``.
        chunk_size: Tokens of a chunk.

    Returns:
        The results of all chunks, joined in their first dimension.
    """
    ends = [0]
    for source in sources:
        ends.append(ends[-1] + len(source.tensors))

    def of_chunk(*rows: Tensor) -> Any:
        values = [source.values(*rows[start:end]) for source, start, end in zip(sources, ends, ends[1:], strict=False)]
        return function(*values, *rows[ends[-1] :])

    tensors = [*(tensor for source in sources for tensor in source.tensors), *token_tensors]
    requires_grad = any(source.requires_grad for source in sources) or any(t.requires_grad for t in token_tensors)
    compute: Callable[..., Any] = of_chunk
    if requires_grad and torch.is_grad_enabled():
        compute = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(*(tensor.split(chunk_size) for tensor in tensors), strict=True)
    parts = [compute(*chunk) for chunk in chunks]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    return tuple(joined) if type(parts[0]) is tuple else type(parts[0])(joined)
