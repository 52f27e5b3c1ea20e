"""Metrics of post-training: exact means, largest and smallest values over micro-batches and ranks."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from lightning_liger.training.metrics import MeanOverTokens

MAX_TERMS = 8
"""Summands that a loss may have, the model's auxiliary losses included."""


class Mean(NamedTuple):
    """One batch's part of a mean: a sum over units, and their number."""

    total: Tensor
    count: Tensor | float  # type: ignore[assignment]  # hides the method of tuples


class Largest(NamedTuple):
    """One batch's value of a maximum over batches and ranks; ``-inf`` where the batch has none."""

    value: Tensor


class Smallest(NamedTuple):
    """One batch's value of a minimum over batches and ranks; ``inf`` where the batch has none."""

    value: Tensor


class Total(NamedTuple):
    """One batch's part of a sum over batches and ranks, such as a number of tokens."""

    value: Tensor


class Difference(NamedTuple):
    """One batch's part of the difference of two means over different units."""

    first: Mean
    second: Mean


Measured = Mean | Largest | Smallest | Total | Difference
KINDS = {"mean": Mean, "max": Largest, "min": Smallest, "sum": Total, "difference": Difference}


def mean_of(values: Tensor, where: Tensor | None = None) -> Mean:
    """The mean of a vector, over the elements where a mask is True if one is given."""
    values = values.detach()
    if where is None:
        return Mean(values.sum(), values.new_full((), values.numel(), dtype=torch.float64))
    return Mean(torch.where(where, values, 0).sum(), where.sum())


class Extremum(Metric):
    """The largest or smallest of all values. NaN before the first.

    Args:
        kind: ``"max"`` or ``"min"``.
    """

    full_state_update = False
    value: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.sign = 1.0 if kind == "max" else -1.0
        start = torch.full((), -torch.inf, dtype=torch.float64, device="cpu")  # not on meta, where it has no value
        self.add_state("value", start, dist_reduce_fx="max")

    def update(self, value: Tensor) -> None:
        self.value = torch.maximum(self.value, self.sign * value.detach().double())

    def compute(self) -> Tensor:
        return torch.where(self.value == -torch.inf, torch.nan, self.sign * self.value)

    def sums(self) -> Tensor:
        """A copy of this rank's state."""
        return self.value.clone()

    def load_sums(self, state: Tensor) -> None:
        """Restores what :meth:`sums` returned."""
        self.value = state.to(self.value.device, copy=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "Extremum":
        super()._apply(lambda t: fn(t) if t.is_meta else t.to(fn(t.new_empty(0)).device), *args, **kwargs)
        return self


class SumOfMeans(Metric):
    """A loss whose summands are means over different units: the sum of their exact means."""

    full_state_update = False
    parts: Tensor

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros((MAX_TERMS, 2), dtype=torch.float64, device="cpu")
        self.add_state("parts", zeros, dist_reduce_fx="sum")

    def update(self, parts: Tensor) -> None:
        """Adds ``[number of terms, 2]``: for each term the sum over units, and their number."""
        # Not in place, as MeanOverTokens.
        self.parts = self.parts + F.pad(parts, (0, 0, 0, MAX_TERMS - len(parts)))

    def compute(self) -> Tensor:
        return sum_of_means(self.parts)

    def sums(self) -> Tensor:
        """A copy of this rank's state."""
        return self.parts.clone()

    def load_sums(self, state: Tensor) -> None:
        """Restores what :meth:`sums` returned."""
        self.parts = state.to(self.parts.device, copy=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "SumOfMeans":
        super()._apply(lambda t: fn(t) if t.is_meta else t.to(fn(t.new_empty(0)).device), *args, **kwargs)
        return self


def sum_of_means(parts: Tensor) -> Tensor:
    """Of ``[number of terms, 2]``, sums and numbers of units; a term without units is 0."""
    return torch.where(parts[:, 1] > 0, parts[:, 0] / parts[:, 1].clamp(min=1e-300), 0.0).sum()


class MeanOverUnits(MeanOverTokens):
    """A mean that is updated with sums, and their numbers of units."""

    def update(self, total: Tensor, number: Tensor | float) -> None:
        self._add(total.detach(), number)


class Sum(MeanOverUnits):
    """A sum over batches and ranks."""

    def compute(self) -> Tensor:
        return self.total


class DifferenceOfMeans(SumOfMeans):
    """The difference of two means, NaN if one of them is over nothing."""

    def compute(self) -> Tensor:
        first, second = self.parts[:2, 0] / self.parts[:2, 1]
        return first - second


def make_metric(kind: str) -> MeanOverUnits | Extremum | DifferenceOfMeans:
    """The metric of a kind in :data:`KINDS`."""
    if kind == "difference":
        return DifferenceOfMeans()
    return {"mean": MeanOverUnits, "sum": Sum}[kind]() if kind in ("mean", "sum") else Extremum(kind)


def update_metric(metric: MeanOverUnits | Extremum | DifferenceOfMeans, measured: Measured) -> None:
    """Adds one batch's part."""
    if isinstance(measured, Difference):
        rows = [[torch.as_tensor(x, dtype=torch.float64) for x in mean] for mean in measured]
        cast(DifferenceOfMeans, metric).update(torch.stack([torch.stack(row) for row in rows]))
    elif isinstance(metric, Extremum):
        metric.update(cast(Largest, measured).value)
    elif isinstance(measured, Mean):
        cast(MeanOverUnits, metric).update(*measured)
    else:
        cast(MeanOverUnits, metric).update(cast(Total, measured).value, 1)
