"""Options of distillation modules."""

from dataclasses import dataclass
from typing import Literal, get_args

from liger_ops.arguments import check_choice, wrong_value
from lightning_liger.losses.distillation import (
    SampledDistillationOptions,
    SampledEstimator,
    SparseDistillationOptions,
    SupportMode,
    ULDOptions,
)
from lightning_liger.losses.options import Count, NonNegative, Options, Positive, Share

Mode = Literal["full_logits", "topk_logits", "sampled_token", "uld"]
Divergence = Literal[
    "forward_kl", "reverse_kl", "mixed", "jsd", "skew_kl", "skew_reverse_kl", "total_variation", "mse", "cosine"
]
MODES = get_args(Mode)
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
class DistillationOptions(Options):
    """What a student learns from a teacher.

    Args:
        distillation_mode: ``"full_logits"``: the divergence over the vocabulary. ``"topk_logits"``: that over K ids per
            token, stored ones if batches have them. ``"sampled_token"``: an estimate of the reverse KL divergence at
            the labels, sampled from the student. ``"uld"``: the distance of sorted probabilities, for teachers
            with a different tokenizer.
        divergence: Of ``"full_logits"``; of ``"topk_logits"``: ``"forward_kl"``, ``"reverse_kl"`` or ``"jsd"``.
        beta: Of ``"mixed"``, ``"jsd"``, ``"skew_kl"`` and ``"skew_reverse_kl"``; None for 0.5.
        temperature: Divides the logits of both models.
        teacher_temperature: That of stored log-probabilities; None for the data module's, or 1.
        t_squared: Whether losses are multiplied by ``temperature ** 2``.
        vocab: ``"equal"``, or ``"common"`` to compare the first ids of vocabularies of different sizes.
        support_mode: How ``"topk_logits"`` treats the other ids; see :mod:`lightning_liger.losses.distillation`.
        distillation_topk: K, if none is stored.
        distillation_support: Whose top-k ids these are.
        estimator: Of ``"sampled_token"``; see :class:`~lightning_liger.SampledDistillationOptions`.
        distillation_is_clip: Of ``"sampled_token"``: the largest importance weight, None for no weights.
        crossentropy_weight: Weight of cross entropy on the labels, which is not part of the loss by default.
        distillation_weight: Weight of the distillation loss.
        log_entropy: Whether the student's entropy is logged if that costs an additional product of its head.
    """

    distillation_mode: Mode = "full_logits"
    divergence: Divergence = "forward_kl"
    beta: Share | None = None
    temperature: Positive = 1.0
    teacher_temperature: Positive | None = None
    t_squared: bool = False
    vocab: Literal["equal", "common"] = "equal"
    support_mode: SupportMode = "tail"
    distillation_topk: Count = 100
    distillation_support: Literal["teacher", "student", "union"] = "teacher"
    estimator: SampledEstimator = "policy_gradient"
    distillation_is_clip: Positive | None = 2.0
    crossentropy_weight: NonNegative = 0.0
    distillation_weight: NonNegative = 1.0
    log_entropy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distillation_mode == "topk_logits":
            check_choice("divergence", self.divergence, (*_BETAS, "jsd"))
            self.sparse(1.0)
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
