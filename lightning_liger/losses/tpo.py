"""Losses of triples: a chosen, a rejected and a reference (gold) completion of each prompt (TPO, arXiv:2405.16681).

D is the difference of the log-probabilities of the chosen and the rejected completion, summed over tokens for
``sigmoid`` and ``hinge``, averaged for ``ipo`` and ``tpo-l``; ``tpo-l`` is ``sigmoid`` of beta D - tpo_l_gamma. The
whole loss is the mean over triples plus ``tpo_alpha`` times the negative log-likelihood of the reference completions,
averaged over their tokens. There is no reference model.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from torch import Tensor

from lightning_liger.losses.cpo import ContrastiveOptions, Smoothing
from lightning_liger.losses.dpo import PairLogProbs, PairLosses
from lightning_liger.losses.options import NonNegative, Positive

TPOLoss = Literal["sigmoid", "hinge", "ipo", "tpo-l"]
LOSS_TYPES = get_args(TPOLoss)


@dataclass(frozen=True)
class TPOOptions(ContrastiveOptions):
    """Options of TPO, with the names and defaults of TRL.

    Args:
        loss_type: The loss of a pair, see :mod:`lightning_liger.losses.tpo`.
        beta: Scale of the rewards; above 0.
        tpo_alpha: Factor of the negative log-likelihood of the reference completions; with 0, data are pairs.
        tpo_l_gamma: Target margin of ``"tpo-l"``.
        label_smoothing: The probability in [0, 0.5) that a label is wrong; not for ``hinge`` and ``ipo``.
    """

    loss_type: TPOLoss = "sigmoid"
    beta: Positive = 0.01
    tpo_alpha: NonNegative = 1.0
    tpo_l_gamma: float = 0.5
    label_smoothing: Smoothing = 0.0

    @property
    def has_nll(self) -> bool:
        return self.tpo_alpha > 0

    @property
    def num_sequences(self) -> int:
        return 3 if self.has_nll else 2

    @property
    def nll_part(self) -> int | None:
        return 2 if self.has_nll else None

    def losses(self, pairs: PairLogProbs) -> PairLosses:
        nll = -self.tpo_alpha * cast(Tensor, pairs.gold) if self.has_nll else None
        return self.contrastive_losses(pairs, self.tpo_l_gamma, nll)
