"""All data of a Trainer, once and in order, each part on one rank."""

from collections.abc import Iterator
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, IterableDataset

from liger_ops.arguments import wrong_value


def every_batch(trainer: L.Trainer) -> Iterator[Any]:
    """The batches of the training and validation data before they are moved to the device, not shuffled.

    Each rank gets a part, and all ranks equally many batches, for which the first examples may come twice.

    Raises:
        ValueError: For data that has no length, or loaders that are no ``DataLoader``.
    """
    trainer.fit_loop.setup_data()
    loaders = [trainer.train_dataloader]
    if trainer.enable_validation:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        validation = trainer.val_dataloaders
        loaders += validation if isinstance(validation, list | tuple) else [validation]
    for loader in loaders:
        yield from _in_order(loader, trainer)


def _in_order(loader: Any, trainer: L.Trainer) -> DataLoader:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise wrong_value("precompute_ref_log_probs", "False for data without a length, not in a DataLoader", loader)
    kwargs: Any = trainer.distributed_sampler_kwargs or {}
    num_replicas, rank = kwargs.get("num_replicas", 1), kwargs.get("rank", 0)
    length = len(loader.dataset)  # type: ignore[arg-type]
    each = -(-length // num_replicas)
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        size = getattr(loader.batch_sampler, "batch_size", 1)
    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=[index % length for index in range(rank * each, (rank + 1) * each)],
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )
