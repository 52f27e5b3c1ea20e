"""The operations that lazy logits implement, by the names of PyTorch's functions; importing this registers them.

Functions and methods of one name share an entry, and an operator or in-place method (``mul_``) uses the entry of the
function that returns its result. An entry returns ``NotImplemented`` where it needs the real logits.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_liger.lazy.head import LogitTransform
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.lazy.table import implements
from lightning_liger.lazy.tensor import NO_MEMORY

Entry = Callable[..., Any]
_MASKS = (torch.bool, torch.uint8)
_RECORDED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_vocab(x: Any, dim: Any) -> bool:
    """Whether a dimension, or a sequence of one, is the vocabulary's."""
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    ndim = x.hidden_states.ndim  # a plain tensor answers faster
    return isinstance(dim, int) and -ndim <= dim < ndim and dim % ndim == x.vocab_dim % ndim


def _factor(x: LazyLogits, other: Any) -> float | None:
    """``other`` as a number, None if reading it would wait for the device or it requires a gradient."""
    if isinstance(other, LazyLogits):
        return None
    if isinstance(other, Tensor):
        fits = other.ndim == 0 or (other.numel() == 1 and other.ndim <= x.twin.ndim and other.device == x.device)
        if not fits or other.requires_grad or other.device.type != "cpu" or other.is_complex():
            return None
        other = other.item()
    if not isinstance(other, Real):
        return None
    value = float(other)
    return value if math.isfinite(value) and value != 0 else None


def _in_dtype(x: LazyLogits, dtype: torch.dtype, **changes: Any) -> Any:
    """The lazy result of an elementwise operation in ``dtype``, with changes of the transform."""
    if dtype != x.twin.dtype and dtype not in _RECORDED_DTYPES:
        return NotImplemented
    return x.recorded(_like(x.twin, dtype), transform=x.transform._replace(dtype=dtype, **changes))


def _like(twin: Tensor, dtype: torch.dtype) -> Tensor:
    """The result of an elementwise operation. A cast is the only one that the meta device does not run in Python."""
    return twin.to(dtype, copy=True)


def _scale(x: LazyLogits, other: Any, *, divide: bool = False) -> Any:
    value = _factor(x, other)
    if value is None or x.transform.normalized:
        return NotImplemented
    scale = x.transform.scale * (1.0 / value if divide else value)
    is_usual = math.isfinite(scale) and scale != 0
    return _in_dtype(x, torch.result_type(x.twin, other), scale=scale) if is_usual else NotImplemented


implements("mul", "multiply", "__mul__", "__rmul__", commutative=True)(lambda x, other: _scale(x, other))


@implements("div", "divide", "true_divide", "__truediv__", "__div__")
def _divide(x: LazyLogits, other: Any, *, rounding_mode: None = None) -> Any:
    return _scale(x, other, divide=True) if rounding_mode is None else NotImplemented


@implements("add", "__add__", "__radd__", commutative=True)
def _add(x: LazyLogits, other: Any) -> Any:
    if x.transform != LogitTransform(x.twin.dtype) or x.head.shard is not None or not isinstance(other, Tensor):
        return NotImplemented
    return _add_low_rank(x, other) if isinstance(other, LazyLogits) else _add_bias(x, other)


def _add_low_rank(x: LazyLogits, other: LazyLogits) -> Any:
    """Adds a low-rank update, as LoRA's: its input is appended to the hidden states, scaled by its factor."""
    if type(other) is not type(x) or other.transform._replace(scale=1.0) != LogitTransform(other.dtype):
        return NotImplemented
    if other.head.bias is not None or other.head.adapter is not None or other.shape != x.twin.shape:
        return NotImplemented
    low_rank = other.tokens * other.transform.scale
    if x.vocab_dim != -1 or other.head.shard is not None or low_rank.shape[-1] > x.hidden_states.shape[-1]:
        return NotImplemented
    dtype = torch.promote_types(x.twin.dtype, other.dtype)
    if dtype not in (x.twin.dtype, *_RECORDED_DTYPES):
        return NotImplemented
    other.notice("add")
    # The input of a low-rank update follows all other columns of the hidden states.
    adapters = [each for each in (x.head.adapter, other.head.weight) if each is not None]
    return x.recorded(
        _like(x.twin, dtype) if x.twin.is_contiguous() else x.twin + other.twin,
        hidden_states=torch.cat((x.hidden_states, low_rank.to(x.hidden_states.dtype)), dim=-1),
        head=replace(x.head, adapter=adapters[0] if len(adapters) == 1 else torch.cat(adapters, dim=1)),
        transform=x.transform._replace(dtype=dtype),
    )


