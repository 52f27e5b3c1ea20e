"""Metrics of post-training: sums, extremes, and sums of means over different items."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_liger.training.metrics import RunningMean, RunningMetric, as_count

MAX_TERMS = 8  # summands that a loss may have, the model's auxiliary losses included


class Mean(NamedTuple):
    """One batch's part of a mean: a sum over items, and their number."""

    total: Tensor
    count: Tensor | float  # type: ignore[assignment]  # hides the method of tuples


Measured = Tensor | Mean | tuple[Mean, Mean]
"""One batch's part: of a sum; a largest or smallest value (infinite where the batch has none); of a mean; of the
difference of two means over different items."""


def mean_of(values: Tensor, where: Tensor | None = None) -> Mean:
    """The mean of a vector, over the elements where a mask is True if one is given."""
    values = values.detach()
    if where is None:
        return Mean(values.sum(), values.new_full((), values.numel(), dtype=torch.float64))
    return Mean(torch.where(where, values, 0).sum(), where.sum())


class RunningSum(RunningMetric):
    """A sum over batches and ranks."""

    def update(self, value: Tensor) -> None:
        self.parts = self.parts + value.detach()

    def compute(self) -> Tensor:
        return self.parts


class Maximum(RunningMetric):
    """The largest of all values. NaN before the first."""

    _sign = 1.0

    def __init__(self) -> None:
        super().__init__(start=-torch.inf, reduce="max")

    def update(self, value: Tensor) -> None:
        self.parts = torch.maximum(self.parts, self._sign * value.detach().double())

    def compute(self) -> Tensor:
        return torch.where(self.parts == -torch.inf, torch.nan, self._sign * self.parts)


class Minimum(Maximum):
    """The smallest of all values. NaN before the first."""

    _sign = -1.0


class SumOfMeans(RunningMetric):
    """A loss whose summands are means over different items: the sum of their exact means."""

    def __init__(self) -> None:
        super().__init__(MAX_TERMS, 2)

    def update(self, parts: Tensor) -> None:
        """Adds ``[number of terms, 2]``: for each term the sum over items, and their number."""
        self.parts = self.parts + torch.cat((parts, parts.new_zeros(MAX_TERMS - len(parts), 2)))

    def compute(self) -> Tensor:
        # A term without items is 0.
        return torch.where(self.parts[:, 1] > 0, self.parts[:, 0] / self.parts[:, 1].clamp(min=1e-300), 0.0).sum()


class DifferenceOfMeans(RunningMetric):
    """The difference of two means, NaN if one of them is over nothing."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def update(self, *means: Mean) -> None:
        rows = [torch.stack((total.detach().double(), as_count(count, total.device))) for total, count in means]
        self.parts = self.parts + torch.stack(rows)

    def compute(self) -> Tensor:
        first, second = self.parts[:, 0] / self.parts[:, 1]
        return first - second


KINDS: dict[str, type[RunningMetric]] = {
    "mean": RunningMean, "max": Maximum, "min": Minimum, "sum": RunningSum, "difference": DifferenceOfMeans
}  # fmt: skip
