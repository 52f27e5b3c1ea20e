"""Scores of tokens in eager PyTorch, of batches as the data modules make them."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

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
