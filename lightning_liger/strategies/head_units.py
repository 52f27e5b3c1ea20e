"""Which FSDP units the LM head and the embeddings tied to it are in."""

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from lightning_liger.patching.rules import Patched


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
    units = _units(model)
    names = {
        module: ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")
        for name, module in model.named_modules()
    }
    for embeddings, head in pairs:
        if units[embeddings][-1:] != units[head][-1:]:
            raise ValueError(
                f"auto_wrap_policy puts {names[embeddings]!r} and {names[head]!r}, which share their weight, into"
                " different FSDP units: leave both in the root unit"
            )
    for module, around in units.items():
        if isinstance(module, Patched) and module.liger_replacement.kernel == "linear_cross_entropy":
            is_alone = bool(around) and around[-1].module is module
            if len(around) > 1 or is_alone:
                raise ValueError(
                    f"the LM head {names[module]!r} is in an FSDP unit of its own, whose weight is gone again when the"
                    " fused loss needs it: leave it in the root unit, or choose kernels without"
                    " 'linear_cross_entropy'"
                )


def _units(model: Module) -> dict[Module, list[FullyShardedDataParallel]]:
    """The FSDP units around each module, from the outermost to its own."""
    found: dict[Module, list[FullyShardedDataParallel]] = {}

    def walk(module: Module, around: list[FullyShardedDataParallel]) -> None:
        found[module] = around
        inside = [*around, module] if isinstance(module, FullyShardedDataParallel) else around
        for child in module.children():
            walk(child, inside)

    walk(model, [])
    return found
