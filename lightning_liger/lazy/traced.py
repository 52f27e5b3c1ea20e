"""Lazy logits in code that ``torch.compile`` traces.

Lazy logits without memory cannot be made in a graph. :class:`TracedLogits` have the head's input and parameters as
attributes. What is applied to them is recorded at the time of tracing, so that a graph has the fused loss and no
logits. Those that stay in their graph have the real values too, which it drops unless something reads them. Those that
leave it are one row of the vocabulary, expanded to the shape of the logits: outside of compiled code they stand for
:class:`~.LazyLogits`, which they become once any function of PyTorch gets them. In the next graph of the same model,
after a graph break, they still are traced logits, unless such a function got them between, which may have written to
them, or an optimizer made a step: then functions of them break the graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import TokenStats, linear_cross_entropy
from liger_ops.backend import autocast_dtype, without_autocast
from lightning_liger.lazy.expression import Expression
from lightning_liger.lazy.head import HeadParameters, LogitTransform
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.lazy.operations import cross_entropy_of_logits, nll_loss_of_logits
from lightning_liger.lazy.steps import CHANGED, Period, clock
from lightning_liger.lazy.table import name_of
from lightning_liger.lazy.warning import warn_traced


class _Memory:
    """What logits that were recorded from each other share."""

    def __init__(self) -> None:
        self.is_written = self.is_shared = False
        self.is_touched = False  # whether functions outside of compiled code got some of them


class TracedLogits(Tensor):
    """The logits of a linear head in compiled code, see :mod:`lightning_liger.lazy.traced`. Made by :meth:`of`."""

    hidden_states: Tensor  # laid out as the logits, with hidden_size in the place of vocab_size
    head: HeadParameters
    transform: LogitTransform
    vocab_dim: int  # not negative
    memory: _Memory
    computed: Tensor | None  # the values, which no graph computes if nothing reads them, or what was written
    source: tuple[TracedLogits, str, Any, Any] | None  # of a view without values: the base, method and arguments
    period: Period  # in which they were made
    frame: str  # the code in whose graph they were made

    @classmethod
    def of(
        cls, hidden_states: Tensor, head: HeadParameters, transform: LogitTransform, vocab_dim: int = -1
    ) -> TracedLogits:
        """Logits without values."""
        if not torch.is_grad_enabled():
            hidden_states, head = hidden_states.detach(), head.map(Tensor.detach)
        vocab_dim %= hidden_states.ndim
        sizes = list(hidden_states.shape)
        del sizes[vocab_dim]
        # Strides of 0 and 1 tell where functions of the layout move the vocabulary. Nothing reads the values.
        row = hidden_states.new_full((head.vocab_size,), math.nan, dtype=transform.dtype)
        traced: Any = row.expand(*sizes, head.vocab_size).movedim(-1, vocab_dim).as_subclass(cls)
        return traced._with((hidden_states, head, transform, vocab_dim), _Memory())

    def _with(self, expression: tuple[Any, ...], memory: _Memory, values: Tensor | None = None) -> TracedLogits:
        self.hidden_states, self.head, self.transform, self.vocab_dim = expression
        self.memory, self.computed, self.source = memory, values, None
        self.period, self.frame = clock.period, _frame()
        return self

    def valued(self, values: Tensor, memory: _Memory | None = None) -> TracedLogits:
        """The same with ``values``, in ``memory``."""
        traced: Any = values.as_subclass(TracedLogits)
        memory = _Memory() if memory is None else memory
        # A view, as the compiler does not expect one of its inputs to be the base of another.
        own = self.hidden_states, self.head, self.transform, self.vocab_dim
        return traced._with(own, memory, values.view(values.shape))

    @property
    def tokens(self) -> Tensor:
        """The hidden states with hidden_size last, ``[..., hidden_size]``."""
        return self.hidden_states.movedim(self.vocab_dim, -1)

    @property
    def is_differentiable(self) -> bool:
        return torch.is_grad_enabled() and (self.hidden_states.requires_grad or self.head.requires_grad)

    @property
    def is_stale(self) -> bool:
        """Whether code outside of graphs may have changed the values since a graph made these."""
        return self.memory.is_touched or self.period.is_over

    def compute(self) -> Tensor:
        """The real logits, in code where functions of traced logits are those of tensors."""
        if self.computed is not None:
            # Only of the same graph, as the compiler's inputs are plain tensors.
            return self if self.frame == _frame() else self.computed
        return self.transform.apply(self.head.project(self.tokens)).movedim(-1, self.vocab_dim)

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, TokenStats]:
        """As that of :class:`~.LazyLogits`."""
        options = {**self.head.options, **self.head.arguments(self.tokens, self.transform), **options}
        with without_autocast(self.hidden_states.device.type):  # the dtype was decided when the head was called
            return linear_cross_entropy(target=target, weight=weight, **options)

    def as_lazy(self) -> Tensor:
        """What these stand for outside of compiled code: their values if they have some, else lazy logits."""
        if not vars(self):  # the compiler makes some that have no attributes yet
            with torch._C.DisableTorchFunctionSubclass():
                return self.as_subclass(Tensor)
        self.memory.is_touched = True
        found = vars(self)
        if self.computed is not None:
            return self.computed
        if "lazy" in found:
            return found["lazy"]
        with torch.set_grad_enabled(self.hidden_states.requires_grad or self.head.requires_grad):
            if self.source is None:
                vocab_dim = self.vocab_dim - self.hidden_states.ndim
                expression = Expression(self.hidden_states, self.head, self.transform, vocab_dim)
                if self.period.has_changed(expression.tensors().values()):
                    expression.refused = CHANGED
                found["lazy"] = LazyLogits.of(expression)
            else:
                base, name, args, kwargs = self.source
                found["lazy"] = getattr(Tensor, name)(base.as_lazy(), *args, **kwargs)
        return found["lazy"]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not torch.compiler.is_dynamo_compiling():
            # The compiler asks for the layout of what crosses a graph break, of which nothing public tells, and its
            # guards for sizes.
            if torch._guards.TracingContext.try_get() is not None or _name_of(func) in _TOLD_BY_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            return _outside(func, args, kwargs)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        x, name = args[0] if args else None, _name_of(func)
        found = _traced_in((args, kwargs))
        for each in found:
            if each.computed is not None and each.frame != _frame():
                _warn_of("a graph break", [each])
            elif each.computed is None and each.is_stale:
                return _outside(func, args, kwargs)
        if isinstance(x, TracedLogits):
            if not x.memory.is_written and not x.is_stale:
                result = _recorded(func, name, x, *args[1:], **kwargs)
                if x.computed is not None and isinstance(result, TracedLogits) and result is not x:
                    with torch._C.DisableTorchFunctionSubclass():
                        return result.valued(func(x.compute(), *args[1:], **kwargs), x.memory)
                if result is not NotImplemented:
                    return result
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                return _write(func, name, x, *args[1:], **kwargs)
        _warn_of(name, found)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_each(TracedLogits.compute, args), **_each(TracedLogits.compute, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # stubs lost the name
        return repr(self.as_lazy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_lazy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_lazy().__reduce_ex__(protocol)


@torch.compiler.disable
def _outside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``func`` in code that is not compiled, of what traced logits stand for there."""
    return func(*_each(TracedLogits.as_lazy, args), **_each(TracedLogits.as_lazy, kwargs))


