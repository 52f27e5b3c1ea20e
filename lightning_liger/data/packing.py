"""Rows of several examples, and the order in which ranks get them: packing, grouping by length, balance over ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info
from typing_extensions import override

from liger_ops.arguments import check_integer, wrong_type, wrong_value
from lightning_liger.data.collate import Batch, Example, Layout

_GROUPED_STEPS = 50  # as many as transformers' LengthGroupedSampler sorts together


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each item, ``[num_items]``: the longest first, each in the fullest row of ``capacity`` that it fits.

    Items of one length that meet rows with equally much left are placed at once: after the sort, a step takes the time
    of one array operation, and there are far fewer steps than items. Raises ValueError for items that fit no row.
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


def rows_of(row_of: np.ndarray) -> list[np.ndarray]:
    """The items of each row, of the row of each item."""
    return np.split(np.argsort(row_of, kind="stable"), np.bincount(row_of).cumsum()[:-1])


def measured(lengths: np.ndarray, counts: np.ndarray, max_length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each example after truncation, and the sums of their sequences' squared lengths, ``[num_examples]``.

    ``lengths`` are those of all sequences, of which each example has ``counts``.
    """
    kept = lengths if max_length is None else np.minimum(lengths, max_length)
    owner, total = np.repeat(np.arange(len(counts)), counts), len(counts)
    found = (np.bincount(owner, kept.astype(np.float64) ** power, total).astype(np.int64) for power in (1, 2))
    return next(found), next(found)


def _dealt(costs: np.ndarray, batch_size: int, num_ranks: int, balanced: bool, steps: np.ndarray) -> np.ndarray:
    """The rows of each step, ``[num_steps, batch_size, num_ranks]``, from ``[num_steps, batch_size * num_ranks]``."""
    if not balanced or num_ranks == 1:
        return steps.reshape(-1, batch_size, num_ranks)
    largest_first = np.argsort(-costs[steps], axis=1, kind="stable")
    dealt = np.take_along_axis(steps, largest_first, axis=1).reshape(-1, batch_size, num_ranks)
    totals = np.zeros((len(steps), num_ranks))
    for place in range(batch_size):  # the largest row that is left to the rank that has least
        ranks = np.argsort(totals, axis=1, kind="stable")
        np.put_along_axis(dealt[:, place], ranks, dealt[:, place].copy(), axis=1)
        totals += costs[dealt[:, place]]
    return dealt


class LengthSampler(DistributedSampler[Any]):
    """Places of examples for one rank in an order of ``seed`` and the epoch; of packed rows tuples of places.

    All ranks get different rows, and equally many batches. Rows that do not fill a batch of each rank are left out,
    others in each epoch.

    Args:
        lengths: Tokens of each example, ``[num_examples]``.
        costs: What is balanced over the ranks in each step, ``[num_examples]``; None deals rows at random.
        batch_size: Rows per batch of a rank.
        capacity: Tokens of a row into which examples are packed, anew in each epoch; None makes each example a row.
        group_by_length: Whether the rows of a step have about the same length.
        num_replicas: The number of ranks.
        rank: This one.
        seed: Of the order.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        costs: np.ndarray | None,
        batch_size: int,
        *,
        capacity: int | None = None,
        group_by_length: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        # Rows of an epoch have the lengths of those of another one: examples of equal length change places.
        num_rows = len(lengths) if capacity is None else int(best_fit_decreasing(lengths, capacity).max()) + 1
        super().__init__(range(num_rows), num_replicas, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.num_rows, self.lengths, self.costs, self.batch_size = num_rows, lengths, costs, batch_size
        self.capacity, self.group_by_length = capacity, group_by_length
        self.num_steps = num_rows // (batch_size * num_replicas)
        self.num_samples = self.num_steps * batch_size

    @override
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).numpy()
        row_of = np.arange(len(order))
        if self.capacity is not None:
            packed = best_fit_decreasing(self.lengths[order], self.capacity)
            row_of = torch.randperm(self.num_rows, generator=generator).numpy()[packed]
        per_step = self.batch_size * self.num_replicas
        steps = np.arange(self.num_steps * per_step)
        if self.group_by_length:
            window = max(1, min(self.num_steps // 4, _GROUPED_STEPS)) * per_step
            sizes = np.bincount(row_of, self.lengths[order])
            steps = np.lexsort((-sizes[steps], steps // window)).reshape(-1, per_step)
            steps = steps[torch.randperm(self.num_steps, generator=generator).numpy()]
        costs = np.bincount(row_of, None if self.costs is None else self.costs[order])
        steps = steps.reshape(-1, per_step)
        mine = _dealt(costs, self.batch_size, self.num_replicas, self.costs is not None, steps)[:, :, self.rank]
        if self.capacity is None:
            yield from order[mine.ravel()].tolist()
            return
        rows = rows_of(row_of)
        yield from (tuple(order[rows[row]].tolist()) for row in mine.ravel())


class PackedExamples(Dataset[Any]):
    """Examples of ``data``, fetched by rows: a batch is the list of the examples whose places its rows have."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int | Sequence[int]) -> list[Example]:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int | Sequence[int]]) -> list[Example]:
        places = np.concatenate([np.atleast_1d(row) for row in rows]).tolist()
        fetch = getattr(self.data, "__getitems__", None)
        return fetch(places) if fetch is not None else [self.data[place] for place in places]


