"""Logits that are not computed until an operation needs all of them at once.

A patched LM head returns :class:`LazyLogits`: hidden states, the head's parameters and the operations that were applied
to the logits since. What models and training steps do between head and loss (scaling, soft-capping, log-softmax, casts,
reshaping, moving and slicing dimensions, slicing the vocabulary) is recorded, and losses run fused; reductions over the
vocabulary run over chunks of tokens. :mod:`lightning_liger.lazy.operations` registers both. Any other operation
computes the logits first (:mod:`lightning_liger.lazy.tensor`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from liger_ops import TokenStats, linear_cross_entropy, linear_divergence, linear_log_probs
from liger_ops.backend import needs_graph, without_autocast
from liger_ops.loss.chunked_loss import MAX_CHUNK_BYTES
from lightning_liger.lazy.chunks import choose_tokens, normal, over_chunks
from lightning_liger.lazy.tensor import LazyTensor

_NO_LABEL = -(2**62)
"""An ``ignore_index`` that is never a label: no token is ignored."""


class _LossWanted:
    """Whether the caller is inside :func:`lazy_logits`. No context variable, which compiled code cannot read."""

    def __init__(self) -> None:
        self.value = False


loss_wanted = _LossWanted()


@contextmanager
def lazy_logits(enabled: bool = True) -> Iterator[None]:
    """Makes patched heads return :class:`LazyLogits` without gradients too, for code that computes a loss.

    With gradients enabled they always do.
    """
    before = loss_wanted.value
    loss_wanted.value = enabled
    try:
        yield
    finally:
        loss_wanted.value = before


def as_lazy(value: Any) -> Any:
    """The lazy logits for which logits that compiled code returned stand; anything else as it is."""
    if torch.compiler.is_compiling():
        return value
    convert = getattr(type(value), "as_lazy", None)
    return value if convert is None else convert(value)


def materialize(logits: Tensor) -> Tensor:
    """Turns lazy logits, and all that were recorded from the same output, into real tensors; returns ``logits``.

    Call it to keep logits beyond a change of the model's parameters that is no optimizer's step, or to see their
    gradient. Real tensors are returned as they are.

    Args:
        logits: ``[..., vocab_size]`` or any layout of them, any floating-point dtype.

    Raises:
        RuntimeError: If the logits can no longer be computed, because their sources were modified.
    """
    if isinstance(logits := as_lazy(logits), LazyLogits):
        logits.become_real("materialize()", warn=False)
    return logits


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class LazyLogits(LazyTensor):
    """The logits ``hidden_states @ weight.T + bias`` of a linear head, computed only where an operation needs them.

    A tensor without memory, of the logits' shape, dtype and device: PyTorch's functions take it, and those that
    :mod:`lightning_liger.lazy.operations` does not register compute the logits. Made by :meth:`of`.
    """

    hidden_states = property(attrgetter("expression.hidden_states"))
    tokens = property(attrgetter("expression.tokens"))
    head = property(attrgetter("expression.head"))
    transform = property(attrgetter("expression.transform"))
    vocab_dim = property(attrgetter("expression.vocab_dim"))
    vocab_size = property(attrgetter("expression.head.vocab_size"))

    @property
    def is_differentiable(self) -> bool:
        """Whether what is computed from these now gets a gradient."""
        return torch.is_grad_enabled() and self.requires_grad

    @property
    def is_streamed(self) -> bool:
        """Whether reductions over the vocabulary read a chunk of tokens after the other.

        Otherwise they read the values of all, which are kept, or those of a DTensor.
        """
        return self.is_local and (self.is_differentiable or not self.expression.root.is_small)

    def at_labels(self, labels: Tensor) -> Tensor:
        """The value of each token's label: ``labels`` and the result are ``[...]``.

        With gradients it is computed without the other values, and may differ from the materialized one by rounding.
        """
        if not self.is_differentiable:
            result: Tensor = self.over_chunks(lambda values, rows: values.gather(-1, rows), labels.unsqueeze(-1))
            return result.squeeze(self.vocab_dim)
        if self.transform.normalized:
            return self._score(labels, "log_probs")
        self.notice("gather")
        return self.transform.apply_elementwise(self.head.project_to(self.tokens, labels))

    def log_sum_exp(self) -> Tensor:
        """That over the vocabulary, differentiable, ``[...]``."""
        return self._score(torch.zeros(self.tokens.shape[:-1], dtype=torch.int64, device=self.device), "lse")

    def _score(self, labels: Tensor, output: str) -> Tensor:
        """One score of every token, in the dtype of the logits."""
        # As for losses of single tokens: backward need not compute again what fits this budget.
        budget = MAX_CHUNK_BYTES if self.is_cuda and "chunk_bytes" not in self.head.options else 0
        saved = self.head.options.get("saved_logits_bytes", budget)
        options = {"outputs": (output,), "ignore_index": _NO_LABEL, "saved_logits_bytes": saved}
        score: Tensor = getattr(self._fused(linear_log_probs, labels, **options), output)
        return score.to(self.dtype)

    def over_chunks(self, function: Callable[..., Any], *token_tensors: Tensor) -> Any:
        """Applies ``function`` to the values of one chunk of tokens after the other, differentiably.

        It gets ``[chunk_size, vocab_size]`` and the same rows of ``token_tensors``, whose leading dimensions are those
        of :attr:`tokens`, and returns tensors ``[chunk_size, any]``: one, or a named tuple. The results of all chunks
        have the leading dimensions of :attr:`tokens`, and the last dimension where the vocabulary is.
        """
        self.notice("a reduction over the vocabulary")
        tokens, num_tokens = self.tokens, self.expression.num_tokens
        rows = [tensor.reshape(num_tokens, tensor.shape[-1]) for tensor in token_tensors]
        parts = over_chunks(function, [self.expression.rows()], rows, self.expression.chunk_size)

        def laid_out(rows: Tensor) -> Tensor:
            return rows.reshape(*tokens.shape[:-1], rows.shape[-1]).movedim(-1, self.vocab_dim)

        return laid_out(parts) if isinstance(parts, Tensor) else type(parts)([laid_out(part) for part in parts])

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, TokenStats]:
        """``F.cross_entropy`` of these logits over their vocabulary, fused: :func:`liger_ops.linear_cross_entropy`.

        Args:
            target: Class indices, int64, of the logits' shape without the vocabulary.
            return_stats: Whether to also return :class:`~liger_ops.TokenStats`.

        Raises:
            RuntimeError: If the tensors that the logits are computed from were modified.
        """
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "return_stats": return_stats}
        return self.fused_loss(linear_cross_entropy, target, weight=weight, reduction=reduction, **options)

    def fused_loss(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A function of ``liger_ops`` of this head, counted as a loss; the head's options are its defaults."""
        result = self._fused(function, *arguments, **options)
        self._count_loss(options.get("chunk_bytes"))
        return result

    def divergence(self, teacher: LazyLogits, **options: Any) -> Tensor:
        """``linear_divergence`` of heads that are whole or shared by ranks in the same way."""
        with torch.no_grad():
            teacher.notice("a divergence")
            teacher_arguments = teacher.head.arguments(teacher.tokens, teacher.transform)
            pair = normal(teacher_arguments.pop("input")), normal(teacher_arguments.pop("linear_weight"))
            adapter, bias = teacher_arguments.pop("adapter"), teacher_arguments.pop("linear_bias")
            options["teacher_adapter"] = adapter and tuple(map(normal, adapter))
            options["teacher_bias"] = None if bias is None else normal(bias)
        options |= {f"teacher_{name}": value for name, value in teacher_arguments.items()}
        loss: Tensor = self._fused(linear_divergence, *pair, **options)
        self._count_loss(options.get("chunk_bytes"), teacher)
        return loss

    def _count_loss(self, chunk_bytes: int | None, teacher: LazyLogits | None = None) -> None:
        """Counts a loss of these logits, or of these and a teacher's, which has one chunk of them at a time."""
        head, num_tokens = self.head, self.expression.num_tokens
        heads = [head] if teacher is None else [head, teacher.head]
        element_size = sum(each.compute_dtype.itemsize for each in heads)
        hidden_size = head.weight.shape[1] if needs_graph(head.weight) else 0
        sizes = num_tokens, head.weight.shape[0], element_size
        rows = choose_tokens(*sizes, chunk_bytes or head.options.get("chunk_bytes"), self.device, hidden_size)
        bytes_of_token = sum(each.vocab_size * each.compute_dtype.itemsize for each in heads)
        head.counters.num_losses += 1
        head.counters.bytes_avoided += max(0, num_tokens - rows) * bytes_of_token

    def _fused(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.notice("a fused loss")
        head = self.head.arguments(self.tokens, self.transform)
        own = {"vocab_shard": self.head.shard, **self.head.options}
        own = {name: value for name, value in own.items() if name in _parameters(function)}
        given = {name: value for name, value in options.items() if value is not None}
        with without_autocast(self.device.type):  # the dtype was decided when the head was called
            return function(head.pop("input"), head.pop("linear_weight"), *arguments, **{**head, **own, **given})

    def materialize(self) -> Tensor:
        """As :func:`materialize`."""
        return materialize(self)
