"""Rows of several examples, and the order in which ranks get them: packing, grouping by length, balance over ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info
from typing_extensions import override

from liger_ops.arguments import check_integer, wrong_type, wrong_value
from lightning_liger.data.collate import Batch, Example, Layout


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each item, ``[num_items]``: the longest first, each in the fullest row of ``capacity`` that it fits.

    After the sort, items of one length that meet rows with equally much left are placed at once, by array operations.
    Raises ValueError for items that fit no row.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise wrong_value("lengths", f"from 1 to {capacity}", f"{lengths.min()} to {lengths.max()}")
    order = np.argsort(-lengths, kind="stable")
    sizes, starts = np.unique(-lengths[order], return_index=True)
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows_with: dict[int, list[int]] = defaultdict(list)
    num_rows, is_left = 0, 0  # bit i of is_left: whether some row has i tokens left
    for size, start, stop in zip((-sizes).tolist(), starts.tolist(), [*starts.tolist()[1:], len(lengths)], strict=True):
        while start < stop:
            fitting = is_left >> size
            left = size + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            per_row = left // size  # a row that got one is the fullest that fits the next one
            needed = -(-(stop - start) // per_row)
            if not fitting:
                rows_with[left] = [*range(num_rows, num_rows + needed)]
                num_rows += needed
            rows = rows_with[left][-needed:]
            del rows_with[left][-needed:]
            num_items = min(len(rows) * per_row, stop - start)
            row_of[order[start : start + num_items]] = np.repeat(rows, per_row)[:num_items]
            start += num_items
            rows_with[left - size * per_row] += rows[:-1]
            rows_with[last := left - size * (num_items - (len(rows) - 1) * per_row)].append(rows[-1])
            for changed in (left, left - size * per_row, last):
                is_left = is_left | 1 << changed if rows_with[changed] else is_left & ~(1 << changed)
    return row_of


def rows_of(row_of: np.ndarray) -> list[Any]:
    """The items of each row, of the row of each item."""
    return np.split(np.argsort(row_of, kind="stable"), np.bincount(row_of).cumsum()[:-1])


def measured(lengths: np.ndarray, counts: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each example, ``[num_examples]``, and sums of squares, of the ``counts`` lengths of its sequences."""
    kept = np.minimum(lengths, max_length, dtype=np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owner, kept).astype(np.int64), np.bincount(owner, kept**2)


