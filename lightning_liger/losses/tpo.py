"""Losses of triples: a chosen, a rejected and a reference (gold) completion of each prompt (TPO, arXiv:2405.16681).

D is the difference of the log-probabilities of the chosen and the rejected completion, summed over tokens for
``sigmoid`` and ``hinge``, averaged for ``ipo`` and ``tpo-l``; ``tpo-l`` is ``sigmoid`` of beta D - tpo_l_gamma. The
whole loss is the mean over triples plus ``tpo_alpha`` times the negative log-likelihood of the reference completions,
averaged over their tokens. There is no reference model.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from liger_ops.arguments import check_choice, check_number, check_shape, check_tensor
from lightning_liger.losses.cpo import check_label_smoothing, contrastive_loss
from lightning_liger.losses.dpo import (
    PAIR_METRICS,
    PairLogProbs,
    PairLosses,
    PreferenceOptions,
    check_pairs,
    pair_metrics,
)

LOSS_TYPES = ("sigmoid", "hinge", "ipo", "tpo-l")


@dataclass(frozen=True)
class TPOOptions(PreferenceOptions):
    """Options of :func:`tpo_loss`, with the names and defaults of TRL.

    Args:
        loss_type: ``"sigmoid"``, ``"hinge"``, ``"ipo"`` or ``"tpo-l"``.
        beta: Scale of the rewards; above 0.
        tpo_alpha: Factor of the negative log-likelihood of the reference completions; 0 needs none.
        tpo_l_gamma: Target margin of ``"tpo-l"``.
        label_smoothing: The probability in [0, 0.5) that a label is wrong; not for ``hinge`` and ``ipo``.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For one out of range, or one that the loss would ignore.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.01
    tpo_alpha: float = 1.0
    tpo_l_gamma: float = 0.5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_number("beta", self.beta, above=0)
        check_number("tpo_alpha", self.tpo_alpha, at_least=0)
        check_number("tpo_l_gamma", self.tpo_l_gamma)
        check_label_smoothing(self.label_smoothing, self.loss_type)

    @property
    def has_nll(self) -> bool:
        """Whether the loss has a part that is averaged over tokens."""
        return self.tpo_alpha > 0

    @property
    def num_sequences(self) -> int:
        return 3 if self.has_nll else 2

    @property
    def nll_part(self) -> int | None:
        return 2 if self.has_nll else None

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*PAIR_METRICS, *(("nll_loss",) if self.has_nll else ()))


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
    chosen, rejected = pairs.averages if options.loss_type in ("ipo", "tpo-l") else (pairs.chosen, pairs.rejected)
    difference = chosen - rejected
    losses = contrastive_loss(difference, options.loss_type, options.beta, options.tpo_l_gamma, options.label_smoothing)
    nll = None
    if options.has_nll:
        check_tensor("reference", reference)
        reference = cast(Tensor, reference)
        check_shape("reference", reference, chosen.shape, "one value for each triple")
        nll = -options.tpo_alpha * reference
    return PairLosses(losses, nll, pair_metrics(options.beta * chosen, options.beta * rejected, chosen, rejected))
