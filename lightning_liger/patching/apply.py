"""``apply_liger_kernels``: finds every replacement in a model first, then makes them all."""

import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from liger_ops.arguments import check_choice, check_integer, did_you_mean, wrong_type, wrong_value
from lightning_liger.activations.layers import find_layers
from lightning_liger.lazy.logits import loss_wanted
from lightning_liger.patching.float8 import (
    Float8Choice,
    Float8Recipe,
    check_device,
    check_float8,
    converted_layers,
    with_min_tokens,
)
from lightning_liger.patching.report import PatchEntry, PatchReport
from lightning_liger.patching.rules import RULES
from lightning_liger.patching.rules.adapters import AdapterRule
from lightning_liger.patching.rules.base import Patched, Replacement, Rule
from lightning_liger.patching.rules.gated_mlp import MLPReplacement
from lightning_liger.patching.rules.head import LOSS_WANTED, HeadRule
from lightning_liger.patching.rules.linear import convert, find_layers_of, hold_frozen
from lightning_liger.patching.verify import Mismatch, trial
from lightning_liger.sequences.empty_cache import give_empty_cache

KERNELS: tuple[str, ...] = tuple(dict.fromkeys(kernel for rule in (*RULES, HeadRule()) for kernel in rule.kernels))
"""The names that ``kernels=`` takes."""

KernelChoice = str | list[str] | dict[str, Any]

_HEAD = HeadRule.kernels[0]
_LEAST_BYTES = {"chunk_bytes": 1, "saved_logits_bytes": 0}
_ACCUMULATE_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
_LOSS_OPTIONS = ("chunk_bytes", "accumulate_dtype", "saved_logits_bytes")
_EXPECTED = f"'auto', 'none', a name, or a list or dict of names out of {list(KERNELS)}"
_ALREADY = "already replaced"
_Decision = tuple[PatchEntry, Replacement | None]


def check_kernels(kernels: KernelChoice) -> dict[str, dict[str, Any]]:
    """The kernels that a choice stands for, with their options; raises as :func:`apply_liger_kernels`."""
    named = _named(kernels)
    unknown = [name for name in named if name not in KERNELS]
    if unknown:
        raise ValueError(f"kernels must be {_EXPECTED}, got unknown {unknown}{did_you_mean(unknown[0], KERNELS)}")
    extends_auto = isinstance(kernels, Mapping) or kernels == "auto"
    choice = {**dict.fromkeys(KERNELS if extends_auto else (), True), **named}
    return {name: _check_options(name, options) for name, options in choice.items() if options is not False}


def _named(kernels: KernelChoice) -> dict[str, Any]:
    """The names in ``kernels``, each with True, False or options."""
    if isinstance(kernels, str):
        return {} if kernels in ("auto", "none") else {kernels: True}
    # No iterator, which would be empty the second time.
    is_collection = isinstance(kernels, Collection) and not isinstance(kernels, bytes | Tensor | nn.Module)
    if not is_collection or not all(isinstance(name, str) for name in kernels):
        raise wrong_type("kernels", _EXPECTED, kernels)
    return dict(kernels) if isinstance(kernels, Mapping) else dict.fromkeys(kernels, True)


def _check_options(name: str, options: Any) -> dict[str, Any]:
    if options is True or options is None:
        return {}
    argument = f"kernels[{name!r}]"
    if name != _HEAD:
        raise wrong_value(argument, "True or False", options)
    if not isinstance(options, Mapping) or not set(options) <= set(_LOSS_OPTIONS):
        raise wrong_value(argument, f"True or False, or a dict with any of {', '.join(_LOSS_OPTIONS)}", options)
    options = dict(options)
    for key in options.keys() & _LEAST_BYTES.keys():
        check_integer(f"{argument}[{key!r}], a number of bytes,", options[key], at_least=_LEAST_BYTES[key])
    if "accumulate_dtype" in options:
        dtype = options["accumulate_dtype"]
        check_choice(f"{argument}['accumulate_dtype']", dtype, (*_ACCUMULATE_DTYPES, *_ACCUMULATE_DTYPES.values()))
        options["accumulate_dtype"] = _ACCUMULATE_DTYPES.get(dtype, dtype)
    return options


