"""A tensor whose values are not computed until an operation needs all of them.

:class:`LazyTensor` has no memory. PyTorch's functions of it are looked up in :mod:`lightning_liger.lazy.table`, which
records them. All others compute the values. Those that only read them get a separate real tensor. Writes, hooks, views
and whatever else could tell a tensor without memory from a real one turn it, and all that was recorded from the same
output, into real tensors (:meth:`LazyTensor.become_real`). Operations below autograd get the values too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import swap_tensors
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_liger.activations.cheap import count_writes
from lightning_liger.lazy import table
from lightning_liger.lazy.bypassed import GATHERING_ENGINES, WATCHES, Bypassed, found, is_engines, refuse_bypassed
from lightning_liger.lazy.expression import Expression, laid_out
from lightning_liger.lazy.steps import living
from lightning_liger.lazy.warning import warn_materialized

NO_MEMORY = torch.empty(2**60, dtype=torch.uint8, device="meta")
"""Where layouts are taken from, so that whoever counts tensors on the meta device can tell them from a model's."""


class LazyTensor(Tensor):
    """A tensor without memory, whose expression gives the values.

    Its shape, strides, dtype, device and place in the autograd graph are those of the real tensor. Created without
    gradients enabled it is detached from the graph, as any tensor.
    """

    is_local = True
    """Whether the real tensor is a plain one, not a DTensor."""
    expression: Expression
    twin: Tensor
    _real_values: Tensor | None

    @classmethod
    def of(cls, expression: Expression, twin: Tensor | None = None, parent: Expression | None = None) -> Self:
        """The values of an expression in the layout of ``twin``, contiguous by default; see :class:`Expression`."""
        if expression.requires_grad and not torch.is_grad_enabled():
            expression = expression.map(Tensor.detach)
        if twin is None:
            twin = NO_MEMORY.view(expression.transform.dtype)[: expression.shape.numel()].view(expression.shape)
        deferred: Any = _Deferred.apply
        lazy: Any = deferred(cls, expression, twin, *expression.tensors().values())
        lazy.expression, lazy.twin, lazy._real_values = expression, twin, None
        expression.enter(lazy, twin, parent)
        if parent is None:
            living().add(expression)
        return lazy

    @property
    def is_foreign(self) -> bool:
        """Whether a ``torch.autograd.Function`` put this tensor into its graph, so that its gradient has to pass it."""
        return not self.expression.requires_grad and self.requires_grad

    def recorded(self, twin: Tensor, **changes: Any) -> Self:
        """The lazy result of an operation, given its result for :attr:`twin` and what changes in the expression."""
        return self.of(self.expression.changed(**changes), twin, self.expression)

    def same(self, **changes: Any) -> Self:
        """The same values (or, with other hidden states, such of other tokens), with no connection to this tensor."""
        expression = self.expression.changed(**changes)
        return self.of(expression, self.twin if expression.shape == self.shape else None)

    def notice(self, operation: str) -> None:
        """Notes that ``operation`` is computed from the expression; raises if that is no longer possible."""
        self.expression.check(operation)
        if torch.is_grad_enabled() and self.requires_grad:
            self.expression.bypass(operation)

    def placed(self, values: Tensor) -> Tensor:
        """``values`` in the layout of this tensor, and in its place in the graph if that is foreign."""
        values = laid_out(values, self.twin)
        if not self.is_foreign:
            return values
        # In a list, since autograd does not allow writes to what a function returns of its arguments.
        return _PassedOn.apply(self, [values.detach() if values.requires_grad else values])

    def real_values(self, operation: str) -> Tensor:
        """The real tensor for operations that only read it; it is computed once, and this one stays lazy."""
        differentiable = torch.is_grad_enabled() and self.requires_grad
        # Values that were first computed without gradients have no graph, and must not replace those that need one.
        if self._real_values is None or (differentiable and not self._real_values.requires_grad):
            if differentiable:
                self._warn(operation)
                self.expression.bypass(operation)
            if differentiable or self.is_foreign or not (self.is_local and self.expression.root.is_small):
                self._real_values = self.placed(self.expression.compute(operation))
            else:  # those of the head's output, so that all that is read from it agrees
                self._real_values = self.expression.values(operation)
        return self._real_values

    def become_real(self, operation: str, warn: bool = True) -> None:
        """Turns this tensor, with all that was recorded from the same output, into what PyTorch would have returned.

        The Python objects stay the same and are real tensors afterward: aliases share memory, and gradients pass from
        one to the other as the recorded operations say.

        Raises a RuntimeError, and all are lazy as before, if an object cannot be exchanged because other code refers
        weakly to it or to its C++ tensor, or if its values can no longer be computed.
        """
        lazy = {expression: expression.tensor() for expression in self.expression.alive()}
        try:
            for tensor in lazy.values():  # there and back
                exchange(tensor, empty := torch.empty(0))
                exchange(tensor, empty)
        except RuntimeError as error:
            raise RuntimeError(
                f"{operation} needs real logits instead of an LM head's lazy output, which other code (such as a"
                " torch.autograd.Function that saved it) refers to. Call lightning_liger.materialize(logits) before"
                " that"
            ) from error
        if warn and any(tensor.requires_grad for tensor in lazy.values()):
            self._warn(operation)
        root = self.expression.root
        self._real_values = root.kept = None
        # Also under no_grad: a write there does not detach the tensor written to.
        with torch.inference_mode(self.is_inference()), torch.enable_grad():
            real = {root: laid_out(root.compute(operation), root.twin)}
            for expression, tensor in lazy.items():
                exchange(tensor, tensor.placed(expression.derived(real)))
                real[expression] = tensor
                if expression.bypassed_by is not None:
                    tensor.__class__ = Bypassed
                    tensor.bypassed_by = expression.bypassed_by

    def _warn(self, operation: str) -> None:
        self.expression.head.counters.num_materialized += 1
        warn_materialized(operation, self.shape, self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = torch.compiler.disable(_call) if torch.compiler.is_dynamo_compiling() else _call
        return call(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as an instance's method
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _call_below_autograd(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # stubs lost the name
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # Engines copy a module's output before they convert the tensors in it; the autograd graph stays shared.
        if self.requires_grad:
            return self.same()
        self.become_real("copy.deepcopy")
        return copy.deepcopy(self, memo)

    def __copy__(self) -> Tensor:
        self.become_real("copy.copy")  # which shares memory
        return copy.copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real_values("pickling").__reduce_ex__(protocol)


def exchange(lazy: LazyTensor, other: Tensor) -> None:
    """Swaps the contents of two objects; raises a RuntimeError where other code refers to a C++ tensor of them."""
    pair = lazy, other
    _refer(pair, lambda tensor: lambda: None)  # weak references prevent the exchange
    try:
        Tensor.__torch_function__(swap_tensors, (), pair)
    finally:
        _refer(pair, weakref.ref)


def _refer(tensors: tuple[Tensor, ...], reference: Callable[[Tensor], Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, LazyTensor):
            tensor.expression.tensor = reference(tensor)


class _Deferred(torch.autograd.Function):
    """Lazy logits from the tensors they are computed from.

    Its backward is only entered by gradients of the logits themselves, not by those of fused losses.
    """

    @staticmethod
    def forward(ctx: Any, cls: type[LazyTensor], expression: Expression, twin: Tensor, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.expression = expression
        device, layout = expression.hidden_states.device, (twin.stride(), twin.storage_offset())
        return Tensor._make_wrapper_subclass(cls, twin.shape, *layout, dtype=twin.dtype, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        expression = ctx.expression
        if expression.watched_by is not None:
            raise RuntimeError(
                f"{expression.watched_by} came after a function to which an LM head's lazy output was given, so it"
                " would miss that function's gradient. Call lightning_liger.materialize(logits) before that function"
            )
        tensors = expression.tensors().values()
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            expression.check("backward")
            logits = expression.with_tensors(leaves).compute("backward")
        gradients = iter(torch.autograd.grad(logits, [leaf for leaf in leaves if leaf.requires_grad], gradient))
        return None, None, None, *(next(gradients) if need else None for need in needed)


class _PassedOn(torch.autograd.Function):
    """The values of a lazy tensor, whose gradient is that of the lazy tensor."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyTensor, values: list[Tensor]) -> Tensor:
        return values[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, is_plain = table.name_of(func)
    if is_plain:
        return Tensor.__torch_function__(func, (), args, kwargs)
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    if name in table.LIKE and isinstance(args[0], LazyTensor):
        return func(args[0].twin, *args[1:], **{"device": args[0].device, **kwargs})
    if name in table.NEED_NO_VALUES:
        start = table.NEED_NO_VALUES[name]
        args, kwargs = (*args[:start], *_replaced(args[start:], _stand_in)), _replaced(kwargs, _stand_in)
        if not isinstance(args[0], LazyTensor):
            return func(*args, **kwargs)
    if func is torch.autograd.grad:
        return _gradient(*args, **kwargs)
    if name in WATCHES:
        return _watch(func, name, *args, **kwargs)
    return _computed(func, name, args, kwargs)


def _computed(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As registered if ``func`` is, else of real tensors."""
    if not torch.is_grad_enabled():
        for lazy in _lazy_in((args, kwargs)):
            if lazy.requires_grad:  # perhaps in a torch.autograd.Function, which gives it a gradient
                lazy.expression.bypass(f"{name} under no_grad or in a torch.autograd.Function")
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name} of an LM head's lazy output comes inside a transform of torch.func, such as grad or vmap. Call"
            " lightning_liger.materialize(logits) before that, or call the head inside"
        )
    name_out_of_place = table.name_out_of_place(name)
    operation = table.operations.get(name_out_of_place or name)
    first = args[0] if args else None
    if operation is not None and name_out_of_place is None:
        is_second = operation.is_commutative and len(args) == 2 and not isinstance(first, LazyTensor)
        first, *rest = args[::-1] if is_second else args
        result = _registered(operation, name, (first, *rest), kwargs)
        if result is not NotImplemented:
            return _noted(result, first, name, lambda real: func(real, *rest, **kwargs))
    elif operation is not None and isinstance(first, LazyTensor) and _done_in_place(operation, name, args, kwargs):
        return first
    written: Any = [kwargs.get("out")]
    is_in_place = name_out_of_place is not None or kwargs.get("inplace") is True
    shows_memory = name in table.SHOWS_MEMORY or name in table.VIEWS
    if is_in_place or (shows_memory and isinstance(first, LazyTensor) and first.is_local):
        written += args[:1]
    if lazy_written := _lazy_in(written):
        _all_become_real(lazy_written, name)
        return func(*args, **kwargs)
    if name.strip("_") in table.COMPARISONS:
        return _compared(func, name, args, kwargs)
    return _noted(_read(func, name, args, kwargs), first, name, func)


def _registered(operation: table.Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The registered function's result, or ``NotImplemented`` where it does not cover the call."""
    lazy_arguments = _lazy_in((args, kwargs))
    fits = isinstance(args[0], LazyTensor) and (len(lazy_arguments) == 1 or operation.is_commutative)
    if (
        not fits
        or not table.accepts(operation.function, len(args), *kwargs)
        or any(lazy.is_foreign for lazy in lazy_arguments)
    ):
        return NotImplemented
    for lazy in lazy_arguments:
        lazy.expression.check(name)
    return operation.function(*args, **kwargs)


def _noted(result: Any, first: Any, name: str, replay: Callable[[Tensor], Any]) -> Any:
    """``result`` of an operation on ``first``, after notes on how to replay it, or whether it was rounded as others."""
    parts = result if isinstance(result, tuple) else (result,)
    for position, part in enumerate(parts if isinstance(first, LazyTensor) else ()):
        if isinstance(part, LazyTensor):
            if part.expression.parent is first.expression:
                part.expression.replay = replay if part is result else lambda real, at=position: replay(real)[at]
        elif name in table.READS and type(part) is Tensor:
            if part.requires_grad:
                first.expression.root.rounded_by = name
            else:
                vars(part)["liger_exact"] = count_writes(part)
    return result


def _done_in_place(operation: table.Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first argument now is the lazy result of an in-place operation; only without relatives."""
    first = args[0]
    if len(first.expression.alive()) > 1:
        return False
    result = _registered(operation, name, args, kwargs)
    if not isinstance(result, LazyTensor) or result.dtype != first.dtype or result.requires_grad != first.requires_grad:
        return False
    if result is not first:
        try:
            exchange(first, result)
        except RuntimeError:
            return False
        first.expression.enter(first, first.twin, None)
        living().add(first.expression)
        first.expression.bypass(name)
    return True


def _read(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of separate real tensors, unless it turns out to write to one or to return a view."""
    lazy_arguments = _lazy_in((args, kwargs))
    values = {id(lazy): lazy.real_values(name) for lazy in lazy_arguments}
    versions = {key: count_writes(value) for key, value in values.items()}

    def value(lazy: LazyTensor) -> Tensor:
        return values[id(lazy)]

    result = func(*_replaced(args, value), **_replaced(kwargs, value))
    shown = _storages(result)
    touched = [
        lazy
        for lazy in lazy_arguments
        if count_writes(value(lazy)) != versions[id(lazy)] or not shown.isdisjoint(_storages(value(lazy)))
    ]
    if not touched:
        return result
    values.clear()
    del result
    _all_become_real(touched, name)
    return func(*args, **kwargs)


def _all_become_real(lazy_arguments: list[LazyTensor], name: str) -> None:
    for lazy in lazy_arguments:
        if isinstance(lazy, LazyTensor):  # not yet real with another one
            lazy.become_real(name)


def _compared(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A comparison, which has no gradient, of values as they are without gradients."""
    lazy_arguments = _lazy_in((args, kwargs))
    others = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point())
    others = (each for each in others if not isinstance(each, LazyTensor) and each.ndim > 0)
    # Values that were read without gradients, and not changed since, are exact.
    if any(getattr(other, "liger_exact", None) != count_writes(other) for other in others):
        for read in filter(None, (lazy.expression.root.rounded_by for lazy in lazy_arguments)):
            raise RuntimeError(
                f"{name} compares an LM head's lazy output with a tensor, after {read} read values of it with"
                f" gradients, which are rounded differently. Call lightning_liger.materialize(logits) before {read},"
                " or read the values of logits.detach()"
            )
    if torch.is_grad_enabled() and lazy_arguments[0].requires_grad:
        lazy_arguments[0]._warn(name)
    with torch.no_grad():
        return _read(func, name, args, kwargs)


def _watch(func: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Registers a hook of, or retains, the gradient of the first argument."""
    lazy, *hooks = *args, *kwargs.values()
    if is_engines(*hooks):
        # Such an engine gathers parameters for each use.
        lazy.expression.head.counters.is_gathered |= is_engines(hooks[0], GATHERING_ENGINES)
        # Backward comes by what the logits are computed from also if the loss is fused. Hooks of parameters would stay.
        tensors = lazy.expression.tensors().values()
        return _Handles(each.register_hook(*hooks) for each in tensors if each.requires_grad and not each.is_leaf)
    _become_watched(lazy, name)
    return func(*args, **kwargs)


class _Handles(tuple[RemovableHandle, ...]):
    """Handles of hooks, removed together."""

    def remove(self) -> None:
        for handle in self:
            handle.remove()


def _gradient(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    for lazy in _lazy_in(inputs):
        if isinstance(lazy, LazyTensor):  # not yet real with another one
            _become_watched(lazy, "torch.autograd.grad")
    return torch.autograd.grad(_replaced(outputs, lambda lazy: lazy.real_values("grad")), inputs, *args, **kwargs)


def _become_watched(lazy: LazyTensor, name: str) -> None:
    if lazy.requires_grad and lazy.expression.bypassed_by is not None:
        refuse_bypassed(name, lazy.expression.bypassed_by)
    expressions = lazy.expression.alive() if lazy.requires_grad else []
    lazy.become_real(name)
    for expression in expressions:
        expression.watched_by = name


def _call_below_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func``, an overload of an op, of arguments that contain lazy tensors."""
    first, aten = args[0] if args else None, torch.ops.aten
    if isinstance(first, LazyTensor) and (
        func in (aten.detach.default, aten.alias.default)
        or (func is aten.view.default and tuple(args[1]) == tuple(first.shape))
    ):
        with torch.no_grad():
            return _noted(first.recorded(first.twin), first, "", Tensor.detach)
    written = args[:1] if func.overloadpacket.__name__.endswith("_") else ()
    if _lazy_in((written, kwargs.get("out"))):
        raise RuntimeError(
            f"{func} writes to an LM head's lazy output, which has no memory. Call"
            " lightning_liger.materialize(logits) before"
        )

    with torch.no_grad():
        args, kwargs = _replaced((args, kwargs), lambda lazy: lazy.real_values(str(func)).detach())
        return func(*args, **kwargs)


def _lazy_in(tree: Any) -> list[LazyTensor]:
    return found(LazyTensor, tree)


def _replaced(tree: Any, function: Callable[[LazyTensor], Any]) -> Any:
    """``tree`` with ``function`` applied to the lazy tensors in it."""
    if isinstance(tree, LazyTensor):
        return function(tree)
    if not _lazy_in(tree):
        return tree
    if isinstance(tree, dict):
        return {key: _replaced(value, function) for key, value in tree.items()}
    values = [_replaced(value, function) for value in tree]
    return values if isinstance(tree, list) else tuple(values)


def _stand_in(lazy: LazyTensor) -> Tensor:
    """A tensor of the same shape, dtype and device that takes no memory."""
    return torch.empty((), dtype=lazy.dtype, device=lazy.device).expand(lazy.shape)


def _storages(tree: Any) -> set[int]:
    """The addresses of the memory of all tensors in a result."""
    shown = found((Tensor, torch.UntypedStorage, torch.TypedStorage), tree)
    # DTensors and the like have no memory of their own.
    own = [each for each in shown if not isinstance(each, Tensor) or (type(each) is Tensor and each.numel())]
    return {(each.untyped_storage() if isinstance(each, Tensor) else each).data_ptr() for each in own} - {0}
