"""The operations that lazy logits implement, by the names of PyTorch's functions; importing this registers them.

Functions and methods of one name share an entry, and an operator or in-place method (``mul_``) uses the entry of the
function that returns its result. An entry returns ``NotImplemented`` where it needs the real logits.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_liger.lazy.head import LogitTransform
from lightning_liger.lazy.logits import LazyLogits, implements

Entry = Callable[..., Any]
_REDUCED = ("argmax", "argmin", "max", "min", "amax", "amin", "logsumexp", "special_logsumexp")
_RECORDED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _is_vocab(x: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and -x.ndim <= dim < x.ndim and dim % x.ndim == x.vocab_dim % x.ndim


# Values: scale, soft-cap, log-softmax, casts


def _factor(x: LazyLogits, other: Any) -> float | None:
    """``other`` as a number, None if reading it would wait for the device or it requires a gradient."""
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


@implements("mul", "multiply", "__mul__", "__rmul__", commutative=True)
def _multiply(x: LazyLogits, other: Any) -> Any:
    return _scale(x, other, divide=False)


@implements("div", "divide", "true_divide", "__truediv__", "__div__")
def _divide(x: LazyLogits, other: Any, *, rounding_mode: None = None) -> Any:
    return NotImplemented if rounding_mode is not None else _scale(x, other, divide=True)


@implements("add", "__add__", takes_lazy_arguments=True)
def _add(x: LazyLogits, other: Any) -> Any:
    """Adds a low-rank update, as LoRA's: its input is appended to the hidden states, scaled by its factor."""
    if type(other) is not type(x) or other._is_overwritten():
        return NotImplemented
    if x.transform != LogitTransform(x.dtype) or other.transform._replace(scale=1.0) != LogitTransform(other.dtype):
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


@implements("tanh")
def _tanh(x: LazyLogits) -> Any:
    transform = x.transform
    if transform.tanh_scale is not None or transform.normalized:
        return NotImplemented
    return x.changed(transform=transform._replace(scale=1.0, tanh_scale=transform.scale))


@implements("log_softmax", "special_log_softmax")
def _log_softmax(
    x: LazyLogits, dim: int | None = None, dtype: torch.dtype | None = None, *, _stacklevel: int = 3
) -> Any:
    if not _is_vocab(x, dim):
        return NotImplemented
    # Autocast may compute it in float32.
    dtype = torch.log_softmax(torch.empty(0, 1, dtype=x.dtype, device=x.device), -1, dtype=dtype).dtype
    return _cast(x.changed(transform=x.transform._replace(normalized=True)), dtype)


def _cast(x: LazyLogits, dtype: torch.dtype) -> Any:
    if dtype == x.dtype:
        return x
    return x.changed(transform=x.transform._replace(dtype=dtype)) if dtype in _RECORDED_DTYPES else NotImplemented


@implements("to")
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


