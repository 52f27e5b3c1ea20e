"""Logits that are not computed until something needs all of them at once.

A patched LM head returns :class:`LazyLogits`: hidden states, the head's parameters and what happened to the logits
since. What models and training steps do between head and loss (scaling, soft-capping, log-softmax, casts, reshaping,
moving and slicing dimensions, cutting the vocabulary) is recorded, and losses run fused; reductions over the vocabulary
run over chunks of tokens. :mod:`lightning_liger.lazy.operations` is the table of both. Any other operation computes
the real logits first.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import liger_ops
from liger_ops import TokenStats, linear_cross_entropy
from liger_ops.loss.chunked_loss import choose_chunk_size, default_chunk_size
from lightning_liger.lazy import operations

_NO_LABEL = -(2**62)
"""An ``ignore_index`` that nobody uses: no label is left out."""

_loss_wanted: ContextVar[bool] = ContextVar("liger_loss_wanted", default=False)
_warned_operations: set[tuple[str, str]] = set()
_OWN_FILES = (torch.__file__, liger_ops.__file__, str(Path(__file__).parent))
_OWN_FOLDERS = tuple(f"{Path(file).parent}/" for file in _OWN_FILES)


@contextmanager
def lazy_logits(enabled: bool = True) -> Iterator[None]:
    """Makes patched heads return :class:`LazyLogits` without gradients too, for code that is after a loss.

    With gradients enabled they always do.
    """
    token = _loss_wanted.set(enabled)
    try:
        yield
    finally:
        _loss_wanted.reset(token)


def is_loss_wanted() -> bool:
    """Whether the caller is inside :func:`lazy_logits`."""
    return _loss_wanted.get()


@dataclass
class LogitsLedger:
    """What one head's lazy logits came to. Kept on the head, read by reports."""

    num_losses: int = 0
    """Losses computed without whole logits."""
    num_materialized: int = 0
    """Times that whole logits were computed after all, gradients enabled."""
    bytes_avoided: int = 0
    """Bytes of logits minus the chunk that stood in for them, summed over the losses."""


