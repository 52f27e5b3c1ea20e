"""Kinds of divergences, and their options."""

from typing import Any, NamedTuple

from liger_ops.arguments import check_bool, check_choice, check_number, wrong_value
from liger_ops.loss.options import TokenLossOptions

KL_KINDS = ("forward_kl", "reverse_kl", "mixed")
DISTRIBUTION_KINDS = (*KL_KINDS, "jsd", "skew_kl", "skew_reverse_kl", "total_variation")
KINDS = (*DISTRIBUTION_KINDS, "mse", "cosine")


class DivergenceOptions(NamedTuple):
    """Options of the divergence of one token, as ops take them; see :mod:`liger_ops.divergence.rows` for formulas."""

    kind: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    t_squared: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0

    @classmethod
    def checked(cls, *values: Any, **others: Any) -> "DivergenceOptions":
        """The options of a caller; raises a TypeError or a ValueError that names the one that is wrong."""
        options = cls(*values, **others)
        check_choice("kind", options.kind, KINDS)
        check_number("beta", options.beta, at_least=0, at_most=1)
        check_number("temperature", options.temperature, above=0)
        check_bool("t_squared", options.t_squared)
        for name in ("", "teacher_"):
            check_number(f"{name}softcap", getattr(options, f"{name}softcap"), above=0, optional=True)
            check_number(f"{name}logit_scale", getattr(options, f"{name}logit_scale"))
        numbers = [each if each is None or isinstance(each, bool | str) else float(each) for each in options]
        return cls(*numbers)  # type: ignore[arg-type]  # the same kinds as before

    @property
    def resolved_kind(self) -> str:
        """The kind, or the simpler one that it is at an end of beta's range."""
        limits = {
            ("jsd", 0.0): "forward_kl",
            ("jsd", 1.0): "reverse_kl",
            ("mixed", 0.0): "reverse_kl",
            ("mixed", 1.0): "forward_kl",
            ("skew_kl", 0.0): "forward_kl",
            ("skew_reverse_kl", 1.0): "reverse_kl",
        }
        return limits.get((self.kind, float(self.beta)), self.kind)

    @property
    def factor(self) -> float:
        """Factor of each token's divergence."""
        return self.temperature**2 if self.t_squared else 1.0

    @property
    def transforms(self) -> list[TokenLossOptions]:
        """How raw logits of the student and the teacher become tempered ones.

        The temperature is in the scale and the cap: c/T * tanh((s/T) * a / (c/T)) = c * tanh(s * a / c) / T.
        """
        pairs = (self.logit_scale, self.softcap), (self.teacher_logit_scale, self.teacher_softcap)
        t = self.temperature
        return [TokenLossOptions(logit_scale=s / t, softcap=None if c is None else c / t) for s, c in pairs]


def num_common_columns(student: int, teacher: int, vocab: str) -> int:
    """How many classes are compared, given the numbers that the two models have.

    Raises:
        ValueError: If they differ though ``vocab`` is ``"equal"``, or if there are none.
    """
    check_choice("vocab", vocab, ("equal", "common"))
    if student != teacher and vocab == "equal":
        raise ValueError(
            f"vocab must be 'common' for vocabularies of different sizes, got 'equal' with {student} classes of the"
            f" student and {teacher} of the teacher; 'common' compares the first {min(student, teacher)} of both"
        )
    if not min(student, teacher):
        raise wrong_value("the vocabulary", "of at least one class", min(student, teacher))
    return min(student, teacher)
