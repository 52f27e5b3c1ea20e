"""A linear head's loss whose logits lie in the memory of the head's gradient, which is written last.

The gradient of a head ``[vocab_size, hidden_size]`` has a row for each class, so that it has a place for the logits of
up to ``hidden_size`` tokens: row v holds those of class v. The logits become their gradient there; the gradient of the
hidden states is one product; and then, for one block of classes after the other, the logits' gradient is copied out and
the head's gradient written in its place. So a few tokens and a wide head need hardly more memory than the gradients,
and no gradient is read and written again, as it is where chunks of tokens add to it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_ops.loss.chunked_loss import (
    GOOD_CHUNK_TOKENS,
    MEMORY_SHARE,
    ChunkLoss,
    Gradients,
    KeptTokens,
    choose_accumulate_dtype,
)

_BLOCK_BYTES = 64 * 2**20  # of logits' gradients that are copied out at a time
_ROW_MULTIPLE = 256
_UNIT_BYTES = 16  # of complex128
_MIN_LOGITS_BYTES = 128 * 2**20  # of fewer the launches show
# Products with a narrower head are so short that a third passage over the logits, and the copy, take too large a share.
_MIN_HIDDEN_SIZE = 2048
TOKEN_MULTIPLE = 16
"""Must divide the number of tokens: rows of the logits are copied 16 bytes at a time, and Triton reads as much at once
where 16 divides their length."""


def holds_logits(
    num_tokens: int,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    beside: Sequence[Tensor | None] = (),
    accumulate_dtype: torch.dtype | None = None,
) -> bool:
    """Whether so many tokens' logits are better kept in a head's gradient, which is wanted, than in chunks.

    On a GPU, if logits and head are not small, what does not fit into the gradient takes no more memory than a chunk of
    ``GOOD_CHUNK_TOKENS``, and the gradient has the logits' dtype. On a CPU never, where chunks fit its cache.

    Args:
        num_tokens: Of the hidden states.
        weight: ``[vocab_size, hidden_size]``.
        dtype: Of the products.
        beside: A bias or an adapter: with one of them, never.
        accumulate_dtype: Of the gradient, None for the default.
    """
    if not _is_on_gpu(weight) or any(each is not None for each in beside):
        return False
    vocab_size, hidden_size = weight.shape
    chunk = GOOD_CHUNK_TOKENS * (vocab_size + hidden_size)
    return (
        hidden_size >= _MIN_HIDDEN_SIZE
        and hidden_size % (_UNIT_BYTES // dtype.itemsize) == 0
        and num_tokens % TOKEN_MULTIPLE == 0
        and num_tokens * vocab_size * dtype.itemsize >= _MIN_LOGITS_BYTES
        and num_numbers_outside(num_tokens, vocab_size, hidden_size, dtype.itemsize) <= chunk
        and (accumulate_dtype or choose_accumulate_dtype(dtype, 1)) == dtype
    )


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type in ("cuda", "meta")  # a meta tensor stands for one on a GPU


def num_tokens_outside(num_tokens: int, hidden_size: int) -> int:
    """How many tokens' logits do not fit into the gradient and take memory of their own."""
    outside = max(0, num_tokens - hidden_size)
    return min(num_tokens, outside + -outside % _ROW_MULTIPLE)