class HeadParameters:
    """The linear head behind lazy logits. No dataclass, so that engines which convert outputs leave it alone.

    Args:
        weight: ``[vocab_size, hidden_size]``.
        bias: ``[vocab_size]`` or None.
        compute_dtype: Dtype of the projection: the weight's, or autocast's where it was on.
        ledger: Where its losses are counted.
        options: How the fused loss is computed: ``chunk_bytes`` and ``accumulate_dtype`` of
            :func:`liger_ops.linear_cross_entropy`.
        adapter: ``[vocab_size, rank]``, the second factor of a low-rank update, or None. The hidden states then end in
            rank more columns, which it multiplies.
    """

    __slots__ = ("adapter", "bias", "compute_dtype", "ledger", "options", "weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        ledger: LogitsLedger,
        options: Mapping[str, Any] = MappingProxyType({}),
        adapter: Tensor | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.compute_dtype = compute_dtype
        self.ledger = ledger
        self.options = options
        self.adapter = adapter

    @property
    def requires_grad(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in (self.weight, self.bias, self.adapter))

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether its tensors hold the whole vocabulary, so that a part of it can be cut out."""
        return True

    def loss_options(self) -> Mapping[str, Any]:
        """What ``linear_cross_entropy`` has to know of this head."""
        return self.options

    def _replaced(self, **tensors: Tensor | None) -> HeadParameters:
        other = copy.copy(self)
        for name, tensor in tensors.items():
            setattr(other, name, tensor)
        return other

    def map(self, function: Callable[[Tensor], Tensor]) -> HeadParameters:
        """The same head with ``function`` applied to its tensors."""
        bias, adapter = (None if tensor is None else function(tensor) for tensor in (self.bias, self.adapter))
        return self._replaced(weight=function(self.weight), bias=bias, adapter=adapter)

    def cast(self) -> HeadParameters:
        """The same head with its parameters in ``compute_dtype``."""
        return self.map(lambda parameter: parameter.to(self.compute_dtype))

    def with_adapter(self, weight: Tensor) -> HeadParameters:
        """The same head with one more low-rank update, whose input comes behind all others."""
        return self._replaced(adapter=weight if self.adapter is None else torch.cat((self.adapter, weight), dim=1))

    def inputs(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the weight multiplies and what the adapter does, in ``compute_dtype``."""
        hidden_states = hidden_states.to(self.compute_dtype)
        if self.adapter is None:
            return hidden_states, None
        return hidden_states.split((self.weight.shape[1], self.adapter.shape[1]), dim=-1)

    def project(self, hidden_states: Tensor) -> Tensor:
        """The real logits, ``[..., vocab_size]`` in ``compute_dtype``."""
        head = self.cast()
        # The head decided on its dtype when it was called; autocast may be over (or on) by now.
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states, low_rank = head.inputs(hidden_states)
            logits = F.linear(hidden_states, head.weight, head.bias)
            return logits if low_rank is None else logits + F.linear(low_rank, head.adapter)

    def project_to(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """One real logit for each token, that of its label: ``[...]`` in ``compute_dtype``."""
        head = self.cast()
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = torch.zeros((), dtype=head.compute_dtype, device=labels.device)
            for weight, input in zip((head.weight, head.adapter), head.inputs(hidden_states), strict=True):
                if input is not None:
                    logits = logits + torch.einsum("...h,...h->...", input, F.embedding(labels, weight))
            return logits if head.bias is None else logits + F.embedding(labels, head.bias[:, None]).squeeze(-1)

    def chunk_size(self, num_tokens: int) -> int:
        """Tokens a chunk of the loss."""
        sizes = num_tokens, self.weight.shape[0], self.compute_dtype.itemsize
        chunk_bytes = self.options.get("chunk_bytes")
        if chunk_bytes is None:
            return default_chunk_size(*sizes, self.weight.device)
        return choose_chunk_size(*sizes, chunk_bytes)


class LogitTransform(NamedTuple):
    """What happened to the logits.

    ``scale * logits``, or after a tanh ``scale * tanh(tanh_scale * logits)``; then a log-softmax if ``normalized``.
    """

    dtype: torch.dtype
    scale: float = 1.0
    tanh_scale: float | None = None
    normalized: bool = False

    def apply(self, logits: Tensor) -> Tensor:
        """The same done to real logits, ``[..., vocab_size]``."""
        logits = self.apply_elementwise(logits)
        return torch.log_softmax(logits, -1) if self.normalized else logits

    def apply_elementwise(self, logits: Tensor) -> Tensor:
        """The same without the log-softmax, of some of the logits."""
        logits = logits.to(self.dtype)
        if self.tanh_scale is not None:
            logits = torch.tanh(logits * self.tanh_scale)
        return logits if self.scale == 1.0 else logits * self.scale

    def loss_options(self) -> dict[str, float | None]:
        """The same as ``linear_cross_entropy`` spells it: ``softcap * tanh(logit_scale * logits / softcap)``.

        A log-softmax changes nothing for a loss that starts with one.
        """
        if self.tanh_scale is None:
            return {"logit_scale": self.scale, "softcap": None}
        return {"logit_scale": self.scale * self.tanh_scale, "softcap": abs(self.scale)}


class _View:
    """What lazy logits are a view of, so that a write into either is seen by both. Opaque to engines, as the head."""

    __slots__ = ("parent", "replay")

    def __init__(self, parent: LazyLogits) -> None:
        self.parent = parent
        self.replay: Callable[[Tensor], Tensor] | None = None


@dataclass(eq=False, repr=False)
class LazyLogits:
    """The logits ``hidden_states @ weight.T + bias`` of a linear head, computed only if nothing less will do.

    It is no tensor, but has a tensor's ``shape``, ``dtype`` and ``device``, goes into PyTorch's functions and has a
    tensor's methods; those that :mod:`lightning_liger.lazy.operations` does not know turn it into real logits.
    ``hidden_states`` is a dataclass field of its own so that engines which look for tensors in a module's output (FSDP,
    DDP) find it. Made without gradients enabled it is cut from the graph, as any tensor.

    Args:
        hidden_states: Laid out as the logits, with hidden_size in the place of vocab_size: ``[..., hidden_size]``.
        head: The projection that was not done.
        transform: What was done to the logits since.
        vocab_dim: Where the vocabulary is, counted from the end.
    """

    hidden_states: Tensor
    head: HeadParameters
    transform: LogitTransform
    vocab_dim: int = -1
    _whole: Tensor | None = None
    _origin: _View | None = None
    _has_views: bool = field(default=False)

    __array_priority__ = 1000  # as tensors', so that numpy's numbers leave arithmetic to these

    def __post_init__(self) -> None:
        if not torch.is_grad_enabled() and self.requires_grad:
            self.hidden_states, self.head = self.hidden_states.detach(), self.head.map(Tensor.detach)

    # What a tensor says of itself

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.hidden_states.shape)
        sizes[self.vocab_dim] = self.vocab_size
        return torch.Size(sizes)

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.transform.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden_states.device

    @property
    def ndim(self) -> int:
        return self.hidden_states.ndim

    @property
    def requires_grad(self) -> bool:
        return self.hidden_states.requires_grad or self.head.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.hidden_states.is_cuda

    @property
    def is_local(self) -> bool:
        """Whether this stands for a plain tensor, not for one that is distributed over ranks."""
        return True

    @property
    def mT(self) -> LazyLogits:
        return self.transpose(-1, -2)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{grad})"

    # What operations are made of

    @property
    def tokens(self) -> Tensor:
        """The hidden states with hidden_size last, ``[..., hidden_size]``."""
        return self.hidden_states if self.vocab_dim == -1 else self.hidden_states.movedim(self.vocab_dim, -1)

    def changed(self, **changes: Any) -> LazyLogits:
        """A copy with other values for some of the fields."""
        return dataclasses.replace(self, **{"_whole": None, "_origin": None, "_has_views": False, **changes})

    def viewed(self, **changes: Any) -> LazyLogits:
        """The same where a tensor's operation returns a view."""
        self._has_views = True
        return self.changed(_origin=_View(self), **changes)

    def at_labels(self, labels: Tensor) -> Tensor:
        """The value of one class for each token, differentiable: ``labels`` and the result are ``[...]``."""
        if self.transform.normalized:
            return -self._linear_cross_entropy(labels, reduction="none", ignore_index=_NO_LABEL).to(self.dtype)
        return self.transform.apply_elementwise(self.head.project_to(self.tokens, labels))

    def over_chunks(self, function: Callable[..., Any], *token_tensors: Tensor) -> Any:
        """``function`` of the values of a chunk of tokens, for all chunks, differentiable.

        Backward computes each chunk's logits again.

        Args:
            function: Gets ``[chunk_size, vocab_size]`` and the same rows of ``token_tensors``, returns a tensor (or a
                named tuple of them) whose first dimension is chunk_size and that has one more.
            token_tensors: ``[..., any]``, with this object's tokens.

        Returns:
            The same with the tokens' dimensions, and the last dimension where the vocabulary is.
        """
        head, tokens = self.head.cast(), self.tokens
        element_size = max(self.dtype.itemsize, head.compute_dtype.itemsize)
        num_tokens = math.prod(tokens.shape[:-1])
        chunk_size = default_chunk_size(num_tokens, self.vocab_size, element_size, self.device)

        def of_chunk(hidden_states: Tensor, *rows: Tensor) -> Any:
            return function(self.transform.apply(head.project(hidden_states)), *rows)

        if torch.is_grad_enabled() and self.requires_grad:
            of_chunk = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
        chunks = (tensor.reshape(num_tokens, tensor.shape[-1]).split(chunk_size) for tensor in (tokens, *token_tensors))
        parts = [of_chunk(*chunk) for chunk in zip(*chunks, strict=True)]

        def joined(tensors: Any) -> Tensor:
            rows = torch.cat(tensors)
            return rows.reshape(*tokens.shape[:-1], rows.shape[-1]).movedim(-1, self.vocab_dim)

        if isinstance(parts[0], Tensor):
            return joined(parts)
        return type(parts[0])([joined(tensors) for tensors in zip(*parts, strict=True)])

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
        """``F.cross_entropy`` of these logits over their vocabulary, fused.

        Args:
            target: Class indices, ``[...]`` as these logits without their vocabulary, int64.
            weight: Class weights, ``[vocab_size]``.
            ignore_index: Label of tokens to leave out.
            reduction: ``"none"``, ``"mean"`` or ``"sum"``.
            label_smoothing: Between 0 and 1.
            return_stats: Whether to also return :class:`~liger_ops.TokenStats`.

        Raises:
            ValueError: As :func:`liger_ops.linear_cross_entropy`.
        """
        result = self._linear_cross_entropy(
            target,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            return_stats=return_stats,
        )
        head, num_tokens = self.head, target.numel()
        tokens_avoided = max(0, num_tokens - head.chunk_size(num_tokens))
        head.ledger.num_losses += 1
        head.ledger.bytes_avoided += tokens_avoided * self.vocab_size * head.compute_dtype.itemsize
        return result

    def _linear_cross_entropy(self, target: Tensor, **options: Any) -> Any:
        head = self.head.cast()
        with torch.autocast(self.device.type, enabled=False):
            hidden_states, low_rank = head.inputs(self.tokens)
            return linear_cross_entropy(
                hidden_states,
                head.weight,
                target,
                linear_bias=head.bias,
                adapter=None if low_rank is None else (low_rank, head.adapter),
                **options,
                **self.transform.loss_options(),
                **head.loss_options(),
            )

    # Real logits

    def materialize(self, operation: str = "materialize()") -> Tensor:
        """The real logits; warns once for each ``operation`` and line of code if they are part of a graph."""
        if self._is_overwritten():
            return self._in_memory(operation)
        differentiable = torch.is_grad_enabled() and self.requires_grad
        # Logits that were first seen without gradients have no graph, and must not stand in for those that need one.
        if self._whole is not None and (self._whole.requires_grad or not differentiable):
            return self._whole
        if differentiable:
            self.head.ledger.num_materialized += 1
            self._warn(operation)
        self._whole = self.transform.apply(self._project()).movedim(-1, self.vocab_dim)
        return self._whole

    def _project(self) -> Tensor:
        return self.head.project(self.tokens)

    def _warn(self, operation: str) -> None:
        operation, line = operation.strip("_"), _calling_line()
        if (operation, line) not in _warned_operations:
            _warned_operations.add((operation, line))
            size = self.numel() * self.dtype.itemsize / 2**30
            rank_zero_warn(
                f"{operation} on an LM head's output ({line}) needs whole logits: {tuple(self.shape)} {self.dtype},"
                f" {size:.2f} GiB. The result is right, but the loss is not fused."
            )

    def _is_overwritten(self) -> bool:
        """Whether the real logits, here or in what this is a view of, were written to or are being watched."""
        if self._origin is not None and self._origin.parent._is_overwritten():
            return True
        whole = self._whole
        if whole is None or whole.is_inference():  # those do not count their versions
            return whole is not None and torch.is_inference_mode_enabled()
        is_watched = whole.retains_grad or whole._backward_hooks or (whole.is_leaf and whole.requires_grad)
        return whole._version > 0 or bool(is_watched)

    def _in_memory(self, operation: str) -> Tensor:
        """The real logits, as a view of those that this is a view of."""
        if self._origin is not None:
            assert self._origin.replay is not None
            self._whole = self._origin.replay(self._origin.parent._in_memory(operation))
        elif not self._is_overwritten():
            with torch.enable_grad():  # a write without gradients does not cut what is written to from its graph
                self.materialize(operation)
        assert self._whole is not None
        return self._whole

    def _become(self, other: LazyLogits) -> bool:
        """Takes the place of a write if nobody else can see what is written to."""
        alone = self._origin is None and not self._has_views and self._whole is None
        if not alone or (other.dtype, other.requires_grad) != (self.dtype, self.requires_grad):
            return False
        self.hidden_states, self.head, self.transform = other.hidden_states, other.head, other.transform
        self.vocab_dim = other.vocab_dim
        return True

    # How operations arrive

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        return _call(func, getattr(func, "__name__", str(func)), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not callable(getattr(Tensor, name)):
            return getattr(self.materialize(name), name)
        return _method(name).__get__(self)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize("__array__").__array__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyLogits:
        # Engines copy a module's output before converting the tensors in it; the graph behind it stays shared.
        return self.changed(_whole=self._whole)

    def __reduce__(self) -> Any:
        return _identity, (self.materialize("pickling"),)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _whole(value: Any, operation: str) -> Any:
    return value.materialize(operation) if isinstance(value, LazyLogits) else value


def _has_lazy(tree: Any) -> bool:
    return any(isinstance(leaf, LazyLogits) for leaf in tree_leaves(tree))


def _name_out_of_place(name: str) -> str | None:
    """The name of the function that returns what the function ``name`` writes into its first argument, or None."""
    if name == "__setitem__":
        return name
    if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else None


def _call(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of arguments among which are lazy logits: recorded if the table has it, else of real logits."""
    if name in operations.COMMUTATIVE and len(args) == 2 and not isinstance(args[0], LazyLogits):
        args = (args[1], args[0])
    first = args[0] if args else None
    if isinstance(first, LazyLogits):
        name_out_of_place = _name_out_of_place(name)
        result = NotImplemented
        computed = name_out_of_place or name
        takes_others = computed in operations.OF_TWO or not _has_lazy((args[1:], kwargs))
        if takes_others and not first._is_overwritten():
            result = operations.record(first, computed, args[1:], kwargs)
        if name_out_of_place is None:
            if result is not NotImplemented:
                return _with_replay(result, lambda whole: func(whole, *args[1:], **kwargs))
        elif isinstance(result, LazyLogits) and first._become(result):
            return first
        else:
            first._in_memory(name)
    whole_args, whole_kwargs = tree_map(lambda leaf: _whole(leaf, name), (args, kwargs))
    return func(*whole_args, **whole_kwargs)


def _with_replay(result: Any, replay: Callable[[Tensor], Any]) -> Any:
    """``result`` where each view in it knows how to get itself from the real logits."""
    if isinstance(result, tuple):
        for position, part in enumerate(result):
            _with_replay(part, lambda whole, position=position: replay(whole)[position])
    elif isinstance(result, LazyLogits) and result._origin is not None and result._origin.replay is None:
        result._origin.replay = replay
    return result


def _calling_line() -> str:
    """``file:line`` of the innermost code that is neither PyTorch nor this project."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _method(name: str) -> Callable[..., Any]:
    def method(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        return _call(getattr(Tensor, name), name, (self, *args), kwargs)

    method.__name__ = name
    return method


# Python looks operators up on the class, so __getattr__ does not see them.
for _name in (
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__mod__", "__pow__", "__rpow__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__matmul__", "__rmatmul__", "__neg__", "__pos__", "__abs__"),
    *("__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iadd__", "__isub__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__contains__", "__invert__"),
    *("__getitem__", "__setitem__", "__iter__", "__float__", "__int__", "__bool__"),
):
    setattr(LazyLogits, _name, _method(_name))
LazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
