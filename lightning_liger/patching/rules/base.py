"""Rules propose replacements for modules; :mod:`lightning_liger.patching.verify` accepts or rejects them."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger.subclasses import made_subclass

NUM_PROBE_TOKENS = 5


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
        return type(f"Liger{original.__name__}", (Patched, original), namespace)


class Rule(ABC):
    """One kind of structure and its possible replacements."""

    kernels: ClassVar[tuple[str, ...]]
    """Names of all kernels that its replacements may use; the first is reported where no replacement fits."""

    @abstractmethod
    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        """Replacements to try in order; a reason if ``module`` looks like the structure but has none; else None."""

    def signature(self, module: nn.Module) -> Hashable:
        """Modules of one class, with equal candidates and signature, are verified once."""
        return (
            tuple((name, each.shape, each.dtype, each.device) for name, each in module.named_parameters()),
            tuple((name, id(buffer)) for name, buffer in module.named_buffers()),  # whose values may differ
            settings_of(module),
        )


def settings_of(module: nn.Module) -> Hashable:
    """The numbers, strings and functions among a module's own attributes: instances of one class may differ in them."""
    # A layer's index does not change what it computes.
    own = [(name, value) for name, value in vars(module).items() if name != "layer_idx"]
    plain = tuple((name, value) for name, value in own if isinstance(value, bool | int | float | str))
    return plain, tuple((name, id(value)) for name, value in own if callable(value))


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
        setattr(probe, name, value)
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
