"""Loss, perplexity and accuracy weighted by tokens, without logits."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_liger.host_copy import HostCopy


class MeanOverTokens(Metric):
    """A mean over tokens, summed in float64: in float32 a sum over millions of tokens would lose small batches.

    torchmetrics' MeanMetric either searches for NaN, for which the host waits for the device, or drops the weights.
    """

    full_state_update = False
    total: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "num_tokens"):
            zero = torch.zeros((), dtype=torch.float64, device="cpu")  # not on meta, where it would have no value
            self.add_state(name, zero, dist_reduce_fx="sum")

    def update(self, mean: Tensor, num_tokens: Tensor) -> None:
        self._add(mean.double() * num_tokens, num_tokens)

    def _add(self, total: Tensor, num_tokens: Tensor | float) -> None:
        # Not in place: `trainer.validate` leaves tensors of inference mode, and validation in `fit` is outside of it.
        self.total = self.total + total
        self.num_tokens = self.num_tokens + num_tokens

    def compute(self) -> Tensor:
        return self.total / self.num_tokens

    def sums(self) -> Tensor:
        """A copy of the sum and the number of tokens, ``[2]`` in float64, of this rank."""
        return torch.stack((self.total, self.num_tokens))

    def load_sums(self, sums: Tensor) -> None:
        """Restores what :meth:`sums` returned."""
        total, num_tokens = sums
        self.total = total.to(self.total.device, copy=True)
        self.num_tokens = num_tokens.to(self.num_tokens.device, copy=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "MeanOverTokens":
        # Moves with its module to a device, keeps float64: torchmetrics guards against `.bfloat16()`, not `.to(dtype)`.
        def move(tensor: Tensor) -> Tensor:
            return fn(tensor) if tensor.is_meta else tensor.to(fn(tensor.new_empty(0)).device)

        super()._apply(move, *args, **kwargs)
        return self


class Perplexity(MeanOverTokens):
    """``exp`` of the mean cross entropy over tokens. Updated with means and their numbers of tokens."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class ShownLoss(Metric):
    """The newest training loss that has arrived on the host, for the progress bar.

    Lightning turns what the bar shows into a number in each batch, for which the host would wait until the device has
    nothing left to do. This is a tensor on the CPU already, one or two steps old; on the CPU it is the loss itself.
    """

    _forward_cache: Any  # of Metric: what Lightning reads in each batch, None for nothing

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Shows nothing, until the batch after the next loss."""
        self._newest = torch.full((), float("nan"), dtype=torch.float64, device="cpu")  # not on meta, without values
        self._copies: deque[HostCopy] = deque()
        self._forward_cache = None

    def show(self, loss: Tensor) -> None:
        """Starts a copy of ``loss``, a scalar, and shows the newest one that has arrived."""
        self._copies.append(HostCopy(loss))
        while self._copies and self._copies[0].has_arrived():
            self._newest.copy_(self._copies.popleft().wait())  # in place: the bar holds on to the tensor
            self._forward_cache = self._newest

    def update(self) -> None:
        """Not used: Lightning reads what :meth:`show` set."""

    def compute(self) -> Tensor:
        return self._newest

    def reset(self) -> None:
        """Keeps the loss, which the bar shows until the next step's is there."""

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "ShownLoss":
        return self  # stays on the host

    def __getstate__(self) -> dict[str, Any]:  # of a copied or pickled module
        return {**super().__getstate__(), "_copies": deque()}


class TokenMetrics(MetricCollection):
    """``loss``, ``perplexity`` and ``accuracy`` of one stage.

    Args:
        stage: Prefix of their names, ``train``, ``val`` or ``test``.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(
            {"loss": MeanOverTokens(), "perplexity": Perplexity(), "accuracy": MeanOverTokens()},
            prefix=f"{stage}_",
            compute_groups=False,
        )

    def sums(self) -> Tensor:
        """A copy of the metrics' sums and numbers of tokens, ``[3, 2]`` in float64, of this rank."""
        return torch.stack([metric.sums() for metric in self._means()])

    def _means(self) -> Iterable[MeanOverTokens]:
        return cast(Iterable[MeanOverTokens], self.values())

    def load_sums(self, sums: Tensor) -> None:
        """Restores what :meth:`sums` returned."""
        for metric, own in zip(self._means(), sums, strict=True):
            metric.load_sums(own)

    def update_tokens(
        self, loss: Tensor, num_correct: Tensor, num_tokens: Tensor, auxiliary_loss: Tensor | None = None
    ) -> None:
        """Adds the tokens of one batch.

        Args:
            loss: Their mean cross entropy, a scalar.
            num_correct: How many labels had the largest logit, a scalar.
            num_tokens: How many labels were not ignored, a scalar.
            auxiliary_loss: Added to the loss, not to the perplexity; a scalar.
        """
        # Without tokens the mean is 0 / 0; it must not reach the sums.
        loss = torch.where(num_tokens > 0, loss.detach(), 0.0)
        accuracy = num_correct / num_tokens.clamp(min=1)
        self["loss"].update(loss if auxiliary_loss is None else loss + auxiliary_loss.detach(), num_tokens)
        self["perplexity"].update(loss, num_tokens)
        self["accuracy"].update(accuracy, num_tokens)
