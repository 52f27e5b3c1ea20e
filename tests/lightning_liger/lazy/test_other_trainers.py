"""Losses as trainers of TRL 1.16 compute them, call for call, on patched models: fused, or chunk by chunk."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def policy(model: Model, teacher: Model) -> Tensor:
    """As trainers of policy gradients: log-probabilities and their divergence from a reference's."""
    log_probs = selected_log_probs(model(input_ids=IDS).logits[:, :-1], IDS[:, 1:], 0.9)
    with torch.no_grad():
        reference = selected_log_probs(teacher(input_ids=IDS).logits[:, :-1], IDS[:, 1:], 0.9)
    divergence = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    return (-log_probs * 0.3 + 0.04 * divergence).mean()


def distillation(model: Model, teacher: Model) -> Tensor:
    """As ``generalized_jsd_loss``, which computes the logits."""
    student = F.log_softmax(model(input_ids=IDS).logits[:, :-1, :] / 2.0, dim=-1)
    with torch.no_grad():
        other = F.log_softmax(teacher(input_ids=IDS).logits[:, :-1, :] / 2.0, dim=-1)
    weight = torch.tensor(0.3, dtype=student.dtype)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-weight), other + torch.log(weight)]), dim=0)
    of_teacher = F.kl_div(mixture, other, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    mask = LABELS[:, 1:] != -100
    return (weight * of_teacher + (1 - weight) * of_student)[mask].sum() / mask.sum()


LOSSES: dict[str, tuple[int, int, Callable[[Model, Model], Tensor]]] = {
    "cpo": (1, 0, partial(preference, False)),
    "orpo": (1, 0, partial(preference, True)),
    "policy": (0, 0, policy),
    "gkd": (0, 1, distillation),
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


@pytest.mark.filterwarnings("ignore:.*on an LM head's output")
@pytest.mark.parametrize(("num_losses", "num_materialized", "loss"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_loss_of_another_trainer_is_that_of_stock_models(
    dtype: torch.dtype,
    num_losses: int,
    num_materialized: int,
    loss: Callable[[Model, Model], Tensor],
    models: dict[bool, Models],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for patched, (model, teacher) in models.items():
        model.to(dtype).zero_grad()
        teacher.to(dtype)
        counters = vars(model.lm_head).setdefault("fusion_counters", FusionCounters())
        before = counters.num_losses, counters.num_materialized
        sizes = TensorSizes(monkeypatch)
        with lazy_logits(), sizes:
            value = loss(model, teacher)
            value.backward()
        if patched:
            counted = counters.num_losses - before[0], counters.num_materialized - before[1]
            assert counted == (num_losses, num_materialized)
            assert num_materialized or sizes.largest < IDS.numel() * VOCAB_SIZE * 2 // 3
        results.append((value.detach(), [parameter.grad for parameter in model.parameters()]))
    (want, wanted), (got, gradients) = results
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, check_dtype=False)
    for gradient, each in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, each, rtol=0, atol=4 * tolerance * float(each.abs().max()))
