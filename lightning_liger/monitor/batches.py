"""Padding, ignored labels and lengths of sequences in batches, counted on their device without waiting for it."""

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.monitor.flops import num_pairs
from lightning_liger.monitor.tokens import Part

LENGTH_EDGES = (1, 2, *(edge for power in range(1, 24) for edge in (3 * 2 ** (power - 1), 2 ** (power + 1))))
"""The largest length of each class of the histogram: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
_MAX_PENDING = 2**20
"""Tokens whose labels and masks are kept before they are counted: 24 MB at most."""


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
        """The totals of which :meth:`BatchCounter.take` returned the numbers, those that shapes tell first."""
        rows, tokens, checked, labels, num_lengths, *rest = values
        attended, learned, *counted = rest[num_windows + len(LENGTH_EDGES) :]
        pairs = [known + found for known, found in zip(rest[:num_windows], counted[:num_windows], strict=True)]
        at_most = [*counted[num_windows:], num_lengths]  # ... 0, each edge but the last, and any length
        lengths = [
            known + upper - lower
            for known, (lower, upper) in zip(rest[num_windows:], itertools.pairwise(at_most), strict=False)
        ]
        return BatchTotals(rows, tokens, checked - attended, labels, labels - learned, pairs, lengths)

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
        self._windows = list(windows)
        self._zeros = torch.zeros(len(LENGTH_EDGES), dtype=torch.int64, device=device)
        # Without the last one: longer rows are in its class too.
        self._edges = torch.tensor([0, *LENGTH_EDGES[:-1]], device=device)
        self._reset()

    def _reset(self) -> None:
        self._num_rows = self._num_tokens = self._num_checked = self._num_labels = self._num_lengths = 0
        self._rows: Counter[int] = Counter()
        """How many rows attend to so many tokens."""
        self._whole: Counter[int] = Counter()
        """How many sequences have a length that their shape tells."""
        self._counted: Tensor | None = None
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._num_pending = 0
        self._masks: dict[int, list[tuple[Tensor, ...]]] = {}
        self._documents: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._labels: dict[int, list[Tensor]] = {}

    def add(self, num_rows: int, parts: Sequence[Part]) -> None:
        """Adds a training batch, of which only shapes are looked at for now.

        Args:
            num_rows: Those of the batch.
            parts: Those of the batch.
        """
        self._num_rows += num_rows
        for part in parts:
            if part.num_tokens:
                self._add(part)
        if self._num_pending >= _MAX_PENDING:
            self._count_pending()

    def _add(self, part: Part) -> None:
        num_tokens, length = part.num_tokens, part.shape[-1]
        num_rows = num_tokens // length
        self._num_tokens += num_tokens
        self._num_pending += num_tokens
        if part.masks or part.positions is None:  # a mask lets attention see whole rows, also packed ones
            self._rows[length] += num_rows
        if part.positions is not None:
            self._documents.append((part.positions, part.masks))
            self._num_lengths += num_tokens
        elif part.masks:
            self._masks.setdefault(length, []).append(part.masks)
            self._num_lengths += num_rows
        else:
            self._whole[length] += num_rows
        if part.positions is not None or part.masks:
            self._num_checked += num_tokens
        if part.labels is not None:
            self._num_labels += part.num_labels
            self._labels.setdefault(part.no_loss, []).append(part.labels)

    def take(self) -> tuple[list[float], Tensor]:
        """The totals since the last call.

        Returns:
            What shapes tell, and the rest as a vector on the device, in int64 or float64; one after the other, and
            added up over processes, they are numbers for :meth:`BatchTotals.from_list`.
        """
        self._count_pending()
        known: list[float] = [
            *(self._num_rows, self._num_tokens, self._num_checked, self._num_labels, self._num_lengths),
            *(sum(num * num_pairs(length, window) for length, num in self._rows.items()) for window in self._windows),
        ]
        histogram = [0] * len(LENGTH_EDGES)
        for length, count in self._whole.items():
            histogram[bisect.bisect_left(LENGTH_EDGES, length, hi=len(LENGTH_EDGES) - 1)] += count
        counted = self._counted
        if counted is None:
            counted = self._zeros.new_zeros(2 + len(self._windows) + len(self._zeros))
        self._reset()
        return [*known, *histogram], counted

    @torch.no_grad()
    def _count_pending(self) -> None:
        if not (self._masks or self._documents or self._labels):
            self._forget_pending()
            return
        zero = self._zeros[:1]
        attended, learned, at_most = zero, zero, self._zeros
        pairs = [zero] * len(self._windows)
        if self._labels:
            counts = [self._joined(labels).ne(no_loss).sum() for no_loss, labels in self._labels.items()]
            learned = (counts[0] if len(counts) == 1 else torch.stack(counts).sum()).view(1)
        lengths = [torch.count_nonzero(self._joined(list(map(_rows, masks))), -1) for masks in self._masks.values()]
        if masked := [document for document in self._documents if document[1]]:
            kept = self._joined([_rows(masks).flatten() for _, masks in masked]).ne(0).long()
            lengths.append(_document_lengths(self._joined([each.flatten() for each, _ in masked]), kept))
        if alone := [positions.flatten() for positions, masks in self._documents if not masks]:
            documents = _document_lengths(self._joined(alone))
            # Padding at the end of a packed row starts again at 0 with each token.
            documents = documents.masked_fill(documents == 1, 0)
            lengths.append(documents)
            exact = documents.double()
            pairs = [
                (exact * (exact if window is None else exact.clamp(max=window))).sum().view(1)
                for window in self._windows
            ]
        if lengths:
            each = lengths[0] if len(lengths) == 1 else torch.cat(lengths)
            attended = each.sum(0, keepdim=True)
            at_most = torch.searchsorted(each.sort().values, self._edges, right=True)
        counted = torch.cat([attended, learned, *pairs, at_most])
        self._counted = counted if self._counted is None else self._counted + counted
        self._forget_pending()

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        """The elements of all tensors on the device, in rows if they have rows of one length."""
        joined = tensors[0]
        if len(tensors) > 1:
            in_rows = all(each.shape[1:] == joined.shape[1:] for each in tensors)
            joined = torch.cat(tensors if in_rows else [each.flatten() for each in tensors])
        return joined.to(self._zeros.device, non_blocking=True)  # a step may do so on its own


def _rows(masks: tuple[Tensor, ...]) -> Tensor:
    """The mask of whole rows, ``[num_rows, seq_len]``."""
    mask = masks[0] if len(masks) == 1 else torch.cat(masks, -1)
    return mask if mask.ndim == 2 else mask.reshape(-1, mask.shape[-1])


def _document_lengths(positions: Tensor, counts: Tensor | None = None) -> Tensor:
    """The lengths of documents, and zeros: a document starts where the position does not increase by one.

    Args:
        positions: Those of all tokens, one row after the other.
        counts: 0 for tokens that are not counted, 1 for all others.
    """
    number = F.pad(positions.diff() != 1, (1, 0)).cumsum(0)
    return torch.zeros_like(number).scatter_add_(0, number, torch.ones_like(number) if counts is None else counts)
