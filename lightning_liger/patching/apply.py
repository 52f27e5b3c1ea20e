"""``apply_liger_kernels``: plans every replacement in a model first, then makes them all."""

import textwrap
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from liger_ops.arguments import check_choice, check_integer, did_you_mean, wrong_type, wrong_value
from lightning_liger.lazy.logits import loss_wanted
from lightning_liger.patching.report import PatchEntry, PatchReport
from lightning_liger.patching.rules import RULES, HeadRule, Patched, Replacement, Rule
from lightning_liger.patching.verify import Mismatch, trial

KERNELS: tuple[str, ...] = tuple(dict.fromkeys(kernel for rule in (*RULES, HeadRule()) for kernel in rule.kernels))
"""The names that ``kernels=`` takes."""

KernelChoice = str | list[str] | dict[str, Any]

_LOSS_OPTIONS = ("chunk_bytes", "accumulate_dtype", "saved_logits_bytes")
_ACCUMULATE_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_EXPECTED = f"'auto', 'none', a name, or a list or dict of names out of {list(KERNELS)}"
_LOSS_WANTED = "_liger_loss_wanted"
_MAX_REASONS = 3
_REASON_WIDTH = 120
_warned_models: WeakSet[nn.Module] = WeakSet()


def check_kernels(kernels: KernelChoice) -> dict[str, dict[str, Any]]:
    """The kernels that a choice stands for, with their options.

    Args:
        kernels: See :func:`apply_liger_kernels`.

    Raises:
        TypeError: For a value of another type.
        ValueError: For an unknown name or option, listing the known ones.
    """
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
    if not isinstance(kernels, Collection) or isinstance(kernels, bytes | Tensor | nn.Module):
        raise wrong_type("kernels", _EXPECTED, kernels)
    if not all(isinstance(name, str) for name in kernels):
        raise wrong_type("kernels", _EXPECTED, kernels)
    return dict(kernels) if isinstance(kernels, Mapping) else dict.fromkeys(kernels, True)


def _check_options(name: str, options: Any) -> dict[str, Any]:
    if options is True or options is None:
        return {}
    argument, known = f"kernels[{name!r}]", _LOSS_OPTIONS if name == HeadRule.kernels[0] else ()
    if not known or not isinstance(options, Mapping) or not set(options) <= set(known):
        raise wrong_value(
            argument, "True or False" + (f", or a dict with any of {', '.join(known)}" if known else ""), options
        )
    options = dict(options)
    for key, least in (("chunk_bytes", 1), ("saved_logits_bytes", 0)):
        if key in options:
            check_integer(f"{argument}[{key!r}], a number of bytes,", options[key], at_least=least)
    if "accumulate_dtype" in options:
        dtype = options["accumulate_dtype"]
        check_choice(f"{argument}['accumulate_dtype']", dtype, (*_ACCUMULATE_DTYPES, *_ACCUMULATE_DTYPES.values()))
        options["accumulate_dtype"] = _ACCUMULATE_DTYPES.get(dtype, dtype)
    return options


def apply_liger_kernels(model: nn.Module, kernels: KernelChoice = "auto") -> PatchReport:
    """Replaces the modules of ``model`` that it recognises by fused kernels, after verifying each structure.

    Only the instance changes, no class and no other model: parameters, their names and ``state_dict`` stay the same. A
    replacement whose outputs or gradients differ from the original's is not made, and reported. Call it before the
    model is wrapped by FSDP, DDP or ``torch.compile``. Warns if nothing in the model was replaced, and why.

    Args:
        model: Any module that contains a Hugging Face causal LM, or parts of one.
        kernels: ``"auto"`` for all that fit, ``"none"``, one name out of :data:`KERNELS`, a list of names for only
            these, or a dict of changes to ``"auto"``: False leaves a kernel out, True requires it, options require and
            configure it. ``linear_cross_entropy`` has the options ``chunk_bytes``, ``accumulate_dtype`` and
            ``saved_logits_bytes`` (see :func:`liger_ops.linear_cross_entropy`).

    Returns:
        A report that prints as a table and can undo the replacements.

    Raises:
        TypeError: If ``model`` is no module, or one that TorchScript compiled, or ``kernels`` is of another type.
        ValueError: For an unknown name in ``kernels``, or a name in it that fits nothing in the model.

    The model is unchanged after an error, also after one of the device while replacements are verified, such as
    ``torch.OutOfMemoryError``.
    """
    chosen = check_kernels(kernels)
    check_model(model)
    plan = _plan(model, chosen)
    _check_all_found([name for name, options in _named(kernels).items() if options is not False], plan)
    report = PatchReport()
    try:
        for group in plan:
            report.entries.append(group.entry)
            if group.replacement is not None:
                for module in group.modules:
                    report._undo.append(partial(setattr, module, "__class__", type(module)))
                    module.__class__ = group.replacement.patched_class(type(module))
        if any(group.replacement is not None and group.entry.kernel == "linear_cross_entropy" for group in plan):
            for owner, _ in _heads(model):
                report._undo.extend(_watch_labels(owner))
    except BaseException:
        report.undo()
        raise
    if chosen and not any(isinstance(module, Patched) for module in model.modules()):
        _warn_of_nothing_replaced(model, kernels, report)
    return report