@implements("type")
def _type(x: LazyLogits, dtype: torch.dtype) -> Any:
    return _cast(x, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


@implements("type_as")
def _type_as(x: LazyLogits, other: Tensor) -> Any:
    return _to(x, other)


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
for _name, _dtype in _CASTS.items():
    implements(_name)(partial(_cast, dtype=_dtype))


@implements("clone", "contiguous")
def _copy(x: LazyLogits, *, memory_format: Any = None) -> Any:
    return x.changed()


@implements("detach")
def _detach(x: LazyLogits) -> Any:
    return x.viewed(hidden_states=x.hidden_states.detach(), head=x.head.map(Tensor.detach))


implements("numel")(lambda x: x.numel())
implements("is_floating_point")(lambda x: True)
implements("is_complex")(lambda x: False)


# Layout: dimensions of the logits are dimensions of the hidden states


def _follow(function: Entry, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Applies a function whose arguments name dimensions to the hidden states, if the vocabulary stays whole."""
    hidden_states = x.hidden_states
    hidden_size = hidden_states.shape[x.vocab_dim]
    if 1 in (hidden_size, x.vocab_size):  # would be squeezed, or taken for another dimension of size 1
        return NotImplemented
    # An expanded row without memory: hidden_size alone has stride 1, so the result tells where that dimension went.
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
    implements(_name)(partial(_follow, getattr(Tensor, _name)))


@implements("unflatten")
def _unflatten(x: LazyLogits, dim: int, sizes: Any) -> Any:
    return NotImplemented if _is_vocab(x, dim) else _follow(torch.unflatten, x, dim, sizes)


@implements("reshape", "view")
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
    # The vocabulary stays whole if a dimension of its size has as many elements before it, and so after it, as now.
    tokens_before = math.prod(x.shape[: x.vocab_dim])
    for dim, value in enumerate(sizes):
        if value == x.vocab_size and math.prod(sizes[:dim]) == tokens_before:
            sizes[dim] = x.hidden_states.shape[x.vocab_dim]
            return x.viewed(hidden_states=x.hidden_states.reshape(sizes), vocab_dim=dim - len(sizes))
    return NotImplemented


@implements("reshape_as", "view_as")
def _reshape_as(x: LazyLogits, other: Tensor) -> Any:
    return _reshape(x, other.shape)


def _along_dim(function: Entry, position: int, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Applies a function that slices one dimension, its argument at ``position``."""
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
    is_after = dim % x.ndim > x.vocab_dim % x.ndim

    def lazy(part: Tensor) -> LazyLogits:
        return derived(hidden_states=part, vocab_dim=x.vocab_dim + (is_after and part.ndim < x.ndim))

    return lazy(result) if isinstance(result, Tensor) else tuple(lazy(part) for part in result)


_DIM_POSITIONS = {"narrow": 0, "select": 0, "index_select": 0, "unbind": 0, "chunk": 1, "tensor_split": 1}
for _name, _position in _DIM_POSITIONS.items():
    implements(_name)(partial(_along_dim, getattr(torch, _name), _position))


@implements("split")
def _split(x: LazyLogits, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    # The function and the method give their argument different names.
    return _along_dim(torch.split, 1, x, split_size_or_sections or split_size, dim)


@implements("__iter__")
def _iterate(x: LazyLogits) -> Any:
    return NotImplemented if _is_vocab(x, 0) else iter(x.unbind(0))


@implements("__getitem__")
def _getitem(x: LazyLogits, index: Any) -> Any:
    entries = [_index_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    whole = [slice(None)] * (x.ndim - sum(map(_num_consumed, entries)))
    position = next((position for position, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[position : position + 1] = whole
    ends = list(accumulate(map(_num_consumed, entries)))
    position = bisect_right(ends, x.vocab_dim % x.ndim)
    if position == len(entries):  # more entries than dimensions
        return NotImplemented
    before, columns, after = entries[:position], entries[position], entries[position + 1 :]
    gathers = any(isinstance(entry, Tensor | bool) for entry in (*before, *after))

    if gathers and after:  # dimensions may come out in another order
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
    rows = (*before, slice(None), *after)
    return derived(
        hidden_states=x.hidden_states[rows],
        head=head,
        vocab_dim=-1 - sum(entry is None or isinstance(entry, slice) for entry in after),
    )


def _index_entry(entry: Any) -> Any:
    """A tensor instead of a sequence or array, such as NumPy's."""
    is_array = hasattr(entry, "__array__") and hasattr(entry, "__len__") and not isinstance(entry, Tensor)
    if not is_array and not isinstance(entry, list | tuple | range):
        return entry
    return torch.as_tensor(entry) if len(entry) else torch.empty(0, dtype=torch.int64)


def _num_consumed(entry: Any) -> int:
    """How many dimensions one entry of an index selects from."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _getitem_pairs(x: LazyLogits, tokens: list[Any], labels: Tensor) -> Any:
    """``logits[rows, labels]``: the value of one label for each of the selected tokens."""
    if not all(isinstance(entry, Tensor) and entry.dtype == torch.int64 for entry in (*tokens, labels)):
        return NotImplemented
    indices = torch.broadcast_tensors(*(entry.to(x.device) for entry in (*tokens, labels)))
    labels = torch.where(indices[-1] < 0, indices[-1] + x.vocab_size, indices[-1])
    return x.changed(hidden_states=x.hidden_states[tuple(indices[:-1])]).at_labels(labels)


# Losses


def _classes_are_vocab(x: LazyLogits, target: Tensor) -> bool:
    """Whether the vocabulary is where PyTorch expects classes (dimension 1, or 0 of one token), with class indices."""
    return target.dtype == torch.int64 and _is_vocab(x, min(1, x.ndim - 1)) and target.ndim == x.ndim - 1


@implements("cross_entropy")
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
    if size_average is not None or reduce is not None:  # the deprecated spelling
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    loss = x.cross_entropy(
        target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    assert isinstance(loss, Tensor)
    return loss.to(torch.promote_types(x.dtype, torch.float32))  # a float64 head's logits may have been cast


@implements("nll_loss")
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


@implements("gather")
def _gather(x: LazyLogits, dim: int | None, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if not x.is_local or not _is_vocab(x, dim) or index.ndim != x.ndim or index.dtype != torch.int64:
        return NotImplemented
    labels = index.movedim(x.vocab_dim, -1)
    if labels.shape[:-1] != x.tokens.shape[:-1]:
        return NotImplemented
    if labels.shape[-1] == 1:
        return x.at_labels(labels.squeeze(-1)).unsqueeze(x.vocab_dim)
    return x.over_chunks(lambda values, rows: values.gather(-1, rows), labels)


@implements("take_along_dim")
def _take_along_dim(x: LazyLogits, indices: Tensor, dim: int | None = None) -> Any:
    return _gather(x, dim, indices)


def _reduce(function: Entry, x: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not x.is_local or not _is_vocab(x, dim):
        return NotImplemented
    result = x.over_chunks(lambda values: function(values, -1, keepdim=True))
    if keepdim:
        return result
    if isinstance(result, Tensor):
        return result.squeeze(x.vocab_dim)
    return type(result)([part.squeeze(x.vocab_dim) for part in result])


for _name in _REDUCED:
    implements(_name)(partial(_reduce, getattr(torch, _name.removeprefix("special_"))))


@implements("topk")
def _topk(x: LazyLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.is_local or not _is_vocab(x, dim):
        return NotImplemented
    return x.over_chunks(lambda values: torch.topk(values, k, -1, largest, sorted))
