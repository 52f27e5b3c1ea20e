"""Plain PyTorch on whole logits."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses.data import Data

BETA = 0.5
SKEW = 0.1
KINDS = (
    "forward_kl",
    "reverse_kl",
    "jsd",
    "skew_kl",
    "skew_reverse_kl",
    "mixed",
    "total_variation",
    "cosine",
    "mse",
)


def beta_of(kind: str) -> float:
    """The mixture's weight that a kind is measured with."""
    return SKEW if kind.startswith("skew") else BETA


def log_probs(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(F.linear(hidden_states, weight).float(), labels, reduction="none")


def with_entropy(data: Data) -> Tensor:
    """Log-probabilities and entropies, both with an upstream gradient."""
    logs = F.linear(data.hidden_states, data.weight).float().log_softmax(-1)
    label_log_probs = logs.gather(-1, data.labels[:, None]).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return -(data.coefficients * (label_log_probs + entropy)).sum()


def topk(data: Data, renormalize: bool) -> Tensor:
    logits = F.linear(data.hidden_states, data.weight).float()
    id_logits = logits.gather(-1, data.ids)
    lse = (id_logits if renormalize else logits).logsumexp(-1, keepdim=True)
    return -(data.id_coefficients * (id_logits - lse)).sum()


def divergence(data: Data, kind: str) -> Tensor:
    """The mean over tokens of a divergence of the student (gradient) from the teacher."""
    student = F.linear(data.hidden_states, data.weight).float()
    with torch.no_grad():
        teacher = F.linear(data.other_hidden_states, data.other_weight).float()
    if kind == "mse":
        return (student - teacher).square().mean()
    if kind == "cosine":
        return (1 - F.cosine_similarity(student, teacher, dim=-1)).mean()
    return _DIVERGENCES[kind](student.log_softmax(-1), teacher.log_softmax(-1)).sum(-1).mean()


def _kl(left: Tensor, right: Tensor) -> Tensor:
    """``KL(left || right)`` of log-probabilities, before the sum over the vocabulary."""
    return left.exp() * (left - right)


def _mixture(left: Tensor, right: Tensor, share: float) -> Tensor:
    """The logarithm of ``share`` of the right distribution and the rest of the left one."""
    return torch.logaddexp(left + math.log(1 - share), right + math.log(share))


def _jsd(student: Tensor, teacher: Tensor) -> Tensor:
    mixture = _mixture(student, teacher, BETA)
    return BETA * _kl(teacher, mixture) + (1 - BETA) * _kl(student, mixture)


_DIVERGENCES = {
    "forward_kl": lambda student, teacher: _kl(teacher, student),
    "reverse_kl": lambda student, teacher: _kl(student, teacher),
    "jsd": _jsd,
    "skew_kl": lambda student, teacher: _kl(teacher, _mixture(student, teacher, SKEW)),
    "skew_reverse_kl": lambda student, teacher: _kl(student, _mixture(student, teacher, SKEW)),
    "mixed": lambda student, teacher: BETA * _kl(teacher, student) + (1 - BETA) * _kl(student, teacher),
    "total_variation": lambda student, teacher: 0.5 * (student.exp() - teacher.exp()).abs(),
}
