"""The mean over the tokens of all micro-batches and ranks of an optimizer step, however they were split.

Micro-batches and ranks hold different numbers of target tokens, so the mean of their means is not the mean over tokens.
Each therefore differentiates the sum of its losses, times a constant. Once the tokens of the step are counted, the
gradients are divided by their number, before callbacks, clipping or the optimizer see them.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_SUM_SCALE = 2.0**-12  # sums of thousands of tokens, brought near to means, so that float16 holds their gradients


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiplies the gradients of ``parameters``, DTensors included, by a number in float32, in place."""
    gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), same in gradients.items():
        torch._foreach_mul_(same, factor.to(device, torch.float32))


class TokenMean:
    """Counts the tokens of one optimizer step and turns gradients of sums into those of their mean."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the micro-batches so far."""
        self._sum_and_count: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch was added since the last step."""
        return self._sum_and_count is None

    def add(self, loss_sum: Tensor, num_tokens: Tensor) -> Tensor:
        """Adds a micro-batch.

        Args:
            loss_sum: The sum of the losses of its tokens, a differentiable scalar.
            num_tokens: The number of these tokens, a scalar.

        Returns:
            A loss whose value is the micro-batch's mean (0 without tokens) and whose gradient is that of its sum, times
            a constant that :meth:`normalize` removes.
        """
        total = loss_sum.detach()
        added = torch.stack((total.double(), num_tokens.double()))
        self._sum_and_count = added if self._sum_and_count is None else self._sum_and_count + added
        scaled = loss_sum * _SUM_SCALE
        return scaled + (total / _divisor(num_tokens) - scaled.detach())

    def normalize(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        num_micro_batches: int,
        num_ranks: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
        scale: Callable[[Iterable[nn.Parameter], Tensor], None] = scale_gradients,
    ) -> Tensor:
        """Makes the parameters' gradients those of the mean over all tokens since the last call.

        Args:
            parameters: Their gradients are scaled in place.
            num_micro_batches: The number that losses were divided by before backward.
            num_ranks: The number of ranks over which gradients were averaged.
            sum_over_ranks: Sums a tensor over these ranks.
            scale: Multiplies the parameters' gradients by a number.

        Returns:
            That mean, 0 without any token.
        """
        if self._sum_and_count is None:
            raise RuntimeError("normalize needs the loss of at least one micro-batch first")
        loss_sum, num_tokens = sum_over_ranks(self._sum_and_count)
        self.reset()
        factor = num_micro_batches * num_ranks / _SUM_SCALE / _divisor(num_tokens)
        scale(parameters, factor)
        return loss_sum / _divisor(num_tokens)


def _divisor(number: Tensor) -> Tensor:
    """``number``, or 1 where it is 0: a sum over nothing is 0. Ranks that share sequences count fractions of them."""
    return number.masked_fill(number == 0, 1)
