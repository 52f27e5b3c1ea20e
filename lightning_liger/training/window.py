"""The micro-batches of an optimizer step that are still to come, looked at before the first is trained on."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning as L


class _LookAhead:
    """An iterator whose next items can be looked at."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._items: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._items.popleft() if self._items else next(self._iterator)

    def peek(self, number: int) -> list[Any]:
        """The next items, fewer at the end."""
        while len(self._items) < number:
            try:
                self._items.append(next(self._iterator))  # no itertools: Lightning's iterators start again with iter()
            except StopIteration:
                break
        return list(islice(self._items, number))


def upcoming_batches(trainer: L.Trainer, number: int) -> list[Any]:
    """The next training batches, on the host, fewer at the end of the epoch; the Trainer gets them later too."""
    loop = trainer.fit_loop
    fetcher: Any = loop._data_fetcher
    left = trainer.num_training_batches - loop.epoch_loop.batch_progress.current.ready
    number = int(max(0, min(number, left)))
    found = list(getattr(fetcher, "batches", ()))[:number]  # Lightning fetches one ahead if the loader has no length
    if len(found) < number:
        if not isinstance(fetcher.iterator, _LookAhead):
            fetcher.iterator = _LookAhead(fetcher.iterator)
        found += fetcher.iterator.peek(number - len(found))
    return [batch for batch, _, _ in found]
