"""Quantities of scored tokens from whole logits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_ops import IGNORE_INDEX


class TokenScores(NamedTuple):
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logit: Tensor | None = None
    predictions: Tensor | None = None
    correct: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


def token_scores(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (), ignore_index: int = IGNORE_INDEX,
) -> TokenScores:  # fmt: skip
    z = logits.float() / temperature
    kept = labels != ignore_index
    lse = z.logsumexp(-1)
    log_p = z - lse[..., None]
    predictions = z.argmax(-1)
    values = {
        "log_probs": log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": lse,
        "mean_logit": z.mean(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
    }
    values = {name: torch.where(kept, value, 0.0) for name, value in values.items() if name in outputs}
    values = {name: value.detach() if name in detach else value for name, value in values.items()}
    if "predictions" in outputs:
        values["predictions"] = predictions.masked_fill(~kept, ignore_index)
    if "correct" in outputs:
        values["correct"] = (predictions == labels) & kept
    return TokenScores(**values)