def _add_bias(x: LazyLogits, other: Tensor) -> Any:
    """Adds a bias of the vocabulary, as BART's ``final_logits_bias``."""
    if not -x.vocab_dim <= other.ndim <= x.twin.ndim or {other.numel(), other.shape[x.vocab_dim]} != {x.vocab_size}:
        return NotImplemented
    if type(other) not in (Tensor, torch.nn.Parameter) or other.device != x.device:
        return NotImplemented
    if other.dtype != x.twin.dtype or x.head.compute_dtype != x.twin.dtype or not x.is_local:
        return NotImplemented
    bias = other.reshape(-1)
    head = replace(x.head, bias=bias if x.head.bias is None else x.head.bias.to(x.twin.dtype) + bias)
    return x.recorded(_like(x.twin, x.twin.dtype) if x.twin.is_contiguous() else x.twin + other.to("meta"), head=head)


@implements("tanh")
def _tanh(x: LazyLogits) -> Any:
    transform = x.transform
    if transform.tanh_scale is not None or transform.normalized:
        return NotImplemented
    return _in_dtype(x, x.twin.dtype, scale=1.0, tanh_scale=transform.scale)


@implements("log_softmax", "special_log_softmax")
def _log_softmax(
    x: LazyLogits, dim: int | None = None, dtype: torch.dtype | None = None, *, _stacklevel: int = 3
) -> Any:
    if dim is None or not is_vocab(x, dim):
        return NotImplemented
    # Autocast may compute it in float32.
    dtype = torch.log_softmax(torch.empty(0, 1, dtype=x.twin.dtype, device=x.device), -1, dtype=dtype).dtype
    if dtype != x.twin.dtype and dtype not in _RECORDED_DTYPES:
        return NotImplemented
    twin = _like(x.twin, dtype) if x.twin.is_contiguous() else torch.log_softmax(x.twin, dim)
    return x.recorded(twin, transform=x.transform._replace(dtype=dtype, normalized=True))


def _cast(x: LazyLogits, dtype: torch.dtype) -> Any:
    return x if dtype == x.twin.dtype else _in_dtype(x, dtype)


@implements("to", "type_as")
def _to(x: LazyLogits, *args: Any, copy: bool = False, non_blocking: bool = False, **kwargs: Any) -> Any:
    dtype, device = x.twin.dtype, x.device
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            dtype, device = value.dtype, value.device
        elif isinstance(value, str | torch.device) or type(value) is int:
            device = torch.device(value)
        elif value is not None and value is not False:  # True is a copy, an object a memory format
            return NotImplemented
    if device.type != x.device.type or device.index not in (None, x.device.index):
        return NotImplemented
    return _in_dtype(x, dtype) if copy else _cast(x, dtype)


@implements("cuda")
def _cuda(x: LazyLogits, device: Any = None, *, non_blocking: bool = False) -> Any:
    return _to(x, torch.cuda.current_device() if device is None else device) if x.is_cuda else NotImplemented


