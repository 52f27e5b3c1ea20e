"""Padding, ignored labels and lengths of sequences in batches, counted on their device without waiting for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_ops import IGNORE_INDEX
from lightning_liger.monitor.clock import size_of, tokens_of

LENGTH_EDGES = (1, 2, *(edge for power in range(1, 24) for edge in (3 * 2 ** (power - 1), 2 ** (power + 1))))
"""The largest length of each class of the histogram: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
_MAX_PENDING = 2**20
"""Tokens whose labels and masks are kept before they are counted: 24 MB at most."""
_KINDS = ("padding", "labels", "ignored")


@dataclass
class BatchTotals:
    """Sums over batches. They add up with ``+``."""

    num_rows: float = 0.0
    num_tokens: float = 0.0
    """Those of padding included."""
    num_padding: float = 0.0
    num_labels: float = 0.0
    num_ignored: float = 0.0
    pairs: list[float] = field(default_factory=list)
    """Pairs of a token and one that it attends to, for each window."""
    lengths: list[float] = field(default_factory=lambda: [0.0] * len(LENGTH_EDGES))
    """How many sequences have a length in each class of :data:`LENGTH_EDGES`."""

    @staticmethod
    def from_list(values: Sequence[float], num_windows: int) -> "BatchTotals":
        """The totals of which :meth:`BatchCounter.take` returned the numbers."""
        rows, tokens, padding, labels, ignored, *rest = values
        return BatchTotals(rows, tokens, padding, labels, ignored, rest[:num_windows], rest[num_windows:])

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        return BatchTotals(
            self.num_rows + other.num_rows,
            self.num_tokens + other.num_tokens,
            self.num_padding + other.num_padding,
            self.num_labels + other.num_labels,
            self.num_ignored + other.num_ignored,
            _added(self.pairs, other.pairs),
            _added(self.lengths, other.lengths),
        )

    def times(self, factor: float) -> "BatchTotals":
        """All numbers multiplied by a factor."""
        return BatchTotals(
            self.num_rows * factor,
            self.num_tokens * factor,
            self.num_padding * factor,
            self.num_labels * factor,
            self.num_ignored * factor,
            [each * factor for each in self.pairs],
            [each * factor for each in self.lengths],
        )


def _added(left: list[float], right: list[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)] if left and right else list(left or right)


