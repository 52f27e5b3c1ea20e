"""The table of problems: inputs, and every implementation of each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from benchmarks.cases import Maker
from benchmarks.losses import data, eager, formulas, others, ours
from benchmarks.losses.data import Data, Sizes

Call = Callable[[Data], Tensor]

AGAINST = ("eager", "compile", "trl", "liger")
"""Contenders that the command line can choose; ours always run."""
TITLES = {
    "eager": "eager",
    "compile": "torch.compile",
    "trl": "TRL",
    "liger": "liger-kernel",
    "ours": "lightning-liger",
}
"""Names in tables and figures; the settings of ours follow after a comma."""
WITHIN_BUDGET = f"ours, {ours.BUDGET_GIB:g} GiB"
IN_LOOP = "ours, in the loop"

BATCH = Sizes(8, 1024, 4096, 128256)
PAIR = Sizes(2, 32768, 4096, 128256)
TINY = Sizes(4, 8, 16, 320)
"""Sizes that replace all others with ``--quick``."""


@dataclass(frozen=True)
class Problem:
    """A loss, forward and backward, with a trained or a frozen head.

    Attributes:
        title: As in tables.
        make: Makes the tensors.
        trained: Whether the head takes a gradient.
        calls: The scalar loss of each contender but ``compile``, which is made from ``eager``.
        sizes: Of the measurement.
        check_sizes: Sizes at which gradients are compared with float32, None for ``sizes``.
        compiled: Whether torch.compile is measured.
    """

    title: str
    make: Callable[[Maker, Sizes, bool], Data]
    trained: bool
    calls: Mapping[str, Call]
    sizes: Sizes = BATCH
    check_sizes: Sizes | None = None
    compiled: bool = False


def _with_log_probs(loss: Callable[[formulas.LogProbs, Data], Tensor], trained: bool) -> dict[str, Call]:
    """A loss of log-probabilities by each op; a budget for logits saves a product where the head is trained."""
    ops = {"ours": ours.log_probs}
    ops |= {WITHIN_BUDGET: ours.log_probs_within_budget} if trained else {}
    ops |= {"eager": eager.log_probs, "trl": others.trl_log_probs}
    return {name: functools.partial(loss, op) for name, op in ops.items()}


def _for_kind(kind: str) -> dict[str, Call]:
    calls: dict[str, Call] = {"ours": ours.divergence, "eager": eager.divergence}
    if kind in ("forward_kl", "reverse_kl", "jsd"):
        calls["trl"] = others.trl_divergence
    if kind in ("forward_kl", "reverse_kl", "jsd", "cosine"):
        calls["liger"] = others.liger_divergence
    return {name: functools.partial(call, kind=kind) for name, call in calls.items()}


def _problems() -> dict[str, Problem]:
    found: dict[str, Problem] = {}
    for trained, suffix, words in ((True, "", "head trained"), (False, "_frozen", "head frozen")):
        loop: dict[str, Call] = {IN_LOOP: ours.weighted_sum_in_loop} if trained else {}
        found[f"log_probs{suffix}"] = Problem(
            f"log-probabilities, {words}",
            data.with_coefficients,
            trained,
            loop | _with_log_probs(formulas.weighted_sum, trained),
            compiled=trained,
        )
        loop = {IN_LOOP: ours.dpo_in_loop} if trained else {}
        found[f"dpo{suffix}"] = Problem(
            f"DPO with reference, {words}",
            data.with_reference,
            trained,
            loop | _with_log_probs(formulas.dpo, trained) | {"liger": others.liger_dpo},
        )
        loop = {IN_LOOP: ours.grpo_in_loop} if trained else {}
        found[f"grpo{suffix}"] = Problem(
            f"GRPO, {words}",
            data.with_rollouts,
            trained,
            loop | _with_log_probs(formulas.grpo, trained) | {"liger": others.liger_grpo},
        )
        found[f"entropy{suffix}"] = Problem(
            f"log-probabilities and entropy, {words}",
            data.with_coefficients,
            trained,
            {"ours": ours.with_entropy, "eager": eager.with_entropy, "trl": others.trl_with_entropy},
        )
    found["dpo_pair"] = dataclasses.replace(
        found["dpo"],
        title="DPO with reference, one pair, head trained",
        calls={name: call for name, call in found["dpo"].calls.items() if name != IN_LOOP},  # its chunk is the pair
        sizes=PAIR,
        check_sizes=Sizes(2, 1024, 4096, 128256),
    )
    for kind in eager.KINDS:
        found[kind] = Problem(
            kind.replace("_", " ").replace("kl", "KL").replace("jsd", "JSD").replace("mse", "MSE of logits"),
            data.with_teacher,
            True,
            _for_kind(kind),
            compiled=kind in ("forward_kl", "jsd"),
        )
    frozen = {name: call for name, call in found["forward_kl"].calls.items() if name != "liger"}  # it has one way
    found["forward_kl_frozen"] = Problem("forward KL, head frozen", data.with_teacher, False, frozen)
    for k in (16, 100):
        for renormalize in (False, True):
            found[f"top{k}" + "_renormalized" * renormalize] = Problem(
                f"log-probabilities of {k} ids" + ", renormalized" * renormalize,
                functools.partial(data.with_ids, k=k),
                True,
                {
                    "ours": functools.partial(ours.topk, renormalize=renormalize),
                    "eager": functools.partial(eager.topk, renormalize=renormalize),
                },
            )
    return found


PROBLEMS = _problems()
"""Every problem by its name on the command line."""
