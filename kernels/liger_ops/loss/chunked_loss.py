"""The loop over chunks of tokens for any loss of a linear head: project, logits to loss and gradient, accumulate.

Chunks are projected one at a time into one buffer, so logits never exist for more than a chunk. Ignored tokens are
sorted to the end and left out of the matrix products.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_ops.loss.token_plan import TokenPlan

CPU_CHUNK_BYTES = 8 * 2**20
"""Default chunk on a CPU: about the size of its cache, and few new memory pages."""

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 512 * 2**20, 2 * 2**30
"""Bounds of the default chunk on a GPU. Each chunk reads and writes the head's gradient once, which smaller chunks do
more often; with 1 GiB the loss, not the backward pass, became the peak of training Llama 3 8B on 4 H200, by 0.4 GiB."""

_GPU_CHUNK_TOKENS = 2048
_MAX_ROUNDED_ACCUMULATIONS = 4  # each rounds the sum so far: together 1.5 times the error of a single product
_ROW_MULTIPLES = ((1024, 128), (128, 16))  # from how many rows on chunks are whole tiles of the matrix products
_WHOLE_BYTES = 4 * 2**20


def choose_chunk_size(num_tokens: int, vocab_size: int, element_size: int, chunk_bytes: int) -> int:
    """Tokens a chunk: as many as fit ``chunk_bytes``, evenly spread, and never all of them at once.

    Args:
        num_tokens: Rows of the hidden states.
        vocab_size: Columns of the logits.
        element_size: Bytes of one logit.
        chunk_bytes: Budget for one chunk of logits.
    """
    budget_rows = max(1, chunk_bytes // (vocab_size * element_size))
    multiple = next((multiple for limit, multiple in _ROW_MULTIPLES if budget_rows > limit), 1)
    budget_rows -= budget_rows % multiple
    num_chunks = max(2, -(-num_tokens // budget_rows))
    rows = -(-num_tokens // num_chunks)
    if rows > multiple:
        rows += -rows % multiple
    return max(1, rows)


def default_chunk_size(num_tokens: int, vocab_size: int, element_size: int, device: torch.device) -> int:
    """Tokens a chunk where no budget is given.

    On a GPU 2048 tokens, or as many as make 4 chunks, within ``MIN_CHUNK_BYTES`` and ``MAX_CHUNK_BYTES``; all tokens if
    their logits are so small that launching the kernels of two chunks would take longer than running them.
    """
    if device.type != "cuda":
        return choose_chunk_size(num_tokens, vocab_size, element_size, CPU_CHUNK_BYTES)
    token_bytes = vocab_size * element_size
    if num_tokens * token_bytes <= _WHOLE_BYTES:
        return max(1, num_tokens)
    chunk_tokens = max(_GPU_CHUNK_TOKENS, -(-num_tokens // _MAX_ROUNDED_ACCUMULATIONS))
    chunk_tokens += -chunk_tokens % _ROW_MULTIPLES[0][1]
    chunk_bytes = min(max(chunk_tokens * token_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    return choose_chunk_size(num_tokens, vocab_size, element_size, chunk_bytes)


def choose_accumulate_dtype(weight_dtype: torch.dtype, num_chunks: int) -> torch.dtype:
    """The dtype that the weight gradient is summed in: the weight's while few chunks round, then float32."""
    if weight_dtype == torch.bfloat16 and num_chunks <= _MAX_ROUNDED_ACCUMULATIONS:
        return weight_dtype
    return torch.promote_types(weight_dtype, torch.float32)


class Gradients(NamedTuple):
    """Gradients of the hidden states, the head and its adapter; empty tensors where not requested."""

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor
    adapter_input: Tensor
    adapter_weight: Tensor


class KeptTokens:
    """The order in which tokens are visited, those that are not ignored first, and how many there are of them.

    Args:
        plan: The order and the number, on the device; without an order tokens are visited as they are.
        max_kept: An upper bound of the number that the host knows already. Without one the number is copied to the host
            in the background: :meth:`count` waits for it, which the loop does only once the first chunk's work is
            queued, so that the device is never idle.
    """

    def __init__(self, plan: TokenPlan, max_kept: int | None = None) -> None:
        self.order = plan.order
        self._ready: torch.cuda.Event | None = None
        self._count = plan.num_kept if max_kept is None else max_kept
        if isinstance(self._count, Tensor) and self._count.is_cuda:
            on_device, self._count = self._count, torch.empty((), dtype=torch.int64, pin_memory=True)
            self._count.copy_(on_device, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(on_device.device))  # which may not be the current device's

    def count(self) -> int:
        """How many tokens to visit, waiting for the device if it has not counted yet."""
        if self._ready is not None:
            self._ready.synchronize()
        assert self._count is not None  # a plan with an order has a number
        return int(self._count)


ChunkLoss = Callable[[Tensor, Tensor | None], None]
"""Called with one chunk's logits ``[chunk_size, vocab_size]`` and its tokens' indices (None if it holds all tokens in
order); overwrites the logits with their gradient."""


