"""What every loss over class indices shares: its options, the checks of its arguments, and how tokens are reduced."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class TokenLossOptions:
    """What turns one token's logits into its loss; see :mod:`liger_ops.cross_entropy` for the formula.

    Raises:
        ValueError: If an option is out of its range.
    """

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be between 0 and 1, got {self.label_smoothing}")
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError(f"softcap must be positive or None, got {self.softcap}")
        if not self.z_loss_weight >= 0.0:
            raise ValueError(f"z_loss_weight must not be negative, got {self.z_loss_weight}")

    def as_scalars(self) -> tuple[int, float, float, float, float]:
        """The options as an op's schema takes them, ``softcap`` 0 for none."""
        return self.ignore_index, self.label_smoothing, self.softcap or 0.0, self.logit_scale, self.z_loss_weight

    @classmethod
    def from_scalars(
        cls, ignore_index: int, label_smoothing: float, softcap: float, logit_scale: float, z_loss_weight: float
    ) -> "TokenLossOptions":
        """The inverse of :meth:`as_scalars`."""
        return cls(ignore_index, label_smoothing, softcap or None, logit_scale, z_loss_weight)


class TokenStats(NamedTuple):
    """What the loss knew about each token; none of it carries gradients. Zero at ignored tokens."""

    losses: Tensor
    """``[num_tokens]``, float32: each token's loss before reduction."""
    lse: Tensor
    """``[num_tokens]``, float32: log-sum-exp of the token's scaled and capped logits."""
    predictions: Tensor
    """``[num_tokens]``, int64: the class with the largest logit (the first of equals), ``ignore_index`` at ignored
    tokens."""


def check_labels(name: str, labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raises a ValueError for labels of a wrong dtype, and on the CPU for labels that are no class."""
    if labels.dtype != torch.int64:
        raise ValueError(f"{name} must hold class indices of dtype torch.int64, got {labels.dtype}")
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)]
        if wrong.numel():
            raise ValueError(
                f"{name} must be between 0 and vocab_size - 1 = {vocab_size - 1}, or ignore_index = {ignore_index};"
                f" got {wrong[0].item()} ({wrong.numel()} of {labels.numel()} labels are out of range)"
            )


def reduce_losses(
    losses: Tensor, labels: Tensor, class_weight: Tensor | None, options: TokenLossOptions, reduction: str
) -> Tensor:
    """Per-token losses as they are, their sum, or their mean over the (weighted) tokens that are not ignored."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / mean_denominator(labels, class_weight, options, losses.dtype)


def mean_denominator(
    labels: Tensor, class_weight: Tensor | None, options: TokenLossOptions, dtype: torch.dtype
) -> Tensor:
    """What the summed losses are divided by under ``reduction="mean"``: 0 when every token is ignored."""
    kept = labels != options.ignore_index
    if class_weight is None:
        return kept.sum(dtype=dtype)
    safe_labels = labels.clamp(0, class_weight.shape[0] - 1)
    return class_weight.to(dtype)[safe_labels].where(kept, 0.0).sum()


def check_reduction(reduction: str) -> None:
    """Raises a ValueError that lists the known reductions."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
