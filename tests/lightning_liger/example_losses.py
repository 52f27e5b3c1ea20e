"""The loss of each example in eager PyTorch from its definition.

That of ``OWN`` is the module's on whole logits, which tests in ``post_training`` compare with its definition.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
OWN = ("distill", "dpo", "grpo", "kto")


def sum_and_number(example: str, module: Any, batch: Any) -> tuple[Tensor, Tensor | int]:
    """A sum over a batch, and the number of what it is summed over: a step divides sums over its batches."""
    if example.startswith(OWN):
        return module.training_step(batch, 0), 1
    if example == "ranking/ranking.yaml":
        labels, numbers, ids = batch
        clicks, id_logits = module.model(numbers.double(), ids)
        loss = F.binary_cross_entropy_with_logits(clicks, labels.double())
        id_loss = -id_logits[labels == 1].log_softmax(-1).gather(-1, ids[labels == 1, :1]).mean()
        return loss + 0.1 * id_loss, 1
    targets = targets_of(batch)
    if example == "medusa.yaml":  # head k, from 1, looks k further tokens ahead
        hidden = module.model.model(batch["input_ids"], batch.get("attention_mask")).last_hidden_state
        total = -log_probs_of(module.model.lm_head(hidden), targets).sum()
        for k, (block, head) in enumerate(module.medusa_heads, start=1):
            ahead = F.pad(targets[:, k:], (0, k), value=IGNORED)
            total = total - 0.2 * 0.8**k * log_probs_of(head(hidden + F.silu(block.linear(hidden))), ahead).sum()
        return total, (targets != IGNORED).sum()
    names = ("input_ids", "attention_mask", "position_ids", "pixel_values")
    inputs = {name: batch[name] for name in names if name in batch}
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    return -log_probs_of(module.model(**inputs).logits, targets).sum(), (targets != IGNORED).sum()


def targets_of(batch: dict[str, Tensor]) -> Tensor:
    """What each token predicts: the label of the next one, unless that begins another document."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if "position_ids" in batch:
        labels[:, :-1][batch["position_ids"][:, 1:] == 0] = IGNORED
    return labels


def log_probs_of(logits: Tensor, targets: Tensor) -> Tensor:
    kept = targets != IGNORED
    return logits[kept].log_softmax(-1).gather(-1, targets[kept][:, None])


def loss_and_gradients(example: str, module: Any, batches: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a step of these batches, with respect to all parameters that are trained."""
    sums, numbers = zip(*(sum_and_number(example, module, batch) for batch in batches), strict=True)
    loss = sum(sums) / sum(numbers)
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), {
        name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    }