def apply_liger_kernels(model: nn.Module, kernels: KernelChoice = "auto", fp8: Float8Choice = None) -> PatchReport:
    """Replaces the modules of ``model`` that it recognizes by fused kernels, after verifying each structure.

    Only the instance changes, no class and no other model: parameters, their names and ``state_dict`` stay the same. A
    replacement whose outputs or gradients differ from the original's is not made, and reported. Call it before the
    model is wrapped by FSDP, DDP or ``torch.compile``. Warns if nothing in the model was replaced, and why.

    Args:
        model: Any module that contains a Hugging Face causal LM, or parts of one.
        kernels: ``"auto"`` for all that fit, ``"none"``, one name out of :data:`KERNELS`, a list of names for only
            these, or a dict of changes to ``"auto"``: False leaves a kernel out, True requires it, options require and
            configure it. ``linear_cross_entropy`` has the options ``chunk_bytes``, ``accumulate_dtype`` and
            ``saved_logits_bytes`` (see :func:`liger_ops.linear_cross_entropy`).
        fp8: Has linear layers multiply in float8: True, the name of a recipe, or a
            :class:`~lightning_liger.Float8Recipe`. Weights keep their dtype.

    Returns:
        A report that prints as a table and can undo the replacements.

    Raises:
        TypeError: If ``model`` is no module, or one that TorchScript compiled, or ``kernels`` is of another type.
        ValueError: For an unknown name in ``kernels``, or a name in it that fits nothing in the model; for an unknown
            recipe, a name or pattern of its filter that fits no linear layer, ``skip_layers`` of a model in which no
            layers are found, and weights of a dtype or on a device without float8 products.

    The model is unchanged after an error, also after one of the device while replacements are verified, such as
    ``torch.OutOfMemoryError``.
    """
    chosen, recipe = check_kernels(kernels), check_float8(fp8)
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a torch.nn.Module", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise wrong_type("model", "a torch.nn.Module that TorchScript has not compiled", model)
    found = list(_find_replacements(model, chosen))
    recipe, linears = (None, []) if recipe is None else _find_linears(model, recipe, found)
    report = PatchReport(_merged(each[1] for each in (*found, *linears)))
    _check_all_found([name for name, options in _named(kernels).items() if options is not False], report.entries)
    try:
        for module, _, replacement in found:
            if replacement is not None:
                report._undo.append(partial(setattr, module, "__class__", type(module)))
                module.__class__ = replacement.patched_class(type(module))
        for members, entry in linears:
            if recipe is not None and entry.replacement is not None:
                report._undo.extend(convert(members, recipe))
        if recipe is not None and recipe.hold_frozen is True:
            report._undo.extend(hold_frozen(model))
        if any(entry.kernel == _HEAD and entry.replacement is not None for entry in report.entries):
            for owner, _ in _heads(model):
                report._undo.extend([*_watch_labels(owner), *give_empty_cache(owner)])
    except BaseException:
        report.undo()
        raise
    if chosen and not any(isinstance(module, Patched) for module in model.modules()):
        _warn_of_nothing_replaced(model, kernels, report)
    return report


