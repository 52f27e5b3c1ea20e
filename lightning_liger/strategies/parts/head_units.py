"""Checks of which FSDP units hold the LM head and the embeddings tied to it."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from lightning_liger.lazy.head import FusionCounters
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.patching.rules.base import Patched


def patched_heads(model: Module) -> list[Module]:
    """The layers of ``model`` that return lazy logits."""
    return [
        module
        for module in model.modules()
        if isinstance(module, Patched) and module.liger_replacement.kernel == "linear_cross_entropy"
    ]


def gather_heads(model: Module) -> list[Module]:
    """The patched heads of ``model``, after noting that an engine gathers their parameters for each use."""
    heads = patched_heads(model)
    for head in heads:
        vars(head).setdefault("fusion_counters", FusionCounters()).is_gathered = True
    return heads


def tied_pairs(model: Module) -> list[tuple[Module, Module]]:
    """Input and output embeddings of each Hugging Face model in ``model`` that share their weight."""
    pairs = []
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "get_input_embeddings") and hasattr(module, "get_output_embeddings"):
            embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
            weight = getattr(embeddings, "weight", None)
            if weight is not None and weight is getattr(head, "weight", None):
                pairs.append((embeddings, head))
    return pairs


def check_head_units(model: Module, pairs: list[tuple[Module, Module]]) -> None:
    """Raises if FSDP in ``model`` hides the head's weight from the fused loss, or separates ``pairs`` that are tied."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    check_tied_units(model, units, pairs)
    for head in patched_heads(model):
        around = _around(head, units)
        if len(around) > 1 or any(unit.module is head for unit in around):
            raise ValueError(
                f"the LM head {_name(head, model)!r} is in a separate FSDP unit, whose weight is freed before the fused"
                " loss needs it: leave it in the root unit, or choose kernels without 'linear_cross_entropy'"
            )


def check_tied_units(model: Module, units: list[Any], pairs: list[tuple[Module, Module]]) -> None:
    """Raises if ``units``, in the order of the model's modules, separate the two modules of a tied pair."""
    for pair in pairs:
        innermost = [_around(module, units)[-1:] for module in pair]
        if innermost[0] != innermost[1]:
            first, second = (_name(module, model) for module in pair)
            raise ValueError(
                f"auto_wrap_policy puts {first!r} and {second!r}, which share their weight, into different FSDP units:"
                " leave both in the root unit"
            )


def _around(module: Module, units: list[Any]) -> list[Any]:
    """Those of the ``units`` that hold ``module``."""
    return [unit for unit in units if any(part is module for part in unit.modules())]


def _name(module: Module, model: Module) -> str:
    """The name of a module in ``model`` without FSDP's wrappers, whose names begin with an underscore."""
    name = next(name for name, each in model.named_modules() if each is module)
    return ".".join(part for part in name.split(".") if not part.startswith("_"))


def detach_frozen_heads(model: Module) -> None:
    """Saves the loss the gradients of heads that are frozen when they run; call it before ``model`` is wrapped.

    In an FSDP unit with trained parameters, frozen parameters become views of a tensor that is trained.
    """
    for head in patched_heads(model):
        head.register_forward_hook(partial(_detach_frozen, dict(head.named_parameters(recurse=False))))


def _detach_frozen(parameters: dict[str, Tensor], head: Module, args: Any, output: Any) -> Any:
    if not isinstance(output, LazyLogits):
        return output
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    detached = {name: getattr(output.head, name).detach() for name in frozen}
    return output.same(head=replace(output.head, **detached))
