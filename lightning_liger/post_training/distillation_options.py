"""Options of distillation modules."""

from dataclasses import dataclass

from liger_ops.arguments import check_bool, check_choice, check_integer, check_number, wrong_value
from liger_ops.divergence.options import KINDS, VOCAB_RULES
from lightning_liger.losses.distillation import (
    SUPPORT_MODES,
    SampledDistillationOptions,
    SparseDistillationOptions,
)
from lightning_liger.losses.uld import ULDOptions

MODES = ("full_logits", "topk_logits", "sampled_token", "uld")
SUPPORTS = ("teacher", "student", "union")
_BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0}
_WITH_BETA = ("mixed", "jsd", "skew_kl", "skew_reverse_kl")
_MODES_OF = {
    **dict.fromkeys(("divergence", "vocab"), ("full_logits", "topk_logits")),
    **dict.fromkeys(("teacher_temperature", "support_mode"), ("topk_logits",)),
    **dict.fromkeys(("distillation_topk", "distillation_support"), ("topk_logits",)),
    **dict.fromkeys(("estimator", "distillation_is_clip"), ("sampled_token",)),
    "t_squared": ("full_logits", "topk_logits", "uld"),
}
"""The modes that read an option; others would ignore it."""


@dataclass(frozen=True)
class DistillationOptions:
    """What a student learns from a teacher.

    Args:
        distillation_mode: ``"full_logits"``: the divergence over the vocabulary. ``"topk_logits"``: that over K ids a
            token, stored ones if batches have them. ``"sampled_token"``: an estimate of the reverse KL divergence at
            the labels, which the student has sampled.
            ``"uld"``: the distance of sorted probabilities, for teachers with another tokenizer.
        divergence: Of ``"full_logits"``: ``"forward_kl"``, ``"reverse_kl"``, ``"mixed"``, ``"jsd"``, ``"skew_kl"``,
            ``"skew_reverse_kl"``, ``"total_variation"``, ``"mse"`` or ``"cosine"``; of ``"topk_logits"``:
            ``"forward_kl"``, ``"reverse_kl"`` or ``"jsd"``.
        beta: Of ``"mixed"``, ``"jsd"``, ``"skew_kl"`` and ``"skew_reverse_kl"``; None for 0.5.
        temperature: Divides the logits of both.
        teacher_temperature: The one that stored log-probabilities are at; None for the data module's, or 1.
        t_squared: Whether losses are multiplied by ``temperature ** 2``.
        vocab: ``"equal"``, or ``"common"`` to compare the first ids of vocabularies of different sizes.
        support_mode: How ``"topk_logits"`` treats the other ids: ``"tail"``, ``"renormalize"``, ``"zero"`` or
            ``"ignore"``; see :mod:`lightning_liger.losses.distillation`.
        distillation_topk: K, where none is stored.
        distillation_support: Whose likeliest ids these are: ``"teacher"``, ``"student"`` or ``"union"``.
        estimator: Of ``"sampled_token"``: ``"policy_gradient"``, ``"k1"``, ``"k2"`` or ``"k3"``.
        distillation_is_clip: Of ``"sampled_token"``: the largest importance weight, None for no weights.
        crossentropy_weight: Weight of cross entropy on the labels, which is not part of the loss by default.
        distillation_weight: Weight of the distillation loss.
        log_entropy: Whether the student's entropy is measured where that costs one more product of its head.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For one out of its range, and for one that the mode or the divergence does not have.
    """

    distillation_mode: str = "full_logits"
    divergence: str = "forward_kl"
    beta: float | None = None
    temperature: float = 1.0
    teacher_temperature: float | None = None
    t_squared: bool = False
    vocab: str = "equal"
    support_mode: str = "tail"
    distillation_topk: int = 100
    distillation_support: str = "teacher"
    estimator: str = "policy_gradient"
    distillation_is_clip: float | None = 2.0
    crossentropy_weight: float = 0.0
    distillation_weight: float = 1.0
    log_entropy: bool = False

    def __post_init__(self) -> None:
        check_choice("distillation_mode", self.distillation_mode, MODES)
        check_choice("divergence", self.divergence, KINDS)
        check_choice("vocab", self.vocab, VOCAB_RULES)
        check_choice("support_mode", self.support_mode, SUPPORT_MODES)
        check_choice("distillation_support", self.distillation_support, SUPPORTS)
        check_number("beta", self.beta, at_least=0, at_most=1, optional=True)
        check_number("temperature", self.temperature, above=0)
        check_number("teacher_temperature", self.teacher_temperature, above=0, optional=True)
        check_bool("t_squared", self.t_squared)
        check_integer("distillation_topk", self.distillation_topk, at_least=1)
        check_number("crossentropy_weight", self.crossentropy_weight, at_least=0)
        check_number("distillation_weight", self.distillation_weight, at_least=0)
        check_bool("log_entropy", self.log_entropy)
        if self.distillation_mode == "topk_logits":
            check_choice("divergence", self.divergence, (*_BETAS, "jsd"))
            self.sparse(1.0)
        _ = self.sampled, self.uld
        mode = self.distillation_mode
        for name, modes in _MODES_OF.items():
            if mode not in modes and (value := getattr(self, name)) != (default := getattr(type(self), name)):
                raise wrong_value(name, f"{default!r} with distillation_mode={mode!r}, which has no such option", value)
        has_divergence = mode in _MODES_OF["divergence"]
        if self.beta is not None and not (has_divergence and self.divergence in _WITH_BETA):
            loss = f"divergence={self.divergence!r}" if has_divergence else f"distillation_mode={mode!r}"
            raise wrong_value("beta", f"None with {loss}, which has no such parameter", self.beta)

    @property
    def resolved_beta(self) -> float:
        """``beta``, or its default."""
        return 0.5 if self.beta is None else self.beta

    def sparse(self, stored_temperature: float) -> SparseDistillationOptions:
        """The options of ``"topk_logits"`` for log-probabilities at ``stored_temperature``."""
        beta = _BETAS.get(self.divergence, self.resolved_beta)
        return SparseDistillationOptions(beta, self.support_mode, self.temperature, stored_temperature, self.t_squared)

    @property
    def sampled(self) -> SampledDistillationOptions:
        """The options of ``"sampled_token"``."""
        return SampledDistillationOptions(self.estimator, self.distillation_is_clip)

    @property
    def uld(self) -> ULDOptions:
        """The options of ``"uld"``."""
        return ULDOptions(self.temperature, self.temperature)
