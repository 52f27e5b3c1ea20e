"""Rankings of the catalogue without a network: the order of the syllabus, and an n-gram model with back-off."""

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from .data import IGNORE_INDEX

Ints = NDArray[np.int64]
BACK_OFF = 0.4
"""Factor of the scores after a context that is one event shorter."""


def contexts(split: TensorDataset, num_events: int) -> tuple[Ints, Ints, Ints]:
    """The last events before each label, the labels, and their kinds.

    Args:
        split: Rows of inputs, labels and kinds, ``[num_rows, seq_len]``.
        num_events: Length of a context.

    Returns:
        ``[num_labels, num_events]``, the latest event last and -1 before the first one; ``[num_labels]`` twice.
    """
    inputs, labels, kinds = (tensor.numpy() for tensor in split.tensors)
    rows, columns = np.nonzero(labels != IGNORE_INDEX)
    at = columns[:, None] - np.arange(num_events - 1, -1, -1)
    return np.where(at < 0, -1, inputs[rows[:, None], at]), labels[rows, columns], kinds[rows, columns]


def syllabus_ranks(last: Ints, labels: Ints, num_items: int) -> Ints:
    """Ranks of labels if the resources that follow the last one in the syllabus are recommended in their order."""
    return (labels - last - 1) % num_items + 1


class NGram:
    """Counts of items after contexts of up to ``order - 1`` events, with "stupid" back-off (Brants et al., 2007).

    The score of an item is its share among the items after the longest context that it was seen after, times 0.4 for
    each event by which that context is shorter than the longest. Items never seen after the last event come after all
    others, by popularity; so do equal scores.

    Args:
        contexts: ``[num_labels, order - 1]``, of training.
        labels: ``[num_labels]``, the items after them.
        num_items: Size of the catalogue.
    """

    def __init__(self, contexts: Ints, labels: Ints, num_items: int) -> None:
        by_popularity = np.argsort(-np.bincount(labels, minlength=num_items), kind="stable")
        self._popularity_rank = np.empty(num_items, np.int64)
        self._popularity_rank[by_popularity] = np.arange(num_items)
        lengths = range(contexts.shape[1], 0, -1)
        self._followers = [_Followers(contexts, labels, length, num_items) for length in lengths]

    def ranks(self, contexts: Ints, labels: Ints) -> Ints:
        """The rank of each label, from 1; arguments and result are shaped as those of training."""
        found = [each.find(contexts) for each in self._followers]
        return np.array([self._rank(label, [each[row] for each in found]) for row, label in enumerate(labels.tolist())])

    def _rank(self, label: int, slices: list[slice]) -> int:
        scores: dict[int, float] = {}
        for shorter_by, (followers, where) in enumerate(zip(self._followers, slices, strict=True)):
            counts = followers.counts[where]
            shares = BACK_OFF**shorter_by * counts / max(1, counts.sum())
            for item, score in zip(followers.items[where].tolist(), shares.tolist(), strict=True):
                scores.setdefault(item, score)
        popularity = self._popularity_rank
        own = scores.get(label)
        if own is None:
            return 1 + int(popularity[label]) + sum(bool(popularity[item] > popularity[label]) for item in scores)
        is_first = (s > own or (s == own and popularity[item] < popularity[label]) for item, s in scores.items())
        return 1 + sum(map(bool, is_first))


class _Followers:
    """The items seen after each context of one length: a slice of ``items`` and ``counts`` for each context."""

    def __init__(self, contexts: Ints, labels: Ints, length: int, num_items: int) -> None:
        self._powers = (num_items + 1) ** np.arange(length)
        self._length = length
        self._known, index = np.unique(self._keys(contexts), return_inverse=True)
        pairs, self.counts = np.unique(index * num_items + labels, return_counts=True)
        self.items = pairs % num_items
        self._starts = np.searchsorted(pairs // num_items, np.arange(len(self._known) + 1))

    def _keys(self, contexts: Ints) -> Ints:
        return (contexts[:, -self._length :] + 1) @ self._powers

    def find(self, contexts: Ints) -> list[slice]:
        """Where the followers of each context are, ``[num_labels, at least its length]``; empty if it is unknown."""
        keys = self._keys(contexts)
        at = np.searchsorted(self._known, keys).clip(max=len(self._known) - 1)
        stops = np.where(self._known[at] == keys, self._starts[at + 1], self._starts[at])
        return [slice(start, stop) for start, stop in zip(self._starts[at].tolist(), stops.tolist(), strict=True)]