@torch.compiler.assume_constant_result  # so that it runs while the code is traced
def _name_of(func: Any) -> str:
    return name_of(func)[0]


def _each(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers with ``function`` of the traced logits in them, in code that can be traced."""
    if isinstance(tree, tuple | list):
        return type(tree)([_each(function, part) for part in tree])
    if isinstance(tree, dict):
        return {name: _each(function, part) for name, part in tree.items()}
    return function(tree) if isinstance(tree, TracedLogits) else tree


def _traced_in(tree: Any) -> list[TracedLogits]:
    if isinstance(tree, tuple | list):
        return [found for part in tree for found in _traced_in(part)]
    if isinstance(tree, dict):
        return _traced_in(tuple(tree.values()))
    return [tree] if isinstance(tree, TracedLogits) else []


def _warn_of(name: str, found: list[TracedLogits]) -> None:
    """Warns, where the code is traced, of logits with a gradient that ``name`` needs."""
    for each in found:
        if not each.memory.is_written and each.is_differentiable:
            _warn(name, each.head.vocab_size, each.transform.dtype)


@torch.compiler.assume_constant_result
def _frame() -> str:
    """The code that is traced, of which nothing public is an identity."""
    # Nothing public says these either: calls between graphs are not compiled by themselves, and functions that call a
    # method of their argument depend on its type, for which the compiler does not ask then.
    torch._dynamo.eval_frame.skip_code(TracedLogits.__torch_function__.__code__)
    overridable = torch._dynamo.variables.torch.get_overridable_functions()
    overridable.update((F.tanh, F.sigmoid, F.hardsigmoid, F.hardswish))
    compile_id = torch._guards.CompileContext.current_compile_id()
    return str(getattr(compile_id, "frame_id", ""))


@torch.compiler.assume_constant_result
def _warn(name: str, vocab_size: int, dtype: torch.dtype) -> int:
    warn_traced(name, vocab_size, dtype)
    return 0


def _write(func: Any, name: str, x: TracedLogits, *args: Any, **kwargs: Any) -> Any:
    """A function that writes to its first argument."""
    if x.computed is None and x.memory.is_shared:
        raise RuntimeError(
            f"{name} writes, in compiled code, to an LM head's output that shares its memory with views of it, which"
            " would not see it: write to logits.clone()"
        )
    _warn_of(name, [x])
    values = x.compute()
    with torch._C.DisableTorchFunctionSubclass():
        func(values, *_each(TracedLogits.compute, args), **_each(TracedLogits.compute, kwargs))
    if x.computed is None:
        x.computed, x.frame = values, ""
    x.memory.is_written = True
    return x


def _recorded(func: Any, name: str, x: TracedLogits, *args: Any, **kwargs: Any) -> Any:
    """The result of a function without the values, or ``NotImplemented``."""
    if name in _RECORDED:
        return _RECORDED[name](x, *args, **kwargs)
    if name == "__getitem__" and x.vocab_dim == x.hidden_states.ndim - 1:
        result = _columns(x, *args)
        if result is not NotImplemented:
            return result
    if name in _LAYOUTS:
        return _followed(func, name, x, *args, **kwargs)
    if name == "requires_grad":
        return x.is_differentiable
    if name in (*_TOLD_BY_SHAPE, "grad"):
        with torch._C.DisableTorchFunctionSubclass():
            return func(x, *args, **kwargs)
    return NotImplemented


_TOLD_BY_SHAPE = (
    *("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "itemsize", "nbytes"),
    *("__len__", "size", "dim", "ndimension", "nelement", "numel", "element_size", "get_device"),
    *("is_floating_point", "is_complex"),
)
_LAYOUTS = (
    *("view", "reshape", "flatten", "transpose", "swapaxes", "permute", "movedim", "moveaxis", "squeeze", "unsqueeze"),
    *("__getitem__", "narrow", "select"),
)


def _followed(func: Any, name: str, x: TracedLogits, *args: Any, **kwargs: Any) -> Any:
    """A function of the layout, applied to the hidden states, if the vocabulary stays whole."""
    without_values = x if x.computed is None else TracedLogits.of(x.hidden_states, x.head, x.transform, x.vocab_dim)
    with torch._C.DisableTorchFunctionSubclass():
        apply = Tensor.reshape if name == "view" else func  # as other memory may allow other views
        result = apply(without_values, *args, **kwargs)
    sizes, vocab_size = list(result.shape), x.head.vocab_size
    places = [dim for dim in range(len(sizes)) if sizes[dim] == vocab_size and result.stride(dim) == 1]
    is_view = all(sizes[dim] == 1 or result.stride(dim) == 0 for dim in range(len(sizes)) if dim not in places)
    if vocab_size == 1 or len(places) != 1 or not is_view:
        return NotImplemented
    if name in ("view", "reshape"):
        if places[0] != len(sizes) - 1 or x.vocab_dim != x.hidden_states.ndim - 1:
            return NotImplemented
        hidden_states = x.hidden_states.reshape(*sizes[:-1], x.hidden_states.shape[-1])
    else:
        hidden_states = func(x.hidden_states, *args, **kwargs)
    return _shared(TracedLogits.of(hidden_states, x.head, x.transform, places[0]), x, name, args, kwargs)


def _columns(x: TracedLogits, index: Any) -> Any:
    """A slice of the vocabulary, which comes last, of all tokens."""
    is_columns = isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)
    if not is_columns or x.transform.normalized:
        return NotImplemented
    head = x.head.map(lambda parameter: parameter[index[1]])
    return _shared(TracedLogits.of(x.hidden_states, head, x.transform, x.vocab_dim), x, "__getitem__", (index,))


def _shared(view: TracedLogits, base: TracedLogits, name: str, args: Any = (), kwargs: Any = None) -> TracedLogits:
    """``view``, which method ``name`` made of ``base``, in its memory."""
    if base.computed is None:
        view.memory, view.source = base.memory, (base, name, args, kwargs or {})
        view.memory.is_shared = True
    return view


def _changed(x: TracedLogits, dtype: torch.dtype, **changes: Any) -> Any:
    transform = x.transform._replace(dtype=dtype, **changes)
    return TracedLogits.of(x.hidden_states, x.head, transform, x.vocab_dim)


def _cast(x: TracedLogits, dtype: torch.dtype) -> Any:
    return x if dtype == x.transform.dtype else _changed(x, dtype)


def _to(x: TracedLogits, *args: Any, non_blocking: bool = False, copy: bool = False, **kwargs: Any) -> Any:
    values = [*args, *kwargs.values()]
    if copy or len(values) != 1:
        return NotImplemented
    value = values[0]
    if isinstance(value, torch.dtype):
        return _cast(x, value)
    return x if isinstance(value, torch.device) and value == x.hidden_states.device else NotImplemented


def _scale(x: TracedLogits, other: Any, *, divide: bool = False) -> Any:
    if not isinstance(other, int | float) or isinstance(other, bool) or other == 0 or x.transform.normalized:
        return NotImplemented
    scale = x.transform.scale * (1.0 / other if divide else other)
    return _changed(x, x.transform.dtype, scale=scale) if 0 < abs(scale) < math.inf else NotImplemented


def _divide(x: TracedLogits, other: Any, *, rounding_mode: str | None = None) -> Any:
    return _scale(x, other, divide=True) if rounding_mode is None else NotImplemented


def _tanh(x: TracedLogits) -> Any:
    if x.transform.tanh_scale is not None or x.transform.normalized:
        return NotImplemented
    return _changed(x, x.transform.dtype, scale=1.0, tanh_scale=x.transform.scale)


def _log_softmax(
    x: TracedLogits, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if dim is None or dim % x.hidden_states.ndim != x.vocab_dim:
        return NotImplemented
    if dtype is None:
        is_cast = autocast_dtype(x.hidden_states.device.type) is not None and x.transform.dtype != torch.float64
        dtype = torch.float32 if is_cast else x.transform.dtype
    return _changed(x, dtype, normalized=True)


def _detach(x: TracedLogits) -> Any:
    head = x.head.map(Tensor.detach)
    return _shared(TracedLogits.of(x.hidden_states.detach(), head, x.transform, x.vocab_dim), x, "detach")


_RECORDED: dict[str, Callable[..., Any]] = {
    "to": _to,
    "type": _cast,
    "float": lambda x: _cast(x, torch.float32),
    "half": lambda x: _cast(x, torch.float16),
    "bfloat16": lambda x: _cast(x, torch.bfloat16),
    "double": lambda x: _cast(x, torch.float64),
    "contiguous": lambda x: x,
    "clone": lambda x: _changed(x, x.transform.dtype),
    **dict.fromkeys(("mul", "multiply"), _scale),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    "tanh": _tanh,
    "cross_entropy": cross_entropy_of_logits,
    "log_softmax": _log_softmax,
    "nll_loss": nll_loss_of_logits,
    "detach": _detach,
}
