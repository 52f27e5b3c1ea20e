"""Rules propose replacements for modules; :mod:`lightning_liger.patching.verify` accepts or rejects them."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger.activations.cheap import count_writes
from lightning_liger.activations.tiles import has_hooks
from lightning_liger.patching.verify import Mismatch, compare
from lightning_liger.subclasses import made_subclass

NUM_PROBE_TOKENS = 5
_INTERNALS = {*vars(nn.Module())}


class Patched:
    """Base of the classes that replacements create."""

    liger_replacement: ClassVar["Replacement"]
    liger_original: ClassVar[type[nn.Module]]


class Replacement(ABC):
    """A replacement for modules of one structure. Frozen dataclasses: equal ones share the class they create."""

    @property
    @abstractmethod
    def kernel(self) -> str:
        """Its name in ``kernels=``."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The text in the report's column "Replaced by"."""

    @property
    def reads(self) -> Collection[str | None] | None:
        """Names of the attributes that its forward reads; others were settled when it was chosen. None for all."""
        return None

    @abstractmethod
    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Attributes of the subclass of ``original`` that replaces it."""

    @abstractmethod
    def verify(self, module: nn.Module) -> float:
        """The replacement's error relative to ``module``, in outputs and gradients; raises a ``Mismatch``."""

    @made_subclass
    def patched_class(self, original: type[nn.Module]) -> type[nn.Module]:
        """The subclass of ``original`` that becomes the module's class."""
        namespace = {"liger_replacement": self, "liger_original": original, "__module__": original.__module__}
        namespace |= {"__doc__": original.__doc__, **self.namespace(original)}
        if self.reads is not None:
            namespace["__setattr__"] = _setter(original, self.reads)
        return type(f"Liger{original.__name__}", (Patched, original), namespace)


def _setter(original: Any, reads: Collection[str | None]) -> Callable[..., None]:
    """A ``__setattr__`` that gives modules their own forward back if what changes is none of ``reads``."""
    settled = _named_in(original) - {"__class__", "training", "forward", *reads}

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name in settled:
            before = getattr(self, name, value)
            if before is not value and (isinstance(before, nn.Module) or _content(before) != _content(value)):
                _give_back(self, original, name)
        original.__setattr__(self, name, value)

    return __setattr__


def _give_back(module: Any, original: type[nn.Module], name: str) -> None:
    if module.__class__.__bases__ != (Patched, original):
        raise RuntimeError(
            f"{original.__name__}.{name} cannot change any more: the module's kernel was chosen for its value, and"
            " something else changed its class since, as FSDP2 does. Change it before the kernels are applied"
        )
    module.__class__ = original
    rank_zero_warn(
        f"{original.__name__}.{name} changed after the module's kernel was chosen: it runs its own forward from now on."
        " apply_liger_kernels chooses anew if it is called again"
    )


class Rule(ABC):
    """One kind of structure and its possible replacements."""

    kernels: ClassVar[tuple[str, ...]]
    """Names of all kernels that its replacements may use; the first is reported where no replacement fits."""

    @abstractmethod
    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        """Replacements to try in order; a reason if ``module`` looks like the structure but has none; else None."""

    def signature(self, module: nn.Module) -> Hashable:
        """Modules of one class, with equal candidates and signature, are verified once."""
        children = [(name, each) for name, each in module.named_modules() if name and not list(each.parameters())]
        return (
            tuple((name, each.shape, each.dtype, each.device) for name, each in module.named_parameters()),
            tuple((name, id(buffer)) for name, buffer in module.named_buffers()),  # whose values may differ
            settings_of(module),
            tuple((name, type(each), settings_of(each)) for name, each in children),
        )


def settings_of(module: nn.Module) -> Hashable:
    """What a module's own attributes hold: instances of one class may differ in it."""
    module_class: Any = type(module)
    return tuple(
        (name, _content(value))
        for name, value in vars(module).items()
        if name not in _INTERNALS and (name != "layer_idx" or name in _named_in(module_class))
    )


def _content(value: Any, depth: int = 4) -> Hashable:
    """Equal for equal numbers, strings and containers of them, and for the same other objects."""
    if isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), count_writes(value)
    if isinstance(value, dict | list | tuple) and depth:
        items: Any = value.items() if isinstance(value, dict) else value
        return type(value), tuple(_content(each, depth - 1) for each in items)
    return id(value)


