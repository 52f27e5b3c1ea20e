"""What lazy logits do without being computed: one table from the names of PyTorch's functions to what replaces them.

Functions and methods of one name share an entry, and an operator or a write in place (``mul_``) that of the function it
belongs to. An entry returns ``NotImplemented`` where it needs real logits, as does an argument that it does not list.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_liger.lazy.logits import LazyLogits

Entry = Callable[..., Any]
COMMUTATIVE = ("mul", "multiply", "__mul__", "__rmul__")
OF_TWO = ("add", "__add__")
"""Functions that take two lazy logits."""
_REDUCED = ("argmax", "argmin", "max", "min", "amax", "amin", "logsumexp", "special_logsumexp")
_OF_CHUNKS = ("gather", "take_along_dim", "topk", *_REDUCED)
"""Functions of the values over the vocabulary, computed for a chunk of tokens at a time."""
_RECORDED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_table: dict[str, Entry] = {}


def record(x: LazyLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function ``name`` of lazy logits and other arguments returns, or ``NotImplemented``."""
    entry = _table.get(name)
    if entry is None or (name in _OF_CHUNKS and not x.is_local):
        return NotImplemented
    try:
        _signature(entry).bind(x, *args, **kwargs)
    except TypeError:
        return NotImplemented
    return entry(x, *args, **kwargs)


@cache
def _signature(entry: Entry) -> inspect.Signature:
    return inspect.signature(entry)


def _entry(*names: str) -> Callable[[Entry], Entry]:
    def register(function: Entry) -> Entry:
        _table.update(dict.fromkeys(names, function))
        return function

    return register