def _balanced(costs: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The rows of each step, ``[num_steps, batch_size, num_ranks]``, dealt so that their costs are even over ranks."""
    flat, totals = steps.reshape(-1, steps.shape[1] * steps.shape[2]), np.zeros((len(steps), steps.shape[2]))
    dealt = np.take_along_axis(flat, np.argsort(-costs[flat], axis=1, kind="stable"), axis=1).reshape(steps.shape)
    for place in range(steps.shape[1]):  # the largest row that is left to the rank that has least
        ranks = np.argsort(totals, axis=1, kind="stable")
        np.put_along_axis(dealt[:, place], ranks, dealt[:, place].copy(), axis=1)
        totals += costs[dealt[:, place]]
    return dealt


class LengthSampler(DistributedSampler[Any]):
    """Places of examples for one rank in an order of ``seed`` and the epoch; of packed rows tuples of places.

    Ranks get different rows, in equally many batches. Rows that fill no step are left out, others in each epoch.
    ``lengths`` and ``costs`` are ``[num_examples]``: the tokens of each, and what ranks get equal sums of in a step.
    A ``capacity`` is that of rows into which examples are packed. ``options`` are those of DistributedSampler.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        costs: np.ndarray | None,
        batch_size: int,
        capacity: int | None = None,
        group_by_length: bool = False,
        **options: Any,
    ) -> None:
        # The same in all epochs: only examples of equal length change places.
        num_rows = len(lengths) if capacity is None else int(best_fit_decreasing(lengths, capacity).max()) + 1
        super().__init__(range(num_rows), **options, drop_last=True)  # type: ignore[arg-type]
        self.lengths, self.costs, self.capacity, self.group_by_length = lengths, costs, capacity, group_by_length
        self.shape = num_rows // (batch_size * self.num_replicas), batch_size, self.num_replicas
        self.num_samples = self.shape[0] * batch_size

    @override
    def __iter__(self) -> Iterator[Any]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.lengths))
        row_of = np.arange(len(order))
        if self.capacity is not None:
            row_of = best_fit_decreasing(self.lengths[order], self.capacity)
            row_of = random.permutation(row_of.max() + 1)[row_of]
        num_steps, batch_size, num_ranks = self.shape
        steps: np.ndarray = np.arange(num_steps * batch_size * num_ranks)
        if self.group_by_length:
            window = max(1, min(num_steps // 4, 50)) * batch_size * num_ranks  # as transformers' LengthGroupedSampler
            sizes = np.bincount(row_of, self.lengths[order])
            steps = random.permutation(np.lexsort((-sizes[steps], steps // window)).reshape(num_steps, -1))
        steps = steps.reshape(self.shape)
        if self.costs is not None:
            steps = _balanced(np.bincount(row_of, self.costs[order]), steps)
        mine = steps[:, :, self.rank].ravel()
        if self.capacity is None:
            yield from order[mine].tolist()
        else:
            rows = rows_of(row_of)
            yield from (tuple(order[rows[row]].tolist()) for row in mine)


class PackedExamples(Dataset[Any]):
    """Examples of ``data``, fetched by rows: a batch is the list of the examples whose places its rows have."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, rows: Sequence[int | Sequence[int]]) -> list[Example]:
        places = np.concatenate([np.atleast_1d(row) for row in rows]).tolist()
        fetch = getattr(self.data, "__getitems__", None)
        return fetch(places) if fetch is not None else [self.data[place] for place in places]


class PackedStream(IterableDataset[Batch]):
    """Batches of packed rows of a stream of examples, for a ``DataLoader(..., batch_size=None)``.

    Each rank reads and packs the whole stream, and gets about as many tokens as others in a step. Examples of the least
    full rows, which fill no step, stay in the buffer, and are left out at the end. A loader that resumes reads the
    stream from its beginning.

    Args:
        examples: The examples of ``collator``, iterated over in each epoch, such as a ``datasets.IterableDataset``.
        collator: A collator of :mod:`lightning_liger.data` with ``Layout(max_length=..., padding_free=True)``.
        batch_size: Rows of ``max_length`` tokens (for each sequence of an example) per batch of a rank.
        buffer_size: How many examples are read before they are packed.
        num_replicas: The number of ranks.
        rank: This one.
        seed: Of the order of rows in the buffer.

    Raises:
        RuntimeError: With more than one worker process, which would repeat or lose examples.
        TypeError: For an argument of a wrong type, such as an iterator, which ends with the first epoch.
        ValueError: For an argument out of its range, and a layout that pads or has no ``max_length``.
    """

    def __init__(
        self,
        examples: Iterable[Example],
        collator: Any,
        *,
        batch_size: int = 1,
        buffer_size: int = 1000,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        if not isinstance(examples, Iterable) or isinstance(examples, Iterator):
            raise wrong_type("examples", "an iterable that can be iterated over again", examples)
        layout = getattr(collator, "layout", None)
        if not isinstance(layout, Layout) or not layout.padding_free or layout.max_length is None:
            raise wrong_value("collator", "one with Layout(max_length=..., padding_free=True)", collator)
        for name, value in {"batch_size": batch_size, "buffer_size": buffer_size, "num_replicas": num_replicas}.items():
            check_integer(name, value, at_least=1)
        check_integer("rank", rank, at_least=0, at_most=num_replicas - 1)
        check_integer("seed", seed, at_least=0)
        self.examples, self.collator, self.max_length = examples, collator, layout.max_length
        self.shape, self.buffer_size, self.rank, self.seed = (-1, batch_size, num_replicas), buffer_size, rank, seed

    def __iter__(self) -> Iterator[Batch]:
        if (workers := get_worker_info()) is not None and workers.num_workers > 1:
            raise RuntimeError(f"num_workers must be at most 1 for a PackedStream, got {workers.num_workers}")
        random, stream, buffer = np.random.default_rng(self.seed), iter(self.examples), list[Example]()
        while new := [*islice(stream, self.buffer_size)]:
            buffer += new
            lengths = [self.collator.sequence_lengths(each) for each in buffer]
            counts = np.array([*map(len, lengths)])
            tokens, _ = measured(np.concatenate(lengths), counts, self.max_length)
            row_of = best_fit_decreasing(tokens, self.max_length * int(counts.max()))
            costs, rows = np.bincount(row_of, tokens), rows_of(row_of)
            fullest = np.argsort(-costs, kind="stable")
            num_full = len(rows) - (len(new) == self.buffer_size)  # the emptiest row waits for more
            num_dealt = num_full - num_full % (self.shape[1] * self.shape[2])
            dealt = random.permutation(fullest[:num_dealt]).reshape(self.shape)
            for batch in _balanced(costs, dealt)[:, :, self.rank]:
                yield self.collator([buffer[place] for row in batch for place in rows[row]])
            buffer = [buffer[place] for row in fullest[num_dealt:] for place in rows[row]]
