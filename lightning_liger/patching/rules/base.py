"""Rules propose replacements for the modules they recognise; :mod:`lightning_liger.patching.verify` disposes."""

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger.patching.verify import random_like

NUM_PROBE_TOKENS = 5


class Patched:
    """Base of the classes that replacements make; their instances pickle by replacement and original class."""

    liger_replacement: ClassVar["Replacement"]
    liger_original: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_patched, (self.liger_replacement, self.liger_original), *state


def _new_patched(replacement: "Replacement", original: type[nn.Module]) -> nn.Module:
    patched = replacement.patched_class(original)
    return patched.__new__(patched)


class Replacement(ABC):
    """What can take a module's place. Frozen dataclasses: equal ones share the class they make."""

    kernel: str
    """The name that users choose it by."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What a report says the module was replaced by."""

    @abstractmethod
    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """What a subclass of ``original`` overrides."""

    @abstractmethod
    def verify(self, module: nn.Module) -> float:
        """The replacement's error relative to ``module``, in outputs and gradients.

        Raises:
            Mismatch: If the two differ by more than rounding.
        """

    def patched_class(self, original: type[nn.Module]) -> type[nn.Module]:
        """The subclass of ``original`` that a module becomes an instance of."""
        return _patched_class(self, original)

    def patched_copy(self, module: nn.Module) -> nn.Module:
        """A shallow copy of ``module`` with this replacement."""
        patched = probe_of(module)
        patched.__class__ = self.patched_class(type(module))
        return patched


class Rule(ABC):
    """One kind of structure and what may replace it."""

    kernels: ClassVar[tuple[str, ...]]
    """The names of the kernels that its replacements may use; the first stands for it where there is none."""

    @abstractmethod
    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        """Replacements to try in this order; a reason for what looks like it but has none; None for anything else."""

    def signature(self, module: nn.Module) -> Hashable:
        """Modules of one class, with equal candidates and signature, are verified once."""
        tensors = (*module.named_parameters(), *module.named_buffers())
        return (
            tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors),
            settings_of(module),
        )


@functools.cache
def _patched_class(replacement: Replacement, original: type[nn.Module]) -> type[nn.Module]:
    namespace = {
        "liger_replacement": replacement,
        "liger_original": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        **replacement.namespace(original),
    }
    return type(f"Liger{original.__name__}", (Patched, original), namespace)


def settings_of(module: nn.Module) -> Hashable:
    """The numbers, strings and functions among a module's own attributes: instances of one class may differ in them."""
    # A layer's index says where it is, not what it does.
    own = [(name, value) for name, value in vars(module).items() if name != "layer_idx"]
    plain = tuple((name, value) for name, value in own if isinstance(value, bool | int | float | str))
    return plain, tuple((name, id(value)) for name, value in own if callable(value))


def holds_buffers(module: nn.Module) -> bool:
    """Whether ``module`` itself has buffers that a checkpoint may change, and with them what it computes."""
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
    """A forward that is ``function`` for calls with the first argument only, and ``original``'s for all others."""
    first = list(inspect.signature(original.forward).parameters)[1:2]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1 or (kwargs and list(kwargs) != first):
            return original.forward(self, *args, **kwargs)
        (x,) = args or kwargs.values()
        if isinstance(x, DTensor):  # operators of our own do not say how they are distributed
            return original.forward(self, x)
        return function(self, x)

    return forward


def probe_of(module: nn.Module, **attributes: Any) -> nn.Module:
    """A shallow copy in training mode with some attributes exchanged, such as its dictionaries of parameters."""
    probe = copy.copy(module)
    probe.__dict__.update(attributes, training=True)
    return probe


def probe_device(module: nn.Module) -> torch.device:
    """Where ``module`` will run, as far as one can tell now."""
    # A module that its owner wrapped in FSDP has handed its parameters to the wrapper.
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None or parameter.device.type == "meta" else parameter.device


class Randoms:
    """Random tensors that require a gradient, the same at every run."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        values = random_like(torch.empty(shape, device="meta"), self.generator, dtype, self.device)
        return (values.detach() * scale).requires_grad_()
