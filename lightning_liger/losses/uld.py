"""Universal Logit Distillation: distillation from a teacher with another tokenizer, by sorted probabilities.

``D = sum_k |sort(q)_k - sort(p)_k|``, both in descending order, the shorter one followed by zeros (arXiv:2402.12030,
equation 5). Nothing has to be known about which token of one vocabulary is which of the other. The hybrid compares
tokens that both vocabularies have one by one, and sorts only the others (TRL's GOLD).

Rows have to be whole to be sorted: call it with a few tokens at a time, as
:class:`~lightning_liger.LigerDistillationMixin` does.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import check_bool, check_floating, check_number, check_same_device, wrong_type, wrong_value
from lightning_liger.losses.distillation import generalized_divergence

_ABSENT = -1e30
"""The log-probability of a token that a model never predicts."""


@dataclass(frozen=True)
class ULDOptions:
    """Options of Universal Logit Distillation, with the names and defaults of TRL's GOLD.

    Args:
        uld_student_temperature: Of the student's distribution.
        uld_teacher_temperature: Of the teacher's distribution.
        uld_use_hybrid_loss: Whether tokens of both vocabularies are compared one by one.
        uld_hybrid_matched_weight: Weight of those tokens; None for their share of the teacher's vocabulary.
        uld_hybrid_unmatched_weight: Weight of all others; None for 1 minus that share.
        beta: Of the generalized Jensen-Shannon divergence of matched tokens; 0 is the forward KL divergence.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For one out of its range, and for only one of the two weights.
    """

    uld_student_temperature: float = 1.0
    uld_teacher_temperature: float = 1.0
    uld_use_hybrid_loss: bool = False
    uld_hybrid_matched_weight: float | None = None
    uld_hybrid_unmatched_weight: float | None = None
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_number("uld_student_temperature", self.uld_student_temperature, above=0)
        check_number("uld_teacher_temperature", self.uld_teacher_temperature, above=0)
        check_bool("uld_use_hybrid_loss", self.uld_use_hybrid_loss)
        check_number("uld_hybrid_matched_weight", self.uld_hybrid_matched_weight, at_least=0, optional=True)
        check_number("uld_hybrid_unmatched_weight", self.uld_hybrid_unmatched_weight, at_least=0, optional=True)
        check_number("beta", self.beta, at_least=0, at_most=1)
        weights = self.uld_hybrid_matched_weight, self.uld_hybrid_unmatched_weight
        if (weights[0] is None) != (weights[1] is None):
            raise wrong_value(
                "uld_hybrid_unmatched_weight", "given together with uld_hybrid_matched_weight", weights[1]
            )


def universal_logit_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    options: ULDOptions | None = None,
    *,
    matched_ids: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The distance of a student from a teacher with another vocabulary.

    Args:
        student_logits: ``[..., student_vocab_size]``, floating point, differentiable.
        teacher_logits: ``[..., teacher_vocab_size]``, of the same tokens. No gradient.
        options: See :class:`ULDOptions`; None for the defaults.
        matched_ids: For the hybrid: ids of the student and of the teacher, ``[num_matched]`` each, int64, of the tokens
            that both vocabularies have. No id may repeat.

    Returns:
        ``[...]`` in at least float32.

    Raises:
        TypeError: For arguments of a wrong type.
        ValueError: For shapes or devices that do not fit, and for the hybrid without ``matched_ids``.
    """
    options = options or ULDOptions()
    check_floating("student_logits", student_logits)
    check_floating("teacher_logits", teacher_logits)
    if not student_logits.ndim or student_logits.shape[:-1] != teacher_logits.shape[:-1]:
        raise wrong_value(
            "teacher_logits", f"[..., vocab_size] of {tuple(student_logits.shape[:-1])} tokens", teacher_logits
        )
    student = _log_softmax(student_logits, options.uld_student_temperature)
    teacher = _log_softmax(teacher_logits.detach(), options.uld_teacher_temperature)
    if not options.uld_use_hybrid_loss:
        return _sorted_distance(student.exp(), teacher.exp())
    student_ids, teacher_ids = _check_matched(matched_ids, student)
    of_student, of_teacher = (
        each[..., ids].clamp(min=_ABSENT) for each, ids in ((student, student_ids), (teacher, teacher_ids))
    )
    matched = generalized_divergence(of_student, of_teacher, options.beta)
    unmatched = _sorted_distance(_without(student.exp(), student_ids), _without(teacher.exp(), teacher_ids))
    share = student_ids.numel() / teacher.shape[-1]
    weight, rest = options.uld_hybrid_matched_weight, options.uld_hybrid_unmatched_weight
    weight, rest = (share, 1 - share) if weight is None or rest is None else (weight, rest)
    return weight * matched + rest * unmatched


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits / temperature).log_softmax(-1)


def _sorted_distance(student: Tensor, teacher: Tensor) -> Tensor:
    student, teacher = (probabilities.sort(dim=-1, descending=True).values for probabilities in (student, teacher))
    missing = teacher.shape[-1] - student.shape[-1]
    student, teacher = F.pad(student, (0, max(0, missing))), F.pad(teacher, (0, max(0, -missing)))
    return (student - teacher).abs().sum(-1)


def _without(probabilities: Tensor, ids: Tensor) -> Tensor:
    """The probabilities of all other ids; those of ``ids`` count as 0, which sorting moves to the end."""
    return probabilities.index_fill(-1, ids, 0.0)


def _check_matched(matched_ids: tuple[Tensor, Tensor] | None, student: Tensor) -> tuple[Tensor, Tensor]:
    expected = "two int64 tensors of shape [num_matched], with uld_use_hybrid_loss=True"
    if not isinstance(matched_ids, tuple | list) or len(matched_ids) != 2:
        raise wrong_type("matched_ids", expected, matched_ids)
    for index, ids in enumerate(matched_ids):
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            raise wrong_type(f"matched_ids[{index}]", expected, ids)
        if ids.ndim != 1 or ids.shape != matched_ids[0].shape:
            raise wrong_value(f"matched_ids[{index}]", expected, ids)
    check_same_device("student_logits", student, **{"matched_ids[0]": matched_ids[0], "matched_ids[1]": matched_ids[1]})
    return matched_ids[0], matched_ids[1]
