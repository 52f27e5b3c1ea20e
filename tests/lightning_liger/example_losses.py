"""The loss of each example from its definition, in eager PyTorch: sums of terms and the numbers that divide them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Terms = list[tuple[Tensor, Tensor | int]]
"""Each a sum over a batch, and the number of what it is summed over: a step divides sums over its batches."""
IGNORED = -100


def targets_of(batch: dict[str, Tensor]) -> Tensor:
    """What each token predicts: the label of the next one, unless that begins another document."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if "position_ids" in batch:
        labels[:, :-1][batch["position_ids"][:, 1:] == 0] = IGNORED
    return labels


def logits_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    names = ("input_ids", "attention_mask", "position_ids", "pixel_values")
    inputs = {name: batch[name] for name in names if name in batch}
    return model(**{name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}).logits


def scores_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each target, 0 where there is none."""
    scores = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return scores * (targets != IGNORED)


def cross_entropy(module: Any, batch: dict[str, Tensor]) -> Terms:
    targets = targets_of(batch)
    return [(-scores_of(logits_of(module.model, batch), targets).sum(), (targets != IGNORED).sum())]


def sequence_scores(model: nn.Module, batch: dict[str, Tensor], prefix: str = "") -> Tensor:
    """The log-probability of each completion."""
    own = {name.removeprefix(prefix): each for name, each in batch.items() if name.startswith(prefix)}
    labels = own["input_ids"].where(own["completion_mask"].bool(), IGNORED)
    return scores_of(logits_of(model, own), targets_of({"labels": labels})).sum(-1)


def dpo(module: Any, batch: dict[str, Tensor]) -> Terms:
    chosen, rejected = (sequence_scores(module.model, batch) - sequence_scores(module.ref_model, batch)).chunk(2)
    return [(-F.logsigmoid(0.1 * (chosen - rejected)).sum(), len(chosen))]


def kto(module: Any, batch: dict[str, Tensor]) -> Terms:
    ratios = sequence_scores(module.model, batch) - sequence_scores(module.ref_model, batch)
    mismatched = sequence_scores(module.model, batch, "KL_") - sequence_scores(module.ref_model, batch, "KL_")
    kl = mismatched.mean().clamp(min=0).detach()
    signed = torch.where(batch["label"], ratios - kl, kl - ratios)
    return [((1 - torch.sigmoid(0.1 * signed)).sum(), len(ratios))]


def grpo(module: Any, batch: dict[str, Tensor]) -> Terms:
    """DAPO's mean over all tokens; the divergence from the reference is weighted by the ratio."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in enumerate(batch["advantages"].double()):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        ids, size = torch.cat((prompt, completion))[None], len(completion)
        own, ref = (
            scores_of(logits_of(model, {"input_ids": ids})[0, :-1], ids[0, 1:])[-size:]
            for model in (module.model, module.ref_model)
        )
        old = batch["old_per_token_logps"][row, :size].double() if "old_per_token_logps" in batch else own.detach()
        ratio = (own - old).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = ((ref - own).exp() - (ref - own) - 1) * ratio
        total, count = total + (0.04 * kl - objective).sum(), count + size
    return [(total, count)]


def distill(module: Any, batch: dict[str, Tensor]) -> Terms:
    kept = targets_of(batch) != IGNORED
    with torch.no_grad():
        log_p = logits_of(module.configure_teacher().double(), batch)[kept].log_softmax(-1)
    log_q = logits_of(module.model, batch)[kept].log_softmax(-1)
    return [((log_p.exp() * (log_p - log_q)).sum(), kept.sum())]


def distill_topk(module: Any, batch: dict[str, Tensor]) -> Terms:
    """Forward KL over the stored tokens and one class for all others."""
    kept = targets_of(batch) != IGNORED
    q = logits_of(module.model, batch)[kept].softmax(-1).gather(-1, batch["teacher_topk_ids"][kept])
    p = batch["teacher_topk_log_probs"][kept].double().exp()
    p, q = (torch.cat((each, 1 - each.sum(-1, keepdim=True)), -1) for each in (p, q))
    return [(torch.where(p > 0, p * (p.clamp(min=1e-300) / q).log(), 0).sum(), kept.sum())]


def medusa(module: Any, batch: dict[str, Tensor]) -> Terms:
    """The model's own loss, and 0.2 times the heads': head k, from 1, looks k further tokens ahead."""
    targets = targets_of(batch)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    hidden = module.model.model(**inputs).last_hidden_state
    total = -scores_of(module.model.lm_head(hidden), targets).sum()
    for k, (block, head) in enumerate(module.medusa_heads, start=1):
        ahead = F.pad(targets[:, k:], (0, k), value=IGNORED)
        logits = head(hidden + F.silu(block.linear(hidden)))
        total = total - 0.2 * 0.8**k * scores_of(logits, ahead).sum()
    return [(total, (targets != IGNORED).sum())]


def ranking(module: Any, batch: Any) -> Terms:
    labels, numbers, ids = batch
    clicks, id_logits = module.model(numbers.double(), ids)
    loss = F.binary_cross_entropy_with_logits(clicks, labels.double())
    id_loss = -id_logits[labels == 1].log_softmax(-1).gather(-1, ids[labels == 1, :1]).mean()
    return [(loss + 0.1 * id_loss, 1)]


LOSSES: dict[str, Callable[[Any, Any], Terms]] = {
    "distill.yaml": distill,
    "distill_topk.yaml": distill_topk,
    "dpo.yaml": dpo,
    "grpo_offline.yaml": grpo,
    "kto.yaml": kto,
    "medusa.yaml": medusa,
    "ranking/ranking.yaml": ranking,
}
"""Of the other examples: cross entropy."""


def loss_and_gradients(example: str, module: Any, batches: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a step of these batches, with respect to all parameters that are trained."""
    terms = [LOSSES.get(example, cross_entropy)(module, batch) for batch in batches]
    loss = sum(
        torch.stack([total for total, _ in parts]).sum() / sum(count for _, count in parts)
        for parts in zip(*terms, strict=True)
    )
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), {
        name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    }
