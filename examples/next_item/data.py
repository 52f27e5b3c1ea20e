"""The log of a course as batches, split by time."""

from typing import Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .generator import Course, generate

IGNORE_INDEX = -100
_Split = Literal["train", "val", "test"]
_PERIODS: dict[_Split, tuple[float, float]] = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}


class NextItemData(L.LightningDataModule):
    """Rows of one student each, whose labels are the next items of one period.

    Training labels are events before time 0.8, validation labels those before 0.9, test labels the rest: no model has
    seen an event later than those that it is tested on. Each row has the whole history of the student as its input.

    Args:
        course: The course and its log.
        batch_size: Students in a batch.
        num_workers: Processes that load batches.
    """

    def __init__(self, course: Course = Course(), batch_size: int = 64, num_workers: int = 0) -> None:  # noqa: B008
        super().__init__()
        self.course = course
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.splits: dict[_Split, TensorDataset] = {}

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        log = generate(self.course)
        is_event = np.arange(self.course.max_events) < log.lengths[:, None]
        inputs, kinds = torch.from_numpy(log.items[:, :-1]), torch.from_numpy(log.kinds[:, 1:])
        for name, (start, stop) in _PERIODS.items():
            is_label = (is_event & (log.times >= start) & (log.times < stop))[:, 1:]
            labels = torch.from_numpy(np.where(is_label, log.items[:, 1:], IGNORE_INDEX))
            rows = torch.from_numpy(is_label.any(axis=1))
            self.splits[name] = TensorDataset(inputs[rows], labels[rows], kinds[rows])

    def train_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        return self._loader("train")

    def val_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        return self._loader("val")

    def test_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        return self._loader("test")

    def _loader(self, split: _Split) -> "DataLoader[tuple[Tensor, ...]]":
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            shuffle=split == "train",
            collate_fn=collate if split == "train" else collate_with_kinds,
            num_workers=self.num_workers,
        )


def collate(rows: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """A batch of ``input_ids`` and ``shift_labels``, ``[batch_size, seq_len]``, as long as its longest row."""
    batch = collate_with_kinds(rows)
    del batch["kinds"]
    return batch


def collate_with_kinds(rows: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """:func:`collate` with the ``kinds`` of the labels' events."""
    inputs, labels, kinds = (torch.stack(column) for column in zip(*rows, strict=True))
    # Events after a row's last label are no use: no label sees them.
    length = int((labels != IGNORE_INDEX).any(dim=0).nonzero().max()) + 1
    return {"input_ids": inputs[:, :length], "shift_labels": labels[:, :length], "kinds": kinds[:, :length]}
