"""Odds ratio preference optimization, without a reference model (ORPO, arXiv:2403.07691).

With x the log-probability of a completion averaged over its tokens, the log-odds are x - log(1 - e^x), and the loss of
a pair is ``-beta log s(log-odds(chosen) - log-odds(rejected))``. The whole loss is the mean over pairs plus the
negative log-likelihood of the chosen sequences, prompts included, averaged over their tokens.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.losses.dpo import PairLogProbs, PairLosses, PreferenceOptions, pair_metrics
from lightning_liger.losses.options import Positive

_LARGEST = -1e-7
"""Of log-probabilities: those of certain completions round to 0, whose odds are infinite."""


@dataclass(frozen=True)
class ORPOOptions(PreferenceOptions):
    """Options of ORPO, with the names and defaults of TRL.

    Args:
        beta: Factor of the odds ratio's loss (lambda in the paper); above 0.
    """

    scores_prompts = True
    has_nll = True
    nll_part = 0
    beta: Positive = 0.1

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*super().metric_names, "log_odds_ratio", "log_odds_chosen")

    def losses(self, pairs: PairLogProbs) -> PairLosses:
        chosen, rejected = pairs.averages
        log_odds = log_odds_of(chosen) - log_odds_of(rejected)
        log_ratio = F.logsigmoid(log_odds)
        metrics = pair_metrics(self.beta * chosen, self.beta * rejected, chosen, rejected)
        metrics |= {"log_odds_ratio": log_ratio.detach(), "log_odds_chosen": log_odds.detach()}
        return PairLosses(-self.beta * log_ratio, pairs.nll, metrics)


def log_odds_of(log_probs: Tensor) -> Tensor:
    """``x - log(1 - e^x)`` of log-probabilities, which are taken as at most -1e-7; differentiable.

    The derivative, ``1 / (1 - e^x)``, is large near 0, and 0 above -1e-7.
    """
    x = log_probs.clamp(max=_LARGEST)
    return x - log1mexp(x)


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - e^x)`` for x < 0, to full precision near 0 and far from it."""
    near = x > -math.log(2)
    # Both branches get arguments for which they are finite, so that neither makes the other's gradient NaN.
    small = torch.where(near, x, -1.0)
    large = torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
