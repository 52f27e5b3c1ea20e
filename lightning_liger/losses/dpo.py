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
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_floating_tensors,
    check_number,
    check_shape,
    wrong_type,
    wrong_value,
)

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_MAX_EXPONENT = 80.0  # whose exponential is a float32
_MAX_SQUARED = 1e18


class PairLogProbs(NamedTuple):
    """Log-probabilities of pairs of completions, each ``[B]`` in float32 or float64."""

    chosen: Tensor
    """Summed over the completion's tokens, differentiable."""
    rejected: Tensor
    """The same of the rejected completion."""
    num_chosen: Tensor
    """The number of tokens of the chosen completion, ``[B]``."""
    num_rejected: Tensor
    """The number of tokens of the rejected completion, ``[B]``."""
    ref_chosen: Tensor | None = None
    """The reference model's sum over the chosen completion."""
    ref_rejected: Tensor | None = None
    """The reference model's sum over the rejected completion."""
    weight: Tensor | None = None
    """WPO's weight of each pair, see :func:`wpo_weights`."""
    chosen_nll: Tensor | None = None
    """The sum of ``-log p`` over the chosen completion's tokens where it is not ``-chosen`` (with ``ld_alpha``)."""

    @property
    def averages(self) -> tuple[Tensor, Tensor]:
        """``chosen`` and ``rejected``, averaged over tokens; an empty completion counts as one token."""
        return self.chosen / self.num_chosen.clamp(min=1), self.rejected / self.num_rejected.clamp(min=1)


class PairLosses(NamedTuple):
    """Losses of pairs before they are averaged."""

    losses: Tensor
    """Each pair's loss, ``[B]``, to be averaged over pairs; differentiable."""
    nll: Tensor | None
    """Each pair's negative log-likelihood with its weight in the loss, ``[B]``, to be summed and divided by the number
    of tokens that it is summed over; None if the loss has no such part."""
    metrics: dict[str, Tensor]
    """Detached vectors, ``[B]`` each, to be averaged over pairs; by the names that TRL uses."""


