"""Rankings of the catalog without a network: the order of the syllabus, and an n-gram model with back-off."""

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from .data import IGNORE_INDEX

Ints = NDArray[np.int64]
BACK_OFF = 0.4
"""Factor of the scores after a context that is one event shorter."""
_BLOCK = 2**11
"""Labels that are ranked at once."""


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
        num_items: Size of the catalog.
    """

    def __init__(self, contexts: Ints, labels: Ints, num_items: int) -> None:
        by_popularity = np.argsort(-np.bincount(labels, minlength=num_items), kind="stable")
        self._popularity_rank = np.empty(num_items, np.int64)
        self._popularity_rank[by_popularity] = np.arange(num_items)
        lengths = range(contexts.shape[1], 0, -1)
        self._followers = [_Followers(contexts, labels, length, num_items) for length in lengths]

    def ranks(self, contexts: Ints, labels: Ints) -> Ints:
        """The rank of each label, from 1; arguments and result are shaped as those of training."""
        blocks = range(0, len(labels), _BLOCK)
        ranks = [self._ranks(contexts[start : start + _BLOCK], labels[start : start + _BLOCK]) for start in blocks]
        return np.concatenate(ranks)

    def _ranks(self, contexts: Ints, labels: Ints) -> Ints:
        found = [each.find(contexts) for each in self._followers]
        rows, items = (np.concatenate([each[part] for each in found]) for part in (0, 1))
        scores = np.concatenate([BACK_OFF**shorter_by * each[2] for shorter_by, each in enumerate(found)])
        num_items, popularity = len(self._popularity_rank), self._popularity_rank
        keys, first = np.unique(rows * num_items + items, return_index=True)  # that of the longest context
        rows, items, scores = rows[first], items[first], scores[first]

        own_keys = np.arange(len(labels)) * num_items + labels
        at = np.searchsorted(keys, own_keys)
        is_known = np.append(keys, -1)[at] == own_keys
        own = np.where(is_known, np.append(scores, 0.0)[at], 0.0)
        is_more_popular = popularity[items] < popularity[labels[rows]]
        is_before = (scores > own[rows]) | ((scores == own[rows]) & is_more_popular)
        ranks = 1 + np.bincount(rows[is_before], minlength=len(labels))
        # A label never seen after the last event: after all that were, and after more popular ones that were not.
        others = popularity[labels] - np.bincount(rows[is_more_popular], minlength=len(labels))
        return np.where(is_known, ranks, ranks + others)


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

    def find(self, contexts: Ints) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """The followers of each context, ``[num_labels, at least its length]``: rows of contexts, items, and shares."""
        keys = self._keys(contexts)
        at = np.searchsorted(self._known, keys).clip(max=len(self._known) - 1)
        starts = self._starts[at]
        sizes = np.where(self._known[at] == keys, self._starts[at + 1] - starts, 0)
        rows = np.repeat(np.arange(len(keys)), sizes)
        where = np.arange(len(rows)) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        counts = self.counts[where]
        return rows, self.items[where], counts / np.bincount(rows, counts, minlength=len(keys))[rows]
