"""The layers that FSDP wraps or checkpoints, as users name them."""

import importlib
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from liger_ops.arguments import wrong_type

LayerPolicy = list[str] | set[type[Module]] | Callable[..., bool]
"""Layer classes, names of layer classes (dotted, or bare if the model has one of that name), or an FSDP policy."""
_COLLECTIONS = (list, tuple, set, frozenset)
_EXPECTED = "a list or set of layer classes"


def check_policy(argument: str, policy: Any, takes_functions: bool = True) -> None:
    """Raises an error that names the argument for anything but layers, and for dotted names that cannot be imported."""
    if not isinstance(policy, _COLLECTIONS):
        if policy is not None and not (takes_functions and callable(policy) and not isinstance(policy, type)):
            raise wrong_type(argument, f"{_EXPECTED}{', an FSDP policy' if takes_functions else ''} or None", policy)
        return
    for layer in policy:
        if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, Module)):
            raise wrong_type(argument, f"{_EXPECTED}, each a class or its name", policy)
        if isinstance(layer, str) and "." in layer:
            _import_class(argument, layer)


def resolve_policy(argument: str, policy: LayerPolicy | None, model: Module) -> Any:
    """The policy in Lightning's form: names become the classes of ``model``'s layers, everything else stays."""
    if not isinstance(policy, _COLLECTIONS):
        return policy
    found = {type(module) for module in model.modules()}
    classes: set[type[Module]] = set()
    for layer in policy:
        if isinstance(layer, type):
            classes.add(layer)
            continue
        wanted = _import_class(argument, layer) if "." in layer else None
        matching = {
            each
            for each in found
            if (issubclass(each, wanted) if wanted else layer in {base.__name__ for base in each.__mro__})
        }
        if not matching:
            raise ValueError(
                f"{argument} names the layer class {layer!r}, but the model has no such layer; it has"
                f" {sorted({each.__name__ for each in found})}"
            )
        classes |= matching
    return classes


def select_modules(policy: Any, model: Module) -> set[Module]:
    """The modules below ``model`` that a policy in Lightning's form chooses."""
    if isinstance(policy, set):
        return {module for module in model.modules() if isinstance(module, tuple(policy))}
    sizes = {each: sum(p.numel() for p in each.parameters()) for each in model.modules() if each is not model}
    return {each for each, size in sizes.items() if policy(module=each, recurse=False, nonwrapped_numel=size)}


def _import_class(argument: str, name: str) -> type[Module]:
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{argument} names the layer class {name!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Module)):
        raise ValueError(f"{argument} must name subclasses of torch.nn.Module, got {name!r}, which is {found!r}")
    return found