def check_model(model: Any) -> None:
    """Raises TypeError unless ``model`` is a module whose methods can be replaced."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise wrong_type("model", f"an instance of torch.nn.Module, such as {model.__name__}(...)", model)
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a torch.nn.Module", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise wrong_type("model", "a torch.nn.Module that TorchScript has not compiled", model)


def _warn_of_nothing_replaced(model: nn.Module, kernels: KernelChoice, report: PatchReport) -> None:
    """Warns once per model, with the reasons from the report."""
    if model in _warned_models:
        return
    _warned_models.add(model)
    structures: dict[str, list[str]] = {}
    for entry in report.entries:
        structures.setdefault(entry.reason, []).append(f"{entry.count} {entry.structure}")
    reasons = [
        f"{', '.join(names)}: {textwrap.shorten(reason, _REASON_WIDTH, placeholder=' ...')}"
        for reason, names in structures.items()
    ]
    if len(reasons) > _MAX_REASONS:
        reasons[_MAX_REASONS:] = [f"and {len(reasons) - _MAX_REASONS} more reasons in the report"]
    why = "; ".join(reasons) or "no module looks like a norm, rotary embedding, gated MLP or LM head of these kernels"
    rank_zero_warn(
        f"lightning-liger: kernels={kernels!r} replaced nothing in {type(model).__name__} ({why})."
        " The model runs without fused kernels; choose kernels='none' if that is intended."
    )


def apply_and_announce(model: nn.Module, kernels: KernelChoice, earlier: PatchReport | None) -> PatchReport:
    """:func:`apply_liger_kernels` for engines that may set up one model several times: logs the first time only.

    Returns:
        The report, or ``earlier`` if this call replaced nothing.
    """
    report = apply_liger_kernels(model, kernels)
    if earlier is not None and not report.num_replaced:
        return earlier
    rank_zero_info(f"lightning-liger: fused kernels in {report.num_replaced} modules (kernels={kernels})")
    return report


@dataclass
class _Group:
    """Modules of one structure and their replacement, None for those that stay."""

    entry: PatchEntry
    modules: list[nn.Module]
    replacement: Replacement | None


def _plan(model: nn.Module, chosen: Mapping[str, dict[str, Any]]) -> list[_Group]:
    """Groups of modules with verified replacements, in the order in which structures appear."""
    head_rule = HeadRule(chosen.get(HeadRule.kernels[0], {}))
    heads = {id(layer) for _, head in _heads(model) for layer in _projections(head)}
    verified: dict[Hashable, tuple[PatchEntry, Replacement | None]] = {}
    groups: dict[Hashable, _Group] = {}
    for module in model.modules():
        rules: Sequence[Rule] = (head_rule,) if id(module) in heads else RULES
        for rule in rules if not isinstance(module, Patched) else ():
            kernel, candidates = _candidates(rule, module, chosen)
            if not candidates:
                continue
            # Modules of one class with equal candidates and signature are verified once.
            key = type(module), kernel, candidates, None if isinstance(candidates, str) else rule.signature(module)
            if key not in verified:
                verified[key] = _choose(kernel, candidates, module)
            _add(groups, module, *verified[key])
        if isinstance(module, Patched) and module.liger_replacement.kernel in chosen:
            kernel, structure = module.liger_replacement.kernel, module.liger_original.__name__
            _add(groups, module, PatchEntry(structure, kernel, 0, None, reason="already replaced"), None)
    return list(groups.values())


def _add(groups: dict[Hashable, _Group], module: nn.Module, entry: PatchEntry, replacement: Replacement | None) -> None:
    """Adds a module to the group of its structure and replacement, whose entry counts it."""
    key = entry.structure, entry.kernel, entry.reason, replacement
    group = groups.setdefault(key, _Group(entry, [], replacement))
    group.modules.append(module)
    errors = [each.error for each in (group.entry, entry) if each.error is not None]
    group.entry = replace(group.entry, count=len(group.modules), error=max(errors, default=None))


def _candidates(
    rule: Rule, module: nn.Module, chosen: Collection[str]
) -> tuple[str, tuple[Replacement, ...] | str | None]:
    """The kernel that ``module`` is reported under, and the replacements to try or why there are none."""
    if not any(kernel in chosen for kernel in rule.kernels):
        return "", None
    candidates = rule.candidates(module)
    if candidates is None or isinstance(candidates, str):
        return rule.kernels[0], candidates
    unnamed = {candidate.kernel for candidate in candidates} - set(rule.kernels)
    if unnamed:
        raise ValueError(f"{type(rule).__name__}.kernels must name the kernels of all its candidates, got no {unnamed}")
    if "forward" in vars(module):  # which would hide the replacement's
        return rule.kernels[0], "this instance overrides forward, as accelerate's hooks do"
    allowed = tuple(candidate for candidate in candidates if candidate.kernel in chosen)
    return (allowed[0].kernel if allowed else ""), allowed


def _choose(
    kernel: str, candidates: Sequence[Replacement] | str, module: nn.Module
) -> tuple[PatchEntry, Replacement | None]:
    """The first candidate that is verified against a module, or why there is none."""
    structure = type(module).__name__
    reason = candidates if isinstance(candidates, str) else ""
    for candidate in () if isinstance(candidates, str) else candidates:
        try:
            with trial():
                error = candidate.verify(module)
        except Mismatch as failure:
            reason = reason or f"{candidate.description} is not the same: {failure}"
        else:
            return PatchEntry(structure, candidate.kernel, 0, candidate.description, error), candidate
    return PatchEntry(structure, kernel, 0, None, reason=reason), None


def _check_all_found(chosen: Collection[str], plan: list[_Group]) -> None:
    for kernel in sorted(chosen):
        groups = [group for group in plan if group.entry.kernel == kernel]
        already = any(group.entry.reason == "already replaced" for group in groups)
        if not already and not any(group.replacement is not None for group in groups):
            seen = "; ".join(f"{group.entry.structure}: {group.entry.reason}" for group in groups)
            raise ValueError(
                f"kernels asks for {kernel!r}, but nothing in the model can be replaced by it"
                + (f" ({seen})" if seen else "")
                + f": remove {kernel!r} from kernels"
            )


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each causal LM in ``model`` with its output embeddings; of models that name none, the head by its structure."""
    seen: set[int] = set()
    owners: list[Any] = [each for each in model.modules() if callable(getattr(each, "get_output_embeddings", None))]
    for owner in owners:
        head = owner.get_output_embeddings()
        if isinstance(head, nn.Module) and id(head) not in seen:
            seen.add(id(head))
            yield owner, head
    # The only linear layer with an output for each row of the largest embedding, if there is one such layer.
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    heads = [linear for linear in linears if linear.out_features == max(sizes, default=None)]
    if not owners and len(heads) == 1:
        yield model, heads[0]


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
    if _LOSS_WANTED in vars(model):
        return []
    vars(model)[_LOSS_WANTED] = []  # values outside of the forwards that are running
    return [
        partial(vars(model).pop, _LOSS_WANTED),
        model.register_forward_pre_hook(_before_forward, with_kwargs=True).remove,
        model.register_forward_hook(_after_forward, always_call=True).remove,
    ]


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _warn_of_new_head(model)
    vars(model)[_LOSS_WANTED].append(loss_wanted.get())
    if kwargs.get("labels") is not None:
        loss_wanted.set(True)


def _warn_of_new_head(model: Any) -> None:
    """Warns once of a head that came after the kernels, such as of ``resize_token_embeddings`` or of peft."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Module) or isinstance(head, Patched) or head in _warned_models:
        return
    sizes = {module: getattr(module, "out_features", 0) for module in head.modules() if not any(module.children())}
    if any(size == max(sizes.values()) and not isinstance(module, Patched) for module, size in sizes.items()):
        _warned_models.add(head)
        rank_zero_warn(
            f"lightning-liger: the LM head of {type(model).__name__} was replaced (by {type(head).__name__}) after the"
            " kernels were applied, so its loss is not fused. Call lightning_liger.apply_liger_kernels(model) again"
            " after such a change, as of resize_token_embeddings or get_peft_model"
        )


def _after_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    loss_wanted.set(vars(model)[_LOSS_WANTED].pop())
