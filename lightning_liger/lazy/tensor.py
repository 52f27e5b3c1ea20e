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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import swap_tensors
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_liger.lazy import table
from lightning_liger.lazy.bypassed import GATHERING_ENGINES, WATCHES, Bypassed, found, is_engines, refuse_bypassed
from lightning_liger.lazy.lineage import Lineage, laid_out
from lightning_liger.lazy.recipe import Recipe, version
from lightning_liger.lazy.warning import warn_materialized

NO_MEMORY = torch.empty(2**60, dtype=torch.uint8, device="meta")
"""Where layouts are taken from, so that whoever counts tensors on the meta device can tell them from a model's."""


def layout(shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Tensor:
    """A tensor on the meta device that only tells a layout, contiguous by default."""
    source = NO_MEMORY.view(dtype)
    return source[: shape.numel()].view(shape) if stride is None else source.as_strided(shape, stride)


class LazyTensor(Tensor):
    """A tensor without memory, whose recipe computes the values.

    Its shape, strides, dtype, device and place in the autograd graph are those of the real tensor. Created without
    gradients enabled it is detached from the graph, as any tensor.
    """

    is_local = True
    """Whether the real tensor is a plain one, not a DTensor."""
    recipe: Recipe
    lineage: Lineage
    twin: Tensor
    """A tensor of the same layout and dtype on the meta device, to ask PyTorch what an operation returns."""
    _node: Any
    _real_values: Tensor | None

    @classmethod
    def of(cls, recipe: Recipe, twin: Tensor | None = None, parent: Lineage | None = None) -> Self:
        """The result of a recipe.

        Args:
            recipe: What it is computed from.
            twin: A tensor on the meta device with its layout; contiguous by default.
            parent: The lineage of the tensor from which it was recorded, None for the output of a head.
        """
        if recipe.requires_grad and not torch.is_grad_enabled():
            recipe = recipe.map(Tensor.detach)
        if twin is None or twin.dtype != recipe.transform.dtype:
            twin = layout(recipe.shape, recipe.transform.dtype, None if twin is None else twin.stride())
        deferred: Any = _Deferred.apply
        lazy: Any = deferred(cls, recipe, twin, *recipe.tensors().values())
        lazy.recipe, lazy.twin, lazy._real_values = recipe, twin, None
        lazy._descend(parent)
        return lazy

    def _descend(self, parent: Lineage | None) -> None:
        self.lineage = self._node.lineage = Lineage(self, self.recipe, self.twin, parent)

    @property
    def is_foreign(self) -> bool:
        """Whether a function outside of this package (a ``torch.autograd.Function``) put this tensor into its graph.

        Its gradient then has to pass that function.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad and self.grad_fn is not self._node

    def recorded(self, twin: Tensor, **changes: Any) -> Self:
        """The lazy result of an operation on this tensor.

        Args:
            twin: The operation's result for :attr:`twin`.
            changes: What differs in the recipe.
        """
        return self.of(self.recipe.changed(**changes), twin, self.lineage)

    def same(self, **changes: Any) -> Self:
        """The same values (or, with other hidden states, such of other tokens), with no connection to this tensor."""
        return self.with_recipe(self.recipe.changed(**changes))

    def with_recipe(self, recipe: Recipe) -> Self:
        """As :meth:`same`, computed by another recipe."""
        return self.of(recipe, self.twin if recipe.shape == self.shape else None)

    def notice(self, operation: str) -> None:
        """Notes that ``operation`` is computed from the recipe; raises if that is no longer possible."""
        self.recipe.check(operation)
        if torch.is_grad_enabled() and self.requires_grad:
            self.lineage.bypass(operation)

    def compute(self, operation: str) -> Tensor:
        """The real tensor, part of the graph if gradients are enabled."""
        return self.placed(self.recipe.compute(operation))

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
                self.lineage.bypass(operation)
            # Few values are those of the head's output, so that all that is read from it agrees.
            shared = not differentiable and self.is_local and not self.is_foreign and self.lineage.root.recipe.is_small
            self._real_values = self.lineage.values(operation) if shared else self.compute(operation)
        return self._real_values

    def become(self, other: Tensor) -> None:
        """Takes over the contents of ``other``, which is not to be used afterwards."""
        for tensor in (self, other):
            if isinstance(tensor, LazyTensor):
                tensor.lineage.tensor = _nothing  # weak references prevent the exchange
        swap_tensors(self, other)

    @property
    def is_exchangeable(self) -> bool:
        """Whether no other code refers to the C++ tensor of this object, or weakly to it."""
        # Private to torch, and what swap_tensors checks too: here before anything is exchanged.
        return self._use_count() == 1 and weakref.getweakrefs(self) == [self.lineage.tensor]  # type: ignore[attr-defined]

    def become_real(self, operation: str, warn: bool = True) -> None:
        """Turns this tensor, with all that was recorded from the same output, into what PyTorch would have returned.

        The Python objects stay the same and are real tensors afterwards: aliases share memory, and gradients pass from
        one to the other as the recorded operations say.

        Raises:
            RuntimeError: If an object cannot be exchanged because other code refers to its C++ tensor or weakly to it,
                or its values can no longer be computed. All are lazy as before.
        """
        lineages = self.lineage.alive()
        if not all(lineage.tensor().is_exchangeable for lineage in lineages):
            raise RuntimeError(
                f"{operation} needs real logits in the place of an LM head's lazy output, which other code (such as a"
                " torch.autograd.Function that saved it) refers to. Call lightning_liger.materialize(logits) before"
                " that"
            )
        if warn and any(lineage.tensor().requires_grad for lineage in lineages):
            self._warn(operation)
        self._real_values = self.lineage.root.kept = None
        real: dict[Lineage, Tensor] = {}
        # Also under no_grad: a write there does not detach the tensor written to.
        with torch.inference_mode(self.is_inference()), torch.enable_grad():
            for lineage in lineages:
                tensor = lineage.tensor()
                tensor.become(_real_logits(lineage, real, operation))
                real[lineage] = tensor
                if lineage.bypassed_by is not None:
                    tensor.__class__ = Bypassed
                    tensor.bypassed_by = lineage.bypassed_by

    def _warn(self, operation: str) -> None:
        self.recipe.head.counters.num_materialized += 1
        warn_materialized(operation, self.shape, self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(_call)(func, args, dict(kwargs or {}))
        if not kwargs and table.name_of(func)[1]:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return _call(func, args, dict(kwargs or {}))

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


def _real_logits(lineage: Lineage, real: dict[Lineage, Tensor], operation: str) -> Tensor:
    if lineage not in real:
        if lineage.parent is None:
            values = laid_out(lineage.recipe.compute(operation), lineage.twin)
        else:
            values = lineage.replayed(_real_logits(lineage.parent, real, operation))
        tensor = lineage.tensor()
        real[lineage] = values if tensor is None else tensor.placed(values)
    return real[lineage]


def _nothing() -> None:
    return None


class _Deferred(torch.autograd.Function):
    """Lazy logits from the tensors they are computed from.

    Its backward is only entered by gradients of the logits themselves, not by those of fused losses.
    """

    @staticmethod
    def forward(ctx: Any, cls: type[LazyTensor], recipe: Recipe, twin: Tensor, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.recipe = recipe
        lazy: Any = Tensor._make_wrapper_subclass(
            cls,
            twin.shape,
            strides=twin.stride(),
            storage_offset=twin.storage_offset(),
            dtype=twin.dtype,
            device=recipe.hidden_states.device,
        )
        lazy._node = ctx
        return lazy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        if ctx.lineage.watched_by is not None:
            raise RuntimeError(
                f"{ctx.lineage.watched_by} came after a function to which an LM head's lazy output was given, so it"
                " would miss that function's gradient. Call lightning_liger.materialize(logits) before that function"
            )
        tensors = ctx.recipe.tensors().values()
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            ctx.recipe.check("backward")
            logits = ctx.recipe.with_tensors(leaves).compute("backward")
        gradients = torch.autograd.grad(logits, [leaf for leaf in leaves if leaf.requires_grad], gradient)
        remaining = iter(gradients)
        return None, None, None, *(next(remaining) if need else None for need in needed)


class _PassedOn(torch.autograd.Function):
    """The values of a lazy tensor, whose gradient is that of the lazy tensor."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyTensor, values: list[Tensor]) -> Tensor:
        return values[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# Calls of PyTorch's functions


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of arguments that contain lazy tensors."""
    name, is_plain = table.name_of(func)
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    if is_plain:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
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
                lazy.lineage.bypass(f"{name} under no_grad or in a torch.autograd.Function")
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name} of an LM head's lazy output comes inside a transform of torch.func, such as grad or vmap. Call"
            " lightning_liger.materialize(logits) before that, or call the head inside"
        )
    name_out_of_place = table.name_out_of_place(name)
    operation = table.operations.get(name_out_of_place or name)
    first = args[0] if args else None
    if operation is not None and name_out_of_place is None:
        first, *rest = _in_order(operation, args)
        result = _registered(operation, name, (first, *rest), kwargs)
        if result is not NotImplemented:
            _remember_read(result, func, name, first, rest, kwargs)
            return _with_replay(result, first, lambda real: func(real, *rest, **kwargs))
    elif operation is not None and isinstance(first, LazyTensor) and _done_in_place(operation, name, args, kwargs):
        return first
    written: Any = [kwargs.get("out")]
    is_in_place = name_out_of_place is not None or kwargs.get("inplace") is True
    shows_memory = name in table.SHOWS_MEMORY or name in table.VIEWS
    if is_in_place or (shows_memory and isinstance(first, LazyTensor) and first.is_local):
        written += args[:1]
    if lazy_written := _lazy_in(written):
        for lazy in lazy_written:
            if isinstance(lazy, LazyTensor):  # not yet real with another one
                lazy.become_real(name)
        return func(*args, **kwargs)
    if name.strip("_") in table.COMPARISONS:
        return _compared(func, name, args, kwargs)
    result = _read(func, name, args, kwargs)
    if args:
        _remember_read(result, func, name, args[0], args[1:], kwargs)
    return result


def _in_order(operation: table.Operation, args: tuple[Any, ...]) -> tuple[Any, ...]:
    is_second = operation.is_commutative and len(args) == 2 and not isinstance(args[0], LazyTensor)
    return args[::-1] if is_second else args


def _registered(operation: table.Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The registered function's result, or ``NotImplemented`` where it does not cover the call."""
    lazy_arguments = _lazy_in((args, kwargs))
    if not isinstance(args[0], LazyTensor) or not operation.accepts(len(args), *kwargs):
        return NotImplemented
    if len(lazy_arguments) > 1 and not operation.is_commutative:
        return NotImplemented
    if any(lazy.is_foreign for lazy in lazy_arguments):
        return NotImplemented
    for lazy in lazy_arguments:
        lazy.recipe.check(name)
    return operation.function(*args, **kwargs)


def _read(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of separate real tensors, unless it turns out to write to one or to return a view."""
    lazy_arguments = _lazy_in((args, kwargs))
    values = {id(lazy): lazy.real_values(name) for lazy in lazy_arguments}
    versions = {key: version(value) for key, value in values.items()}

    def value(lazy: LazyTensor) -> Tensor:
        return values[id(lazy)]

    result = func(*_replaced(args, value), **_replaced(kwargs, value))
    shown = _storages(result)
    touched = [
        lazy
        for lazy in lazy_arguments
        if version(value(lazy)) != versions[id(lazy)] or not shown.isdisjoint(_storages(value(lazy)))
    ]
    if not touched:
        return result
    values.clear()
    del result
    for lazy in touched:
        lazy.become_real(name)
    return func(*args, **kwargs)


def _remember_read(result: Any, func: Any, name: str, first: Any, rest: Any, kwargs: dict[str, Any]) -> None:
    """Notes on values that were read how to read them without gradients, where they may be rounded differently."""
    values: Any = result[0] if isinstance(result, tuple) else result
    if name not in table.READS or not isinstance(first, LazyTensor) or type(values) is not Tensor:
        return
    is_rounded = values.requires_grad and values.is_floating_point()
    again = (weakref.ref(first.lineage), func, rest, kwargs) if is_rounded else None
    vars(values)["_liger_read"] = version(values), again
    if is_rounded and name in table.GATHERS:
        first.lineage.root.rounded_by = name


def _compared(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A comparison, which has no gradient, of values that agree with what was read from them."""
    lazy_arguments = _lazy_in((args, kwargs))
    if torch.is_grad_enabled() and lazy_arguments[0].requires_grad:
        lazy_arguments[0]._warn(name)
    rounded_by = [lazy.lineage.root.rounded_by for lazy in lazy_arguments]
    with torch.no_grad():
        args = tuple(_exact(value, rounded_by, name) for value in args)
        return _read(func, name, args, {key: _exact(value, rounded_by, name) for key, value in kwargs.items()})


def _exact(value: Any, rounded_by: list[str | None], name: str) -> Any:
    """``value``, compared with lazy logits, as it is without gradients if it was read from them."""
    if not isinstance(value, Tensor) or isinstance(value, LazyTensor) or not value.is_floating_point():
        return value
    written, read = getattr(value, "_liger_read", (None, None))
    if written == version(value):
        if read is None:
            return value
        lineage, func, rest, kwargs = read
        if (source := lineage() and lineage().tensor()) is not None:
            found = func(source, *rest, **kwargs)
            return found[0] if isinstance(found, tuple) else found
    if value.ndim > 0 and (reads := [each for each in rounded_by if each is not None]):
        raise RuntimeError(
            f"{name} compares an LM head's lazy output with a tensor, after {reads[0]} read values of it with"
            f" gradients, which are rounded differently. Call lightning_liger.materialize(logits) before {reads[0]}"
        )
    return value


def _with_replay(result: Any, first: Any, replay: Callable[[Tensor], Any]) -> Any:
    """``result``, where ``replay`` derives each lazy tensor in it that ``first`` is the parent of from its real one."""
    if isinstance(result, tuple):
        for position, part in enumerate(result):
            _with_replay(part, first, partial(_replayed_part, replay, position))
    elif isinstance(result, LazyTensor) and result is not first and result.lineage.parent is not None:
        assert result.lineage.parent is first.lineage
        result.lineage.replay = replay
    return result


def _replayed_part(replay: Callable[[Tensor], Any], position: int, real: Tensor) -> Any:
    return replay(real)[position]


def _done_in_place(operation: table.Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first argument now is the lazy result of an in-place operation; only without relatives."""
    first = args[0]
    if len(first.lineage.alive()) > 1 or not first.is_exchangeable:
        return False
    result = _registered(operation, name, args, kwargs)
    if not isinstance(result, LazyTensor) or result.dtype != first.dtype or result.requires_grad != first.requires_grad:
        return False
    if result is not first:
        first.become(result)
        first._descend(None)
        first.lineage.bypass(name)
    return True


# Gradients of lazy tensors themselves


def _watch(func: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Registers a hook of, or retains, the gradient of the first argument."""
    lazy, *hooks = *args, *kwargs.values()
    if is_engines(*hooks):
        # Such an engine gathers parameters for each use.
        lazy.recipe.head.counters.is_gathered |= is_engines(hooks[0], GATHERING_ENGINES)
        # Backward comes by what the logits are computed from also if the loss is fused. Hooks of parameters would stay.
        tensors = (tensor for tensor in lazy.recipe.tensors().values() if tensor.requires_grad and not tensor.is_leaf)
        return _Handles(tensor.register_hook(*hooks) for tensor in tensors)
    _become_watched(lazy, name)
    return func(*args, **kwargs)


class _Handles(tuple[RemovableHandle, ...]):
    """Handles of hooks, removed together."""

    def remove(self) -> None:
        for handle in self:
            handle.remove()


def _gradient(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad``."""
    for lazy in _lazy_in(inputs):
        if isinstance(lazy, LazyTensor):  # not yet real with another one
            _become_watched(lazy, "torch.autograd.grad")
    return torch.autograd.grad(_replaced(outputs, lambda lazy: lazy.real_values("grad")), inputs, *args, **kwargs)


def _become_watched(lazy: LazyTensor, name: str) -> None:
    if lazy.requires_grad and lazy.lineage.bypassed_by is not None:
        refuse_bypassed(name, lazy.lineage.bypassed_by)
    lineages = lazy.lineage.alive()
    is_watched = lazy.requires_grad
    lazy.become_real(name)
    for lineage in lineages if is_watched else ():
        lineage.watched_by = name


# Below autograd


def _call_below_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func``, an overload of an op, of arguments that contain lazy tensors."""
    first, aten = args[0] if args else None, torch.ops.aten
    if isinstance(first, LazyTensor) and (
        func in (aten.detach.default, aten.alias.default)
        or (func is aten.view.default and tuple(args[1]) == tuple(first.shape))
    ):
        with torch.no_grad():
            return _with_replay(first.recorded(first.twin), first, Tensor.detach)
    written = args[:1] if func.overloadpacket.__name__.endswith("_") else ()
    if _lazy_in((written, kwargs.get("out"))):
        raise RuntimeError(
            f"{func} writes to an LM head's lazy output, which has no memory. Call"
            " lightning_liger.materialize(logits) before"
        )

    def values(lazy: LazyTensor) -> Tensor:
        return lazy.real_values(str(func)).detach()

    with torch.no_grad():
        return func(*_replaced(args, values), **_replaced(kwargs, values))


# Trees of arguments


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
    if isinstance(tree, Tensor):  # DTensors and the like have no memory of their own
        return {tree.untyped_storage().data_ptr()} - {0} if type(tree) is Tensor and tree.numel() else set()
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return set().union(*map(_storages, values))
