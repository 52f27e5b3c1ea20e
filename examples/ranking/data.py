"""A log of clicks as batches, split by time."""

from typing import Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from .files import read_log
from .generator import MISSING, ClickLog, ClickModel, generate

_Split = Literal["train", "val", "test"]
Batch = tuple[Tensor, Tensor, Tensor]
"""Labels ``[batch_size]``, float32; integers ``[batch_size, 2 * num_integers]``, float32: the standardized logarithm,
and whether it is missing; ids ``[batch_size, num_categories]``, int64."""


class ClickData(L.LightningDataModule):
    """The rows of a log: the first 80% for training, the next 10% for validation, the last 10% for the test.

    A category's ids are its values in the training rows, from 1; 0 stands for all others. Of the training rows without
    a click only a share is kept, as usual for logs of which few rows are clicks.

    Args:
        clicks: The generated log.
        path: A file in the format of Criteo (:mod:`.files`) in its place.
        num_integers: Integer columns of that file.
        batch_size: Rows in a batch.
        keep_negatives: Share of the training rows without a click that are kept.
        seed: Of the choice of these rows.

    Raises:
        ValueError: If ``keep_negatives`` is not above 0 and at most 1.
    """

    def __init__(
        self,
        clicks: ClickModel = ClickModel(),  # noqa: B008
        path: str | None = None,
        num_integers: int = 13,
        batch_size: int = 1024,
        keep_negatives: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < keep_negatives <= 1:
            raise ValueError(f"keep_negatives must be above 0 and at most 1, got {keep_negatives}")
        self.clicks, self.path, self.num_integers = clicks, path, num_integers
        self.batch_size, self.keep_negatives, self.seed = batch_size, keep_negatives, seed
        self.splits: dict[_Split, TensorDataset] = {}
        self.vocab_sizes: list[int] = []
        self.num_numbers = 0
        self.test_probabilities: Tensor | None = None
        """``[num_test_rows]``, of clicks in a generated log."""

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        log = generate(self.clicks) if self.path is None else read_log(self.path, self.num_integers)
        num_rows = len(log.labels)
        bounds = {"train": (0, num_rows * 8 // 10), "val": (num_rows * 8 // 10, num_rows * 9 // 10)}
        bounds["test"] = (bounds["val"][1], num_rows)
        end_of_training = bounds["train"][1]
        labels = torch.from_numpy(log.labels).float()
        numbers, ids = torch.from_numpy(_numbers(log, end_of_training)), self._ids(log, end_of_training)
        self.num_numbers = numbers.shape[1]
        is_kept = np.random.default_rng(self.seed).random(num_rows) < self.keep_negatives
        is_kept |= (log.labels == 1) | (np.arange(num_rows) >= end_of_training)
        for name, (start, stop) in bounds.items():
            rows = torch.from_numpy(start + np.flatnonzero(is_kept[start:stop]))
            self.splits[name] = TensorDataset(labels[rows], numbers[rows], ids[rows])  # type: ignore[index]
        if log.probabilities is not None:
            self.test_probabilities = torch.from_numpy(log.probabilities[slice(*bounds["test"])]).float()

    def _ids(self, log: ClickLog, end_of_training: int) -> Tensor:
        columns = []
        for values in log.categories.T:
            known = np.unique(values[:end_of_training])
            known = known[known != MISSING]
            at = np.searchsorted(known, values).clip(max=len(known) - 1)
            columns.append(np.where(known[at] == values, at + 1, 0))
            self.vocab_sizes.append(len(known) + 1)
        return torch.from_numpy(np.stack(columns, axis=1))

    def click_shares(self, column: int) -> Tensor:
        """Share of each id of a category among the training rows with a click, ``[vocab_sizes[column]]``.

        Each id counts once more than it was clicked, so that no share is 0.
        """
        labels, _, ids = self.splits["train"].tensors
        counts = torch.bincount(ids[labels == 1, column], minlength=self.vocab_sizes[column]) + 1
        return counts / counts.sum()

    def train_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        return self._loader("train")

    def val_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        return self._loader("val")

    def test_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        return self._loader("test")

    def _loader(self, split: _Split) -> "DataLoader[tuple[Tensor, ...]]":
        rows = self.splits[split]
        order = RandomSampler(rows) if split == "train" else SequentialSampler(rows)
        # Whole batches are indexed at once, which is much faster than row by row.
        return DataLoader(rows, sampler=BatchSampler(order, self.batch_size, drop_last=False), batch_size=None)


def _numbers(log: ClickLog, end_of_training: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """``[num_rows, 2 * num_integers]``, standardized by the training rows."""
    is_missing = log.integers == MISSING
    logarithms = np.where(is_missing, np.nan, np.log1p(log.integers.clip(min=0)))
    train = logarithms[:end_of_training]
    standardized = (logarithms - np.nanmean(train, axis=0)) / (np.nanstd(train, axis=0) + 1e-6)
    return np.concatenate((np.nan_to_num(standardized), is_missing), axis=1).astype(np.float32)
