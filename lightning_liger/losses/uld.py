"""Universal Logit Distillation: distillation from a teacher with another tokenizer, by sorted probabilities.

``D = sum_k |sort(q)_k - sort(p)_k|``, both in descending order, the shorter one followed by zeros (arXiv:2402.12030,
equation 5). Nothing has to be known about which token of one vocabulary is which of the other.

Rows have to be whole to be sorted: call it with a few tokens at a time, as
:class:`~lightning_liger.LigerDistillationMixin` does.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import check_floating, wrong_value
from lightning_liger.losses.options import Options, Positive


@dataclass(frozen=True)
class ULDOptions(Options):
    """Options of Universal Logit Distillation, with the names and defaults of TRL's GOLD.

    Args:
        uld_student_temperature: Of the student's distribution.
        uld_teacher_temperature: Of the teacher's distribution.
    """

    uld_student_temperature: Positive = 1.0
    uld_teacher_temperature: Positive = 1.0


def universal_logit_divergence(
    student_logits: Tensor, teacher_logits: Tensor, options: ULDOptions | None = None
) -> Tensor:
    """The distance of a student from a teacher with another vocabulary.

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
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits / temperature).log_softmax(-1).exp().sort(dim=-1, descending=True).values