@implements("type")
def _type(x: LazyLogits, dtype: torch.dtype | None = None) -> Any:
    if dtype is None:
        return torch.empty(0, dtype=x.twin.dtype, device=x.device).type()
    return _cast(x, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
for _name, _dtype in _CASTS.items():
    implements(_name)(partial(_cast, dtype=_dtype))
implements("cpu")(lambda x: _to(x, "cpu"))
implements("detach", "data")(lambda x: x.of(x.expression.map(Tensor.detach), x.twin, x.expression))
implements("real")(lambda x: x)


@implements("dropout")
def _dropout(x: LazyLogits, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training and p > 0 else x


@implements("clone")
def _clone(x: LazyLogits, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    return x.recorded(x.twin.clone(memory_format=memory_format))


@implements("contiguous")
def _contiguous(x: LazyLogits, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    twin = x.twin
    result = twin.contiguous(memory_format=memory_format)
    return x if result is twin else x.recorded(result)


# Layout: dimensions of the logits are dimensions of the hidden states


def _follow(function: Entry, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Applies a function of single dimensions to the hidden states, if the vocabulary stays whole."""
    twin = x.twin
    results = function(twin, *args, **kwargs)  # where PyTorch refuses the arguments it says so here
    if results is twin:
        return x
    if 1 in (x.hidden_states.shape[x.vocab_dim], x.vocab_size):  # would be squeezed
        return NotImplemented
    sizes = list(twin.shape)
    sizes[x.vocab_dim] = marked = x.vocab_size + x.expression.num_tokens + 2  # which no other dimension can have
    try:
        probes = function(NO_MEMORY.as_strided(sizes, (0,) * len(sizes)), *args, **kwargs)
    except RuntimeError:  # the arguments divide the vocabulary
        return NotImplemented
    is_one = isinstance(results, Tensor)
    shapes = [probe.shape for probe in ((probes,) if is_one else probes)]
    if not all(marked in shape for shape in shapes):
        return NotImplemented
    parts = function(x.hidden_states, *args, **kwargs)
    pairs = zip(*(([results], [parts]) if is_one else (results, parts)), shapes, strict=True)
    lazy = tuple(
        x.recorded(result, hidden_states=part, vocab_dim=shape.index(marked) - len(shape))
        for result, part, shape in pairs
    )
    return lazy[0] if is_one else lazy


for _name in (
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "narrow", "select", "unbind", "chunk", "tensor_split"),
):
    implements(_name)(partial(_follow, getattr(Tensor, _name)))


for _name in ("T", "H", "mT", "mH"):
    implements(_name)(partial(_follow, getattr(Tensor, _name).__get__))


@implements("index_select")
def _index_select(x: LazyLogits, dim: int, index: Tensor) -> Any:
    if is_vocab(x, dim):
        return NotImplemented
    twin = x.twin.index_select(dim, index.to("meta"))
    return x.recorded(twin, hidden_states=x.hidden_states.index_select(dim, index))


@implements("split")
def _split(x: LazyLogits, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    # The function and the method give their argument different names.
    return _follow(torch.split, x, split_size_or_sections or split_size, dim)


implements("__iter__")(lambda x: iter(x.unbind(0)))


def _to_sizes(function: Entry, x: LazyLogits, *args: Any, shape: Any = None, size: Any = None) -> Any:
    sizes = shape or size or args
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    if not all(isinstance(value, int) for value in sizes):
        return NotImplemented
    twin = x.twin
    result = function(twin, *sizes)
    if result is twin:
        return x
    # The vocabulary stays whole if a dimension of its size has as many elements before it, and so after it, as now.
    sizes = list(result.shape)
    tokens_before = math.prod(twin.shape[: x.vocab_dim])
    vocab_size = x.vocab_size
    for dim, value in enumerate(sizes):
        if value == vocab_size and math.prod(sizes[:dim]) == tokens_before:
            sizes[dim] = x.hidden_states.shape[x.vocab_dim]
            return x.recorded(result, hidden_states=x.hidden_states.reshape(sizes), vocab_dim=dim - len(sizes))
    return NotImplemented


for _function in (Tensor.view, Tensor.reshape):
    implements(_function.__name__)(partial(_to_sizes, _function))
implements("view_as")(lambda x, other: _to_sizes(Tensor.view, x, *other.shape))
implements("reshape_as")(lambda x, other: _to_sizes(Tensor.reshape, x, *other.shape))


@implements("__getitem__")
def _getitem(x: LazyLogits, index: Any) -> Any:
    entries = [_index_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    whole = [slice(None)] * (x.twin.ndim - sum(map(_num_consumed, entries)))
    position = next((position for position, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[position : position + 1] = whole
    ends = list(accumulate(map(_num_consumed, entries)))
    position = bisect_right(ends, x.vocab_dim % x.twin.ndim)
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
        if x.transform.normalized or head.shard is not None:
            return NotImplemented
        head = head.map(lambda parameter: parameter[columns])
    rows = (*before, slice(None), *after)
    return x.recorded(
        x.twin[tuple(chain.from_iterable(map(_entries_on_meta, (*before, columns, *after))))],
        hidden_states=x.hidden_states[rows],
        head=head,
        vocab_dim=-1 - sum(entry is None or isinstance(entry, slice) for entry in after),
    )


def _index_entry(entry: Any) -> Any:
    """A tensor instead of a sequence or array, such as NumPy's; a number instead of an integer tensor of none."""
    if isinstance(entry, Tensor) and entry.ndim == 0 and entry.dtype not in _MASKS:
        return operator.index(entry)
    is_array = hasattr(entry, "__array__") and hasattr(entry, "__len__")
    if isinstance(entry, Tensor) or not (is_array or isinstance(entry, list | tuple | range)):
        return entry
    return torch.as_tensor(entry) if len(entry) else torch.empty(0, dtype=torch.int64)


def _entries_on_meta(entry: Any) -> tuple[Any, ...]:
    """The same entry for a tensor on the meta device, where a mask has no number of elements."""
    if not isinstance(entry, Tensor):
        return (entry,)
    if entry.dtype not in _MASKS:
        return (entry.to("meta"),)
    return (torch.empty(int(entry.count_nonzero()), dtype=torch.int64, device="meta"),) * entry.ndim


def _num_consumed(entry: Any) -> int:
    """How many dimensions one entry of an index selects from."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype in _MASKS else 1


def _getitem_pairs(x: LazyLogits, tokens: list[Any], labels: Tensor) -> Any:
    """``logits[rows, labels]``: the value of one label for each of the selected tokens."""
    if not x.is_streamed or not all(
        isinstance(each, Tensor) and each.dtype == torch.int64 for each in (*tokens, labels)
    ):
        return NotImplemented
    indices = torch.broadcast_tensors(*(entry.to(x.device) for entry in (*tokens, labels)))
    labels = torch.where(indices[-1] < 0, indices[-1] + x.vocab_size, indices[-1])
    return x.same(hidden_states=x.hidden_states[tuple(indices[:-1])]).at_labels(labels)


@implements("cross_entropy")
def cross_entropy_of_logits(
    x: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Of lazy logits, or of traced ones."""
    # PyTorch expects classes in dimension 1, or 0 of one token, and their indices.
    ndim = x.hidden_states.ndim
    if not is_vocab(x, min(1, ndim - 1)) or target.ndim != ndim - 1 or target.dtype != torch.int64:
        return NotImplemented
    if size_average is not None or reduce is not None:  # the deprecated spelling
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
    loss: Any = x.cross_entropy(target, weight, ignore_index=ignore_index, **options)
    return loss.to(torch.promote_types(x.transform.dtype, torch.float32))  # a float64 head's logits may have been cast


@implements("nll_loss")
def nll_loss_of_logits(x: Any, *args: Any, **kwargs: Any) -> Any:
    return cross_entropy_of_logits(x, *args, **kwargs) if x.transform.normalized else NotImplemented


@implements("gather")
def _gather(x: LazyLogits, dim: int | None, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if not x.is_streamed or not is_vocab(x, dim) or index.ndim != x.twin.ndim or index.dtype != torch.int64:
        return NotImplemented
    labels = index.movedim(x.vocab_dim, -1)
    if labels.shape[:-1] != x.tokens.shape[:-1]:
        return NotImplemented
    if labels.shape[-1] == 1:
        return x.at_labels(labels.squeeze(-1)).unsqueeze(x.vocab_dim)
    return x.over_chunks(lambda values, rows: values.gather(-1, rows), labels)


implements("take_along_dim")(lambda x, indices, dim=None: _gather(x, dim, indices))


def _reduce(function: Entry, x: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not x.is_streamed or not is_vocab(x, dim):
        return NotImplemented
    result = x.over_chunks(lambda values: function(values, -1, keepdim=True))
    if keepdim:
        return result
    if isinstance(result, Tensor):
        return result.squeeze(x.vocab_dim)
    return type(result)([part.squeeze(x.vocab_dim) for part in result])


for _name in ("argmax", "argmin", "max", "min", "amax", "amin", "all", "any"):
    implements(_name)(partial(_reduce, getattr(torch, _name)))


@implements("logsumexp", "special_logsumexp")
def _logsumexp(x: LazyLogits, dim: Any, keepdim: bool = False) -> Any:
    if not is_vocab(x, dim) or not x.is_differentiable or not x.is_local or x.transform.normalized:
        return _reduce(torch.logsumexp, x, dim, keepdim)
    return x.log_sum_exp().unsqueeze(x.vocab_dim) if keepdim else x.log_sum_exp()


def _sum(
    x: LazyLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, is_mean: bool = False
) -> Any:
    dims = tuple(range(x.twin.ndim)) if dim in (None, ()) else tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    dtype = x.twin.dtype if dtype is None else dtype
    if not x.is_streamed or not dtype.is_floating_point or not any(is_vocab(x, each) for each in dims):
        return NotImplemented
    precise = torch.promote_types(dtype, torch.float32)
    sums = x.over_chunks(lambda values: values.sum(-1, keepdim=True, dtype=precise))
    total = sums.sum(dims, keepdim)
    return (total / math.prod(x.twin.shape[each] for each in dims) if is_mean else total).to(dtype)


implements("sum")(_sum)
implements("mean")(partial(_sum, is_mean=True))


@implements("topk")
def _topk(x: LazyLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.is_streamed or not is_vocab(x, dim):
        return NotImplemented
    return x.over_chunks(lambda values: torch.topk(values, k, -1, largest, sorted))