def block_rows(num_tokens: int, vocab_size: int, hidden_size: int, element_size: int) -> int:
    """How many classes' gradients of the logits are copied out at a time.

    The smaller block costs 1% of the loss's time more, and is for the memory that it saves where all that is allocated
    with the larger one exceeds ``MEMORY_SHARE`` of whole logits with all gradients.
    """
    gradients = hidden_size * (vocab_size + num_tokens)
    most = MEMORY_SHARE * (num_tokens * vocab_size + gradients)
    allocated = gradients + num_tokens_outside(num_tokens, hidden_size) * vocab_size
    block = _BLOCK_BYTES // element_size
    block = block // 2 if allocated + block > most else block
    rows = max(1, block // max(1, num_tokens))
    return min(vocab_size, max(rows - rows % _ROW_MULTIPLE, min(rows, _ROW_MULTIPLE)))


def num_numbers_outside(num_tokens: int, vocab_size: int, hidden_size: int, element_size: int) -> int:
    """How many numbers the logits take beside the gradients: of tokens outside, and a block of classes."""
    copied = num_tokens * block_rows(num_tokens, vocab_size, hidden_size, element_size)
    return vocab_size * num_tokens_outside(num_tokens, hidden_size) + copied


def linear_loss_in_gradient(
    hidden_states: Tensor,
    weight: Tensor,
    tokens: KeptTokens,
    chunk_loss: ChunkLoss,
    *,
    num_valid: Tensor,
    first_rows: int,
    needs_hidden: bool,
) -> Gradients:
    """As :func:`~liger_ops.loss.chunked_loss.chunked_linear_loss` for a head without bias whose gradient is wanted.

    Args:
        hidden_states: ``[num_tokens, hidden_size]``; see :func:`holds_logits`.
        weight: ``[vocab_size, hidden_size]``, of the same dtype.
        tokens: The order of visiting.
        chunk_loss: Overwrites logits ``[rows, vocab_size]``, of unit stride in the first dimension, with the gradient.
        num_valid: ``[]``, on the device: how many tokens are not ignored, whatever bound ``tokens`` has.
        first_rows: How many tokens' logits are computed before the host asks for the number of tokens to visit, if all
            logits fit into the gradient; a multiple of ``TOKEN_MULTIPLE``. Otherwise they are those that do not.
        needs_hidden: Whether the gradient of the hidden states is wanted.
    """
    num_tokens, hidden_size = hidden_states.shape
    grad_weight = weight.new_empty(weight.shape)
    num_outside = num_tokens_outside(num_tokens, hidden_size)
    outside = weight.new_empty(weight.shape[0], num_outside)
    assert tokens.order is not None  # there are two chunks or more

    first_rows = num_outside or first_rows
    first = outside if num_outside else grad_weight[:, :first_rows]
    _project(hidden_states.index_select(0, tokens.order[:first_rows]), weight, first)
    num_kept = tokens.count()
    num_visited = min(num_tokens, max(first_rows, num_kept + -num_kept % TOKEN_MULTIPLE))
    in_order = tokens.is_exact and num_kept == num_tokens
    order = tokens.order[:num_visited]
    states = hidden_states if in_order else hidden_states.index_select(0, order)
    if not in_order:  # of ignored tokens, which may be NaN
        states.masked_fill_((torch.arange(num_visited, device=states.device) >= num_valid)[:, None], 0.0)
    inside = grad_weight[:, : num_visited - num_outside]
    _project(states[first_rows:], weight, inside[:, first_rows - num_outside :])

    parts = [(outside, slice(0, num_outside)), (inside, slice(num_outside, num_visited))]
    parts = [(logits, rows) for logits, rows in parts if rows.start < rows.stop]
    for logits, rows in parts:
        chunk_loss(logits.t(), order[rows])
    grad_hidden = hidden_states.new_empty(0)
    if needs_hidden:
        allocate = torch.empty_like if num_visited == num_tokens else torch.zeros_like
        grad_hidden = allocate(hidden_states)
        for logits, rows in parts:
            if in_order:
                torch.mm(logits.t(), weight, out=grad_hidden[rows])
                continue
            for some, index in zip(
                logits.split(GOOD_CHUNK_TOKENS, 1), order[rows].split(GOOD_CHUNK_TOKENS), strict=True
            ):
                grad_hidden.index_copy_(0, index, torch.mm(some.t(), weight))
    _write_head_gradient(grad_weight, [logits for logits, _ in parts], states)
    return Gradients(grad_hidden, grad_weight, *(weight.new_empty(0) for _ in range(3)))


def _project(states: Tensor, weight: Tensor, logits: Tensor) -> None:
    """Writes the logits of tokens to ``[vocab_size, num_tokens]``."""
    if len(states):
        torch.mm(states, weight.t(), out=logits.t())


def _write_head_gradient(grad_weight: Tensor, parts: list[Tensor], states: Tensor) -> None:
    """Writes the products of the logits' gradients and the states where the former are.

    Args:
        grad_weight: ``[vocab_size, hidden_size]``.
        parts: ``[vocab_size, any]``, whose columns are the tokens; may be views of ``grad_weight``.
        states: ``[num_tokens, hidden_size]``.
    """
    num_tokens, vocab_size = len(states), len(grad_weight)
    rows = block_rows(num_tokens, vocab_size, states.shape[1], states.element_size())
    copy = states.new_empty(rows, num_tokens)
    for start in range(0, vocab_size, rows):
        block = slice(start, min(start + rows, vocab_size))
        grad_logits = copy[: block.stop - start]
        for target, part in zip(grad_logits.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
            _in_units(target).copy_(_in_units(part[block]))
        torch.mm(grad_logits, states, out=grad_weight[block])


def _in_units(tensor: Tensor) -> Tensor:
    """``tensor`` as numbers of ``_UNIT_BYTES``, whose strided copies are as fast as the memory."""
    return tensor.view(torch.complex128)
