"""Ranks of labels among the whole catalog, and metrics that are made of them."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection

from .generator import KINDS

TOP = (1, 5, 10)


@torch.no_grad()
def label_ranks(hidden_states: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int = 2**28) -> Tensor:
    """The rank of each label among the logits ``hidden_states @ weight.T``, in float32, one chunk of them at a time.

    Args:
        hidden_states: ``[num_tokens, hidden_size]``.
        weight: The head, ``[vocab_size, hidden_size]``.
        labels: ``[num_tokens]``, int64.
        chunk_bytes: Size of one chunk of logits.

    Returns:
        ``[num_tokens]``, int64: how many logits are at least the label's, so 1 is the best and ties count against it.
    """
    chunk_size = max(1, chunk_bytes // (4 * weight.shape[0]))
    ranks = []
    for rows, classes in zip(hidden_states.split(chunk_size), labels.split(chunk_size), strict=True):
        with torch.autocast(rows.device.type, enabled=False):  # in 16 bits many logits would be equal
            logits = F.linear(rows.float(), weight.float())
        ranks.append((logits >= logits.gather(1, classes[:, None])).sum(dim=1))
    return torch.cat(ranks) if ranks else labels.new_empty(0)


class RankMetrics(MetricCollection):
    """``hit@1``, ``hit@5``, ``hit@10`` and ``mrr`` over all labels, and ``hit@10`` of each kind of event.

    Args:
        prefix: Put before their names.
    """

    def __init__(self, prefix: str | None = None) -> None:
        names = [*(f"hit@{k}" for k in TOP), "mrr", *(f"hit@10_{kind}" for kind in KINDS)]
        super().__init__({name: MeanMetric() for name in names}, prefix=prefix, compute_groups=False)

    def update_ranks(self, ranks: Tensor, kinds: Tensor) -> None:
        """Adds labels.

        Args:
            ranks: ``[num_tokens]``, from 1.
            kinds: ``[num_tokens]``, indices of :data:`~.generator.KINDS`.
        """
        for k in TOP:
            self[f"hit@{k}"].update((ranks <= k).float())
        self["mrr"].update(1 / ranks)
        for index, kind in enumerate(KINDS):
            if (kind_ranks := ranks[kinds == index]).numel():
                self[f"hit@10_{kind}"].update((kind_ranks <= 10).float())
