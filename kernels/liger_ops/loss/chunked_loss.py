"""The loop over chunks of tokens for any loss of a linear head: project, logits to loss and gradient, accumulate.

Chunks are projected one at a time into one buffer, so logits never exist for more than a chunk. Ignored tokens are
sorted to the end and left out of the matrix products.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.options import Targets
from liger_ops.loss.token_plan import mean_scale_of

CPU_CHUNK_BYTES = 8 * 2**20
"""Default chunk on a CPU: about the size of its cache, and few new memory pages."""

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 512 * 2**20, 2 * 2**30
"""Bounds of the default chunk on a GPU. Each chunk reads and writes the head's gradient once, which smaller chunks do
more often; with 1 GiB the loss, not the backward pass, became the peak of training Llama 3 8B on 4 H200, by 0.4 GiB."""

MIN_CHUNK_TOKENS, SAVING_CHUNK_TOKENS, GOOD_CHUNK_TOKENS = 1024, 1536, 2048
"""Fewest tokens of a default chunk on a GPU, fewest of one that is made smaller to save memory, and those from which on
more gain nothing. Every chunk but the first costs the time of about 110 tokens more on an H200, whatever the head: the
products and the head's gradient, which is read and written again, both grow with ``vocab_size * hidden_size``."""

MEMORY_SHARE = 0.7
"""Part of the memory of whole logits with all gradients that default chunks stay below, where that costs little time:
of 4096 tokens two chunks take the time of whole logits and 3% more, three 5%, four 8%."""

_MAX_ROUNDED_ACCUMULATIONS = 4  # each rounds the sum so far: together 1.5 times the error of a single product
_COLUMN_MULTIPLE = 64  # the part of an unaligned vocabulary that is multiplied fast
_LONG_ROW = 1024
_WHOLE_BYTES = 4 * 2**20
# From how many rows on chunks are whole tiles of the matrix products. On an H200, 4096 tokens and a head of 4096 x
# 128256, milliseconds by rows of a chunk: 640 22.1, 832 23.2, 1024 21.4, 1408 21.1, 2048 19.8, 4096 19.3.
_ROW_MULTIPLES = ((512, 256), (128, 16))


