"""The micro-batches of an optimizer step that are still to come, looked at before the first is trained on."""

import itertools
from typing import Any

import lightning as L


def upcoming_batches(trainer: L.Trainer, number: int) -> list[Any]:
    """The next ``number`` training batches as the loader gives them, fewer at the end of the epoch.

    They stay on the host, and the Trainer's loop gets them later as if they had not been looked at.
    """
    loop = trainer.fit_loop
    fetcher: Any = loop._data_fetcher
    number = int(min(number, trainer.num_training_batches - loop.epoch_loop.batch_progress.current.ready))
    fetched = list(getattr(fetcher, "batches", ()))[:number]  # Lightning's, one ahead if the loader has no length
    pulled = list(itertools.islice(fetcher.iterator, max(0, number - len(fetched))))
    if pulled:
        fetcher.iterator = itertools.chain(pulled, fetcher.iterator)
    return [batch for batch, _, _ in fetched + pulled]
