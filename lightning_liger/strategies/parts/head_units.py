"""Which FSDP units the LM head and the embeddings tied to it are in, and what engines see of the graph behind it."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.patching.rules import Patched


def patched_heads(model: Module) -> list[Module]:
    """The layers of ``model`` that return lazy logits."""
    return [
        module
        for module in model.modules()
        if isinstance(module, Patched) and module.liger_replacement.kernel == "linear_cross_entropy"
    ]


def tied_pairs(model: Module) -> list[tuple[Module, Module]]:
    """Input and output embeddings of each Hugging Face model in ``model`` that share their weight."""
    pairs = []
    for module in model.modules():
        if callable(getattr(module, "get_output_embeddings", None)):
            embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
            weights = [getattr(each, "weight", None) for each in (embeddings, head)]
            if weights[0] is not None and weights[0] is weights[1]:
                pairs.append((embeddings, head))
    return pairs


def check_head_units(model: Module, pairs: list[tuple[Module, Module]]) -> None:
    """Raises if the fused loss would not find the head's weight, or a tied weight would be in two units.

    Args:
        model: Wrapped in FSDP, wholly or in parts.
        pairs: What :func:`tied_pairs` found before it was wrapped.

    Raises:
        ValueError: Naming the module and what to do.
    """
    units = _units(model, lambda module: isinstance(module, FullyShardedDataParallel))
    names = _names(model)
    _check_tied(units, names, pairs)
    for head in patched_heads(model):
        around = units[head]
        is_alone = bool(around) and around[-1].module is head
        if len(around) > 1 or is_alone:
            raise ValueError(
                f"the LM head {names[head]!r} is in an FSDP unit of its own, whose weight is gone again when the"
                " fused loss needs it: leave it in the root unit, or choose kernels without 'linear_cross_entropy'"
            )


def check_tied_units(model: Module, units: Collection[Module]) -> None:
    """Raises if ``units``, to be sharded one by one inside of ``model``, would take one of two tied weights away.

    Raises:
        ValueError: Naming both modules and what to do.
    """
    _check_tied(_units(model, units.__contains__), _names(model), tied_pairs(model))


def _check_tied(
    units: dict[Module, list[Module]], names: dict[Module, str], pairs: list[tuple[Module, Module]]
) -> None:
    for embeddings, head in pairs:
        if units[embeddings][-1:] != units[head][-1:]:
            raise ValueError(
                f"auto_wrap_policy puts {names[embeddings]!r} and {names[head]!r}, which share their weight, into"
                " different FSDP units: leave both in the root unit"
            )


def _names(model: Module) -> dict[Module, str]:
    return {
        module: ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")
        for name, module in model.named_modules()
    }


def _units(model: Module, is_unit: Callable[[Module], bool]) -> dict[Module, list[Module]]:
    """The FSDP units around each module, from the outermost to its own."""
    found: dict[Module, list[Module]] = {}

    def walk(module: Module, around: list[Module]) -> None:
        inside = [*around, module] if is_unit(module) else around
        # FSDP's wrappers are no part of the units they are.
        found[module] = around if isinstance(module, FullyShardedDataParallel) else inside
        for child in module.children():
            walk(child, inside)

    walk(model, [])
    return found


def detach_frozen_heads(model: Module) -> None:
    """Spares the loss the gradients of heads that are frozen when they run; call it before ``model`` is wrapped.

    In an FSDP unit with trained parameters, frozen ones become views of what is trained.
    """
    for head in patched_heads(model):
        head.register_forward_hook(partial(_detach_frozen, dict(head.named_parameters(recurse=False))))


def _detach_frozen(parameters: dict[str, Tensor], head: Module, args: Any, output: Any) -> Any:
    if not isinstance(output, LazyLogits):
        return output
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    detached = {name: getattr(output.head, name).detach() for name in frozen}
    return output.changed(head=output.head._replaced(**detached))


def enter_backward_at_heads(model: Module) -> None:
    """Lets FSDP2 see backward enter ``model`` where all layers before the head are frozen.

    It waits for the gradients of what its modules return, which before PyTorch 2.12 it takes from tensors in containers
    only: its hooks get the tensors of lazy logits beside the output. A head's weight stays gathered until then, also
    where the head is a unit of its own.
    """
    heads = patched_heads(model)
    units = [
        module
        for module in model.modules()
        if isinstance(module, FSDPModule) and not set(heads).isdisjoint(module.modules())
    ]
    for head in heads:
        if _connect not in head._forward_hooks.values():
            head.register_forward_hook(_connect)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        if _show_tensors not in unit._forward_hooks.values():
            unit.register_forward_hook(_show_tensors, prepend=True)
            unit.register_forward_hook(_hide_tensors)


_SHOWN = object()


def _show_tensors(module: Module, args: Any, output: Any) -> Any:
    tensors = [leaf.hidden_states for leaf in tree_leaves(output) if isinstance(leaf, LazyLogits)]
    return (_SHOWN, output, tensors) if tensors else output


def _hide_tensors(module: Module, args: Any, output: Any) -> Any:
    return output[1] if isinstance(output, tuple) and output and output[0] is _SHOWN else output


def _connect(head: Module, args: Any, output: Any) -> Any:
    if not isinstance(output, LazyLogits) or not output.requires_grad:
        return output
    return output.changed(hidden_states=connected_hidden_states(output))


def connected_hidden_states(logits: LazyLogits) -> Tensor:
    """The hidden states of lazy logits, connected to everything that the logits depend on."""
    head = logits.head
    parameters = [tensor for tensor in (head.weight, head.bias, head.adapter) if tensor is not None]
    return _Connected.apply(logits.hidden_states, *parameters)


class _Connected(torch.autograd.Function):
    """The first tensor, with the others behind it in the graph too, though it gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.num_parameters = len(parameters)
        return hidden_states.detach()  # shares its memory, and is no view, of which FSDP2 would warn

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad_output, *(None for _ in range(ctx.num_parameters))