def _find_linears(model: nn.Module, recipe: Float8Recipe, found: Sequence[Any]) -> tuple[Float8Recipe, list[Any]]:
    """The recipe for ``model``, its linear layers, in groups that share their input, and lines of the report."""
    for device in {parameter.device for parameter in model.parameters()}:
        check_device(recipe, device)
    replacements = [(module, replacement) for module, _, replacement in found]
    replacements += [(each, each.liger_replacement) for each in model.modules() if isinstance(each, Patched)]
    shared = [(module, (each.gate, each.up)) for module, each in replacements if isinstance(each, MLPReplacement)]
    groups = list(find_layers_of(model, recipe, _head_layers(model), shared))
    if not any(entry.replacement for _, entry in groups) and not converted_layers(model):
        reasons = dict.fromkeys(f"{entry.structure}: {entry.reason}" for _, entry in groups)
        shown = "; ".join(list(reasons)[:3]) or "it has no linear layers"
        rank_zero_warn(f"lightning-liger: fp8={recipe} converted nothing in {type(model).__name__} ({shown})")
    converted = [members for members, entry in groups if entry.replacement]
    num_weights = sum(member.weight.numel() for members in converted for member in members)
    recipe = with_min_tokens(recipe, num_weights, len(find_layers(model)))
    least = f", from {recipe.min_tokens:,} tokens on"
    groups = [
        (members, replace(entry, replacement=entry.replacement + least) if entry.replacement else entry)
        for members, entry in groups
    ]
    return recipe, groups


def _warn_of_nothing_replaced(model: nn.Module, kernels: KernelChoice, report: PatchReport) -> None:
    reasons = [
        f"{entry.count} {entry.structure}: {textwrap.shorten(entry.reason, 120, placeholder=' ...')}"
        for entry in report.entries
    ]
    if len(reasons) > 3:
        reasons[3:] = [f"and {len(reasons) - 3} more reasons in the report"]
    why = "; ".join(reasons) or "no module looks like a norm, rotary embedding, gated MLP or LM head of these kernels"
    rank_zero_warn(
        f"lightning-liger: kernels={kernels!r} replaced nothing in {type(model).__name__} ({why})."
        " The model runs without fused kernels; choose kernels='none' if that is intended."
    )


def _find_replacements(
    model: nn.Module, chosen: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[nn.Module, PatchEntry, Replacement | None]]:
    """Each module that a rule recognizes, what the report says of it, and its verified replacement, if it has one."""
    head_rule = HeadRule(chosen.get(_HEAD, {}))
    heads = _head_layers(model)
    decisions: dict[Hashable, _Decision | None] = {}

    def decide(module: nn.Module) -> Iterator[_Decision]:
        if isinstance(module, Patched):
            kernel, structure = module.liger_replacement.kernel, module.liger_original.__name__
            if kernel in chosen:
                yield PatchEntry(structure, kernel, 1, None, reason=_ALREADY), None
            return
        for rule in (head_rule,) if id(module) in heads else rules:
            candidates = None if chosen.keys().isdisjoint(rule.kernels) else rule.candidates(module)
            if candidates is None:
                continue
            # Modules of one class with equal candidates and signature are verified once.
            fixed = candidates if isinstance(candidates, str) else tuple(candidates)
            key = type(module), fixed, "forward" in vars(module), rule.signature(module)
            if key not in decisions:
                decisions[key] = _decide(rule, candidates, module, chosen)
            if (decision := decisions[key]) is not None:
                yield decision

    rules: tuple[Rule, ...] = (*RULES, AdapterRule(decide))
    for module in model.modules():
        for decision in decide(module):
            yield module, *decision


def _decide(
    rule: Rule, candidates: Sequence[Replacement] | str, module: nn.Module, chosen: Collection[str]
) -> _Decision | None:
    """The first candidate that is verified against a module, or why there is none; None without chosen candidates."""
    structure, kernel, reason = type(module).__name__, rule.kernels[0], ""
    allowed: list[Replacement] = []
    if isinstance(candidates, str):
        reason = candidates
    elif "forward" in vars(module):  # which would hide the replacement's
        reason = "this instance overrides forward, as accelerate's hooks do"
    else:
        allowed = [candidate for candidate in candidates if candidate.kernel in chosen]
        if not allowed:
            return None
        kernel = allowed[0].kernel
    for candidate in allowed:
        try:
            with trial():
                error = candidate.verify(module)
        except Mismatch as failure:
            reason = reason or f"{candidate.description} is not equivalent: {failure}"
        else:
            return PatchEntry(structure, candidate.kernel, 1, candidate.description, error), candidate
    return PatchEntry(structure, kernel, 1, None, reason=reason), None