def chunked_linear_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: KeptTokens,
    chunk_loss: ChunkLoss,
    *,
    chunk_size: int,
    accumulate_dtype: torch.dtype,
    needs_gradient: Sequence[bool],
    adapter: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """Runs ``chunk_loss`` over the logits of a linear head, chunk by chunk, and collects the gradients.

    Args:
        hidden_states: ``[num_tokens, hidden_size]``.
        weight: ``[vocab_size, hidden_size]``.
        bias: ``[vocab_size]`` or None.
        tokens: The order of visiting; tokens after its count are only seen if they share the first chunk. An order
            is required unless one chunk holds all tokens.
        chunk_loss: Computes the loss; stores the losses as a side effect.
        chunk_size: Tokens a chunk.
        accumulate_dtype: Dtype of the weight's and the bias's gradient.
        needs_gradient: Whether the gradient of the hidden states, the weight and the bias is wanted; then of the
            adapter's input and weight.
        adapter: ``[num_tokens, rank]`` and ``[vocab_size, rank]``, whose product is added to the logits.
    """
    num_tokens, vocab_size = hidden_states.shape[0], weight.shape[0]
    needs_hidden, needs_weight, needs_bias, *needs_adapter = needs_gradient
    in_order = tokens.order is None
    grad_hidden = hidden_states.new_empty(0)
    if needs_hidden:
        grad_hidden = torch.empty_like(hidden_states) if in_order else torch.zeros_like(hidden_states)
    # The first chunk writes the weight's gradient, the others add to it.
    allocate = weight.new_empty if num_tokens else weight.new_zeros
    grad_weight = allocate(weight.shape if needs_weight else 0, dtype=accumulate_dtype)
    grad_bias = weight.new_zeros(vocab_size if needs_bias else 0, dtype=accumulate_dtype)
    update = None if adapter is None else _Adapter(*adapter, accumulate_dtype, *needs_adapter)
    rows = min(chunk_size, num_tokens)
    logits_buffer = _aligned_rows(hidden_states, rows, vocab_size)
    chunk_buffer = hidden_states.new_empty(0 if in_order else rows, hidden_states.shape[1])

    for start in range(0, num_tokens, chunk_size):
        stop = min(start + chunk_size, num_tokens, tokens.count() if start > 0 else num_tokens)
        if start >= stop:
            break
        index, chunk = None, hidden_states
        if tokens.order is not None:
            index = tokens.order[start:stop]
            chunk = torch.index_select(hidden_states, 0, index, out=chunk_buffer[: stop - start])
        logits = logits_buffer[: stop - start]
        if bias is None:
            torch.mm(chunk, weight.t(), out=logits)
        else:
            torch.addmm(bias, chunk, weight.t(), out=logits)
        if update is not None:
            update.add_to(logits, index)
        chunk_loss(logits, index)
        if update is not None:
            update.collect(logits, index)
        if needs_weight:
            _accumulate_product(grad_weight, logits.t(), chunk, keep=0 if start == 0 else 1)
        if needs_hidden and index is None:
            torch.mm(logits, weight, out=grad_hidden)
        elif needs_hidden and index is not None:  # last, since its gradient overwrites the chunk of hidden states
            grad_hidden.index_copy_(0, index, torch.mm(logits, weight, out=chunk))
        if needs_bias:
            grad_bias += logits.sum(0, dtype=accumulate_dtype)
    nothing = hidden_states.new_empty(0), weight.new_empty(0, dtype=accumulate_dtype)
    return Gradients(grad_hidden, grad_weight, grad_bias, *(nothing if update is None else update.gradients))


class _Adapter:
    """A low-rank update of the logits, ``input @ weight.T``, and its gradients; small next to the head."""

    def __init__(
        self, input: Tensor, weight: Tensor, accumulate_dtype: torch.dtype, needs_input: bool, needs_weight: bool
    ) -> None:
        self.input, self.weight = input, weight
        grad_input = torch.zeros_like(input) if needs_input else input.new_empty(0)
        grad_weight = weight.new_zeros(weight.shape if needs_weight else 0, dtype=accumulate_dtype)
        self.gradients = grad_input, grad_weight

    def _rows(self, tensor: Tensor, index: Tensor | None) -> Tensor:
        return tensor if index is None else tensor.index_select(0, index)

    def add_to(self, logits: Tensor, index: Tensor | None) -> None:
        logits.addmm_(self._rows(self.input, index), self.weight.t())

    def collect(self, grad_logits: Tensor, index: Tensor | None) -> None:
        grad_input, grad_weight = self.gradients
        if grad_weight.numel():
            _accumulate_product(grad_weight, grad_logits.t(), self._rows(self.input, index), keep=1)
        if not grad_input.numel():
            return
        if index is None:
            torch.mm(grad_logits, self.weight, out=grad_input)
        else:
            grad_input.index_copy_(0, index, grad_logits @ self.weight)


def _aligned_rows(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A matrix whose rows start at multiples of 16 bytes, whatever their length; only the padding is initialized."""
    padding = -num_columns % max(1, 16 // like.element_size())
    padded = like.new_empty(num_rows, num_columns + padding)
    if padding:  # matrix products in half precision read it on CPUs with AMX, where NaN would spread
        padded[:, num_columns:] = 0.0
    return padded[:, :num_columns]


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor, keep: int) -> None:
    """``total = keep * total + left @ right`` without a temporary of ``total``'s size where the device can."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=keep, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=keep, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=keep, out=total)
