"""The layers that FSDP wraps or checkpoints, as users name them."""

import importlib
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from liger_ops.arguments import wrong_type

LayerPolicy = list[str] | set[type[Module]] | Callable[..., bool]
"""Layer classes, names of layer classes (dotted, or bare if the model has one of that name), or an FSDP policy."""
_EXPECTED = "a list or set of layer classes"


def check_policy(argument: str, policy: Any, takes_functions: bool = True) -> None:
    """Raises an error that names the argument for anything but layers, and for dotted names that cannot be imported."""
    if isinstance(policy, list | tuple | set | frozenset):
        for layer in policy:
            if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, Module)):
                raise wrong_type(argument, f"{_EXPECTED}, each a class or its name", policy)
    elif policy is not None and not (takes_functions and callable(policy) and not isinstance(policy, type)):
        raise wrong_type(argument, f"{_EXPECTED}{', an FSDP policy' if takes_functions else ''} or None", policy)
    for name in _names(policy):
        if "." in name:
            _import_class(argument, name)


def resolve_policy(argument: str, policy: LayerPolicy | None, model: Module) -> Any:
    """The policy in Lightning's form: names become the classes of ``model``'s layers, everything else stays.

    Raises:
        ValueError: For a name that is no class, or one that ``model`` has no layer of.
    """
    if not isinstance(policy, list | tuple | set | frozenset):
        return policy
    names = _names(policy)
    classes: set[type[Module]] = {layer for layer in policy if isinstance(layer, type)}
    for name in names:
        wanted = _import_class(argument, name) if "." in name else None
        matching = {
            type(module)
            for module in model.modules()
            if (isinstance(module, wanted) if wanted is not None else name in _class_names(module))
        }
        if not matching:
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(
                f"{argument} names the layer class {name!r}, but the model has no such layer; it has {known}"
            )
        classes |= matching
    return classes


def select_modules(policy: Any, model: Module) -> set[Module]:
    """The modules below ``model`` that a policy in Lightning's form chooses."""
    if isinstance(policy, set):
        return {module for module in model.modules() if isinstance(module, tuple(policy))}
    modules = (module for module in model.modules() if module is not model)
    return {each for each in modules if policy(module=each, recurse=False, nonwrapped_numel=_num_parameters(each))}


def _num_parameters(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _names(policy: Any) -> list[str]:
    layers = policy if isinstance(policy, list | tuple | set | frozenset) else ()
    return [layer for layer in layers if isinstance(layer, str)]


def _class_names(module: Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _import_class(argument: str, name: str) -> type[Module]:
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{argument} names the layer class {name!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Module)):
        raise ValueError(f"{argument} must name subclasses of torch.nn.Module, got {name!r}, which is {found!r}")
    return found
