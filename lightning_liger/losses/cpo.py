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
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from liger_ops.arguments import wrong_value
from lightning_liger.losses.dpo import (
    PairLogProbs,
    PairLosses,
    PreferenceOptions,
    pair_metrics,
    smoothed_sigmoid,
)
from lightning_liger.losses.options import Limits, NonNegative, Positive

CPOLoss = Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"]
LOSS_TYPES = get_args(CPOLoss)
Smoothing = Annotated[float, Limits(at_least=0, below=0.5)]
_AVERAGED = ("ipo", "simpo", "alphapo", "tpo-l")


class ContrastiveOptions(PreferenceOptions):
    """Base of options of losses of the difference of the scores of pairs."""

    loss_type: str
    beta: float
    label_smoothing: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
            raise wrong_value("label_smoothing", f"0 for loss_type={self.loss_type!r}", self.label_smoothing)

    def contrastive_losses(
        self, pairs: PairLogProbs, margin: float, nll: Tensor | None, alpha: float = 0.0
    ) -> PairLosses:
        """``hinge``, ``ipo``, ``sigmoid``, and all others as ``sigmoid`` with a margin."""
        log_probs = pairs.averages if self.loss_type in _AVERAGED else (pairs.chosen, pairs.rejected)
        chosen, rejected = (alphapo_score(score, alpha) for score in log_probs)
        logits = self.beta * (chosen - rejected)
        if self.loss_type == "hinge":
            losses = torch.relu(1 - logits)
        elif self.loss_type == "ipo":
            losses = (chosen - rejected - 0.5 / self.beta).square()
        else:
            logits = logits if self.loss_type == "sigmoid" else logits - margin
            losses = smoothed_sigmoid(logits, self.label_smoothing)
        return PairLosses(losses, nll, pair_metrics(self.beta * chosen, self.beta * rejected, *log_probs))


@dataclass(frozen=True)
class CPOOptions(ContrastiveOptions):
    """Options of CPO, SimPO and AlphaPO, with the names and defaults of TRL.

    Args:
        loss_type: A name in the table of :mod:`lightning_liger.losses.cpo`, or ``"alphapo"`` for ``"simpo"`` with
            ``cpo_alpha=0`` (set ``alpha`` with it).
        beta: Scale of the rewards; above 0.
        cpo_alpha: Factor of the negative log-likelihood of chosen completions. SimPO as in its paper needs 0: with the
            default, 1, ``"simpo"`` is CPO-SimPO.
        simpo_gamma: SimPO's target margin.
        alpha: AlphaPO's alpha (arXiv:2501.03884); 0 for none.
        label_smoothing: The probability in [0, 0.5) that a label is wrong; not for ``hinge`` and ``ipo``.
    """

    nll_part = 0
    loss_type: CPOLoss = "sigmoid"
    beta: Positive = 0.1
    cpo_alpha: NonNegative = 1.0
    simpo_gamma: float = 0.5
    alpha: float = 0.0
    label_smoothing: Smoothing = 0.0

    @property
    def has_nll(self) -> bool:
        return self.loss_type != "alphapo" and self.cpo_alpha > 0

    def losses(self, pairs: PairLogProbs) -> PairLosses:
        nll = self.cpo_alpha * pairs.nll if self.has_nll else None
        return self.contrastive_losses(pairs, self.simpo_gamma, nll, alpha=self.alpha)


def alphapo_score(log_probs: Tensor, alpha: float) -> Tensor:
    """``(1 - p^-alpha) / alpha`` from log p, or log p for ``alpha=0`` (AlphaPO, arXiv:2501.03884).

    From log p, because p itself underflows for all but short completions. It is kept below the largest float32.
    """
    if not alpha:
        return log_probs
    return -torch.expm1((-alpha * log_probs).clamp(max=80.0)) / alpha