def choose_chunk_size(num_tokens: int, vocab_size: int, element_size: int, chunk_bytes: int) -> int:
    """Tokens per chunk of logits: as many as fit ``chunk_bytes``, evenly spread, and never all of them at once."""
    return _spread(num_tokens, max(1, chunk_bytes // (vocab_size * element_size)))


def _spread(num_tokens: int, most: int) -> int:
    """Rows of each of the fewest chunks, two or more, that hold at most ``most`` rows."""
    most -= most % _row_multiple(most)
    num_chunks = max(2, -(-num_tokens // most))
    rows = -(-num_tokens // num_chunks)
    return max(1, rows + -rows % _row_multiple(rows))


def _row_multiple(rows: int) -> int:
    return next((multiple for limit, multiple in _ROW_MULTIPLES if rows > limit), 1)


def default_chunk_size(
    num_tokens: int, vocab_size: int, element_size: int, device: torch.device, hidden_size: int = 0
) -> int:
    """Tokens per chunk where no budget is given.

    On a GPU, ``GOOD_CHUNK_TOKENS`` or as many as make 4 chunks or ``MIN_CHUNK_BYTES``. Fewer, down to
    ``SAVING_CHUNK_TOKENS`` or 4 chunks, if that keeps to ``MEMORY_SHARE``. More than 4 chunks, whose sum takes more
    precision, are for logits of which a quarter exceeds both ``MAX_CHUNK_BYTES`` and the memory that this precision
    takes. All tokens are one chunk if they are too few for two. ``hidden_size`` is 0 if the head needs no gradient.
    """
    if device.type not in ("cuda", "meta"):
        return choose_chunk_size(num_tokens, vocab_size, element_size, CPU_CHUNK_BYTES)
    head = vocab_size * hidden_size * element_size
    most = max(1, max(MAX_CHUNK_BYTES + head, 2 * head) // (vocab_size * element_size))
    if num_tokens <= max(min(2 * MIN_CHUNK_TOKENS - 1, most), _WHOLE_BYTES // (vocab_size * element_size)):
        return max(1, num_tokens)
    quarter = -(-num_tokens // _MAX_ROUNDED_ACCUMULATIONS)
    quarter += -quarter % _row_multiple(quarter)
    if quarter > most:
        return _spread(num_tokens, max(1, MAX_CHUNK_BYTES // (vocab_size * element_size)))
    fast = max(GOOD_CHUNK_TOKENS, quarter, MIN_CHUNK_BYTES // (vocab_size * element_size))
    gradients = hidden_size * (vocab_size + num_tokens)
    saving = int(MEMORY_SHARE * (num_tokens * vocab_size + gradients) - gradients) // (vocab_size + hidden_size)
    saving -= saving % _row_multiple(saving)
    return _spread(num_tokens, min(max(saving, quarter) if saving >= SAVING_CHUNK_TOKENS else fast, fast, most))


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
        order: ``[num_tokens]``, int64, those that are visited first; None visits tokens as they are.
        count: How many are visited, as an integer that may be a bound, or exactly as a scalar on the device. That is
            copied to the host in the background: :meth:`count` waits for it, which the loop does only once the first
            chunk's work is queued, so that the device is never idle.
        chunks: Where chunks of the order start and end, in place of chunks of one size.
        in_order: Whether ``order`` is 0, 1, ..., so that no rows need to be gathered.
    """

    def __init__(
        self,
        order: Tensor | None,
        count: Tensor | int,
        chunks: Sequence[tuple[int, int]] | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        self.order = order
        self.in_order = in_order or order is None
        self._chunks = chunks
        self._count = backend.HostNumber(count)

    def count(self) -> int:
        """How many tokens to visit, waiting for the device if it has not counted yet."""
        return int(self._count)

    def chunks(self, num_tokens: int, chunk_size: int) -> Iterator[tuple[int, int]]:
        """Where each chunk starts and ends: the first one at once, the others after :meth:`count`."""
        if self._chunks is not None:
            yield from self._chunks
            return
        for start in range(0, num_tokens, chunk_size):
            stop = min(start + chunk_size, num_tokens, self.count() if start > 0 else num_tokens)
            if start >= stop:
                return
            yield start, stop

    def max_rows(self, num_tokens: int, chunk_size: int) -> int:
        """Tokens of the largest chunk."""
        if self._chunks is None:
            return min(chunk_size, num_tokens)
        return max(stop - start for start, stop in self._chunks)


ChunkLoss = Callable[[Tensor, Tensor | None], Tensor | None]
"""Called with one chunk's logits ``[chunk_size, vocab_size]`` and its tokens' indices (None if it holds all tokens in
order); overwrites the logits with their gradient, or returns the gradient, in the dtype of the hidden states."""


@dataclass
class SavedLogits:
    """Logits of the first chunks, which forward saves so that backward need not compute them again."""

    max_chunks: int = 0  # how many chunks forward may save; 0 in backward
    chunks: list[Tensor] = field(default_factory=list)  # [rows of the chunk, vocab_size] each
    are_needed_again: bool = False
    """Whether backward must leave the saved logits as they are; it copies one chunk at a time then."""

    def allocate(self, number: int, like: Tensor, num_rows: int, num_columns: int) -> Tensor | None:
        """Memory for the logits of the chunk of that number, if forward saves it."""
        if number >= self.max_chunks:
            return None
        self.chunks.append(aligned_rows(like, num_rows, num_columns))
        return self.chunks[-1]

    def logits(self, number: int) -> Tensor | None:
        """A saved chunk that may be overwritten, in backward; None for others."""
        if self.max_chunks or number >= len(self.chunks):
            return None
        logits = self.chunks[number]
        return aligned_rows(logits, *logits.shape).copy_(logits) if self.are_needed_again else logits


def visit_tokens(
    targets: Targets,
    vocab_size: int,
    ignore_index: int,
    like: Tensor,
    chunk_size: int,
    max_valid_tokens: int | None = None,
    *,
    are_all_kept: bool = False,
) -> tuple[KeptTokens, Tensor]:
    """The tokens that are not ignored, for chunks of a size, and the factor of their mean.

    Without a bound the host waits for their number after the first of several chunks, but not if ``are_all_kept``, and
    not in a CUDA graph, which visits all.
    """
    num_tokens = targets.labels.shape[0]
    mean_scale = mean_scale_of(targets, vocab_size, ignore_index, like.dtype)
    if chunk_size >= num_tokens:
        return KeptTokens(None, num_tokens), mean_scale
    if are_all_kept:
        return KeptTokens(torch.arange(num_tokens, device=like.device), num_tokens, in_order=True), mean_scale
    kept = targets.labels != ignore_index
    if max_valid_tokens is None and like.is_cuda and torch.cuda.is_current_stream_capturing():
        max_valid_tokens = num_tokens
    order = torch.argsort(kept, descending=True, stable=True)
    return KeptTokens(order, kept.sum() if max_valid_tokens is None else max_valid_tokens), mean_scale


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
    saved: SavedLogits | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Gradients:
    """Runs ``chunk_loss`` over the logits of a linear head, chunk by chunk, and collects the gradients.

    Args:
        hidden_states: ``[num_tokens, hidden_size]``.
        weight: ``[vocab_size, hidden_size]``.
        bias: ``[vocab_size]`` or None.
        tokens: The order of visiting; tokens after its count are only seen if they share the first chunk. An order
            is required unless one chunk holds all tokens.
        chunk_loss: Computes the loss; stores the losses as a side effect.
        chunk_size: Tokens per chunk.
        accumulate_dtype: Dtype of the weight's and the bias's gradient.
        needs_gradient: Whether the gradient of the hidden states, the weight and the bias is wanted; then of the
            adapter's input and weight.
        adapter: ``[num_tokens, rank]`` and ``[vocab_size, rank]``, whose product is added to the logits.
        saved: Where logits are saved, or were in an earlier pass over the same chunks.
        logits_dtype: Of the logits that ``chunk_loss`` gets, if it is not the hidden states'; it returns the gradient
            then.
    """
    num_tokens, vocab_size = hidden_states.shape[0], weight.shape[0]
    needs_hidden, needs_weight, needs_bias, *needs_adapter = needs_gradient
    rows = tokens.max_rows(num_tokens, chunk_size)
    factors = [_Factor(hidden_states, weight, rows, accumulate_dtype, needs_hidden, needs_weight, tokens.in_order)]
    if adapter is not None:
        needs_low_rank, needs_up = needs_adapter
        factors.append(_Factor(*adapter, rows, accumulate_dtype, needs_low_rank, needs_up, tokens.in_order))
    grad_bias = weight.new_zeros(vocab_size if needs_bias else 0, dtype=accumulate_dtype)
    buffer = None
    parts = _fast_parts(weight, vocab_size)

    for number, (start, stop) in enumerate(tokens.chunks(num_tokens, chunk_size)):
        index = None if tokens.order is None else tokens.order[start:stop]
        place = index if index is not None and not tokens.in_order else slice(start, stop)
        for factor in factors:
            factor.gather(place)
        logits = None if saved is None else saved.logits(number)
        if logits is None:
            logits = None if saved is None else saved.allocate(number, hidden_states, stop - start, vocab_size)
            if logits is None:
                buffer = aligned_rows(hidden_states, rows, vocab_size, logits_dtype) if buffer is None else buffer
                logits = buffer[: stop - start]
            for part in parts:
                _project(factors, bias, logits, part)
        grad_logits = chunk_loss(logits, index)
        logits = logits if grad_logits is None else grad_logits
        for factor in factors:
            factor.collect(logits, parts, place, is_first=start == 0)
        if needs_bias:
            grad_bias += logits.sum(0, dtype=accumulate_dtype)
    head_gradients, *adapter_gradients = ((factor.grad_input, factor.grad_weight) for factor in factors)
    nothing = hidden_states.new_empty(0), weight.new_empty(0, dtype=accumulate_dtype)
    return Gradients(*head_gradients, grad_bias, *(adapter_gradients[0] if adapter_gradients else nothing))


@dataclass
class _Factor:
    """A product that is part of the logits, ``input @ weight.T`` of the head or its adapter, and its gradients."""

    input: Tensor
    weight: Tensor
    rows: int
    accumulate_dtype: torch.dtype
    needs_input: bool = False
    needs_weight: bool = False
    in_order: bool = False

    def __post_init__(self) -> None:
        input, weight = self.input, self.weight
        allocate_input = torch.empty_like if self.in_order else torch.zeros_like
        self.grad_input = allocate_input(input) if self.needs_input else input.new_empty(0)
        # The first chunk writes the weight's gradient, the others add to it.
        allocate_weight = weight.new_empty if len(input) else weight.new_zeros
        self.grad_weight = allocate_weight(weight.shape if self.needs_weight else 0, dtype=self.accumulate_dtype)
        self.chunk = input
        self._buffer = input.new_empty(0 if self.in_order else self.rows, input.shape[1])

    def gather(self, place: Tensor | slice) -> None:
        """Makes ``chunk`` the tokens of these indices."""
        if isinstance(place, slice):
            self.chunk = self.input[place]
        else:
            self.chunk = torch.index_select(self.input, 0, place, out=self._buffer[: len(place)])

    def collect(self, grad_logits: Tensor, parts: list[slice], place: Tensor | slice, *, is_first: bool) -> None:
        """Adds the chunk's share to the gradients; overwrites the chunk if it is a copy."""
        if self.needs_weight:
            for part in parts:
                _accumulate_product(self.grad_weight[part], grad_logits[:, part].t(), self.chunk, keep=not is_first)
        if not self.needs_input:
            return
        grad = self.grad_input[place] if isinstance(place, slice) else self.chunk
        # cuBLAS rounds a product before it adds it to what is there, and what few columns add would be lost in that.
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed = grad if len(parts) == 1 else grad.new_empty(grad.shape, dtype=wide)
        for number, part in enumerate(parts):
            _accumulate_product(summed, grad_logits[:, part], self.weight[part], keep=number > 0)
        if summed is not grad:
            grad.copy_(summed)
        if not isinstance(place, slice):
            self.grad_input.index_copy_(0, place, grad)


class Projection:
    """The logits of a head without gradients, at most ``rows`` tokens at a time in one buffer.

    Other arguments are those of :func:`chunked_linear_loss`.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
        adapter: tuple[Tensor, Tensor] | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        pairs = [(hidden_states, weight), *([] if adapter is None else [adapter])]
        self._factors = [_Factor(*pair, rows, weight.dtype) for pair in pairs]
        self._bias, self._parts = bias, _fast_parts(weight, weight.shape[0])
        self._buffer = aligned_rows(hidden_states, rows, weight.shape[0], logits_dtype)

    def logits(self, index: Tensor | None) -> Tensor:
        """The logits of the tokens of ``index``, or of all, until the next call."""
        for factor in self._factors:
            factor.gather(slice(None) if index is None else index)
        logits = self._buffer[: len(self._factors[0].chunk)]
        for part in self._parts:
            _project(self._factors, self._bias, logits, part)
        return logits


def _project(factors: Sequence[_Factor], bias: Tensor | None, logits: Tensor, part: slice) -> None:
    """Writes the columns of ``part`` of a chunk's logits."""
    head, *others = factors
    if logits.dtype != head.weight.dtype:
        for place, factor in enumerate(factors):
            _accumulate_product(logits[:, part], factor.chunk, factor.weight[part].t(), keep=place > 0)
        if bias is not None:
            logits[:, part] += bias[part]
        return
    if bias is None:
        torch.mm(head.chunk, head.weight[part].t(), out=logits[:, part])
    else:
        torch.addmm(bias[part], head.chunk, head.weight[part].t(), out=logits[:, part])
    for other in others:
        logits[:, part].addmm_(other.chunk, other.weight[part].t())


def _product_multiple(like: Tensor) -> int:
    """The number that divides the columns of logits that are multiplied fast: as many elements as fill 16 bytes."""
    return max(1, 16 // like.element_size()) if like.is_cuda else 1


def _fast_parts(like: Tensor, num_columns: int) -> list[slice]:
    """Columns that are multiplied together: all, or most and the few that keep cuBLAS from its fast kernels.

    On an H200 a chunk of 2048 tokens and a hidden size of 4096, milliseconds of the logits, dX and dW: with 49152
    columns 1.04, 1.13 and 1.21; with 49155, 8.69, 6.37 and 2.04, wherever the rows start.
    """
    if num_columns % _product_multiple(like) == 0 or num_columns < _COLUMN_MULTIPLE:
        return [slice(0, num_columns)]
    cut = num_columns - num_columns % _COLUMN_MULTIPLE
    return [slice(0, cut), slice(cut, num_columns)]


def aligned_rows(like: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """A matrix whose rows start at multiples of 16 bytes, long ones of 128; only the padding is initialized."""
    dtype = dtype or like.dtype
    multiple = 16 if num_columns < _LONG_ROW else 128
    padding = -num_columns % max(1, multiple // dtype.itemsize)
    padded = like.new_empty(num_rows, num_columns + padding, dtype=dtype)
    if padding:  # matrix products in half precision read it on CPUs with AMX, where NaN would spread
        padded[:, num_columns:] = 0.0
    return padded[:, :num_columns]


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor, keep: bool) -> None:
    """``total = keep * total + left @ right`` without a temporary of ``total``'s size where the device can."""
    if total.dtype == left.dtype and not keep:
        torch.mm(left, right, out=total)
    elif total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    elif total.is_cuda and torch.version.hip is None:  # on AMD GPUs that was never tried
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=int(keep), out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=int(keep), out=total)
