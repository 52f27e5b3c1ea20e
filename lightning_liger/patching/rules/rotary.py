"""Rotary embeddings: module-level functions of (q, k, cos, sin), or of complex numbers, that attention methods call.

A method that calls such a function is copied with the same code and with globals in which that one name is replaced,
inside copies of its decorators: the globals of the model's module do not change, and no method is rewritten. What a
function computes (which columns form pairs, the layout of its tables, the dimension of heads) is found by comparing
outputs and gradients.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops import apply_rotary
from lightning_liger.patching.rules.base import NUM_PROBE_TOKENS, Randoms, Replacement, Rule, own_dtype
from lightning_liger.patching.verify import Mismatch, Rejected, compare, trial

_TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda table: table,
    "first half, for neighbors": lambda table: table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1),
    "one column per pair": lambda table: torch.cat((table, table), dim=-1),
    "one column per pair, for neighbors": lambda table: table.repeat_interleave(2, dim=-1),
}
_ONE_COLUMN_A_PAIR = "one column per pair"
_COMPLEX = "freqs_cis"
"""The parameter name of functions that multiply by cos + i sin."""
_PROBE_DIM = 16


@dataclass(frozen=True)
class RotaryForm:
    """The form of rotation that a function computes."""

    tensors: tuple[str, ...]  # names of the parameters that are rotated: queries and keys, or one tensor
    tables: str  # the layout of cos and sin, a key of ``_TABLES``
    interleaved: bool  # whether pairs are neighboring columns
    heads_dim: int  # if the call has no ``unsqueeze_dim``
    reverse: bool  # whether the rotation is by minus the angle
    parts: bool  # whether the two columns of a pair are in different halves of the output
    keep_dtype: bool  # whether outputs have their input's dtype, whatever the dtype of cos and sin
    partial: bool = False  # whether cos and sin may have fewer columns than the tensors, whose last ones then stay

    def covers(self, arguments: dict[str, Any]) -> bool:
        """Whether :func:`liger_ops.apply_rotary` computes this call."""
        shapes = {}
        heads_dim = self.heads_dim
        for name, value in arguments.items():  # loops, which are faster than generators
            if name in self.tensors or name in ("cos", "sin"):
                if not isinstance(value, Tensor):
                    return False
                shapes[name] = value.shape
            elif name == "unsqueeze_dim":
                heads_dim = value
            elif value is not None:
                return False
        table = shapes.pop("cos", None)
        if table is None or shapes.pop("sin", None) != table or len(table) != 3 or heads_dim not in (1, 2):
            return False
        rotary_dim = table[-1] * (2 if self.tables.startswith(_ONE_COLUMN_A_PAIR) else 1)
        for shape in shapes.values():
            if len(shape) != 4 or table[0] not in (1, shape[0]) or table[1] != shape[3 - heads_dim]:
                return False
            if rotary_dim != shape[-1] and not (self.partial and rotary_dim < shape[-1]):
                return False
        return len(shapes) == len(self.tensors)

    def __call__(self, arguments: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        lay_out = _TABLES[self.tables]
        heads_dim = arguments.get("unsqueeze_dim", self.heads_dim)
        first = arguments[self.tensors[0]]
        second = arguments[self.tensors[1]] if len(self.tensors) == 2 else first.narrow(heads_dim, 0, 0)
        cos, sin = lay_out(arguments["cos"]), lay_out(arguments["sin"])
        sin = -sin if self.reverse else sin
        flags: dict[str, Any] = {"interleaved": self.interleaved, "keep_dtype": self.keep_dtype}
        first, second = apply_rotary(first, second, cos, sin, heads_dim=heads_dim, **flags)
        if self.parts:
            first, second = _part(first, cos.shape[-1]), _part(second, cos.shape[-1])
        return (first, second) if len(self.tensors) == 2 else first


def _part(x: Tensor, rotary_dim: int) -> Tensor:
    """The even columns of the first ``rotary_dim``, then the odd ones, then the rest."""
    return torch.cat((x[..., :rotary_dim:2], x[..., 1:rotary_dim:2], x[..., rotary_dim:]), dim=-1)


def _forms(names: Sequence[str]) -> Iterator[RotaryForm]:
    tensors = tuple(names[:2]) if {"cos", "sin", _COMPLEX}.isdisjoint(names[:2]) else tuple(names[:1])
    heads_dims = (1,) if "unsqueeze_dim" in names else (1, 2)
    layouts = ("one column per pair, for neighbors",) if _COMPLEX in names else tuple(_TABLES)
    flags = (False, True)
    for heads_dim, tables, interleaved, reverse, parts, keep_dtype in itertools.product(
        heads_dims, layouts, flags, flags, flags, flags
    ):
        if interleaved >= ("neighbors" in tables) and interleaved >= parts:
            yield RotaryForm(tensors, tables, interleaved, heads_dim, reverse, parts, keep_dtype)


def _compare(
    function: Callable[..., Any],
    form: RotaryForm,
    head_dim: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    module: nn.Module | None = None,
    rotary_dim: int | None = None,
) -> float:
    random = Randoms(module)
    names = list(inspect.signature(function).parameters)
    heads_dim = form.heads_dim
    arguments: dict[str, Any] = {}
    for name, num_heads in zip(form.tensors, (4, 2), strict=False):
        x = random(2, NUM_PROBE_TOKENS, num_heads, head_dim, dtype=dtype).detach()
        arguments[name] = (x.transpose(1, 2) if heads_dim == 1 else x).requires_grad_()
    width = (rotary_dim or head_dim) // (2 if form.tables.startswith(_ONE_COLUMN_A_PAIR) else 1)
    for name in ("cos", "sin"):
        arguments[name] = random(2, NUM_PROBE_TOKENS, width, dtype=table_dtype).detach()
    ordered = {name: arguments[name] for name in names if name in arguments}
    if _COMPLEX in names:
        ordered[_COMPLEX] = torch.complex(arguments["cos"].float(), arguments["sin"].float())
    return compare(lambda: function(**ordered), lambda: form(arguments), [arguments[name] for name in form.tensors])


@functools.cache
def _form_of(function: Callable[..., Any]) -> RotaryForm | str:
    """The form that ``function`` computes, or how it differs from the most common form."""
    mismatch, reason = "", ""
    for form in _forms(list(inspect.signature(function).parameters)):
        found = False
        try:
            with trial():
                for dtype, table_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
                    _compare(function, form, _PROBE_DIM, dtype, table_dtype)
                found = True
                _compare(function, form, _PROBE_DIM, torch.float32, torch.float32, rotary_dim=_PROBE_DIM // 2)
            return replace(form, partial=True)
        except Rejected as error:
            if found:  # it takes no tables that are narrower than heads
                return form
            reason = reason or str(error)
        except Mismatch as error:
            mismatch = mismatch or str(error)
    return mismatch or reason


@functools.cache
def _fused(function: Callable[..., Any], form: RotaryForm) -> Callable[..., Any]:
    """``function``, fused for the calls that :func:`liger_ops.apply_rotary` can compute."""
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    known = set(names)
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or not arguments.keys() <= known:
            return function(*args, **kwargs)
        if _COMPLEX in known:
            frequencies = arguments.pop(_COMPLEX, None)
            if isinstance(frequencies, Tensor) and frequencies.is_complex():
                arguments |= {"cos": frequencies.real, "sin": frequencies.imag}
        return form(arguments) if form.covers(arguments) else function(*args, **kwargs)

    return apply


@dataclass(frozen=True)
class RotaryReplacement(Replacement):
    """Copies of methods that call fused rotary functions."""

    forms: tuple[tuple[str, RotaryForm], ...]  # with the names of the functions
    version: int  # of the methods, which may be exchanged, and of the globals that they name
    kernel = "rope"

    @property
    def description(self) -> str:
        kinds = dict.fromkeys("apply_rotary" + (" (interleaved)" if form.interleaved else "") for _, form in self.forms)
        return ", ".join(kinds)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        forms, fused = dict(self.forms), dict[str, dict[str, Any]]()
        for (method_name, name), function in _calls(original).items():
            if name in forms:
                fused.setdefault(method_name, {})[name] = _fused(function, forms[name])
        return {name: _rebound(inspect.getattr_static(original, name), each) for name, each in fused.items()}

    def verify(self, module: nn.Module) -> float:
        functions = {name: function for (_, name), function in _calls(type(module)).items()}
        head_dim = getattr(module, "head_dim", None)
        head_dim = head_dim if isinstance(head_dim, int) and head_dim % 2 == 0 else _PROBE_DIM
        dtypes = dict.fromkeys([torch.float32, own_dtype(module)])
        return max(
            _compare(functions[name], form, head_dim, dtype, dtype, module)
            for name, form in self.forms
            for dtype in dtypes
        )


def _decorated(method: FunctionType) -> FunctionType | None:
    """What the decorator that made ``method`` wraps, if its closure holds that."""
    wrapped = vars(method).get("__wrapped__")
    return wrapped if isinstance(wrapped, FunctionType) and CellType(wrapped) in (method.__closure__ or ()) else None


def _rebound(method: FunctionType, fused: dict[str, Any]) -> FunctionType:
    """``method``, which calls the functions ``fused`` by their names in a copy of its globals."""
    scope, closure = method.__globals__, method.__closure__
    if (inner := _decorated(method)) is not None:
        copied = CellType(_rebound(inner, fused))
        closure = tuple(copied if cell == CellType(inner) else cell for cell in closure or ())
    else:
        scope = {**scope, **fused}
        scope.pop("__name__", None)  # torch.compile would look the name up in the module of that name
    rebound = FunctionType(method.__code__, scope, method.__name__, method.__defaults__, closure)
    rebound.__kwdefaults__ = method.__kwdefaults__
    functools.update_wrapper(rebound, method)
    return rebound


def _calls(module_class: type[nn.Module]) -> dict[tuple[str, str], FunctionType]:
    """The rotary functions that methods of a class call, by the names of the method and of the global."""
    found: dict[tuple[str, str], FunctionType] = {}
    for owner in module_class.__mro__:
        if owner is nn.Module:
            break
        for method_name, method in vars(owner).items():
            if not isinstance(method, FunctionType) or inspect.getattr_static(module_class, method_name) is not method:
                continue
            method = _innermost(method)
            for name in method.__code__.co_names:
                function = method.__globals__.get(name)
                if isinstance(function, FunctionType):
                    parameters = inspect.signature(function).parameters.keys()
                    if {"cos", "sin"} <= parameters or _COMPLEX in parameters:
                        found[method_name, name] = function
    return found


def _innermost(method: FunctionType) -> FunctionType:
    while (inner := _decorated(method)) is not None:
        method = inner
    return method


def _version_of(module_class: type[nn.Module], method_names: Iterable[str]) -> int:
    methods = [inspect.getattr_static(module_class, name) for name in dict.fromkeys(method_names)]
    inner = [_innermost(each) for each in methods]
    named = [each.__globals__.get(name) for each in inner for name in each.__code__.co_names]
    return hash(tuple(map(id, (*methods, *named))))


class RotaryRule(Rule):
    """Modules with a method that calls a function of ``cos`` and ``sin``, or of ``freqs_cis``."""

    kernels = ("rope",)

    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        calls = _calls(type(module))
        forms = {name: _form_of(function) for (_, name), function in calls.items()}
        if not forms:
            return None
        known = tuple((name, form) for name, form in forms.items() if isinstance(form, RotaryForm))
        if not known:
            return "; ".join(f"{name} is not apply_rotary: {reason}" for name, reason in forms.items())
        return [RotaryReplacement(known, _version_of(type(module), (method for method, _ in calls)))]

    def signature(self, module: nn.Module) -> Hashable:
        return getattr(module, "head_dim", None), own_dtype(module), Randoms(module).device
