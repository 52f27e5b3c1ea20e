"""Losses as trainers of other packages compute them, call for call, on patched models: fused, or chunk by chunk.

The calls are those of TRL 1.16 (the CPO, ORPO and GKD trainers, and helpers that most others share) and of
transformers' ``LabelSmoother``.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from lightning_liger import apply_liger_kernels, lazy_logits
from lightning_liger.lazy.head import FusionCounters
from tests.lightning_liger.tiny import VOCAB_SIZE, TensorSizes, tiny_llama

NUM_CHOSEN, SEQ_LEN = 2, 18
IDS = torch.randint(3, VOCAB_SIZE, (2 * NUM_CHOSEN, SEQ_LEN), generator=torch.Generator().manual_seed(0))
LABELS = IDS.clone()
LABELS[:NUM_CHOSEN, :4] = -100
LABELS[3, 7:] = -100

Model = Callable[..., Any]


def selected_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """As ``selective_log_softmax``: of float32 logits minus their log-sum-exps, others row by row."""
    logits, labels = logits / temperature, labels.unsqueeze(-1)
    if logits.dtype == torch.float32:
        normalizers = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        return (torch.gather(logits, dim=-1, index=labels) - normalizers.unsqueeze(-1)).squeeze(-1)
    rows = [F.log_softmax(row, dim=-1).gather(dim=-1, index=of_row) for row, of_row in zip(logits, labels, strict=True)]
    return torch.stack(rows).squeeze(-1)


def entropies(logits: Tensor, chunk_size: int = 16) -> Tensor:
    """As ``entropy_from_logits``."""
    found = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(chunk_size, dim=0):
        log_probs = F.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(log_probs) * log_probs).sum(-1))
    return torch.cat(found, dim=0).reshape(logits.shape[:-1])


def sequence_log_probs(logits: Tensor, labels: Tensor, average: bool) -> Tensor:
    """As ``get_batch_logps``."""
    labels, logits = labels[:, 1:].clone(), logits[:, :-1, :]
    mask = labels != -100
    labels[labels == -100] = 0
    sums = (selected_log_probs(logits, labels) * mask).sum(-1)
    return sums / mask.sum(-1) if average else sums


def preference(average: bool, model: Model, teacher: Model) -> Tensor:
    """The terms of CPO, or with averages of ORPO and SimPO, and their metrics."""
    logits = model(input_ids=IDS).logits
    chosen = logits[:NUM_CHOSEN][..., :-1, :].contiguous()
    nll = nn.CrossEntropyLoss()(chosen.view(-1, chosen.shape[-1]), LABELS[:NUM_CHOSEN, 1:].contiguous().view(-1))
    log_probs = sequence_log_probs(logits, LABELS, average)
    difference = log_probs[:NUM_CHOSEN] - log_probs[NUM_CHOSEN:]
    with torch.no_grad():
        metrics = logits[:NUM_CHOSEN].detach().mean() + logits[NUM_CHOSEN:, :-1].detach().mean()
    return nll - F.logsigmoid(0.1 * difference).mean() + metrics


def distillation(
    beta: float, mode: Callable[[], AbstractContextManager[Any]], model: Model, teacher: Model, temperature: float = 1.0
) -> Tensor:
    """As ``generalized_jsd_loss``."""
    student_logits = model(input_ids=IDS).logits[:, :-1, :] / temperature
    with mode():
        teacher_logits = teacher(input_ids=IDS).logits
    student = F.log_softmax(student_logits, dim=-1)
    other = F.log_softmax(teacher_logits[:, :-1, :] / temperature, dim=-1)
    if beta == 0:
        losses = F.kl_div(student, other, reduction="none", log_target=True)
    elif beta == 1:
        losses = F.kl_div(other, student, reduction="none", log_target=True)
    else:
        weight = torch.tensor(beta, dtype=student.dtype, device=student.device)
        parts = torch.stack([student + torch.log1p(-weight), other + torch.log(weight)])
        mixture = torch.logsumexp(parts, dim=0)
        of_teacher = F.kl_div(mixture, other, reduction="none", log_target=True)
        of_student = F.kl_div(mixture, student, reduction="none", log_target=True)
        losses = weight * of_teacher + (1 - weight) * of_student
    mask = LABELS[:, 1:] != -100
    return losses[mask].sum() / mask.sum().clamp_min(1)


def three_models(model: Model, teacher: Model) -> Tensor:
    """A mixture that no op computes."""
    x, y = (each(input_ids=IDS).logits.log_softmax(-1) for each in (model, teacher))
    mixture = torch.logsumexp(torch.stack([x - 1.0, y.detach() - 1.0, (x * 0.5).log_softmax(-1) - 1.0]), dim=0)
    return F.kl_div(mixture, x, reduction="batchmean", log_target=True) + F.kl_div(y.detach(), x.exp()).mean()


def policy(model: Model, teacher: Model) -> Tensor:
    """As trainers of policy gradients: log-probabilities and an entropy bonus."""
    logits = model(input_ids=IDS).logits[:, :-1]
    log_probs, entropy = selected_log_probs(logits, IDS[:, 1:], 0.9), entropies(logits / 0.9)
    with torch.no_grad():
        reference = selected_log_probs(teacher(input_ids=IDS).logits[:, :-1], IDS[:, 1:], 0.9)
    divergence = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    return (-log_probs * 0.3 + 0.04 * divergence - 0.01 * entropy).mean()


def label_smoothing(model: Model, teacher: Model) -> Tensor:
    loss: Tensor = LabelSmoother(epsilon=0.1)(model(input_ids=IDS), LABELS.clone(), shift_labels=True)
    return loss


LOSSES: dict[str, tuple[int, Callable[[Model, Model], Tensor]]] = {
    "cpo": (1, partial(preference, False)),
    "orpo": (1, partial(preference, True)),
    "gkd_forward": (1, partial(distillation, 0, torch.no_grad)),
    "gkd_reverse": (1, partial(distillation, 1, torch.no_grad, temperature=0.7)),
    "gkd": (1, partial(distillation, 0.3, torch.no_grad, temperature=2.0)),
    "gkd_of_inference_mode": (1, partial(distillation, 0.5, torch.inference_mode)),
    "mixture": (1, three_models),
    "policy": (5, policy),
    "label_smoothing": (0, label_smoothing),
}


class Models(NamedTuple):
    """A student and a teacher of another hidden size, whose heads are stock or patched."""

    student: Any
    teacher: Any


@pytest.fixture(scope="module")
def models() -> dict[bool, Models]:
    made = {}
    for patched in (False, True):
        made[patched] = Models(tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1, hidden_size=16))
        if patched:
            for model in made[patched]:
                apply_liger_kernels(model, {"linear_cross_entropy": {"chunk_bytes": 30 * VOCAB_SIZE * 4}})
    return made


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("num_losses", "loss"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_loss_of_another_trainer_makes_no_logits(
    dtype: torch.dtype,
    num_losses: int,
    loss: Callable[[Model, Model], Tensor],
    models: dict[bool, Models],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for patched, (model, teacher) in models.items():
        model.to(dtype).zero_grad()
        teacher.to(dtype)
        counters = vars(model.lm_head).setdefault("fusion_counters", FusionCounters())
        before = counters.num_losses
        sizes = TensorSizes(monkeypatch)
        with warnings.catch_warnings(), lazy_logits(), sizes:
            warnings.filterwarnings("error", message=".*on an LM head's output")
            value = loss(model, teacher)
            value.backward()
        if patched:
            assert (counters.num_losses - before, counters.num_materialized) == (num_losses, 0)
            assert sizes.largest < IDS.numel() * VOCAB_SIZE * 2 // 3
        results.append((value.detach(), [parameter.grad for parameter in model.parameters()]))
    (want, wanted), (got, gradients) = results
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, check_dtype=False)
    for gradient, each in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, each, rtol=0, atol=4 * tolerance * float(each.abs().max()))
