"""How lazy logits are computed, and how those that were recorded from one head's output came from each other."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import Parameter
from typing_extensions import Self

from liger_ops import backend
from liger_ops.loss.chunked_loss import CPU_CHUNK_BYTES, MIN_CHUNK_BYTES
from lightning_liger.activations.cheap import count_writes
from lightning_liger.lazy.chunks import Rows, choose_tokens
from lightning_liger.lazy.head import HeadParameters, LogitTransform


class Expression:
    """A head, its input and the operations on its output, which give the real logits.

    All that was recorded from one output is a tree, so that it can become real tensors related in the same way. The
    hidden states are laid out as the logits, with hidden_size in the place of vocab_size; ``vocab_dim`` is negative.
    """

    tensor: Callable[[], Any]  # the lazy logits, None if they are gone or real
    twin: Tensor  # of the same layout and dtype on the meta device, to ask PyTorch what an operation returns
    parent: Expression | None  # of the lazy logits from which these were recorded, None for the output of a head
    members: list[weakref.ref[Expression]]  # all of the tree, parents first
    replay: Callable[[Tensor], Any] | None  # applies the recorded operation to the parent's real logits
    # Operations: one whose gradient does not pass these logits, one that turned them real to see their gradient, and
    # for the output of a head one that read values with gradients, which may round differently.
    bypassed_by: str | None
    watched_by: str | None
    rounded_by: str | None
    kept: Tensor | None  # the values of the output of a head, once :meth:`values` has computed them
    refused: str | None = None  # why the logits can no longer be computed

    def __init__(
        self, hidden_states: Tensor, head: HeadParameters, transform: LogitTransform, vocab_dim: int = -1
    ) -> None:
        self.hidden_states, self.head, self.transform, self.vocab_dim = hidden_states, head, transform, vocab_dim
        self._state = self._current_state()

    def enter(self, tensor: Tensor, twin: Tensor, parent: Expression | None) -> None:
        """Gives the expression its place in a tree, where ``tensor`` are the lazy logits."""
        self.tensor, self.twin, self.parent = weakref.ref(tensor), twin, parent
        self.replay = self.bypassed_by = self.watched_by = self.rounded_by = self.kept = None
        self.members = [] if parent is None else parent.members
        self.members.append(weakref.ref(self))
        self._modes = torch.is_grad_enabled(), backend.autocast_dtype(self.hidden_states.device.type)

    @property
    def shape(self) -> Size:
        sizes = list(self.hidden_states.shape)
        sizes[self.vocab_dim] = self.head.vocab_size
        return Size(sizes)

    @property
    def requires_grad(self) -> bool:
        return self.hidden_states.requires_grad or self.head.requires_grad

    @property
    def tokens(self) -> Tensor:
        """The hidden states with hidden_size last, ``[..., hidden_size]``."""
        return self.hidden_states if self.vocab_dim == -1 else self.hidden_states.movedim(self.vocab_dim, -1)

    @property
    def num_tokens(self) -> int:
        return math.prod(self.tokens.shape[:-1])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the logits are computed from, by the names that errors use."""
        return {"hidden states": self.hidden_states, **self.head.tensors()}

    def changed(self, **changes: Any) -> Self:
        """A copy with other values of some attributes; only new tensors may have been modified since this was made."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), **changes)
        if "hidden_states" in changes or "head" in changes:
            other._state = other._current_state()
        return other

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with ``function`` applied to each of :meth:`tensors`."""
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
        sizes = self.num_tokens, self.head.vocab_size, self._element_size
        return choose_tokens(*sizes, self.head.options.get("chunk_bytes"), self.hidden_states.device)

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
        """Raises a RuntimeError that names ``operation`` if a tensor was modified or freed since this was made."""
        if reason := self.refused or self._loss_of_a_tensor():
            raise RuntimeError(
                f"{operation} needs logits that were not computed yet, but {reason} since the head was called. Call"
                " lightning_liger.materialize(logits) before that, such as before optimizer.step()"
            )

    def _loss_of_a_tensor(self) -> str | None:
        *versions, address = self._state
        for (name, tensor), then in zip(self.tensors().items(), versions, strict=True):
            if (now := count_writes(tensor)) != then:
                return f"the head's {name} was modified in place (version {now}, expected {then})"
            if tensor.untyped_storage().size() == 0 and tensor.numel() and not tensor.is_meta:
                return f"the engine has freed the memory of the head's {name}"
        is_moved_by_engine = self.head.counters.is_gathered or hasattr(self.head.weight, "ds_id")  # DeepSpeed's
        if address and address != self.head.weight.data_ptr() and not is_moved_by_engine:
            return "the memory of the head's weight was replaced (.data was set)"
        return None

    def _current_state(self) -> tuple[Any, ...]:
        weight = self.head.weight
        # Only that of a parameter is replaced by setting .data.
        address = weight.data_ptr() if type(weight) is Parameter else 0
        return (*map(count_writes, self.tensors().values()), address)

    @property
    def root(self) -> Expression:
        return self if self.parent is None else self.parent.root

    def alive(self) -> list[Expression]:
        """Those of the tree whose lazy logits still exist, parents first."""
        found = (member() for member in self.members)
        return [expression for expression in found if expression is not None and expression.tensor() is not None]

    def bypass(self, operation: str) -> None:
        """Notes that the gradient of a result of ``operation`` passes neither these logits nor their ancestors."""
        self.bypassed_by = operation
        if self.parent is not None:
            self.parent.bypass(operation)

    def values(self, operation: str) -> Tensor:
        """The real logits without a graph, all derived from one computation of the head's output."""
        root = self.root
        if root.kept is None:
            root.kept = laid_out(root.compute(operation), root.twin).detach()
        return self.derived({root: root.kept}).detach()

    def derived(self, real: dict[Expression, Tensor]) -> Tensor:
        """The real logits, from those in ``real``, where the root's are, by the operations that were recorded.

        Each is computed in the modes in which it was recorded. What is computed on the way is added to ``real``.
        """
        if self not in real:
            assert self.parent is not None
            assert self.replay is not None
            parent = self.parent.derived(real)
            grad_enabled, autocast_dtype = self._modes
            with ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(grad_enabled))
                if autocast_dtype is not None:
                    modes.enter_context(torch.autocast(parent.device.type, autocast_dtype))
                real[self] = self.replay(parent)
        return real[self]


def laid_out(values: Tensor, twin: Tensor) -> Tensor:
    """``values`` with the dimensions in memory in the order of those of ``twin``, which results of functions keep."""
    order = sorted(range(twin.ndim), key=twin.stride, reverse=True)
    if values.stride() == twin.stride() or values.permute(order).is_contiguous():
        return values
    return values.permute(order).contiguous().permute([order.index(dim) for dim in range(twin.ndim)])
