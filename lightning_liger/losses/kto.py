"""Losses of single completions that are labeled desirable or undesirable: KTO, APO-zero, BCO.

R = log pi(y|x) - log pi_ref(y|x), summed over the completion; s is the logistic function.

=================  ==============================  ==============================  ========================
type               desirable                       undesirable                     source
=================  ==============================  ==============================  ========================
kto                1 - s(beta (R - kl))            1 - s(beta (kl - R))            KTO, arXiv:2402.01306
apo_zero_unpaired  1 - s(beta R)                   s(beta R)                       APO, arXiv:2408.06266
bco                -log s(beta R - delta)          -log s(delta - beta R)          BCO, arXiv:2404.04656
=================  ==============================  ==============================  ========================

``kl`` is the mean of R over mismatched pairs of prompt and completion, at least 0, and ``delta`` is a running mean of
beta R (:func:`running_delta`). Neither has a gradient. Losses are averaged over all completions.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.losses.dpo import PAIR_METRICS, PreferenceOptions
from lightning_liger.losses.options import NonNegative, Positive

KTOLoss = Literal["kto", "apo_zero_unpaired", "bco"]
LOSS_TYPES = get_args(KTOLoss)


@dataclass(frozen=True)
class KTOOptions(PreferenceOptions):
    """Options of :func:`kto_loss`, with the names and defaults of TRL.

    Args:
        loss_type: A name in the table of :mod:`lightning_liger.losses.kto`.
        beta: Strength of the KL penalty toward the reference model; above 0.
        desirable_weight: Factor of the losses of desirable completions. The KTO paper (equation 8) advises
            ``desirable_weight * n_desirable / (undesirable_weight * n_undesirable)`` between 1 and 4/3.
        undesirable_weight: Factor of the losses of undesirable completions.
    """

    needs_reference = True
    is_labelled = True
    num_sequences = 1
    loss_type: KTOLoss = "kto"
    beta: Positive = 0.1
    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0

    @property
    def needs_kl(self) -> bool:
        """Whether the loss needs mismatched pairs."""
        return self.loss_type == "kto"

    @property
    def metric_names(self) -> tuple[str, ...]:
        names = tuple(name for name in PAIR_METRICS if name != "rewards/accuracies")
        return (*names, "kl") if self.needs_kl else names


def kto_loss(
    log_probs: Tensor, ref_log_probs: Tensor, labels: Tensor, options: KTOOptions, *, baseline: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """The loss of each completion with its weight, differentiable, and its reward ``beta R``, ``[B]``.

    From log-probabilities summed over completions, ``[B]``, and whether they are desirable, bool; ``baseline`` is
    ``kl`` of :func:`kl_estimate` for ``"kto"``, ``delta`` for ``"bco"``.
    """
    ratios = log_probs - ref_log_probs
    baseline = baseline.detach() if isinstance(baseline, Tensor) else baseline
    sign = 2 * labels.to(ratios.dtype) - 1
    if options.loss_type == "bco":
        losses = -F.logsigmoid(sign * (options.beta * ratios - baseline))
    else:
        losses = torch.sigmoid(-sign * options.beta * (ratios - baseline if options.needs_kl else ratios))
    weighted = torch.where(labels, options.desirable_weight * losses, options.undesirable_weight * losses)
    return weighted, options.beta * ratios.detach()


def kl_estimate(total: Tensor, count: Tensor | float) -> Tensor:
    """KTO's ``kl``: the mean of R from its sum over mismatched pairs and their number, at least 0; 0 without any."""
    count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    return (total.detach() / count).clamp(min=0)


def reward_sums(rewards: Tensor, labels: Tensor) -> Tensor:
    """The sums of rewards and the numbers of completions, ``[2, 2]``: of desirable ones and of undesirable ones."""
    masks = torch.stack((labels, ~labels))
    return torch.stack((torch.where(masks, rewards.detach(), 0).sum(-1), masks.sum(-1)))


def running_delta(sums: Tensor) -> Tensor:
    """BCO's delta from the sum of all :func:`reward_sums`, a scalar in float32: the mean of the means of both kinds.

    Of one kind only until there is another, 0 before the first.
    """
    means = sums[0] / sums[1].clamp(min=1)
    return (means.sum() / (sums[1] > 0).sum().clamp(min=1)).float()
