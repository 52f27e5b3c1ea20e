"""Logits that are not computed until something needs more of them than their loss.

A patched LM head returns :class:`LazyLogits`: hidden states, the head's parameters and what happened to the logits
since. What models do between head and loss (scaling, soft-capping, casts, reshaping and slicing over tokens, cutting
the vocabulary) is recorded; ``cross_entropy`` then runs fused. Any other operation computes the real logits first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map

from liger_ops import TokenStats, linear_cross_entropy
from liger_ops.chunked_loss import default_chunk_size

_loss_wanted: ContextVar[bool] = ContextVar("liger_loss_wanted", default=False)
_warned_operations: set[str] = set()


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
    """

    __slots__ = ("bias", "compute_dtype", "ledger", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype, ledger: LogitsLedger) -> None:
        self.weight = weight
        self.bias = bias
        self.compute_dtype = compute_dtype
        self.ledger = ledger

    def map(self, function: Callable[[Tensor], Tensor]) -> HeadParameters:
        """The same head with ``function`` applied to its weight and bias."""
        bias = None if self.bias is None else function(self.bias)
        return HeadParameters(function(self.weight), bias, self.compute_dtype, self.ledger)

    def project(self, hidden_states: Tensor) -> Tensor:
        """The real logits, ``[..., vocab_size]`` in ``compute_dtype``."""
        head = self.map(lambda parameter: parameter.to(self.compute_dtype))
        # The head decided on its dtype when it was called; autocast may be over (or on) by now.
        with torch.autocast(hidden_states.device.type, enabled=False):
            return F.linear(hidden_states.to(self.compute_dtype), head.weight, head.bias)


class LogitTransform(NamedTuple):
    """What happened to the logits: ``scale * logits``, or after a tanh ``scale * tanh(tanh_scale * logits)``."""

    dtype: torch.dtype
    scale: float = 1.0
    tanh_scale: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        logits = logits.to(self.dtype)
        if self.tanh_scale is not None:
            logits = torch.tanh(logits * self.tanh_scale)
        return logits if self.scale == 1.0 else logits * self.scale

    def loss_options(self) -> dict[str, float | None]:
        """The same as ``linear_cross_entropy`` spells it: ``softcap * tanh(logit_scale * logits / softcap)``."""
        if self.tanh_scale is None:
            return {"logit_scale": self.scale, "softcap": None}
        return {"logit_scale": self.scale * self.tanh_scale, "softcap": abs(self.scale)}


