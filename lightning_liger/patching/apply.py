"""Walking over a model: plan every replacement first, then make them all."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_liger.lazy_logits import _loss_wanted
from lightning_liger.patching.report import PatchEntry, PatchReport
from lightning_liger.patching.rules import RULES, HeadRule, Patched, Rule
from lightning_liger.patching.verify import Mismatch

KERNELS = ("rms_norm", "rope", "silu_mul", "linear_cross_entropy")
"""The names that ``kernels=[...]`` takes."""

KernelChoice = str | Sequence[str]


def check_kernels(kernels: KernelChoice) -> frozenset[str]:
    """The names that a user's choice of kernels stands for.

    Raises:
        ValueError: For a name that is none of them, listing those that are.
    """
    if kernels in ("auto", "none"):
        return frozenset(KERNELS if kernels == "auto" else ())
    names = [kernels] if isinstance(kernels, str) else list(kernels)
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        raise ValueError(
            f"kernels must be 'auto', 'none' or a list of names out of {list(KERNELS)}; got unknown {unknown}"
        )
    return frozenset(names)


def apply_liger_kernels(model: nn.Module, kernels: KernelChoice = "auto") -> PatchReport:
    """Replaces what it recognises in ``model`` by fused kernels, after verifying each structure.

    The instance changes, no class and no other model does: parameters, their names and ``state_dict`` stay what they
    were. A replacement whose outputs or gradients differ from the original's is not made and reported. Call it before
    the model is wrapped by FSDP, DDP or ``torch.compile``.

    Args:
        model: Any module that holds a Hugging Face causal LM, or parts of one.
        kernels: ``"auto"`` for all that fit, ``"none"``, or a list out of ``rms_norm``, ``rope``, ``silu_mul`` and
            ``linear_cross_entropy``.

    Returns:
        A report that prints as a table and can undo the replacements.

    Raises:
        ValueError: For an unknown name in ``kernels``, or one that was asked for by name and fits nothing in the
            model. The model is then unchanged.
    """
    chosen = check_kernels(kernels)
    plan = _plan(model, chosen)
    if kernels not in ("auto", "none"):
        _check_all_found(chosen, plan)
    report = PatchReport()
    for group in plan:
        report.entries.append(group.entry)
        if group.rule is not None:
            for module in group.modules:
                report._undo.append(partial(setattr, module, "__class__", type(module)))
                module.__class__ = group.rule.patched_class(type(module))
    if any(isinstance(group.rule, HeadRule) for group in plan):
        for owner, _ in _heads(model):
            report._undo.extend(_watch_labels(owner))
    return report


def apply_and_announce(model: nn.Module, kernels: KernelChoice, earlier: PatchReport | None) -> PatchReport:
    """:func:`apply_liger_kernels` for engines that may set up one model several times: says what it did the first time.

    Returns:
        The report, or ``earlier`` if that was of the same model and nothing was left to replace.
    """
    report = apply_liger_kernels(model, kernels)
    if earlier is not None and not report.num_replaced:
        return earlier
    rank_zero_info(f"lightning-liger: fused kernels in {report.num_replaced} modules (kernels={kernels})")
    return report


@dataclass
class _Group:
    """Modules of one structure, and the rule to apply to them, None for those that stay."""

    entry: PatchEntry
    modules: list[nn.Module]
    rule: Rule | None


def _plan(model: nn.Module, chosen: frozenset[str]) -> list[_Group]:
    heads = {id(head): head for _, head in _heads(model)} if "linear_cross_entropy" in chosen else {}
    rules = [rule for rule in RULES if rule.kernel in chosen]
    # Keyed by class and kernel; within, modules that a rule tells apart are verified apart.
    found: dict[tuple[type, str], list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if id(module) in heads:
            found[type(module), HeadRule.kernel].append(module)
        for kernel in dict.fromkeys(rule.kernel for rule in rules if rule.match(module) is not False):
            found[type(module), kernel].append(module)
    groups = []
    for (module_class, kernel), modules in found.items():
        candidates = [HeadRule()] if kernel == HeadRule.kernel else [rule for rule in rules if rule.kernel == kernel]
        groups.extend(_plan_structure(module_class, kernel, modules, candidates))
    return groups


def _plan_structure(
    module_class: type[nn.Module], kernel: str, modules: list[nn.Module], candidates: list[Rule]
) -> Iterator[_Group]:
    name = module_class.__name__
    if issubclass(module_class, Patched):
        name = module_class.liger_original.__name__
        yield _Group(PatchEntry(name, kernel, len(modules), None, reason="already replaced"), modules, None)
        return
    variants: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for module in modules:
        mismatch = candidates[0].match(module)
        variants[mismatch if isinstance(mismatch, str) else candidates[0].signature(module)].append(module)
    merged: dict[tuple[Rule | None, str], list[tuple[list[nn.Module], float | None]]] = defaultdict(list)
    for variant, members in variants.items():
        rule, error, reason = (None, None, variant) if isinstance(variant, str) else _choose(candidates, members[0])
        merged[rule, reason].append((members, error))
    for (rule, reason), parts in merged.items():
        members = [module for part, _ in parts for module in part]
        errors = [error for _, error in parts if error is not None]
        replacement = None if rule is None else rule.replacement
        entry = PatchEntry(name, kernel, len(members), replacement, max(errors, default=None), reason)
        yield _Group(entry, members, rule)


def _choose(candidates: list[Rule], module: nn.Module) -> tuple[Rule | None, float | None, str]:
    """The first candidate that computes what ``module`` does, its error, and why there is none."""
    reason = ""
    for rule in candidates:
        try:
            return rule, rule.verify(module), ""
        except (Mismatch, RuntimeError, TypeError, ValueError) as error:
            # A probe that the module's own forward rejects is a structure that the rule misjudged.
            reason = reason or f"{rule.replacement} is not the same: {error}"
    return None, None, reason


def _check_all_found(chosen: frozenset[str], plan: list[_Group]) -> None:
    for kernel in sorted(chosen):
        groups = [group for group in plan if group.entry.kernel == kernel]
        already = any(group.entry.reason == "already replaced" for group in groups)
        if not already and not any(group.rule is not None for group in groups):
            seen = "; ".join(f"{group.entry.structure}: {group.entry.reason}" for group in groups)
            raise ValueError(
                f"kernels asks for {kernel!r}, but nothing in the model can be replaced by it"
                + (f" ({seen})" if seen else "")
            )


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each causal LM in ``model`` with its head, as the model itself names it."""
    seen: set[int] = set()
    for module in model.modules():
        get_head = getattr(module, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        if isinstance(head, nn.Module) and id(head) not in seen:
            seen.add(id(head))
            yield module, head


def _watch_labels(model: nn.Module) -> list[Callable[[], None]]:
    """Makes a forward with labels ask for lazy logits without gradients too; returns how to stop that."""
    if _before_forward in model._forward_pre_hooks.values():
        return []
    return [
        model.register_forward_pre_hook(_before_forward, with_kwargs=True).remove,
        model.register_forward_hook(_after_forward, always_call=True).remove,
    ]


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model.__dict__.setdefault("_liger_loss_wanted", []).append(_loss_wanted.get())
    if kwargs.get("labels") is not None:
        _loss_wanted.set(True)


def _after_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _loss_wanted.set(model.__dict__["_liger_loss_wanted"].pop())
