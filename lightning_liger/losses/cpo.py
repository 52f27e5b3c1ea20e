"""Losses of preference pairs without a reference model: CPO, SimPO, AlphaPO.

S is the log-probability of a completion, summed over its tokens for ``sigmoid`` and ``hinge``, averaged for ``ipo`` and
``simpo``; with ``alpha`` it becomes ``(1 - exp(-alpha S)) / alpha``. D = S_w - S_r; s is the logistic function.

=======  =================================================================  ======================
type     loss of a pair                                                     source
=======  =================================================================  ======================
sigmoid  -(1 - eps) log s(beta D) - eps log s(-beta D)                      CPO, arXiv:2401.08417
hinge    max(0, 1 - beta D)                                                 SLiC-HF, arXiv:2305.10425
ipo      (D - 1 / (2 beta))^2                                               IPO, arXiv:2310.12036
simpo    as sigmoid, of beta D - simpo_gamma                                SimPO, arXiv:2405.14734
=======  =================================================================  ======================

The whole loss is the mean over pairs plus ``cpo_alpha`` times the negative log-likelihood, averaged over the tokens of
the chosen completions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_ops.arguments import check_choice, check_number, wrong_value
from lightning_liger.losses.dpo import (
    PAIR_METRICS,
    PairLogProbs,
    PairLosses,
    PreferenceOptions,
    check_pairs,
    pair_metrics,
    smoothed_sigmoid,
)

LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")
_AVERAGED = ("ipo", "simpo", "alphapo")


@dataclass(frozen=True)
class CPOOptions(PreferenceOptions):
    """Options of :func:`cpo_loss`, with the names and defaults of TRL.

    Args:
        loss_type: ``"sigmoid"``, ``"hinge"``, ``"ipo"``, ``"simpo"``, or ``"alphapo"`` for ``"simpo"`` with
            ``cpo_alpha=0`` (set ``alpha`` with it).
        beta: Scale of the rewards; above 0.
        cpo_alpha: Factor of the negative log-likelihood. SimPO as in its paper needs 0: with the default, 1,
            ``"simpo"`` is CPO-SimPO.
        simpo_gamma: SimPO's target margin.
        alpha: AlphaPO's alpha (arXiv:2501.03884); 0 for none.
        label_smoothing: The probability in [0, 0.5) that a label is wrong; not for ``hinge`` and ``ipo``.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For one out of range, or one that the loss would ignore.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5
    alpha: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_number("beta", self.beta, above=0)
        check_number("cpo_alpha", self.cpo_alpha, at_least=0)
        check_number("simpo_gamma", self.simpo_gamma)
        check_number("alpha", self.alpha)
        check_label_smoothing(self.label_smoothing, self.loss_type)

    @property
    def nll_weight(self) -> float:
        """The factor of the negative log-likelihood."""
        return 0.0 if self.loss_type == "alphapo" else self.cpo_alpha

    @property
    def has_nll(self) -> bool:
        """Whether the loss has a part that is averaged over tokens."""
        return self.nll_weight > 0

    @property
    def nll_part(self) -> int:
        return 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*PAIR_METRICS, "nll_loss")


def cpo_loss(pairs: PairLogProbs, options: CPOOptions) -> PairLosses:
    """The loss of each pair, and ``rewards/*``, ``logps/*`` (averaged over tokens where the loss is).

    Raises:
        TypeError: For log-probabilities that are no floating-point tensors.
        ValueError: For vectors of different lengths.
    """
    check_pairs(pairs)
    chosen, rejected = pairs.averages if options.loss_type in _AVERAGED else (pairs.chosen, pairs.rejected)
    rewards = [alphapo_score(score, options.alpha) for score in (chosen, rejected)]
    losses = contrastive_loss(rewards[0] - rewards[1], options.loss_type, options.beta, options.simpo_gamma,
                              options.label_smoothing)  # fmt: skip
    nll = None
    if options.has_nll:
        nll = options.nll_weight * (-pairs.chosen if pairs.chosen_nll is None else pairs.chosen_nll)
    metrics = pair_metrics(options.beta * rewards[0], options.beta * rewards[1], chosen, rejected)
    return PairLosses(losses, nll, metrics)


def check_label_smoothing(label_smoothing: float, loss_type: str) -> None:
    """Raises unless :func:`contrastive_loss` takes the label smoothing."""
    check_number("label_smoothing", label_smoothing, at_least=0, below=0.5)
    if label_smoothing and loss_type in ("hinge", "ipo"):
        raise wrong_value("label_smoothing", f"0 for loss_type={loss_type!r}", label_smoothing)


def alphapo_score(log_probs: Tensor, alpha: float) -> Tensor:
    """``(1 - p^-alpha) / alpha`` from log p, or log p for ``alpha=0`` (AlphaPO, arXiv:2501.03884).

    From log p, because p itself underflows for all but short completions. It is kept below the largest float32.
    """
    if not alpha:
        return log_probs
    return -torch.expm1((-alpha * log_probs).clamp(max=80.0)) / alpha


def contrastive_loss(
    difference: Tensor, loss_type: str, beta: float, margin: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """``sigmoid``, ``hinge`` or ``ipo`` of a difference of scores; all other types are sigmoid with a margin."""
    if loss_type == "hinge":
        return torch.relu(1 - beta * difference)
    if loss_type == "ipo":
        return (difference - 0.5 / beta).square()
    logits = beta * difference
    return smoothed_sigmoid(logits if loss_type == "sigmoid" else logits - margin, label_smoothing)