class PreferenceOptions:
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
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that the loss itself computes."""
        return PAIR_METRICS

    @property
    def has_nll(self) -> bool:
        """Whether the loss has a part that is averaged over tokens."""
        return False

    @property
    def is_of_single_examples(self) -> bool:
        """Whether the loss is a sum over pairs or triples, each of which depends on its own sequences only."""
        return not self.is_labelled and not self.has_nll


@dataclass(frozen=True)
class DPOOptions(PreferenceOptions):
    """Options of :func:`dpo_loss`, with the names and defaults of TRL.

    Args:
        loss_type: A name in the table of :mod:`lightning_liger.losses.dpo`, or several, whose losses are added (MPO).
        loss_weights: The factor of each loss; None for 1.
        beta: Strength of the tie to the reference model (IPO's tau); above 0.
        label_smoothing: The probability that a label is wrong: of ``robust`` (below 0.5), ``exo_pair`` (above 0), and
            ``aot``, ``aot_unpaired``.
        f_divergence_type: ``"reverse_kl"``, ``"forward_kl"``, ``"js_divergence"`` or ``"alpha_divergence"``
            (arXiv:2309.16240). The last three are for losses of the difference D only.
        f_alpha_divergence_coef: Alpha of ``"alpha_divergence"``.
        ld_alpha: Weight in [0, 1] of the tokens of a completion that the shorter one of its pair does not have
            (LD-DPO, arXiv:2409.06411). None for 1.
        use_weighting: Whether losses are weighted by the policy's probability of both completions (WPO,
            arXiv:2406.11827). With ``sft``, each pair's negative log-likelihood is weighted too.
        discopop_tau: Tau of ``discopop``; above 0.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For one out of range, and combinations that have no meaning.
    """

    needs_reference = True
    loss_type: str | tuple[str, ...] = "sigmoid"
    loss_weights: tuple[float, ...] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        types = self.loss_types
        for each in types:
            check_choice("loss_type", each, LOSS_TYPES)
        weights = self.loss_weights
        if weights is not None:
            if not isinstance(weights, list | tuple):
                raise wrong_type("loss_weights", "a list of numbers or None", weights)
            for index, weight in enumerate(weights):
                check_number(f"loss_weights[{index}]", weight)
            if len(weights) != len(types):
                raise wrong_value("loss_weights", f"one weight for each of the {len(types)} loss types", weights)
        check_number("beta", self.beta, above=0)
        check_number("label_smoothing", self.label_smoothing, at_least=0, at_most=1)
        check_choice("f_divergence_type", self.f_divergence_type, DIVERGENCES)
        check_number("f_alpha_divergence_coef", self.f_alpha_divergence_coef)
        check_number("ld_alpha", self.ld_alpha, at_least=0, at_most=1, optional=True)
        check_bool("use_weighting", self.use_weighting)
        check_number("discopop_tau", self.discopop_tau, above=0)
        if self.f_divergence_type != "reverse_kl" and not _OF_DIFFERENCE.issuperset(types):
            raise wrong_value(
                "f_divergence_type",
                f"'reverse_kl' for loss types other than {', '.join(sorted(_OF_DIFFERENCE))}",
                self.f_divergence_type,
            )
        if "robust" in types and not self.label_smoothing < 0.5:
            raise wrong_value("label_smoothing", "below 0.5 for loss_type='robust'", self.label_smoothing)
        if "exo_pair" in types and not 0 < self.label_smoothing < 1:
            raise wrong_value(
                "label_smoothing", "above 0 and below 1 for loss_type='exo_pair', such as 1e-3", self.label_smoothing
            )
        if self.label_smoothing and not _SMOOTHED.intersection(types):
            raise wrong_value(
                "label_smoothing", f"0 for loss types other than {', '.join(sorted(_SMOOTHED))}", self.label_smoothing
            )
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
        """Whether the loss has a part that is averaged over tokens."""
        return "sft" in self.loss_types

    @property
    def is_of_single_examples(self) -> bool:
        """Whether the loss is a sum over pairs, each of which depends on its own sequences only."""
        return super().is_of_single_examples and not _SORTED.intersection(self.loss_types)


def dpo_loss(pairs: PairLogProbs, options: DPOOptions) -> PairLosses:
    """The loss of each pair, and ``rewards/*`` and ``logps/*``.

    Raises:
        TypeError: For log-probabilities that are no floating-point tensors.
        ValueError: For missing reference log-probabilities, or vectors of different lengths.
    """
    chosen, rejected, ref_difference = log_ratios(pairs)
    if options.use_weighting and pairs.weight is None:
        raise wrong_value("pairs.weight", "the weights of wpo_weights for use_weighting=True", None)
    ratios = _Ratios(pairs, chosen, rejected, ref_difference, options)
    losses: Tensor = torch.zeros_like(ratios.chosen)
    nll = None
    weights = options.loss_weights or (1.0,) * len(options.loss_types)
    factor = 1.0 if pairs.weight is None or not options.use_weighting else pairs.weight.detach()
    for loss_type, weight in zip(options.loss_types, weights, strict=True):
        if loss_type == "sft":
            each = -pairs.chosen if pairs.chosen_nll is None else pairs.chosen_nll
            nll = weight * factor * each + (0.0 if nll is None else nll)
        else:
            losses = losses + weight * factor * _LOSSES[loss_type](ratios)
    rewards = options.beta * ratios.chosen.detach(), options.beta * ratios.rejected.detach()
    return PairLosses(losses, nll, pair_metrics(*rewards, pairs.chosen, pairs.rejected))


def check_pairs(pairs: PairLogProbs) -> None:
    """Raises unless all vectors of ``pairs`` fit ``pairs.chosen``."""
    given = {f"pairs.{name}": value for name, value in pairs._asdict().items() if value is not None}
    vectors = {name: value for name, value in given.items() if not name.startswith("pairs.num_")}
    check_floating_tensors("pairs.chosen", pairs.chosen, **{k: v for k, v in vectors.items() if k != "pairs.chosen"})
    if pairs.chosen.ndim != 1:
        raise wrong_value("pairs.chosen", "a vector with a number for each pair", pairs.chosen)
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise wrong_type(name, "a tensor", value)
        check_shape(name, value, pairs.chosen.shape, "one value for each pair")


def log_ratios(pairs: PairLogProbs) -> tuple[Tensor, Tensor, Tensor]:
    """R of the chosen and the rejected completions, and the reference's difference of both; checks ``pairs``."""
    check_pairs(pairs)
    if pairs.ref_chosen is None or pairs.ref_rejected is None:
        raise wrong_value("pairs.ref_chosen and pairs.ref_rejected", "log-probabilities of a reference model", None)
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return chosen, rejected, pairs.ref_chosen - pairs.ref_rejected


def pair_metrics(
    chosen_rewards: Tensor, rejected_rewards: Tensor, chosen: Tensor, rejected: Tensor
) -> dict[str, Tensor]:
    """Metrics of pairs by TRL's names, from implicit rewards and log-probabilities, ``[B]`` each."""
    chosen_rewards, rejected_rewards = chosen_rewards.detach(), rejected_rewards.detach()
    return {
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).to(chosen_rewards.dtype),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": chosen.detach(),
        "logps/rejected": rejected.detach(),
    }


PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""The names of :func:`pair_metrics`."""


def wpo_weights(log_probs: Tensor, log_sum_sq_probs: Tensor, num_chosen: Tensor, num_rejected: Tensor) -> Tensor:
    """WPO's weight of each pair, without gradient (arXiv:2406.11827, equation 2).

    ``exp(mean(log p - log sum p^2))`` over the tokens of the chosen completion, times the same of the rejected one.

    Args:
        log_probs: Sums over sequences, B chosen and then B rejected ones, ``[2B]``.
        log_sum_sq_probs: The sums of ``log sum_v p_v^2`` over the same tokens, ``[2B]``.
        num_chosen: Numbers of tokens, ``[B]``.
        num_rejected: Numbers of tokens, ``[B]``.

    Returns:
        ``[B]``.
    """
    aligned = (log_probs - log_sum_sq_probs).detach()
    chosen, rejected = aligned.chunk(2)
    return (chosen / num_chosen.clamp(min=1) + rejected / num_rejected.clamp(min=1)).exp()


def smoothed_sigmoid(logits: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - eps) log s(x) - eps log s(-x)``."""
    loss = -F.logsigmoid(logits)
    return loss if not label_smoothing else (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-logits)


class _Ratios(NamedTuple):
    pairs: PairLogProbs
    chosen: Tensor
    rejected: Tensor
    ref_difference: Tensor
    options: DPOOptions

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

    @property
    def scores(self) -> tuple[Tensor, Tensor]:
        return self.score(self.chosen), self.score(self.rejected)

    @property
    def logits(self) -> Tensor:
        """beta D."""
        chosen, rejected = self.scores
        return self.options.beta * (chosen - rejected)

    @property
    def mean_difference(self) -> Tensor:
        """D of scores divided by the numbers of tokens; an empty completion counts as one token."""
        scores = self.scores
        chosen, rejected = self.pairs._replace(chosen=scores[0], rejected=scores[1]).averages
        return chosen - rejected


def _exo(r: _Ratios) -> Tensor:
    logits, eps = r.logits, r.options.label_smoothing
    positive, negative = F.logsigmoid(logits), F.logsigmoid(-logits)
    return positive.exp() * (positive - math.log1p(-eps)) + negative.exp() * (negative - math.log(eps))


def _nca(r: _Ratios) -> Tensor:
    chosen, rejected = r.options.beta * r.chosen, r.options.beta * r.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(r: _Ratios) -> Tensor:
    logits, eps = r.logits, r.options.label_smoothing
    return (eps * F.logsigmoid(-logits) - (1 - eps) * F.logsigmoid(logits)) / (1 - 2 * eps)


def _sppo(r: _Ratios) -> Tensor:
    half = 0.5 / r.options.beta
    return (r.chosen - half).square() + (r.rejected + half).square()


def _aot(r: _Ratios) -> Tensor:
    quantiles = (r.pairs.chosen - r.pairs.rejected).sort().values - r.ref_difference.sort().values
    return smoothed_sigmoid(r.options.beta * quantiles, r.options.label_smoothing)


def _aot_unpaired(r: _Ratios) -> Tensor:
    quantiles = r.chosen.sort().values - r.rejected.sort().values
    return smoothed_sigmoid(r.options.beta * quantiles, r.options.label_smoothing)


def _apo_zero(r: _Ratios) -> Tensor:
    return torch.sigmoid(-r.options.beta * r.chosen) + torch.sigmoid(r.options.beta * r.rejected)


def _apo_down(r: _Ratios) -> Tensor:
    beta = r.options.beta
    return torch.sigmoid(beta * r.chosen) + torch.sigmoid(beta * (r.rejected - r.chosen))


def _discopop(r: _Ratios) -> Tensor:
    logits = r.logits
    mix = torch.sigmoid(logits / r.options.discopop_tau)
    # m exp(-d) is exp(log m - d), which does not overflow: log m falls faster than d for tau below 1.
    exponential = (F.logsigmoid(logits / r.options.discopop_tau) - logits).clamp(max=_MAX_EXPONENT).exp()
    return -F.logsigmoid(logits) * (1 - mix) + exponential


_LOSSES: dict[str, Callable[[_Ratios], Tensor]] = {
    "sigmoid": lambda r: -F.logsigmoid(r.logits),
    "hinge": lambda r: torch.relu(1 - r.logits),
    # Bounded, as the square of an exponential that was is not.
    "ipo": lambda r: (r.mean_difference - 0.5 / r.options.beta).clamp(-_MAX_SQUARED, _MAX_SQUARED).square(),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda r: -F.logsigmoid(r.options.beta * r.chosen) - F.logsigmoid(-r.options.beta * r.rejected),
    "sppo_hard": _sppo,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": lambda r: -F.logsigmoid(r.options.beta * r.mean_difference),
}
LOSS_TYPES = (*_LOSSES, "sft")
_OF_DIFFERENCE = frozenset(("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"))
_SMOOTHED = frozenset(("exo_pair", "robust", "aot", "aot_unpaired"))
_SORTED = frozenset(("aot", "aot_unpaired"))
