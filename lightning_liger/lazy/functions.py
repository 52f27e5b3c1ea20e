"""PyTorch's functions that make expressions of lazy logits, and sums of these; importing this registers them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.lazy.expressions import LazyExpression, record
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.lazy.patterns import fused_sum
from lightning_liger.lazy.table import implements


def is_vocab(x: LazyLogits, dim: Any) -> bool:
    """Whether a dimension, or a sequence of one, is the vocabulary's."""
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    ndim = x.twin.ndim  # a plain tensor answers faster
    return isinstance(dim, int) and -ndim <= dim < ndim and dim % ndim == x.vocab_dim % ndim


def is_recorded(*operands: Any) -> bool:
    """Whether functions of single values are recorded for one of the operands: probabilities, not logits themselves.

    What is computed from logits by other functions usually needs them all in the end, and then once is enough.
    """
    return any(
        isinstance(operand, LazyExpression) or (isinstance(operand, LazyLogits) and operand.transform.normalized)
        for operand in operands
    )


def elementwise(name: str, function: Callable[..., Tensor], x: Any, other: Any) -> Any:
    """The expression of a function of two operands, of which one is lazy and the other any tensor or number."""
    if not is_recorded(x, other):
        return NotImplemented
    if isinstance(other, Tensor) and isinstance(x, Tensor):
        return record(name, function, x, other)
    if isinstance(x, Tensor) and isinstance(other, Real):
        return record(f"{name} of a number", lambda values: function(values, other), x)
    return NotImplemented


@implements("softmax", "special_softmax")
def _softmax(x: LazyLogits, dim: int | None = None, dtype: torch.dtype | None = None, *, _stacklevel: int = 3) -> Any:
    if dim is None or not is_vocab(x, dim):
        return NotImplemented
    return record("softmax", partial(torch.softmax, dim=-1, dtype=dtype), x)


def _unary(name: str, function: Callable[[Tensor], Tensor], x: LazyLogits) -> Any:
    return record(name, function, x) if is_recorded(x) else NotImplemented


implements("exp")(partial(_unary, "exp", torch.exp))
implements("log")(partial(_unary, "log", torch.log))


@implements("neg", "negative", "__neg__")
def _negative(x: LazyLogits) -> Any:
    return x * -1.0 if x.is_expression and not x.transform.normalized else _unary("neg", torch.neg, x)


@implements("sub", "subtract", "__sub__", takes_lazy_arguments=True)
def _subtract(x: Any, other: Any) -> Any:
    if isinstance(x, LazyLogits) and not isinstance(other, LazyLogits) and isinstance(other, Tensor):
        if x.is_log_sum_exp(other):
            return x.log_softmax(-1)
        if other.shape == (*x.shape[:-1], 1):  # such as a maximum
            return record("sub", torch.sub, x, other)
    return elementwise("sub", torch.sub, x, other)


@implements("logaddexp", takes_lazy_arguments=True)
def _logaddexp(x: Any, other: Any) -> Any:
    return elementwise("logaddexp", torch.logaddexp, x, other)


@implements("clamp", "clip")
def _clamp(x: LazyLogits, min: Any = None, max: Any = None) -> Any:
    if not is_recorded(x) or not all(bound is None or isinstance(bound, Real) for bound in (min, max)):
        return NotImplemented
    is_lowest = max is None and min == torch.finfo(x.dtype).min  # against infinities, as torch.distributions
    return record("clamp_lowest" if is_lowest else "clamp", lambda values: torch.clamp(values, min, max), x)


@implements("eq", "__eq__", takes_lazy_arguments=True)
def _equal(x: Any, other: Any) -> Any:
    """Whether values are numbers, as torch.distributions asks."""
    return record("eq", lambda values: values == values, x) if x is other else NotImplemented


