"""Losses of preference pairs relative to a reference model: direct preference optimization and its relatives.

Per pair, R = log pi(y|x) - log pi_ref(y|x), summed over the completion, for the chosen (w) and rejected (r) completion;
n is the number of its tokens; h maps R by an f-divergence; D = h(R_w) - h(R_r), d = beta D; s is the logistic function.

=============  ==========================================================================  ==========================
type           loss of a pair                                                              source
=============  ==========================================================================  ==========================
sigmoid        -log s(d)                                                                   DPO, arXiv:2305.18290
hinge          max(0, 1 - d)                                                               SLiC-HF, arXiv:2305.10425
ipo            (h(R_w) / n_w - h(R_r) / n_r - 1 / (2 beta))^2                              IPO, arXiv:2310.12036
exo_pair       s(d) (log s(d) - log(1 - eps)) + s(-d) (log s(-d) - log eps)                EXO, arXiv:2402.00856
nca_pair       -log s(beta R_w) - log s(-beta R_w) / 2 - log s(-beta R_r) / 2              NCA, arXiv:2402.05369
robust         (-(1 - eps) log s(d) + eps log s(-d)) / (1 - 2 eps)                         arXiv:2403.00409
bco_pair       -log s(beta R_w) - log s(-beta R_r)                                         BCO, arXiv:2404.04656
sppo_hard      (R_w - 1 / (2 beta))^2 + (R_r + 1 / (2 beta))^2                             SPPO, arXiv:2405.00675
aot            -(1 - eps) log s(beta q) - eps log s(-beta q), q = sort(l_w - l_r)          AOT, arXiv:2406.05882
               - sort(ref_w - ref_r), both over the pairs of the batch
aot_unpaired   the same with q = sort(R_w) - sort(R_r)                                     AOT, arXiv:2406.05882
apo_zero       1 - s(beta R_w) + s(beta R_r)                                               APO, arXiv:2408.06266
apo_down       s(beta R_w) + 1 - s(beta (R_w - R_r))                                       APO, arXiv:2408.06266
discopop       (1 - m) (-log s(d)) + m exp(-d), m = s(d / tau)                             DiscoPOP, arXiv:2406.08414
sft            -log pi(y_w|x), averaged over the chosen tokens
sigmoid_norm   -log s(beta (h(R_w) / n_w - h(R_r) / n_r))                                  Tulu 3, arXiv:2411.15124
=============  ==========================================================================  ==========================
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import check_choice, check_number, wrong_type, wrong_value
from lightning_liger.losses.options import Options, Positive, Share

DPOLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
LOSS_TYPES, DIVERGENCES = get_args(DPOLoss), get_args(FDivergence)
_MAX_EXPONENT = 80.0  # whose exponential is a float32
_MAX_SQUARED = 1e18


class PairLogProbs(NamedTuple):
    """Log-probabilities of pairs, ``[B]`` each in float32 or float64, summed over the tokens of completions."""

    chosen: Tensor
    rejected: Tensor
    num_chosen: Tensor
    """The number of tokens of the chosen completion."""
    num_rejected: Tensor
    ref_chosen: Tensor | None = None
    """The reference model's."""
    ref_rejected: Tensor | None = None
    weight: Tensor | None = None
    """WPO's weight of each pair, see :func:`wpo_weights`."""
    chosen_nll: Tensor | None = None
    """The sum of ``-log p`` over the chosen completion's tokens where it is not ``-chosen`` (with ``ld_alpha``)."""
    gold: Tensor | None = None
    """Of the reference completion of a triple."""

    @property
    def averages(self) -> tuple[Tensor, Tensor]:
        """``chosen`` and ``rejected``, averaged over tokens; an empty completion counts as one token."""
        return self.chosen / self.num_chosen.clamp(min=1), self.rejected / self.num_rejected.clamp(min=1)

    @property
    def nll(self) -> Tensor:
        return -self.chosen if self.chosen_nll is None else self.chosen_nll


