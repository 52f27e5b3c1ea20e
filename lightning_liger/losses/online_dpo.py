"""DPO of pairs that the policy generated (OnlineDPO), and its exploration bonus (XPO, arXiv:2405.21046).

``sigmoid`` is ``-log s(beta (R_w - R_r))``, and ``ipo`` is ``(R_w - R_r - 1 / (2 beta))^2`` of summed log-ratios: it is
not divided by lengths, unlike ``ipo`` of :mod:`lightning_liger.losses.dpo`.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from liger_ops.arguments import check_choice, check_number, wrong_type
from lightning_liger.losses.cpo import contrastive_loss
from lightning_liger.losses.dpo import PairLogProbs, PairLosses, log_ratios, pair_metrics


@dataclass(frozen=True)
class OnlineDPOOptions:
    """Options of :func:`online_dpo_loss`, with the names and defaults of TRL.

    Args:
        loss_type: ``"sigmoid"`` or ``"ipo"``.
        beta: Strength of the tie to the reference model, above 0; or one for each epoch, the last of which stays.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For one out of range.
    """

    loss_type: str = "sigmoid"
    beta: float | tuple[float, ...] = 0.1

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, ("sigmoid", "ipo"))
        betas: Any = self.beta
        if not isinstance(betas, list | tuple):
            check_number("beta", betas, above=0)
            return
        if not betas:
            raise wrong_type("beta", "a number or a list of numbers", betas)
        for index, beta in enumerate(betas):
            check_number(f"beta[{index}]", beta, above=0)

    def beta_of(self, epoch: int) -> float:
        """The beta of an epoch, counted from 0."""
        return self.beta[min(epoch, len(self.beta) - 1)] if isinstance(self.beta, list | tuple) else self.beta


def online_dpo_loss(pairs: PairLogProbs, options: OnlineDPOOptions, *, epoch: int = 0) -> PairLosses:
    """The loss of each pair, and ``rewards/*``, ``logps/*``.

    Raises:
        TypeError: For log-probabilities that are no floating-point tensors.
        ValueError: For missing reference log-probabilities, or vectors of different lengths.
    """
    beta, (chosen, rejected, _) = options.beta_of(epoch), log_ratios(pairs)
    losses = contrastive_loss(chosen - rejected, options.loss_type, beta)
    return PairLosses(losses, None, pair_metrics(beta * chosen, beta * rejected, pairs.chosen, pairs.rejected))


def xpo_loss(losses: Tensor, reference_completions: Tensor, alpha: float) -> Tensor:
    """``losses + alpha * log pi(y~ref|x)``: XPO's bonus for exploring, on completions of the reference model.

    Args:
        losses: Of :func:`online_dpo_loss`, ``[B]``.
        reference_completions: The policy's log-probabilities of completions that the reference model generated, summed
            over their tokens, ``[B]``.
        alpha: Factor of the bonus, at least 0.
    """
    check_number("alpha", alpha, at_least=0)
    return losses + alpha * reference_completions