@dataclass(eq=False)
class LazyLogits:
    """The logits ``hidden_states @ weight.T + bias`` of a linear head, computed only if their loss is not enough.

    It is no tensor, but has a tensor's ``shape``, ``dtype`` and ``device``, goes into ``F.cross_entropy`` and
    :meth:`cross_entropy`, and turns into real logits in any other operation. ``hidden_states`` is a dataclass field of
    its own so that engines which look for tensors in a module's output (FSDP, DDP) find it.

    Args:
        hidden_states: ``[..., hidden_size]``.
        head: The projection that was not done.
        transform: What was done to the logits since.
    """

    hidden_states: Tensor
    head: HeadParameters
    transform: LogitTransform
    _whole: Tensor | None = field(default=None, repr=False)

    # What a tensor says of itself

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden_states.shape[:-1], self.head.weight.shape[0]))

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
        return self.hidden_states.requires_grad or self.head.weight.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.hidden_states.is_cuda

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    # What is recorded

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits | Tensor:
        """Casts between floating-point types are recorded; moving to another device computes the logits."""
        values = (*args, *kwargs.values())
        dtypes = [value for value in values if isinstance(value, torch.dtype)]
        devices = [torch.device(value) for value in values if isinstance(value, str | torch.device)]
        here = all(device.type == self.device.type and device.index in (None, self.device.index) for device in devices)
        recordable = here and all(dtype.is_floating_point for dtype in dtypes)
        if not recordable or any(isinstance(value, Tensor | LazyLogits) for value in values):
            return self.materialize("to").to(*(_whole(arg) for arg in args), **kwargs)
        return self._cast(dtypes[0]) if dtypes else self

    def float(self) -> LazyLogits:
        return self._cast(torch.float32)

    def _cast(self, dtype: torch.dtype) -> LazyLogits:
        return self._with(transform=self.transform._replace(dtype=dtype))

    def contiguous(self) -> LazyLogits:
        return self

    def detach(self) -> LazyLogits:
        return LazyLogits(self.hidden_states.detach(), self.head.map(Tensor.detach), self.transform)

    def view(self, *shape: Any) -> LazyLogits | Tensor:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> LazyLogits | Tensor:
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        vocab_size = self.shape[-1]
        tokens = list(shape[:-1])
        if shape and shape[-1] == -1 and -1 not in tokens and math.prod(tokens) * vocab_size == self.numel():
            return self._with(self.hidden_states.reshape(*tokens, self.hidden_states.shape[-1]))
        if shape and shape[-1] == vocab_size:
            return self._with(self.hidden_states.reshape(*tokens, self.hidden_states.shape[-1]))
        return self.materialize(f"reshape{shape}").reshape(shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> LazyLogits | Tensor:
        if end_dim % self.ndim == self.ndim - 1:
            return self.materialize("flatten").flatten(start_dim, end_dim)
        return self._with(self.hidden_states.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> LazyLogits | Tensor:
        entries = index if isinstance(index, tuple) else (index,)
        consumed = sum(_consumed_dims(entry) for entry in entries)
        has_ellipsis = any(entry is Ellipsis for entry in entries)
        touches_vocab = consumed == self.ndim or (has_ellipsis and entries[-1] is not Ellipsis)
        if not touches_vocab:
            return self._with(self.hidden_states[index])
        columns = entries[-1]
        if not isinstance(columns, slice):
            return self.materialize("indexing the vocabulary")[index]
        head = self.head
        if columns != slice(None):
            head = head.map(lambda parameter: parameter[columns])
        return LazyLogits(self.hidden_states[(*entries[:-1], slice(None))], head, self.transform)

    def __mul__(self, other: Any) -> LazyLogits | Tensor:
        if isinstance(other, Real):
            return self._scaled(float(other))
        return self.materialize("multiplication") * _whole(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LazyLogits | Tensor:
        if isinstance(other, Real):
            return self._scaled(1.0 / float(other))
        return self.materialize("division") / _whole(other)

    def tanh(self) -> LazyLogits | Tensor:
        if self.transform.tanh_scale is not None:
            return self.materialize("a second tanh").tanh()
        return self._with(transform=LogitTransform(self.dtype, scale=1.0, tanh_scale=self.transform.scale))

    def _scaled(self, factor: float) -> LazyLogits:
        return self._with(transform=self.transform._replace(scale=self.transform.scale * factor))

    def _with(self, hidden_states: Tensor | None = None, transform: LogitTransform | None = None) -> LazyLogits:
        return LazyLogits(
            self.hidden_states if hidden_states is None else hidden_states,
            self.head,
            self.transform if transform is None else transform,
        )

    # What the logits are for

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
        """``F.cross_entropy`` of these logits over their last dimension, fused.

        Args:
            target: Class indices, ``[...]`` as these logits without their last dimension, int64.
            weight: Class weights, ``[vocab_size]``.
            ignore_index: Label of tokens to leave out.
            reduction: ``"none"``, ``"mean"`` or ``"sum"``.
            label_smoothing: Between 0 and 1.
            return_stats: Whether to also return :class:`~liger_ops.TokenStats`.

        Raises:
            ValueError: As :func:`liger_ops.linear_cross_entropy`.
        """
        head = self.head
        cast = head.map(lambda parameter: parameter.to(head.compute_dtype))
        with torch.autocast(self.device.type, enabled=False):
            result = linear_cross_entropy(
                self.hidden_states.to(head.compute_dtype),
                cast.weight,
                target,
                linear_bias=cast.bias,
                weight=weight,
                reduction=reduction,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                return_stats=return_stats,
                **self.transform.loss_options(),
            )
        num_tokens, element_size = target.numel(), head.compute_dtype.itemsize
        chunk_size = default_chunk_size(num_tokens, self.shape[-1], element_size, self.device)
        head.ledger.num_losses += 1
        head.ledger.bytes_avoided += max(0, num_tokens - chunk_size) * self.shape[-1] * element_size
        return result

    def materialize(self, operation: str = "materialize()") -> Tensor:
        """The real logits, ``[..., vocab_size]``; warns once for each ``operation`` if they are part of a graph."""
        differentiable = torch.is_grad_enabled() and self.requires_grad
        # Logits that were first seen without gradients have no graph, and must not stand in for those that need one.
        if self._whole is not None and (self._whole.requires_grad or not differentiable):
            return self._whole
        if differentiable:
            self.head.ledger.num_materialized += 1
            if operation not in _warned_operations:
                _warned_operations.add(operation)
                size = self.numel() * self.dtype.itemsize / 2**30
                rank_zero_warn(
                    f"{operation} on an LM head's output needs whole logits: {tuple(self.shape)} {self.dtype},"
                    f" {size:.2f} GiB. The result is right, but the loss is not fused."
                )
        self._whole = self.transform.apply(self.head.project(self.hidden_states))
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and func in _RECORDED and not _has_lazy((args[1:], kwargs)):
            return _RECORDED[func](*args, **kwargs)
        operation = getattr(func, "__name__", str(func))
        args, kwargs = tree_map(lambda leaf: _whole(leaf, operation), (args, kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.materialize(name), name)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize("__array__").__array__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyLogits:
        # Engines copy a module's output before converting the tensors in it; the graph behind it stays shared.
        return LazyLogits(self.hidden_states, self.head, self.transform, self._whole)

    def __reduce__(self) -> Any:
        return _identity, (self.materialize("pickling"),)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _whole(value: Any, operation: str = "an operator") -> Any:
    return value.materialize(operation) if isinstance(value, LazyLogits) else value


def _has_lazy(tree: Any) -> bool:
    found = False

    def visit(leaf: Any) -> None:
        nonlocal found
        found = found or isinstance(leaf, LazyLogits)

    tree_map(visit, tree)
    return found


def _consumed_dims(entry: Any) -> int:
    """How many dimensions one entry of an index stands for."""
    if entry is None or entry is Ellipsis:
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


def _recorded_cross_entropy(
    input: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    # PyTorch's class dimension is the second; with more dimensions that is not the vocabulary.
    if input.ndim > 2 or target.is_floating_point():
        logits = input.materialize("cross_entropy over another dimension or with class probabilities")
        return F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    return input.cross_entropy(
        target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def _recorded_multiply(input: LazyLogits, other: Any) -> LazyLogits | Tensor:
    return input * other


def _recorded_divide(input: LazyLogits, other: Any, *, rounding_mode: str | None = None) -> LazyLogits | Tensor:
    if rounding_mode is not None:
        return torch.div(input.materialize("div"), other, rounding_mode=rounding_mode)
    return input / other


_RECORDED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _recorded_cross_entropy,
    torch.tanh: LazyLogits.tanh,
    torch.mul: _recorded_multiply,
    torch.multiply: _recorded_multiply,
    torch.div: _recorded_divide,
    torch.divide: _recorded_divide,
    torch.true_divide: _recorded_divide,
    torch.reshape: lambda input, shape: input.reshape(shape),
    torch.flatten: LazyLogits.flatten,
    torch.detach: LazyLogits.detach,
}


def _materializing(name: str) -> Callable[..., Any]:
    def operator(self: LazyLogits, *args: Any) -> Any:
        return getattr(self.materialize(name.strip("_")), name)(*(_whole(arg) for arg in args))

    operator.__name__ = name
    return operator


# Python looks operators up on the class, so __getattr__ does not see them.
for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__rtruediv__", "__floordiv__", "__mod__", "__pow__", "__rpow__"),
    *("__matmul__", "__rmatmul__", "__neg__", "__pos__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__eq__", "__ne__", "__iter__", "__float__", "__bool__", "__setitem__", "__contains__", "__invert__"),
):
    setattr(LazyLogits, _name, _materializing(_name))
LazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
