"""Logits that are not computed until an operation needs all of them at once.

A patched LM head returns :class:`LazyLogits`: hidden states, the head's parameters and the operations that were applied
to the logits since. What models and training steps do between head and loss (scaling, soft-capping, log-softmax, casts,
reshaping, moving and slicing dimensions, slicing the vocabulary) is recorded, and losses run fused; reductions over the
vocabulary run over chunks of tokens. :mod:`lightning_liger.lazy.operations` registers both. Any other operation
materializes the logits first.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

import liger_ops
from liger_ops import TokenStats, linear_cross_entropy
from lightning_liger.lazy.head import HeadParameters, LogitTransform

_NO_LABEL = -(2**62)
"""An ``ignore_index`` that is never a label: no token is ignored."""

loss_wanted: ContextVar[bool] = ContextVar("liger_loss_wanted", default=False)
"""Whether heads return lazy logits without gradients too; see :func:`lazy_logits`."""

_warned_operations: set[tuple[str, str]] = set()
_OWN_FILES = (torch.__file__, liger_ops.__file__, str(Path(__file__).parent))
_OWN_FOLDERS = tuple(f"{Path(file).parent}/" for file in _OWN_FILES)


class _Operation(NamedTuple):
    """How lazy logits compute a function of PyTorch; see :func:`implements`."""

    function: Callable[..., Any]
    signature: inspect.Signature
    is_commutative: bool
    takes_lazy_arguments: bool


_operations: dict[str, _Operation] = {}


def implements(
    *names: str, commutative: bool = False, takes_lazy_arguments: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function that computes PyTorch's functions and methods of these names for lazy logits.

    The decorated function gets the lazy logits and the call's other arguments. It returns ``NotImplemented`` where it
    needs the real logits; a call with arguments that its signature does not have gets real logits too.

    Args:
        names: As in ``torch`` and ``torch.Tensor``. An operator or in-place method (``mul_``) uses the function that
            returns its result (``mul``).
        commutative: Whether the lazy logits may also be the second of two arguments.
        takes_lazy_arguments: Whether arguments other than the first may be or contain lazy logits.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operation = _Operation(function, inspect.signature(function), commutative, takes_lazy_arguments)
        _operations.update(dict.fromkeys(names, operation))
        return function

    return register


@contextmanager
def lazy_logits(enabled: bool = True) -> Iterator[None]:
    """Makes patched heads return :class:`LazyLogits` without gradients too, for code that computes a loss.

    With gradients enabled they always do.
    """
    token = loss_wanted.set(enabled)
    try:
        yield
    finally:
        loss_wanted.reset(token)


def is_loss_wanted() -> bool:
    """Whether the caller is inside :func:`lazy_logits`."""
    return loss_wanted.get()


class _View:
    """The lazy logits that others are a view of, so that an in-place write to either is seen by both.

    Not a dataclass, for the reason given in :class:`~lightning_liger.lazy.head.HeadParameters`.
    """

    __slots__ = ("parent", "replay")

    def __init__(self, parent: LazyLogits) -> None:
        self.parent = parent
        self.replay: Callable[[Tensor], Tensor] | None = None


@dataclass(eq=False, repr=False)
class LazyLogits:
    """The logits ``hidden_states @ weight.T + bias`` of a linear head, materialized only where an operation needs them.

    It is not a tensor, but has a tensor's ``shape``, ``dtype`` and ``device``, can be passed to PyTorch's functions and
    has a tensor's methods; those that :mod:`lightning_liger.lazy.operations` does not implement materialize it.
    ``hidden_states`` is a dataclass field so that engines which look for tensors in a module's output (FSDP, DDP) find
    it. Created without gradients enabled it is detached from the graph, as any tensor.

    Args:
        hidden_states: Laid out as the logits, with hidden_size in the place of vocab_size: ``[..., hidden_size]``.
        head: The projection that is postponed.
        transform: The operations that were applied to the logits since.
        vocab_dim: The vocabulary's dimension, a negative index.
    """

    hidden_states: Tensor
    head: HeadParameters
    transform: LogitTransform
    vocab_dim: int = -1
    _whole: Tensor | None = None
    _origin: _View | None = None
    _has_views: bool = field(default=False)

    __array_priority__ = 1000  # as a tensor's, so that NumPy scalars leave arithmetic to lazy logits

    def __post_init__(self) -> None:
        if not torch.is_grad_enabled() and self.requires_grad:
            self.hidden_states, self.head = self.hidden_states.detach(), self.head.map(Tensor.detach)

    # Attributes of a tensor

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
        """Whether the real logits are a plain tensor, not a DTensor."""
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

    def __hash__(self) -> int:  # by identity, as a tensor's, although == compares elements
        return id(self)

    # Building blocks of operations

    @property
    def tokens(self) -> Tensor:
        """The hidden states with hidden_size last, ``[..., hidden_size]``."""
        return self.hidden_states if self.vocab_dim == -1 else self.hidden_states.movedim(self.vocab_dim, -1)

    def changed(self, **changes: Any) -> Self:
        """A copy with other values in some of the fields."""
        return dataclasses.replace(self, **{"_whole": None, "_origin": None, "_has_views": False, **changes})

    def viewed(self, **changes: Any) -> Self:
        """As :meth:`changed`, for operations that return a view of a tensor."""
        self._has_views = True
        return self.changed(_origin=_View(self), **changes)

    def at_labels(self, labels: Tensor) -> Tensor:
        """The value of each token's label, differentiable: ``labels`` and the result are ``[...]``."""
        if self.transform.normalized:
            return -self._linear_cross_entropy(labels, reduction="none", ignore_index=_NO_LABEL).to(self.dtype)
        return self.transform.apply_elementwise(self.head.project_to(self.tokens, labels))

    def over_chunks(self, function: Callable[..., Any], *token_tensors: Tensor) -> Any:
        """Applies ``function`` to the values of one chunk of tokens after the other, differentiably.

        Backward computes each chunk's logits again. Chunks have the size of the head's ``chunk_bytes`` option.

        Args:
            function: Gets ``[chunk_size, vocab_size]`` and the same rows of ``token_tensors``, returns a tensor (or a
                named tuple of them) whose first dimension is chunk_size and that has one more.
            token_tensors: ``[..., any]``, with the same leading dimensions as :attr:`tokens`.

        Returns:
            The results of all chunks with the leading dimensions of :attr:`tokens`, and the last dimension where the
            vocabulary is.
        """
        head, tokens = self.head.cast(), self.tokens
        element_size = max(self.dtype.itemsize, head.compute_dtype.itemsize)
        num_tokens = math.prod(tokens.shape[:-1])
        chunk_size = head.chunk_size(num_tokens, self.vocab_size, element_size)

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
            target: Class indices, int64, of the logits' shape without the vocabulary.
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
        element_size = head.compute_dtype.itemsize
        tokens_avoided = max(0, num_tokens - head.chunk_size(num_tokens, head.weight.shape[0], element_size))
        head.counters.num_losses += 1
        head.counters.bytes_avoided += tokens_avoided * self.vocab_size * element_size
        return result

    def _linear_cross_entropy(self, target: Tensor, **options: Any) -> Any:
        head = self.head.cast()
        with torch.autocast(self.device.type, enabled=False):
            (hidden_states, weight), *adapters = head.factors(self.tokens)
            return linear_cross_entropy(
                hidden_states,
                weight,
                target,
                linear_bias=head.bias,
                adapter=adapters[0] if adapters else None,
                **options,
                **self.transform.loss_options(),
                **head.loss_options(),
            )

    # Real logits

    def materialize(self, operation: str = "materialize()") -> Tensor:
        """The real logits; warns once per ``operation`` and line of code if they are part of a graph."""
        if self._is_overwritten():
            return self._in_memory(operation)
        differentiable = torch.is_grad_enabled() and self.requires_grad
        # Logits that were first computed without gradients have no graph, and must not replace those that need one.
        if self._whole is not None and (self._whole.requires_grad or not differentiable):
            return self._whole
        if differentiable:
            self.head.counters.num_materialized += 1
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
                f"{operation} on an LM head's output ({line}) materializes the logits: {tuple(self.shape)}"
                f" {self.dtype}, {size:.2f} GiB. The result is right, but the loss is not fused."
            )

    def _is_overwritten(self) -> bool:
        """Whether the real logits, or those that this is a view of, were written to in place or have hooks."""
        if self._origin is not None and self._origin.parent._is_overwritten():
            return True
        whole = self._whole
        if whole is None or whole.is_inference():  # inference tensors have no version
            return whole is not None and torch.is_inference_mode_enabled()
        # Private to torch: nothing public says whether a tensor was written to or has hooks.
        is_watched = whole.retains_grad or whole._backward_hooks or (whole.is_leaf and whole.requires_grad)
        return whole._version > 0 or bool(is_watched)

    def _in_memory(self, operation: str) -> Tensor:
        """The real logits; if this is a view, as a view of its base's real logits."""
        if self._origin is not None:
            assert self._origin.replay is not None
            self._whole = self._origin.replay(self._origin.parent._in_memory(operation))
        elif not self._is_overwritten():
            with torch.enable_grad():  # an in-place write under no_grad does not detach the tensor written to
                self.materialize(operation)
        assert self._whole is not None
        return self._whole

    def _become(self, other: LazyLogits) -> bool:
        """Takes over the fields of ``other``, the result of an in-place operation, if there is no alias of this."""
        alone = self._origin is None and not self._has_views and self._whole is None
        if not alone or (other.dtype, other.requires_grad) != (self.dtype, self.requires_grad):
            return False
        self.hidden_states, self.head, self.transform = other.hidden_states, other.head, other.transform
        self.vocab_dim = other.vocab_dim
        return True

    # Dispatch

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
        # Engines copy a module's output before they convert the tensors in it; the autograd graph stays shared.
        return self.changed(_whole=self._whole)

    def __reduce__(self) -> Any:
        return _identity, (self.materialize("pickling"),)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _has_lazy(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return isinstance(tree, LazyLogits)
    return any(map(_has_lazy, tree))


def _materialized(tree: Any, operation: str) -> Any:
    """``tree``, a function's arguments, with real logits."""
    if isinstance(tree, LazyLogits):
        return tree.materialize(operation)
    if not _has_lazy(tree):
        return tree
    if isinstance(tree, Mapping):
        return {key: _materialized(value, operation) for key, value in tree.items()}
    values = [_materialized(value, operation) for value in tree]
    return values if isinstance(tree, list) else tuple(values)


def _name_out_of_place(name: str) -> str | None:
    """The name of the function that returns the value which the in-place function ``name`` writes, or None."""
    if name == "__setitem__":
        return name
    if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else None


def _call(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of arguments that contain lazy logits: as registered if it is, else of the real logits."""
    name_out_of_place = _name_out_of_place(name)
    operation = _operations.get(name_out_of_place or name)
    if name_out_of_place is None and operation is not None and operation.is_commutative and len(args) == 2:
        args = args if isinstance(args[0], LazyLogits) else (args[1], args[0])
    first = args[0] if args else None
    if isinstance(first, LazyLogits):
        result = NotImplemented if operation is None else _registered(operation, first, args[1:], kwargs)
        if name_out_of_place is None:
            if result is not NotImplemented:
                return _with_replay(result, lambda whole: func(whole, *args[1:], **kwargs))
        elif isinstance(result, LazyLogits) and first._become(result):
            return first
        else:
            first._in_memory(name)
    return func(*_materialized(args, name), **_materialized(kwargs, name))


def _registered(operation: _Operation, first: LazyLogits, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The registered function's result, or ``NotImplemented`` where it does not cover the call."""
    if not operation.takes_lazy_arguments and _has_lazy((others, kwargs)):
        return NotImplemented
    if first._is_overwritten():
        return NotImplemented
    try:
        operation.signature.bind(first, *others, **kwargs)
    except TypeError:
        return NotImplemented
    return operation.function(first, *others, **kwargs)


def _with_replay(result: Any, replay: Callable[[Tensor], Any]) -> Any:
    """``result``, where ``replay`` derives each view in it from the real logits of its base."""
    if isinstance(result, tuple):
        for position, part in enumerate(result):
            _with_replay(part, partial(_replayed_part, replay, position))
    elif isinstance(result, LazyLogits) and result._origin is not None and result._origin.replay is None:
        result._origin.replay = replay
    return result


def _replayed_part(replay: Callable[[Tensor], Any], position: int, whole: Tensor) -> Any:
    return replay(whole)[position]


def _calling_line() -> str:
    """``file:line`` of the innermost code outside of PyTorch and this project."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