class PairLosses(NamedTuple):
    """Losses of pairs before they are averaged."""

    losses: Tensor
    """To be averaged over pairs, ``[B]``, differentiable."""
    nll: Tensor | None
    """Negative log-likelihoods with their weight in the loss, ``[B]``, whose sum is to be divided by the number of
    tokens; None if the loss has no such part."""
    metrics: dict[str, Tensor]
    """Detached vectors, ``[B]`` each, to be averaged over pairs; by the names that TRL uses."""


class PreferenceOptions(Options):
    """What the options of a preference loss say about it, whatever its formula."""

    needs_reference: ClassVar[bool] = False
    """Whether the loss needs log-probabilities of a reference model."""
    is_labelled: ClassVar[bool] = False
    """Whether its data are single completions with labels."""
    scores_prompts: ClassVar[bool] = False
    """Whether the negative log-likelihood of chosen sequences includes their prompts."""

    @property
    def num_sequences(self) -> int:
        """Sequences of one example: 2 of a pair, 3 of a triple."""
        return 2

    @property
    def nll_part(self) -> int | None:
        """Which sequence of an example the metric ``nll_loss`` is of, None if there is none."""
        return None

    @property
    def has_nll(self) -> bool:
        """Whether the loss has a part that is averaged over tokens."""
        return False

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of the loss itself."""
        return PAIR_METRICS if self.nll_part is None else (*PAIR_METRICS, "nll_loss")

    @property
    def is_of_single_examples(self) -> bool:
        """Whether the loss is a sum over pairs or triples, each of which depends on its own sequences only."""
        return not self.has_nll

    def losses(self, pairs: PairLogProbs) -> PairLosses:
        """The loss of each pair or triple, and its metrics."""
        raise NotImplementedError


@dataclass(frozen=True)
class DPOOptions(PreferenceOptions):
    """Options of DPO and its variants, with the names and defaults of TRL.

    Args:
        loss_type: A name in the table of :mod:`lightning_liger.losses.dpo`, or several, whose losses are added (MPO).
        loss_weights: The factor of each loss; None for 1.
        beta: Strength of the KL penalty toward the reference model (IPO's tau); above 0.
        label_smoothing: The probability that a label is wrong: of ``robust`` (below 0.5), ``exo_pair`` (above 0), and
            ``aot``, ``aot_unpaired``.
        f_divergence_type: The divergence from the reference (arXiv:2309.16240). All but ``"reverse_kl"`` are only for
            losses of the difference D.
        f_alpha_divergence_coef: Alpha of ``"alpha_divergence"``.
        ld_alpha: Weight in [0, 1] of the tokens of a completion that the shorter one of its pair does not have
            (LD-DPO, arXiv:2409.06411). None for 1.
        use_weighting: Whether losses are weighted by the policy's probability of both completions (WPO,
            arXiv:2406.11827). With ``sft``, each pair's negative log-likelihood is weighted too.
        discopop_tau: Tau of ``discopop``; above 0.
    """

    needs_reference = True
    loss_type: DPOLoss | Sequence[DPOLoss] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    beta: Positive = 0.1
    label_smoothing: Share = 0.0
    f_divergence_type: FDivergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: Share | None = None
    use_weighting: bool = False
    discopop_tau: Positive = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        types, weights, smoothing = self.loss_types, self.loss_weights, self.label_smoothing
        for each in types:
            check_choice("loss_type", each, LOSS_TYPES)
        if weights is not None:
            if not isinstance(weights, list | tuple):
                raise wrong_type("loss_weights", "a list of numbers or None", weights)
            for index, weight in enumerate(weights):
                check_number(f"loss_weights[{index}]", weight)
            if len(weights) != len(types):
                raise wrong_value("loss_weights", f"one weight for each of the {len(types)} loss types", weights)
        if self.f_divergence_type != "reverse_kl" and not _OF_DIFFERENCE.issuperset(types):
            others = f"'reverse_kl' for loss types other than {', '.join(sorted(_OF_DIFFERENCE))}"
            raise wrong_value("f_divergence_type", others, self.f_divergence_type)
        if "robust" in types and not smoothing < 0.5:
            raise wrong_value("label_smoothing", "below 0.5 for loss_type='robust'", smoothing)
        if "exo_pair" in types and not 0 < smoothing < 1:
            expected = "above 0 and below 1 for loss_type='exo_pair', such as 1e-3"
            raise wrong_value("label_smoothing", expected, smoothing)
        if smoothing and not _SMOOTHED.intersection(types):
            others = f"0 for loss types other than {', '.join(sorted(_SMOOTHED))}"
            raise wrong_value("label_smoothing", others, smoothing)
        if self.use_weighting and _SORTED.intersection(types):
            raise wrong_value("use_weighting", "False for aot and aot_unpaired, whose losses mix pairs", True)

    @property
    def loss_types(self) -> tuple[str, ...]:
        """The names in ``loss_type``."""
        types = self.loss_type
        if isinstance(types, str):
            return (types,)
        if not isinstance(types, list | tuple) or not types:
            raise wrong_type("loss_type", "a name or a list of names", types)
        return tuple(types)

    @property
    def has_nll(self) -> bool:
        return "sft" in self.loss_types

    @property
    def is_of_single_examples(self) -> bool:
        return super().is_of_single_examples and not _SORTED.intersection(self.loss_types)

    def losses(self, pairs: PairLogProbs) -> PairLosses:
        ratios = _Ratios(pairs, self)
        losses, nll = torch.zeros_like(ratios.chosen), None
        factor = 1.0 if pairs.weight is None or not self.use_weighting else pairs.weight.detach()
        weights = self.loss_weights or (1.0,) * len(self.loss_types)
        for loss_type, weight in zip(self.loss_types, weights, strict=True):
            if loss_type == "sft":
                nll = weight * factor * pairs.nll + (0.0 if nll is None else nll)
            else:
                losses = losses + weight * factor * _LOSSES[loss_type](ratios)
        return PairLosses(losses, nll, pair_metrics(ratios.chosen, ratios.rejected, pairs.chosen, pairs.rejected))


PAIR_METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)


def pair_metrics(
    chosen_rewards: Tensor, rejected_rewards: Tensor, chosen: Tensor, rejected: Tensor
) -> dict[str, Tensor]:
    """Metrics of pairs by TRL's names, from implicit rewards and log-probabilities, ``[B]`` each."""
    chosen_rewards, rejected_rewards = chosen_rewards.detach(), rejected_rewards.detach()
    accuracies = (chosen_rewards > rejected_rewards).to(chosen_rewards.dtype)
    rewards = (chosen_rewards, rejected_rewards, accuracies, chosen_rewards - rejected_rewards)
    return dict(zip(PAIR_METRICS, (*rewards, chosen.detach(), rejected.detach()), strict=True))