class PackedStream(IterableDataset[Batch]):
    """Batches of packed rows of a stream of examples, for a ``DataLoader(..., batch_size=None)``.

    Best-fit decreasing packs as many examples as are in the buffer. Rows of a step are dealt out so that ranks get
    about as many tokens; each rank reads the whole stream. Examples of the least full rows, which fill no step, stay in
    the buffer, and those that fill none at the end are left out. A loader that resumes reads the stream again.

    Args:
        examples: What is iterated over in each epoch, such as a ``datasets.IterableDataset``: examples as ``collator``
            takes them.
        collator: A collator of :mod:`lightning_liger.data` with ``Layout(max_length=..., padding_free=True)``.
        batch_size: Rows of ``max_length`` tokens (for each sequence of an example) per batch of a rank.
        buffer_size: How many examples are read before they are packed.
        num_replicas: The number of ranks.
        rank: This one.
        seed: Of the order of rows in the buffer.

    Raises:
        RuntimeError: With more than one worker process, which would repeat or lose examples.
        TypeError: For an argument of a wrong type.
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
            expected = "a collator with Layout(max_length=..., padding_free=True)"
            raise wrong_type("collator", expected, collator)
        for name, value, least in (("batch_size", batch_size, 1), ("buffer_size", buffer_size, 1), ("seed", seed, 0)):
            check_integer(name, value, at_least=least)
        check_integer("num_replicas", num_replicas, at_least=1)
        check_integer("rank", rank, at_least=0, at_most=num_replicas - 1)
        self.examples, self.collator, self.batch_size, self.buffer_size = examples, collator, batch_size, buffer_size
        self.num_replicas, self.rank, self.seed = num_replicas, rank, seed

    def __iter__(self) -> Iterator[Batch]:
        workers = get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise RuntimeError(f"num_workers must be at most 1 for a PackedStream, got {workers.num_workers}")
        random, stream, buffer = np.random.default_rng(self.seed), iter(self.examples), list[Example]()
        per_step = self.batch_size * self.num_replicas
        while new := [*islice(stream, self.buffer_size)]:
            buffer += new
            lengths = [self.collator.sequence_lengths(each) for each in buffer]
            counts = np.array([*map(len, lengths)])
            tokens, _ = measured(np.concatenate(lengths), counts, self.collator.layout.max_length)
            row_of = best_fit_decreasing(tokens, int(self.collator.layout.max_length * counts.max()))
            costs, rows = np.bincount(row_of, tokens), rows_of(row_of)
            fullest = np.argsort(-costs, kind="stable")
            num_dealt = len(costs) // per_step * per_step
            steps = random.permutation(fullest[:num_dealt]).reshape(-1, per_step)
            for batch in _dealt(costs, self.batch_size, self.num_replicas, True, steps)[:, :, self.rank]:
                yield self.collator([buffer[place] for row in batch for place in rows[row]])
            buffer = [buffer[place] for row in fullest[num_dealt:] for place in rows[row]]