class BatchCounter:
    """Counts what is in the batches of this process.

    A batch is counted with the ones after it, together, because many small operators would cost the host more.

    Args:
        device: Of the batches.
        windows: The widths of attention for which pairs are counted, None for any width.
    """

    def __init__(self, device: torch.device, windows: Sequence[int | None] = ()) -> None:
        self._device = device
        self._windows = list(windows)
        self._edges: Tensor | None = None
        self._reset()

    def _reset(self) -> None:
        self._num_rows = self._num_tokens = self._num_labels = self._num_pending = 0
        self._whole_rows: dict[int, int] = {}
        self._counted: Tensor | None = None
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._num_pending = 0
        self._masks: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._labels: list[tuple[Tensor, int]] = []

    def add(self, batch: Any) -> None:
        """Adds a training batch, of which only shapes are looked at for now."""
        num_rows, num_tokens = size_of(batch)
        self._num_rows += num_rows
        self._num_tokens += num_tokens
        tokens = tokens_of(batch)
        if tokens is None or not num_tokens:
            return
        labels, ignored = _labels_of(batch)
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        if isinstance(mask, Tensor) and mask.shape == tokens.shape:
            self._masks.append(mask)
        elif isinstance(positions, Tensor) and positions.shape == tokens.shape:
            self._positions.append(positions)
        else:
            length = tokens.shape[-1]
            self._whole_rows[length] = self._whole_rows.get(length, 0) + num_tokens // length
        if labels is not None:
            self._num_labels += labels.numel()
            self._labels.append((labels, ignored))
        self._num_pending += num_tokens
        if self._num_pending >= _MAX_PENDING:
            self._count_pending()

    def take(self) -> Tensor:
        """The totals since the last call as a vector in float64 on the device, for :meth:`BatchTotals.from_list`."""
        self._count_pending()
        own = [self._num_rows, self._num_tokens, 0, self._num_labels, 0]
        own += [sum(count * _pairs(length, window) for length, count in self._whole_rows.items())
                for window in self._windows]  # fmt: skip
        histogram = [0] * len(LENGTH_EDGES)
        for length, count in self._whole_rows.items():
            histogram[next((i for i, edge in enumerate(LENGTH_EDGES) if edge >= length), -1)] += count
        found = torch.tensor([*own, *histogram], dtype=torch.float64).to(self._device, non_blocking=True)
        found = found if self._counted is None else found + self._counted
        self._reset()
        return found

    @torch.inference_mode()
    def _count_pending(self) -> None:
        if not self._num_pending or not (self._masks or self._positions or self._labels):
            self._forget_pending()
            return
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        padding, ignored = zero, zero
        pairs, histogram = [zero] * len(self._windows), zero.new_zeros(len(LENGTH_EDGES))
        if self._labels:
            values = [(labels == value).sum() for labels, value in _joined(self._labels)]
            ignored = torch.stack(values).sum().double()
        groups: list[tuple[Tensor, Tensor | None]] = []  # lengths, and the lengths that attention sees
        if self._masks:
            masks = [mask.reshape(-1, mask.shape[-1]) for mask in self._masks]
            lengths = torch.cat([mask.ne(0).sum(-1) for mask in masks])
            widths = [torch.full((len(mask),), mask.shape[-1], device=mask.device) for mask in masks]
            groups.append((lengths, torch.cat(widths)))
            padding = padding + sum(mask.numel() for mask in masks) - lengths.sum()
        if self._positions:
            documents = _document_lengths(torch.cat([positions.flatten() for positions in self._positions]))
            alone = documents == 1  # padding at the end of a packed row starts again at 0 with each token
            padding = padding + alone.sum()
            groups.append((documents.masked_fill(alone, 0), None))
        for lengths, seen in groups:
            if self._edges is None:
                self._edges = torch.tensor(LENGTH_EDGES, device=self._device)
            classes = torch.bucketize(lengths, self._edges).clamp_(max=len(LENGTH_EDGES) - 1)
            histogram.scatter_add_(0, classes, lengths.ne(0).double())
            exact = (lengths if seen is None else seen).double()
            pairs = [
                total + (exact * (exact if window is None else exact.clamp(max=window))).sum()
                for total, window in zip(pairs, self._windows, strict=True)
            ]
        counted = torch.cat([torch.stack([zero, zero, padding, zero, ignored, *pairs]), histogram])
        self._counted = counted if self._counted is None else self._counted + counted
        self._forget_pending()


def _labels_of(batch: Mapping[str, Any]) -> tuple[Tensor | None, int]:
    """The labels of a batch, or the mask of its completions, and the value of those that have no loss."""
    for key, value in (("labels", IGNORE_INDEX), ("shift_labels", IGNORE_INDEX), ("completion_mask", 0)):
        labels = batch.get(key)
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            return labels, value
    return None, 0


def _joined(labels: list[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    """The labels of each value as one tensor."""
    values = sorted({value for _, value in labels})
    return [(torch.cat([each.flatten() for each, own in labels if own == value]), value) for value in values]


def _document_lengths(positions: Tensor) -> Tensor:
    """The lengths of documents, followed by zeros: a document starts where the position does not increase by one."""
    starts = torch.ones_like(positions)
    starts[1:] = positions.diff() != 1
    number = starts.cumsum(0) - 1
    return torch.zeros_like(number).scatter_add_(0, number, torch.ones_like(number))


def _pairs(length: int, window: int | None) -> int:
    return length * (length if window is None else min(length, window))
