"""How to compute logits that were not computed yet, and whether that still gives the values they had."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import Parameter
from typing_extensions import Self

from liger_ops.loss.chunked_loss import CPU_CHUNK_BYTES, MIN_CHUNK_BYTES
from lightning_liger.lazy.chunks import Rows
from lightning_liger.lazy.head import HeadParameters, LogitTransform


@dataclass(frozen=True, eq=False)
class Recipe:
    """A head, its input, the operations on its output, and the state of their tensors when the recipe was made.

    Attributes:
        hidden_states: Laid out as the logits, with hidden_size in the place of vocab_size: ``[..., hidden_size]``.
        head: The projection that is postponed.
        transform: The elementwise operations that were applied to the logits since.
        vocab_dim: The vocabulary's dimension, a negative index.
    """

    hidden_states: Tensor
    head: HeadParameters
    transform: LogitTransform
    vocab_dim: int = -1
    _state: tuple[Any, ...] = field(init=False)
    _refused: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        vars(self)["_state"] = self._current_state()

    @property
    def shape(self) -> Size:
        """The shape of the logits."""
        sizes = list(self.hidden_states.shape)
        sizes[self.vocab_dim] = self.head.vocab_size
        return Size(sizes)

    @property
    def requires_grad(self) -> bool:
        """Whether the logits depend on a tensor that requires a gradient."""
        return self.hidden_states.requires_grad or self.head.requires_grad

    @property
    def tokens(self) -> Tensor:
        """The hidden states with hidden_size last, ``[..., hidden_size]``."""
        return self.hidden_states if self.vocab_dim == -1 else self.hidden_states.movedim(self.vocab_dim, -1)

    @property
    def num_tokens(self) -> int:
        """The product of all dimensions but the vocabulary."""
        return math.prod(self.tokens.shape[:-1])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the logits are computed from, by the names that errors use."""
        head = self.head
        named = {"hidden states": self.hidden_states, "weight": head.weight, "bias": head.bias, "adapter": head.adapter}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def changed(self, **changes: Any) -> Self:
        """A copy with other values of some attributes; only new tensors may have been modified since this was made."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)  # dataclasses.replace takes longer than the rest of an operation
        if "hidden_states" in changes or "head" in changes:
            vars(copy)["_state"] = copy._current_state()
        return copy

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with ``function`` applied to each of :meth:`tensors`, in their order."""
        return self.changed(hidden_states=function(self.hidden_states), head=self.head.map(function))

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """A copy with other tensors in the place and order of :meth:`tensors`."""
        remaining = iter(tensors)
        return self.map(lambda _: next(remaining))

    def compute(self, operation: str) -> Tensor:
        """The real logits, for ``operation``; raises as :meth:`check`."""
        self.check(operation)
        logits = self.transform.apply(self._project())
        return logits if self.vocab_dim == -1 else logits.movedim(-1, self.vocab_dim)

    def _project(self) -> Tensor:
        # With gradients all values at once; otherwise as for reductions, since sizes change the rounding.
        if self.is_small or (torch.is_grad_enabled() and self.requires_grad):
            return self.head.project(self.tokens)
        result = self.tokens.new_empty((self.num_tokens, self.head.vocab_size), dtype=self.head.compute_dtype)
        rows = self.tokens.reshape(self.num_tokens, self.tokens.shape[-1])
        for chunk, values in zip(rows.split(self.chunk_size), result.split(self.chunk_size), strict=True):
            values.copy_(self.head.project(chunk))
        return result.view(*self.tokens.shape[:-1], self.head.vocab_size)

    @property
    def chunk_size(self) -> int:
        """Tokens whose logits reductions read at once."""
        return self.head.chunk_size(self.num_tokens, self.head.vocab_size, self._element_size)

    @property
    def is_small(self) -> bool:
        """Whether all values take no more memory than a chunk may."""
        default = MIN_CHUNK_BYTES if self.hidden_states.is_cuda else CPU_CHUNK_BYTES
        budget: int = self.head.options.get("chunk_bytes", default)
        return self.num_tokens * self.head.vocab_size * self._element_size <= budget

    @property
    def _element_size(self) -> int:
        return max(self.head.compute_dtype.itemsize, torch.float32.itemsize)

    def rows(self) -> Rows:
        """The values of single tokens, in the order of :attr:`tokens`."""
        head = self.head.cast()

        def values(hidden_states: Tensor) -> Tensor:
            self.check("backward of a function of logits")  # which calls this again
            return self.transform.apply(head.project(hidden_states))

        return Rows(self.tokens.reshape(-1, self.tokens.shape[-1]), values, self.requires_grad)

    def check(self, operation: str) -> None:
        """Raises a RuntimeError that names ``operation`` if a tensor was modified or freed since the recipe was made.

        The logits that the head would have returned can no longer be computed then.
        """
        *versions, address = self._state
        for (name, tensor), then in zip(self.tensors().items(), versions, strict=True):
            if (now := version(tensor)) != then:
                _refuse(operation, f"the head's {name} was modified in place (version {now}, expected {then})")
            if tensor.untyped_storage().size() == 0 and tensor.numel() and not tensor.is_meta:
                _refuse(operation, f"the engine has freed the memory of the head's {name}")
        if self._refused is not None:
            _refuse(operation, self._refused)
        is_moved_by_engine = self.head.counters.is_gathered or hasattr(self.head.weight, "ds_id")  # DeepSpeed's
        if address and address != self.head.weight.data_ptr() and not is_moved_by_engine:
            _refuse(operation, "the memory of the head's weight was replaced (.data was set)")

    def refuse(self, reason: str) -> None:
        """Makes :meth:`check` raise with ``reason`` from now on."""
        vars(self)["_refused"] = reason

    def _current_state(self) -> tuple[Any, ...]:
        weight = self.head.weight
        # Only that of a parameter is replaced by setting .data.
        address = weight.data_ptr() if type(weight) is Parameter else 0
        return (*map(version, self.tensors().values()), address)


def version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    # Private to torch: nothing public says it. Inference tensors do not know.
    return 0 if tensor.is_inference() else tensor._version


def _refuse(operation: str, reason: str) -> None:
    raise RuntimeError(
        f"{operation} needs logits that were not computed yet, but {reason} since the head was called. Call"
        " lightning_liger.materialize(logits) before that, such as before optimizer.step()"
    )
