"""Metrics of a stage, exact over batches and ranks, and the loss in the progress bar."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_liger.host_copy import HostCopy


def as_count(number: Tensor | float, device: torch.device) -> Tensor:
    """A number in float64 on the device, which the host does not wait for."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


class RunningMetric(Metric):
    """A state in float64. torchmetrics' own metrics search for NaN, for which the host waits, or drop the weights."""

    full_state_update = False
    parts: Tensor

    def __init__(self, *shape: int, start: float = 0.0, reduce: str = "sum") -> None:
        super().__init__()
        state = torch.full(shape, start, dtype=torch.float64, device="cpu")  # not on meta, where it would have no value
        self.add_state("parts", state, dist_reduce_fx=reduce)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "RunningMetric":
        # Moves with its module to a device, keeps float64: torchmetrics guards against `.bfloat16()`, not `.to(dtype)`.
        super()._apply(lambda t: fn(t) if t.is_meta else t.to(fn(t.new_empty(0)).device), *args, **kwargs)
        return self


class RunningMean(RunningMetric):
    """A mean over items such as tokens, updated with sums and their numbers of items."""

    def __init__(self) -> None:
        super().__init__(2)

    def update(self, total: Tensor, number: Tensor | float) -> None:
        # Not in place: `trainer.validate` leaves tensors of inference mode, and validation in `fit` is outside of it.
        self.parts = self.parts + torch.stack((total.detach().double(), as_count(number, total.device)))

    def compute(self) -> Tensor:
        return self.parts[0] / self.parts[1]


class Perplexity(RunningMean):
    """``exp`` of the mean cross entropy over tokens."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class ShownLoss(Metric):
    """The newest training loss that has arrived on the host, a step or two old, for the progress bar.

    Lightning turns what the bar shows into a number in each batch, for which the host would wait for the device.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self._copies: deque[HostCopy] = deque()
        self.newest: Tensor | None = None

    def show(self, loss: Tensor) -> None:
        """Starts a copy of ``loss``, a scalar, and shows the newest one that has arrived."""
        self._copies.append(HostCopy(loss))
        while self._copies and self._copies[0].has_arrived():
            arrived = self._copies.popleft().wait()
            if self.newest is None:
                self.newest = self(arrived)  # the tensor that Lightning reads for the bar from now on
            self.newest.copy_(arrived)

    def update(self, loss: Tensor) -> None:
        self._loss = loss.double()

    def compute(self) -> Tensor:
        return self._loss

    def reset(self) -> None:
        """Keeps the loss, which the bar shows until the next step's is there."""

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "ShownLoss":
        return self  # stays on the host

    def __getstate__(self) -> dict[str, Any]:  # of a copied or pickled module
        return {**super().__getstate__(), "_copies": deque()}