def _merged(entries: Iterable[PatchEntry]) -> list[PatchEntry]:
    """One entry for all modules of a structure with one replacement, or one reason for having none."""
    merged: dict[Hashable, PatchEntry] = {}
    for entry in entries:
        key = replace(entry, error=None)
        before = merged.get(key, replace(entry, count=0))
        errors = [each.error for each in (before, entry) if each.error is not None]
        merged[key] = replace(entry, count=before.count + 1, error=max(errors, default=None))
    return list(merged.values())


def _check_all_found(required: Collection[str], entries: Sequence[PatchEntry]) -> None:
    for kernel in sorted(required):
        found = [entry for entry in entries if entry.kernel == kernel]
        if not any(entry.replacement is not None or entry.reason == _ALREADY for entry in found):
            seen = "; ".join(f"{entry.structure}: {entry.reason}" for entry in found)
            raise ValueError(
                f"kernels asks for {kernel!r}, but nothing in the model can be replaced by it"
                + (f" ({seen})" if seen else "")
                + f": remove {kernel!r} from kernels"
            )


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each causal LM in ``model`` with its output embeddings; of models that name none, the head by its structure."""
    owners: list[Any] = [each for each in model.modules() if callable(getattr(each, "get_output_embeddings", None))]
    found = {id(head): (owner, head) for owner in reversed(owners) for head in [owner.get_output_embeddings()]}
    yield from (pair for pair in found.values() if isinstance(pair[1], nn.Module))
    # The only linear layer with an output for each row of the largest embedding, if there is one such layer.
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    largest = [linear for linear in linears if linear.out_features == max(sizes, default=None)]
    if not owners and len(largest) == 1:
        yield model, largest[0]


def _head_layers(model: nn.Module) -> set[int]:
    """Ids of the layers that project onto the vocabulary."""
    return {id(layer) for _, head in _heads(model) for layer in _projections(head)}


def _projections(head: nn.Module) -> list[nn.Module]:
    """The layers that project onto the vocabulary: the head itself, or those whose outputs an adapter adds up."""
    sizes = {module: getattr(module, "out_features", None) for module in head.modules()}
    vocab_size = max((size for size in sizes.values() if isinstance(size, int)), default=None)
    if isinstance(head, nn.Linear | nn.ModuleList) or vocab_size is None:
        return [head]
    layers = [module for module, size in sizes.items() if size == vocab_size and not any(module.children())]
    # If one of them is computed at once, postponing the others gains nothing.
    are_linear = all(isinstance(layer, Patched) or type(layer).forward is nn.Linear.forward for layer in layers)
    return layers if are_linear else [head]


def _watch_labels(model: nn.Module) -> list[Callable[[], None]]:
    """Makes forwards with labels ask for lazy logits without gradients too; returns the functions that undo it."""
    if LOSS_WANTED in vars(model):
        return []
    vars(model)[LOSS_WANTED] = []  # values outside of the forwards that are running
    return [
        partial(vars(model).pop, LOSS_WANTED),
        model.register_forward_pre_hook(_before_forward, with_kwargs=True).remove,
        model.register_forward_hook(_after_forward, always_call=True).remove,
    ]


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    vars(model)[LOSS_WANTED].append(loss_wanted.value)
    loss_wanted.value = loss_wanted.value or kwargs.get("labels") is not None
    if not torch.compiler.is_compiling() and hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
        if isinstance(head, nn.Module) and not all(isinstance(each, Patched) for each in _projections(head)):
            rank_zero_warn(
                f"lightning-liger: the LM head of {type(model).__name__} was replaced (by {type(head).__name__}) after"
                " the kernels were applied, so its loss is not fused. Call lightning_liger.apply_liger_kernels(model)"
                " again after such a change, for example by resize_token_embeddings or get_peft_model"
            )


def _after_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    loss_wanted.value = vars(model)[LOSS_WANTED].pop()