@implements("broadcast_tensors", takes_lazy_arguments=True)
def _broadcast_tensors(*tensors: Any) -> Any:
    lazy = [tensor for tensor in tensors if isinstance(tensor, LazyLogits)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if any(logits.shape != shape for logits in lazy):
        return NotImplemented
    return [tensor if isinstance(tensor, LazyLogits) else tensor.expand(shape) for tensor in tensors]


@implements("stack", takes_lazy_arguments=True)
def _stack(tensors: Any, dim: int = 0) -> Any:
    if dim != 0 or not all(isinstance(x, LazyLogits) and is_recorded(x) for x in tensors):
        return NotImplemented
    if len({x.dtype for x in tensors}) > 1:
        return NotImplemented
    return record("stack", _chosen, *tensors, is_stack=True)


def _chosen(position: Tensor, *values: Tensor) -> Tensor:
    result = values[0]
    for index, other in enumerate(values[1:], 1):
        result = torch.where(position == index, other, result)
    return result


def logsumexp_of_stack(x: LazyLogits, dim: Any, keepdim: bool) -> Any:
    """The log-sum-exp over the first dimension of stacked lazy logits."""
    if not isinstance(x, LazyExpression) or dim not in (0, (0,), [0]) or keepdim:
        return NotImplemented
    head = x.head
    if not x.recipe.is_stack:
        return NotImplemented
    parts = [x.part(operand) for operand in head.operands]
    return record("logsumexp", lambda *values: torch.logsumexp(torch.stack(values), 0), *parts)


@implements("kl_div", takes_lazy_arguments=True)
def _kl_div(
    input: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    if (
        size_average is not None
        or reduce is not None
        or not isinstance(input, Tensor)
        or not isinstance(target, Tensor)
    ):
        return NotImplemented
    if reduction not in ("none", "sum", "mean", "batchmean"):
        return NotImplemented
    name = "kl_div of logs" if log_target else "kl_div"
    losses = record(name, partial(F.kl_div, reduction="none", log_target=log_target), input, target)
    if losses is NotImplemented or reduction == "none":
        return losses
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses.sum() / input.shape[0]


# Sums over the vocabulary


def _reduced(
    x: LazyLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, is_mean: bool = False
) -> Any:
    dtype = x.dtype if dtype is None else dtype
    ndim = x.twin.ndim
    dims = tuple(range(ndim)) if dim is None or dim == () else tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    if not all(isinstance(d, int) and -ndim <= d < ndim for d in dims):
        return NotImplemented
    dims = tuple(d % ndim for d in dims)
    vocab_dim = x.vocab_dim % ndim
    if vocab_dim not in dims or len(set(dims)) < len(dims) or not x.is_local:
        return NotImplemented
    if not dtype.is_floating_point or not x.dtype.is_floating_point:
        return NotImplemented
    precise = torch.promote_types(dtype, torch.float32)
    total = fused_sum(x, "sum") if len(dims) == ndim else None
    if total is not None:
        result = total.reshape((1,) * ndim) if keepdim else total
    else:
        of_tokens = _sum_of_tokens(x, precise)
        if len(dims) > 1:
            result = of_tokens.sum(dims, keepdim)
        else:
            result = of_tokens if keepdim else of_tokens.squeeze(vocab_dim)
    if is_mean:
        result = result / torch.Size(x.shape[d] for d in dims).numel()
    return result.to(dtype)


def _sum_of_tokens(x: LazyLogits, dtype: torch.dtype) -> Tensor:
    """The sum over the vocabulary of each token, whose dimension is kept."""
    if (fused := fused_sum(x, "none")) is not None or (fused := x.linear_sum(dtype)) is not None:
        return fused.unsqueeze(-1).movedim(-1, x.vocab_dim)
    result = x.over_chunks(lambda values: values.sum(-1, keepdim=True, dtype=dtype))
    assert isinstance(result, Tensor)
    return result


implements("sum")(_reduced)
implements("mean")(partial(_reduced, is_mean=True))
