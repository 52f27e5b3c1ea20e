"""Knowledge distillation from stored or sampled teacher tokens, or from a teacher with another tokenizer.

A teacher's distribution p is known on a support S of K token ids; q is the student's distribution over the whole
vocabulary. All functions take ``[..., K]`` (or, for sampled tokens, ``[...]``) log-probabilities and return losses
``[...]``, one per token; gradients are autograd's, on K numbers per token. ``P = sum_S p`` and ``Q = sum_S q``.

==================  ====================================================================================================
``support_mode``    the distributions that are compared
==================  ====================================================================================================
``"tail"``          p and q on S and one more bucket with the remaining mass, ``1 - P`` and ``1 - Q``
``"renormalize"``   ``p / P`` and ``q / Q`` on S: mass outside S costs nothing
``"zero"``          ``p / P`` on S and 0 elsewhere, against q over the vocabulary
``"ignore"``        p on S, not normalized: terms outside S are left out; forward KL only
==================  ====================================================================================================

Sources: forward KL, arXiv:1503.02531; generalized Jensen-Shannon divergence, arXiv:2306.13649 (GKD), equation 1;
sampled supports, arXiv:2503.16870 (RS-KD). The tail bucket and ``"renormalize"`` are ``loss_add_tail`` of TRL.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import check_floating, check_shape, wrong_type, wrong_value
from lightning_liger.losses.options import Options, Positive, Share

_ABSENT = -1e30  # the log-probability of an id that is not in the support: no infinity meets a 0
_MIN_TAIL = 1e-6  # the smallest remaining mass: float32 sums of probabilities are no more exact
_MAX_LOG_RATIO = 20.0

SupportMode = Literal["tail", "renormalize", "zero", "ignore"]
SampledEstimator = Literal["policy_gradient", "k1", "k2", "k3"]

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class SparseDistillationOptions(Options):
    """How a student is compared with a teacher that is known on K ids per token.

    Args:
        beta: 0 is the forward KL divergence KL(p || q), 1 the reverse one, KL(q || p); between them the generalized
            Jensen-Shannon divergence ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``.
            Only 0 with ``support_mode="ignore"``, and below 1 with ``"zero"``.
        support_mode: ``"tail"``, ``"renormalize"``, ``"zero"`` or ``"ignore"``, see the module.
        temperature: Of both distributions. The student's log-probabilities have to be those at this temperature.
        teacher_temperature: The one that the teacher's log-probabilities were stored at.
        t_squared: Whether to multiply losses by ``temperature ** 2``, as arXiv:1503.02531.
    """

    beta: Share = 0.0
    support_mode: SupportMode = "tail"
    temperature: Positive = 1.0
    teacher_temperature: Positive = 1.0
    t_squared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.support_mode == "ignore" and self.beta > 0:
            raise wrong_value("beta", "0 with support_mode='ignore', which has no other divergence", self.beta)
        if self.support_mode == "zero" and self.beta == 1:
            raise wrong_value("beta", "below 1 with support_mode='zero', where KL(q || p) is infinite", self.beta)


@dataclass(frozen=True)
class SampledDistillationOptions(Options):
    """How a student is compared with a teacher at the tokens that were sampled from the student.

    Args:
        estimator: ``"policy_gradient"``: ``sg[l_s - l_t] l_s``, whose gradient is that of the reverse KL divergence
            (TRL's SDPO and SDFT). With ``r = l_t - l_s``: ``"k1"``: ``-r``, unbiased, but with an expected gradient
            of 0; ``"k2"``: ``r ** 2 / 2``, with the gradient of ``"policy_gradient"``; ``"k3"``:
            ``exp(r) - 1 - r``, unbiased and never negative, with the gradient of the forward KL divergence.
        distillation_is_clip: Largest importance weight ``exp(l_s - l_old)`` of tokens that an older policy sampled,
            None for no weights. Has an effect where old log-probabilities are given.
    """

    estimator: SampledEstimator = "policy_gradient"
    distillation_is_clip: Positive | None = 2.0


@dataclass(frozen=True)
class ULDOptions(Options):
    """Options of Universal Logit Distillation, with the names and defaults of TRL's GOLD.

    Args:
        uld_student_temperature: Of the student's distribution.
        uld_teacher_temperature: Of the teacher's distribution.
    """

    uld_student_temperature: Positive = 1.0
    uld_teacher_temperature: Positive = 1.0


def sparse_divergence(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    options: SparseDistillationOptions | None = None,
    *,
    support_mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """The divergence of a student from a teacher that is known on K ids per token.

    An id whose teacher log-probability is -inf is not in the support. Ids must not repeat.

    Args:
        student_log_probs: ``[..., K]``, normalized over the whole vocabulary, at ``options.temperature``;
            floating point, differentiable.
        teacher_log_probs: ``[..., K]``, at ``options.teacher_temperature``. No gradient.
        options: See :class:`SparseDistillationOptions`; None for the defaults.
        support_mask: ``[..., K]`` bool, False for further ids that are not in the support.

    Returns:
        Losses ``[...]`` in at least float32, and the metrics ``student_mass`` (Q) and ``teacher_mass`` (P), ``[...]``.

    Raises:
        TypeError: For arguments of a wrong type.
        ValueError: For shapes that do not fit.
    """
    options = options or SparseDistillationOptions()
    _check_pair(student_log_probs, teacher_log_probs)
    if not student_log_probs.ndim or not student_log_probs.shape[-1]:
        raise wrong_value("student_log_probs", "a tensor of shape [..., K] with at least one id", student_log_probs)
    absent = teacher_log_probs == -math.inf
    if support_mask is not None:
        if not isinstance(support_mask, Tensor) or support_mask.dtype != torch.bool:
            raise wrong_type("support_mask", "a tensor of dtype torch.bool", support_mask)
        check_shape("support_mask", support_mask, student_log_probs.shape, "as student_log_probs")
        absent = absent | ~support_mask
    student = _at_least_float32(student_log_probs).masked_fill(absent, _ABSENT)
    teacher = _at_least_float32(teacher_log_probs.detach()).masked_fill(absent, _ABSENT)
    metrics = {"student_mass": student.detach().exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}

    if options.temperature != options.teacher_temperature:
        with_tail = options.support_mode in ("tail", "ignore")
        teacher = _tempered(teacher, options.teacher_temperature / options.temperature, with_tail)
    if options.support_mode == "tail":
        # Only the reverse KL divergence, which would be infinite, needs a tail of a teacher that has none.
        teacher_tail = log_tail_mass(teacher) if options.beta == 1 else _tail_or_none(teacher)
        student, teacher = _with_bucket(student, log_tail_mass(student)), _with_bucket(teacher, teacher_tail)
    elif options.support_mode == "renormalize":
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    elif options.support_mode == "zero":
        teacher = teacher.log_softmax(-1)
        if options.beta > 0:
            bucket = log_tail_mass(student)
            student, teacher = _with_bucket(student, bucket), _with_bucket(teacher, torch.full_like(bucket, _ABSENT))
    losses = generalized_divergence(student, teacher, options.beta).masked_fill(absent.all(-1), 0.0)
    return losses * options.temperature**2 if options.t_squared else losses, metrics


def log_tail_mass(log_probs: Tensor) -> Tensor:
    """``log(1 - sum(exp(log_probs)))``, at least ``log(1e-6)``; no gradient passes where less than 1e-6 remains."""
    log_mass = log_probs.clamp(min=_ABSENT).logsumexp(-1)
    return (-torch.expm1(log_mass.clamp(max=math.log1p(-_MIN_TAIL)))).log()


def first_occurrences(ids: Tensor) -> Tensor:
    """Whether an id is the first of its value in its row, ``[..., K]``, bool: a ``support_mask``."""
    ordered, order = ids.sort(dim=-1, stable=True)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return torch.empty_like(is_new).scatter_(-1, order, is_new)


def importance_weighted_log_probs(ids: Tensor, log_probs: Tensor, proposal_log_probs: Tensor) -> Tensor:
    """The estimate of a teacher's distribution from ids that were sampled from a proposal (RS-KD, arXiv:2503.16870).

    Each sample weighs ``p / r``, its probability over that of the proposal; weights of a row are divided by their sum,
    and those of equal ids are added. With ``support_mode="zero"`` and samples from the teacher itself, the expected
    gradient is that of the whole teacher; a top-k support makes students overconfident instead.
    All are ``[..., K]``; the result sums to 1, and is -inf at repeated ids but the first.
    """
    weights = (_at_least_float32(log_probs) - _at_least_float32(proposal_log_probs)).log_softmax(-1)
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    merged = weights.unsqueeze(-2).masked_fill(~same, -math.inf).logsumexp(-1)
    return merged.masked_fill(~first_occurrences(ids), -math.inf)


def sample_support(
    log_probs: Tensor, num_samples: int, *, proposal_temperature: float = 1.0, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Samples K ids of a teacher, with repetition, for :func:`sparse_divergence` with ``support_mode="zero"``.

    From its log-probabilities ``[..., vocab_size]`` at ``proposal_temperature``; also returns what
    :func:`importance_weighted_log_probs` makes of them.
    """
    log_probs = _at_least_float32(log_probs)
    proposal = (log_probs / proposal_temperature).log_softmax(-1)
    ids = torch.multinomial(proposal.flatten(0, -2).exp(), num_samples, replacement=True, generator=generator)
    ids = ids.unflatten(0, log_probs.shape[:-1])
    return ids, importance_weighted_log_probs(ids, log_probs.gather(-1, ids), proposal.gather(-1, ids))


def sampled_divergence(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    options: SampledDistillationOptions | None = None,
    *,
    old_log_probs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Estimates of the reverse KL divergence at tokens that were sampled from the student.

    Sources: TRL's self-distillation (SDPO, SDFT) for ``"policy_gradient"``; J. Schulman, "Approximating KL Divergence"
    (2020) for the others.

    Args:
        student_log_probs: ``[...]``, of the tokens; floating point, differentiable.
        teacher_log_probs: ``[...]``. No gradient.
        options: See :class:`SampledDistillationOptions`; None for the defaults.
        old_log_probs: ``[...]``, of the policy that the tokens were sampled from; None if it is the student.

    Returns:
        Losses ``[...]`` in at least float32, and the metrics ``log_ratio`` (``l_s - l_t``) and, with old
        log-probabilities, ``importance_weight``.
    """
    options = options or SampledDistillationOptions()
    _check_pair(student_log_probs, teacher_log_probs)
    student = _at_least_float32(student_log_probs)
    teacher = _at_least_float32(teacher_log_probs.detach())
    log_ratio = student.detach() - teacher
    if options.estimator == "policy_gradient":
        losses = log_ratio * student
    elif options.estimator == "k1":
        losses = student - teacher
    elif options.estimator == "k2":
        losses = (student - teacher).square() / 2
    else:
        difference = teacher - student
        losses = difference.clamp(max=_MAX_LOG_RATIO).expm1() - difference
    metrics = {"log_ratio": log_ratio}
    if old_log_probs is not None:
        check_floating("old_log_probs", old_log_probs)
        check_shape("old_log_probs", old_log_probs, student.shape, "as student_log_probs")
        if options.distillation_is_clip is not None:
            age = (student - old_log_probs).detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            weight = age.exp().clamp(max=options.distillation_is_clip)
            losses, metrics["importance_weight"] = losses * weight, weight
    return losses, metrics


def universal_logit_divergence(
    student_logits: Tensor, teacher_logits: Tensor, options: ULDOptions | None = None
) -> Tensor:
    """The distance of a student from a teacher with another vocabulary, by sorted probabilities.

    ``D = sum_k |sort(q)_k - sort(p)_k|``, both in descending order, the shorter one followed by zeros, whichever tokens
    they are (arXiv:2402.12030, equation 5). Rows have to be whole to be sorted: call it with a few tokens at a time, as
    :class:`~lightning_liger.LigerDistillationMixin` does.

    Args:
        student_logits: ``[..., student_vocab_size]``, floating point, differentiable.
        teacher_logits: ``[..., teacher_vocab_size]``, of the same tokens. No gradient.
        options: See :class:`ULDOptions`; None for the defaults.

    Returns:
        ``[...]`` in at least float32.

    Raises:
        TypeError: For arguments of a wrong type.
        ValueError: For shapes that do not fit.
    """
    options = options or ULDOptions()
    check_floating("student_logits", student_logits)
    check_floating("teacher_logits", teacher_logits)
    if not student_logits.ndim or student_logits.shape[:-1] != teacher_logits.shape[:-1]:
        raise wrong_value(
            "teacher_logits", f"[..., vocab_size] of {tuple(student_logits.shape[:-1])} tokens", teacher_logits
        )
    student = _sorted_probabilities(student_logits, options.uld_student_temperature)
    teacher = _sorted_probabilities(teacher_logits.detach(), options.uld_teacher_temperature)
    missing = teacher.shape[-1] - student.shape[-1]
    student, teacher = F.pad(student, (0, max(0, missing))), F.pad(teacher, (0, max(0, -missing)))
    return (student - teacher).abs().sum(-1)


def _sorted_probabilities(logits: Tensor, temperature: float) -> Tensor:
    return (_at_least_float32(logits) / temperature).log_softmax(-1).exp().sort(dim=-1, descending=True).values


def generalized_divergence(student_log_probs: Tensor, teacher_log_probs: Tensor, beta: float) -> Tensor:
    """``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``.

    A ``beta`` of 0 stands for KL(p || q), one of 1 for KL(q || p). From finite log q and log p of each category,
    ``[..., C]`` (-1e30 for a probability of 0), which need not add up to 1, to the sum over categories, ``[...]``.
    """
    student, teacher = student_log_probs, teacher_log_probs
    difference = teacher - student
    if beta == 0:
        return (teacher.exp() * difference).sum(-1)
    if beta == 1:
        return -(student.exp() * difference).sum(-1)
    # log q - log m without the logarithm of a sum of probabilities, which may underflow.
    student_ratio = -torch.logaddexp(torch.full_like(difference, math.log1p(-beta)), difference + math.log(beta))
    terms = beta * teacher.exp() * (difference + student_ratio) + (1 - beta) * student.exp() * student_ratio
    return terms.sum(-1)


def _tempered(log_probs: Tensor, factor: float, with_tail: bool) -> Tensor:
    """Log-probabilities multiplied by ``factor`` and normalized again."""
    scaled = (log_probs * factor).clamp(min=_ABSENT)
    if not with_tail:
        return scaled.log_softmax(-1)
    tail = (_tail_or_none(log_probs) * factor).clamp(min=_ABSENT)
    return _with_bucket(scaled, tail).log_softmax(-1)[..., :-1].clamp(min=_ABSENT)


def _tail_or_none(log_probs: Tensor) -> Tensor:
    """:func:`log_tail_mass`, that of an absent id where no more than rounding errors remain."""
    tail = log_tail_mass(log_probs)
    return tail.masked_fill(tail <= math.log(1.01 * _MIN_TAIL), _ABSENT)


def _with_bucket(log_probs: Tensor, bucket: Tensor) -> Tensor:
    return torch.cat((log_probs, bucket.unsqueeze(-1)), dim=-1)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check_pair(student_log_probs: Tensor, teacher_log_probs: Tensor) -> None:
    check_floating("student_log_probs", student_log_probs)
    check_floating("teacher_log_probs", teacher_log_probs)
    check_shape("teacher_log_probs", teacher_log_probs, student_log_probs.shape, "as student_log_probs")
