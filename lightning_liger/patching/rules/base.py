"""Rules propose replacements for modules; :mod:`lightning_liger.patching.verify` accepts or rejects them."""

import copy
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
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
"""Attributes of a module with its hooks. Private to torch, which has no public way to see them."""


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
        """The replacement's error relative to ``module``, in outputs and gradients.

        Raises:
            Mismatch: If the two differ by more than rounding.
        """

    def patched_class(self, original: type[nn.Module]) -> type[nn.Module]:
        """The subclass of ``original`` that becomes the module's class."""
        patched: type[nn.Module] = _patched_class(self, original)
        return patched


@made_subclass
def _patched_class(replacement: Replacement, original: type[nn.Module]) -> type[nn.Module]:
    namespace = {
        "liger_replacement": replacement,
        "liger_original": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        **replacement.namespace(original),
    }
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
        tensors = (*module.named_parameters(), *module.named_buffers())
        return (
            tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors),
            settings_of(module),
        )


def settings_of(module: nn.Module) -> Hashable:
    """The numbers, strings and functions among a module's own attributes: instances of one class may differ in them."""
    # A layer's index does not change what it computes.
    own = [(name, value) for name, value in vars(module).items() if name != "layer_idx"]
    plain = tuple((name, value) for name, value in own if isinstance(value, bool | int | float | str))
    return plain, tuple((name, id(value)) for name, value in own if callable(value))


def holds_buffers(module: nn.Module) -> bool:
    """Whether ``module`` itself has persistent buffers: loading a checkpoint may change what it computes."""
    # Private to torch, which has no public way to tell persistent buffers from others.
    return not module._buffers.keys() <= module._non_persistent_buffers_set


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether ``module(x)`` is a complete call."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    return bool(parameters) and all(
        parameter.default is not parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in parameters[1:]
    )


def forward_of_one_tensor(
    original: type[nn.Module], function: Callable[[nn.Module, Tensor], Tensor]
) -> Callable[..., Any]:
    """A forward that calls ``function`` if it gets the first argument only, and ``original``'s forward otherwise."""
    first = list(inspect.signature(original.forward).parameters)[1:2]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1 or (kwargs and list(kwargs) != first):
            return original.forward(self, *args, **kwargs)
        (x,) = args or kwargs.values()
        if isinstance(x, DTensor):  # the fused ops have no sharding rules
            return original.forward(self, x)
        return function(self, x)

    return forward


def probe_of(module: nn.Module, **attributes: Any) -> nn.Module:
    """A shallow copy in training mode with other values of some attributes, such as its dictionaries of parameters."""
    probe = copy.copy(module)
    probe.__dict__.update(attributes, training=True)
    return probe


def without_hooks(module: nn.Module) -> nn.Module:
    """A shallow copy of ``module`` whose calls run no hooks."""
    bare = copy.copy(module)
    bare.__dict__.update({name: type(hooks)() for name, hooks in vars(module).items() if name in HOOKS})
    return bare


def own_dtype(module: nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of ``module``'s first floating-point parameter."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), default)


class Randoms:
    """Random tensors that require a gradient, the same in every run; the global random state does not change.

    Args:
        module: They are on the device of its parameters, on the CPU if it has none yet.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        # A module that was wrapped in FSDP before has no parameters: the wrapper has them.
        parameter = None if module is None else next(module.parameters(), None)
        self.device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        # On the CPU, where the generator is, also inside a torch.device context such as configure_model's.
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu") * scale
        return values.to(dtype=dtype, device=self.device).requires_grad_()