def _is_vocab(x: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and -x.ndim <= dim < x.ndim and dim % x.ndim == x.vocab_dim % x.ndim


# Values: scale, soft-cap, log-softmax, casts


def _factor(x: LazyLogits, other: Any) -> float | None:
    """The number that ``other`` is, if reading it costs nothing and nobody wants its gradient."""
    if isinstance(other, Tensor):
        fits = other.ndim == 0 or (other.numel() == 1 and other.ndim <= x.ndim and other.device == x.device)
        if not fits or other.requires_grad or other.device.type != "cpu" or other.is_complex():
            return None
        other = other.item()
    if not isinstance(other, Real):
        return None
    value = float(other)
    return value if math.isfinite(value) and value != 0 else None


def _scale(x: LazyLogits, other: Any, *, divide: bool) -> Any:
    value = _factor(x, other)
    if value is None or x.transform.normalized:
        return NotImplemented
    factor = 1.0 / value if divide else value
    scaled = x.changed(transform=x.transform._replace(scale=x.transform.scale * factor))
    dtype = torch.result_type(torch.empty((1,) * x.ndim, dtype=x.dtype), other)
    return _cast(scaled, dtype)


@_entry("mul", "multiply", "__mul__", "__rmul__")
def _multiply(x: LazyLogits, other: Any) -> Any:
    return _scale(x, other, divide=False)


@_entry("div", "divide", "true_divide", "__truediv__", "__div__")
def _divide(x: LazyLogits, other: Any, *, rounding_mode: None = None) -> Any:
    return NotImplemented if rounding_mode is not None else _scale(x, other, divide=True)


@_entry(*OF_TWO)
def _add(x: LazyLogits, other: Any) -> Any:
    """A low-rank update, as LoRA makes it: its input follows the hidden states, its factor is folded into that."""
    if type(other) is not type(x) or other._is_overwritten():
        return NotImplemented
    untouched = type(x.transform)
    if x.transform != untouched(x.dtype) or other.transform._replace(scale=1.0) != untouched(other.dtype):
        return NotImplemented
    if other.head.bias is not None or other.head.adapter is not None or other.shape != x.shape:
        return NotImplemented
    if not (x.head.is_whole and other.head.is_whole):
        return NotImplemented
    low_rank = other.tokens * other.transform.scale
    if x.vocab_dim != -1 or low_rank.shape[-1] > x.hidden_states.shape[-1]:
        return NotImplemented
    hidden_states = torch.cat((x.hidden_states, low_rank.to(x.hidden_states.dtype)), dim=-1)
    updated = x.changed(hidden_states=hidden_states, head=x.head.with_adapter(other.head.weight))
    return _cast(updated, torch.promote_types(x.dtype, other.dtype))


@_entry("tanh")
def _tanh(x: LazyLogits) -> Any:
    transform = x.transform
    if transform.tanh_scale is not None or transform.normalized:
        return NotImplemented
    return x.changed(transform=transform._replace(scale=1.0, tanh_scale=transform.scale))


@_entry("log_softmax", "special_log_softmax")
def _log_softmax(
    x: LazyLogits, dim: int | None = None, dtype: torch.dtype | None = None, *, _stacklevel: int = 3
) -> Any:
    if not _is_vocab(x, dim):
        return NotImplemented
    # Autocast may have it in float32.
    dtype = torch.log_softmax(torch.empty(0, 1, dtype=x.dtype, device=x.device), -1, dtype=dtype).dtype
    return _cast(x.changed(transform=x.transform._replace(normalized=True)), dtype)


def _cast(x: LazyLogits, dtype: torch.dtype) -> Any:
    if dtype == x.dtype:
        return x
    return x.changed(transform=x.transform._replace(dtype=dtype)) if dtype in _RECORDED_DTYPES else NotImplemented


@_entry("to")
def _to(x: LazyLogits, *args: Any, copy: bool = False, non_blocking: bool = False, **kwargs: Any) -> Any:
    dtype, device = x.dtype, x.device
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            dtype, device = value.dtype, value.device
        elif isinstance(value, str | torch.device) or type(value) is int:
            device = torch.device(value)
        elif not (value is None or isinstance(value, bool)):
            return NotImplemented
    if device.type != x.device.type or device.index not in (None, x.device.index):
        return NotImplemented
    return _cast(x.changed() if copy else x, dtype)


@_entry("type")
def _type(x: LazyLogits, dtype: torch.dtype) -> Any:
    return _cast(x, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


@_entry("type_as")
def _type_as(x: LazyLogits, other: Tensor) -> Any:
    return _to(x, other)


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
for _name, _dtype in _CASTS.items():
    _entry(_name)(partial(_cast, dtype=_dtype))


@_entry("clone", "contiguous")
def _copy(x: LazyLogits, *, memory_format: Any = None) -> Any:
    return x.changed()


@_entry("detach")
def _detach(x: LazyLogits) -> Any:
    return x.viewed(hidden_states=x.hidden_states.detach(), head=x.head.map(Tensor.detach))


_entry("numel")(lambda x: x.numel())
_entry("is_floating_point")(lambda x: True)
_entry("is_complex")(lambda x: False)


# Layout: what happens to dimensions happens to those of the hidden states


def _follow(function: Entry, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Functions whose arguments name dimensions: the same one of the hidden states, if the vocabulary stays whole."""
    hidden_states = x.hidden_states
    hidden_size = hidden_states.shape[x.vocab_dim]
    if 1 in (hidden_size, x.vocab_size):  # would be squeezed, or look as if it was there for another
        return NotImplemented
    # Of all the dimensions of a single row, which needs no memory, hidden_size alone moves in memory.
    sizes = [1] * x.ndim
    sizes[x.vocab_dim] = hidden_size
    row = function(torch.empty(sizes, device="meta").expand(hidden_states.shape), *args, **kwargs)
    for dim in range(-row.ndim, 0):
        if row.shape[dim] == hidden_size and row.stride(dim) == 1:
            return x.viewed(hidden_states=function(hidden_states, *args, **kwargs), vocab_dim=dim)
    return NotImplemented


for _name in (
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t"),
    *("flatten", "squeeze", "unsqueeze"),
):
    _entry(_name)(partial(_follow, getattr(Tensor, _name)))


@_entry("unflatten")
def _unflatten(x: LazyLogits, dim: int, sizes: Any) -> Any:
    return NotImplemented if _is_vocab(x, dim) else _follow(torch.unflatten, x, dim, sizes)


@_entry("reshape", "view")
def _reshape(x: LazyLogits, *args: Any, shape: Any = None, size: Any = None) -> Any:
    sizes = shape or size or args
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    if not all(isinstance(value, int) for value in sizes):
        return NotImplemented
    known = math.prod(value for value in sizes if value != -1)
    sizes = [x.numel() // max(known, 1) if value == -1 else value for value in sizes]
    if math.prod(sizes) != x.numel():
        return NotImplemented
    # The vocabulary is still there if as much as before is in front of it, and thus behind it.
    tokens_in_front = math.prod(x.shape[: x.vocab_dim])
    for dim, value in enumerate(sizes):
        if value == x.vocab_size and math.prod(sizes[:dim]) == tokens_in_front:
            sizes[dim] = x.hidden_states.shape[x.vocab_dim]
            return x.viewed(hidden_states=x.hidden_states.reshape(sizes), vocab_dim=dim - len(sizes))
    return NotImplemented


@_entry("reshape_as", "view_as")
def _reshape_as(x: LazyLogits, other: Tensor) -> Any:
    return _reshape(x, other.shape)


def _along_dim(function: Entry, position: int, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Functions that take from one dimension, their argument at ``position``."""
    dim = kwargs.get("dim", args[position] if len(args) > position else 0)
    if not isinstance(dim, int):
        return NotImplemented
    derived = x.changed if function is torch.index_select else x.viewed
    if _is_vocab(x, dim):
        if function not in (torch.narrow, torch.index_select) or x.transform.normalized or not x.head.is_whole:
            return NotImplemented
        # The head's vocabulary is its first dimension.
        kwargs |= {"dim": 0} if "dim" in kwargs else {}
        args = args if "dim" in kwargs else (0, *args[1:])
        return derived(head=x.head.map(lambda parameter: function(parameter, *args, **kwargs)))
    result = function(x.hidden_states, *args, **kwargs)
    is_behind = dim % x.ndim > x.vocab_dim % x.ndim

    def lazy(part: Tensor) -> LazyLogits:
        return derived(hidden_states=part, vocab_dim=x.vocab_dim + (is_behind and part.ndim < x.ndim))

    return lazy(result) if isinstance(result, Tensor) else tuple(lazy(part) for part in result)


_DIM_POSITIONS = {"narrow": 0, "select": 0, "index_select": 0, "unbind": 0, "chunk": 1, "tensor_split": 1}
for _name, _position in _DIM_POSITIONS.items():
    _entry(_name)(partial(_along_dim, getattr(torch, _name), _position))


@_entry("split")
def _split(x: LazyLogits, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    # The function and the method call their argument differently.
    return _along_dim(torch.split, 1, x, split_size_or_sections or split_size, dim)


@_entry("__iter__")
def _iterate(x: LazyLogits) -> Any:
    return NotImplemented if _is_vocab(x, 0) else iter(x.unbind(0))


@_entry("__getitem__")
def _getitem(x: LazyLogits, index: Any) -> Any:
    entries = [_index_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    whole = [slice(None)] * (x.ndim - sum(map(_num_consumed, entries)))
    position = next((position for position, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[position : position + 1] = whole
    ends = np.cumsum([_num_consumed(entry) for entry in entries])
    position = int(np.searchsorted(ends, x.vocab_dim % x.ndim, side="right"))
    if position == len(entries):  # too many for the dimensions there are
        return NotImplemented
    before, columns, behind = entries[:position], entries[position], entries[position + 1 :]
    gathers = any(isinstance(entry, Tensor | bool) for entry in (*before, *behind))

    if gathers and behind:  # dimensions may come out in another order
        return NotImplemented
    if isinstance(columns, Tensor) and gathers:
        return _getitem_pairs(x, before, columns)
    if not isinstance(columns, slice) and not (isinstance(columns, Tensor) and columns.ndim == 1):
        return NotImplemented
    head = x.head
    if isinstance(columns, Tensor) or columns.indices(x.vocab_size) != (0, x.vocab_size, 1):
        if x.transform.normalized or not head.is_whole:
            return NotImplemented
        head = head.map(lambda parameter: parameter[columns])
    derived = x.changed if gathers or isinstance(columns, Tensor) else x.viewed
    return derived(
        hidden_states=x.hidden_states[(*before, slice(None), *behind)],
        head=head,
        vocab_dim=-1 - sum(entry is None or isinstance(entry, slice) for entry in behind),
    )


def _index_entry(entry: Any) -> Any:
    if not isinstance(entry, list | tuple | range | np.ndarray):
        return entry
    return torch.as_tensor(entry) if len(entry) else torch.empty(0, dtype=torch.int64)


def _num_consumed(entry: Any) -> int:
    """How many dimensions one entry of an index stands for."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _getitem_pairs(x: LazyLogits, tokens: list[Any], labels: Tensor) -> Any:
    """``logits[rows, labels]``: one class of each of some tokens."""
    if not all(isinstance(entry, Tensor) and entry.dtype == torch.int64 for entry in (*tokens, labels)):
        return NotImplemented
    *tokens, labels = torch.broadcast_tensors(*(entry.to(x.device) for entry in (*tokens, labels)))
    labels = torch.where(labels < 0, labels + x.vocab_size, labels)
    return x.changed(hidden_states=x.hidden_states[tuple(tokens)]).at_labels(labels)


# Losses


def _classes_are_vocab(x: LazyLogits, target: Tensor) -> bool:
    """PyTorch's classes are the second dimension, or the only one; with probabilities the target has them too."""
    return target.dtype == torch.int64 and _is_vocab(x, min(1, x.ndim - 1)) and target.ndim == x.ndim - 1


@_entry("cross_entropy")
def _cross_entropy(
    x: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not _classes_are_vocab(x, target):
        return NotImplemented
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    loss = x.cross_entropy(
        target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.to(torch.promote_types(x.dtype, torch.float32))  # a float64 head's logits may have been cast


@_entry("nll_loss")
def _nll_loss(
    x: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if not x.transform.normalized:
        return NotImplemented
    return _cross_entropy(x, target, weight, size_average, ignore_index, reduce, reduction)


# Reductions over the vocabulary


@_entry("gather")
def _gather(x: LazyLogits, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if not _is_vocab(x, dim) or index.ndim != x.ndim or index.dtype != torch.int64:
        return NotImplemented
    labels = index.movedim(x.vocab_dim, -1)
    if labels.shape[:-1] != x.tokens.shape[:-1]:
        return NotImplemented
    if labels.shape[-1] == 1:
        return x.at_labels(labels.squeeze(-1)).unsqueeze(x.vocab_dim)
    return x.over_chunks(lambda values, rows: values.gather(-1, rows), labels)


@_entry("take_along_dim")
def _take_along_dim(x: LazyLogits, indices: Tensor, dim: int | None = None) -> Any:
    return _gather(x, dim, indices)  # type: ignore[arg-type]


def _reduce(function: Entry, x: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not _is_vocab(x, dim):
        return NotImplemented
    result = x.over_chunks(lambda values: function(values, -1, keepdim=True))
    if keepdim:
        return result
    if isinstance(result, Tensor):
        return result.squeeze(x.vocab_dim)
    return type(result)([part.squeeze(x.vocab_dim) for part in result])


for _name in _REDUCED:
    _entry(_name)(partial(_reduce, getattr(torch, _name.removeprefix("special_"))))


@_entry("topk")
def _topk(x: LazyLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not _is_vocab(x, dim):
        return NotImplemented
    return x.over_chunks(lambda values: torch.topk(values, k, -1, largest, sorted))