def wpo_weights(log_probs: Tensor, log_sum_sq_probs: Tensor, num_chosen: Tensor, num_rejected: Tensor) -> Tensor:
    """WPO's weight of each pair, ``[B]``, without gradient (arXiv:2406.11827, equation 2).

    ``exp(mean(log p - log sum p^2))`` over the tokens of the chosen completion, times the same of the rejected one:
    from sums over B chosen and then B rejected ones, ``[2B]``, and their numbers of tokens.
    """
    chosen, rejected = (log_probs - log_sum_sq_probs).detach().chunk(2)
    return (chosen / num_chosen.clamp(min=1) + rejected / num_rejected.clamp(min=1)).exp()


def smoothed_sigmoid(logits: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - eps) log s(x) - eps log s(-x)``."""
    loss = -F.logsigmoid(logits)
    return loss if not label_smoothing else (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-logits)


class _Ratios:
    """Of pairs: ``chosen`` and ``rejected`` are beta R, the implicit rewards."""

    def __init__(self, pairs: PairLogProbs, options: DPOOptions) -> None:
        self.pairs, self.beta, self.options, self.eps = pairs, options.beta, options, options.label_smoothing
        self.ratios = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected  # type: ignore[operator]
        self.chosen, self.rejected = (options.beta * ratio for ratio in self.ratios)

    def score(self, ratio: Tensor) -> Tensor:
        """h of a log-ratio."""
        kind, alpha = self.options.f_divergence_type, self.options.f_alpha_divergence_coef
        if kind == "forward_kl":
            return -torch.expm1((-ratio).clamp(max=_MAX_EXPONENT))
        if kind == "js_divergence":
            return math.log(2) + F.logsigmoid(ratio)
        if kind == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
            return torch.expm1(((alpha - 1) * ratio).clamp(max=_MAX_EXPONENT)) / (alpha - 1)
        return ratio

    @cached_property
    def logits(self) -> Tensor:
        """beta D."""
        return self.beta * (self.score(self.ratios[0]) - self.score(self.ratios[1]))

    @cached_property
    def mean_difference(self) -> Tensor:
        """D of scores divided by the numbers of tokens; an empty completion counts as one token."""
        scores = [self.score(ratio) for ratio in self.ratios]
        chosen, rejected = self.pairs._replace(chosen=scores[0], rejected=scores[1]).averages
        return chosen - rejected

    def sorted_loss(self, first: Tensor, second: Tensor) -> Tensor:
        """AOT's loss of the difference of sorted values."""
        return smoothed_sigmoid(self.beta * (first.sort().values - second.sort().values), self.eps)


