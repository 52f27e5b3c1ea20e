"""Losses of triples: a chosen, a rejected and a reference (gold) completion of each prompt (TPO, arXiv:2405.16681).

D is the difference of the log-probabilities of the chosen and the rejected completion, summed over tokens for
``sigmoid`` and ``hinge``, averaged for ``ipo`` and ``tpo-l``; ``tpo-l`` is ``sigmoid`` of beta D - tpo_l_gamma. The
whole loss is the mean over triples plus ``tpo_alpha`` times the negative log-likelihood of the reference completions,
averaged over their tokens. There is no reference model.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from torch import Tensor

from liger_ops.arguments import check_shape, check_tensor
from lightning_liger.losses.cpo import Smoothing, check_label_smoothing, contrastive_losses
from lightning_liger.losses.dpo import PairLogProbs, PairLosses, PreferenceOptions, check_pairs
from lightning_liger.losses.options import NonNegative, Positive

TPOLoss = Literal["sigmoid", "hinge", "ipo", "tpo-l"]
LOSS_TYPES = get_args(TPOLoss)


@dataclass(frozen=True)
class TPOOptions(PreferenceOptions):
    """Options of :func:`tpo_loss`, with the names and defaults of TRL.

    Args:
        loss_type: The loss of a pair, see :mod:`lightning_liger.losses.tpo`.
        beta: Scale of the rewards; above 0.
        tpo_alpha: Factor of the negative log-likelihood of the reference completions; with 0, data are pairs.
        tpo_l_gamma: Target margin of ``"tpo-l"``.
        label_smoothing: The probability in [0, 0.5) that a label is wrong; not for ``hinge`` and ``ipo``.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For one out of range, or one that the loss would ignore.
    """

    loss_type: TPOLoss = "sigmoid"
    beta: Positive = 0.01
    tpo_alpha: NonNegative = 1.0
    tpo_l_gamma: float = 0.5
    label_smoothing: Smoothing = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing, self.loss_type)

    @property
    def has_nll(self) -> bool:
        return self.tpo_alpha > 0

    @property
    def num_sequences(self) -> int:
        return 3 if self.has_nll else 2

    @property
    def nll_part(self) -> int | None:
        return 2 if self.has_nll else None

    def losses(self, pairs: PairLogProbs, gold: Tensor | None) -> PairLosses:
        return tpo_loss(pairs, gold, self)


def tpo_loss(pairs: PairLogProbs, reference: Tensor | None, options: TPOOptions) -> PairLosses:
    """The loss of each triple, and ``rewards/*``, ``logps/*`` (averaged over tokens where the loss is).

    Args:
        pairs: Of the chosen and the rejected completion.
        reference: Log-probabilities of the reference completions, summed over their tokens, ``[B]``. None for
            ``tpo_alpha=0``.
        options: Of the loss.

    Raises:
        TypeError: For log-probabilities that are no floating-point tensors.
        ValueError: For vectors of different lengths.
    """
    check_pairs(pairs)
    nll = None
    if options.has_nll:
        check_tensor("reference", reference)
        reference = cast(Tensor, reference)
        check_shape("reference", reference, pairs.chosen.shape, "one value for each triple")
        nll = -options.tpo_alpha * reference
    return contrastive_losses(pairs, options.loss_type, options.beta, options.tpo_l_gamma, options.label_smoothing, nll)