@functools.cache
def _named_in(module_class: Any) -> frozenset[str]:
    """The names, also as strings, in all methods of a class other than ``__init__``: what they may read."""

    def names(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        yield from (each for each in code.co_consts if isinstance(each, str))
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield from names(each)

    own = module_class.__mro__[: module_class.__mro__.index(nn.Module)]
    methods = [inspect.unwrap(each) for owner in own for key, each in vars(owner).items() if key != "__init__"]
    codes = [getattr(getattr(each, "fget", each), "__code__", None) for each in methods]
    return frozenset(name for code in codes if code is not None for name in names(code))


def compare_calls(
    probe: nn.Module,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    evaluate: bool = True,
) -> float:
    """The error of ``run(probe, *inputs)`` in outputs and gradients of ``leaves``, as :func:`compare` has it.

    With ``evaluate`` outputs are compared in evaluation mode too, without gradients and for more tokens. Raises a
    Mismatch too if the probe's forward changes attributes of its own or of its children: a replacement would not.
    """
    modules = list(probe.modules())
    kept = [dict(vars(each)) for each in modules]  # so that no other object gets the identity of one of these
    before = [settings_of(each) for each in modules]
    error = compare(partial(probe.forward, *inputs), partial(run, probe, *inputs), leaves)
    has_changed = [settings_of(each) for each in modules] != before
    del kept
    if has_changed:
        raise Mismatch("its forward changes attributes, as those of an auxiliary loss")
    if evaluate:
        more = [each.detach().repeat(*(2 for _ in each.shape[:-1]), 1) for each in inputs]
        probe.eval()
        try:
            compare(partial(probe.forward, *more), partial(run, probe, *more), ())
        except Mismatch as failure:
            raise Mismatch(f"in evaluation, {failure}") from failure
    return error


def has_hooks_besides(module: nn.Module, called: Collection[str | None] = ()) -> bool:
    """Whether something wants to see the calls of children that the replacement does not make, as an activation's."""
    for name, child in module.named_children():
        if name not in called and (has_hooks(child) or "forward" in vars(child)):
            return True
    return False


def has_state(children: Iterable[nn.Module]) -> bool:
    """Whether any of these modules, whose calls a replacement does not make, has parameters or buffers."""
    return any(True for child in children for _ in (*child.parameters(), *child.buffers()))


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether ``module(x)`` is a complete call."""
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError:
        return False
    return True


def forward_of_tensors(
    original: type[nn.Module],
    function: Callable[..., Tensor],
    num_tensors: int = 1,
    otherwise: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A forward that calls ``function`` if it gets just so many first arguments, ``original``'s forward otherwise.

    ``otherwise`` is called in place of that forward.
    """
    other = otherwise or original.forward
    names = list(inspect.signature(original.forward).parameters)[1 : 1 + num_tensors]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = args
        if kwargs or len(args) != num_tensors:
            if len(args) + len(kwargs) != num_tensors or kwargs.keys() != {*names[len(args) :]}:
                return other(self, *args, **kwargs)
            tensors = (*args, *(kwargs[name] for name in names[len(args) :]))
        for each in tensors:  # a loop, which is faster than a generator
            if each is None or isinstance(each, DTensor):  # the fused ops have no sharding rules
                return other(self, *tensors)
        return function(self, *tensors)

    return forward


def probe_of(module: nn.Module, **replaced: Any) -> Any:
    """A module in training mode that computes as ``module`` does, with some parameters, children or settings replaced.

    It runs no hooks, and does not share what a forward may change.
    """

    def find(self: nn.Module, name: str) -> Any:
        """What the probe itself does not have: buffers, and parameters and buffers that are None."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name in replaced:  # which was removed, as parametrizations do
                raise
            value = getattr(module, name)
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            return value.clone() if is_buffer else value

    probe_class: Any = type(type(module).__name__, (type(module),), {})
    probe = probe_class.__new__(probe_class)
    nn.Module.__init__(probe)
    vars(probe).update({name: value for name, value in vars(module).items() if name not in vars(probe)})
    for name, child in children_of(module).items():
        if name not in replaced:
            probe.add_module(name, probe_of(child))
    for name, value in replaced.items():
        nn.Module.__setattr__(probe, name, value)
    probe_class.__getattr__ = find
    return probe


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """By all names: ``named_children()`` leaves out the second name of a child that has two."""
    return {name: child for name, child in module.named_modules(remove_duplicate=False) if name and "." not in name}


def own_dtype(module: nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of ``module``'s first floating-point parameter."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), default)


class Randoms:
    """Random tensors that require a gradient, the same in every run, on the device of a module's parameters."""

    def __init__(self, module: nn.Module | None = None) -> None:
        # On the CPU if there are none yet. Those of a module that was wrapped in FSDP before are the wrapper's.
        parameter = None if module is None else next(module.parameters(), None)
        self.device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        # On the CPU, where the generator is, also inside a torch.device context such as configure_model's.
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu") * scale
        return values.to(dtype=dtype, device=self.device).requires_grad_()