def _exo(r: _Ratios) -> Tensor:
    positive, negative = F.logsigmoid(r.logits), F.logsigmoid(-r.logits)
    return positive.exp() * (positive - math.log1p(-r.eps)) + negative.exp() * (negative - math.log(r.eps))


def _aot(r: _Ratios) -> Tensor:
    return r.sorted_loss(r.pairs.chosen - r.pairs.rejected, r.pairs.ref_chosen - r.pairs.ref_rejected)  # type: ignore[operator]


def _discopop(r: _Ratios) -> Tensor:
    # m exp(-d) is exp(log m - d), which does not overflow: log m falls faster than d for tau below 1.
    scaled = r.logits / r.options.discopop_tau
    exponential = (F.logsigmoid(scaled) - r.logits).clamp(max=_MAX_EXPONENT).exp()
    return -F.logsigmoid(r.logits) * (1 - torch.sigmoid(scaled)) + exponential


_LOSSES: dict[str, Callable[[_Ratios], Tensor]] = {
    "sigmoid": lambda r: -F.logsigmoid(r.logits),
    "hinge": lambda r: torch.relu(1 - r.logits),
    # Bounded, as the square of an exponential that was is not.
    "ipo": lambda r: (r.mean_difference - 0.5 / r.beta).clamp(-_MAX_SQUARED, _MAX_SQUARED).square(),
    "exo_pair": _exo,
    "nca_pair": lambda r: -F.logsigmoid(r.chosen) - 0.5 * F.logsigmoid(-r.chosen) - 0.5 * F.logsigmoid(-r.rejected),
    "robust": lambda r: (r.eps * F.logsigmoid(-r.logits) - (1 - r.eps) * F.logsigmoid(r.logits)) / (1 - 2 * r.eps),
    "bco_pair": lambda r: -F.logsigmoid(r.chosen) - F.logsigmoid(-r.rejected),
    "sppo_hard": lambda r: (r.ratios[0] - 0.5 / r.beta).square() + (r.ratios[1] + 0.5 / r.beta).square(),
    "aot": _aot,
    "aot_unpaired": lambda r: r.sorted_loss(*r.ratios),
    "apo_zero": lambda r: torch.sigmoid(-r.chosen) + torch.sigmoid(r.rejected),
    "apo_down": lambda r: torch.sigmoid(r.chosen) + torch.sigmoid(r.rejected - r.chosen),
    "discopop": _discopop,
    "sigmoid_norm": lambda r: -F.logsigmoid(r.beta * r.mean_difference),
}
_OF_DIFFERENCE = frozenset(("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"))
_SMOOTHED = frozenset(("exo_pair", "robust", "aot", "aot_unpaired"))
_SORTED = frozenset(("aot", "aot_unpaired"))
