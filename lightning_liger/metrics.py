"""Loss, perplexity and accuracy weighted by tokens, without logits."""

import torch
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection


class _TokenMean(MeanMetric):
    """A mean over tokens, summed in float64: millions of tokens would drown in float32."""

    def __init__(self) -> None:
        super().__init__(nan_strategy="disable")  # looking for NaN would make the host wait for the device
        self.set_dtype(torch.float64)


class Perplexity(_TokenMean):
    """``exp`` of the mean loss over tokens. Updated with mean losses and their numbers of tokens."""

    full_state_update = False

    def compute(self) -> Tensor:
        return super().compute().exp()


class TokenMetrics(MetricCollection):
    """``loss``, ``perplexity`` and ``accuracy`` of one stage.

    Args:
        stage: Prefix of their names, ``train``, ``val`` or ``test``.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(
            {"loss": _TokenMean(), "perplexity": Perplexity(), "accuracy": _TokenMean()},
            prefix=f"{stage}_",
            compute_groups=False,
        )

    def update_tokens(self, loss: Tensor, num_correct: Tensor, num_tokens: Tensor) -> None:
        """Adds the tokens of one batch.

        Args:
            loss: Their mean loss, a scalar.
            num_correct: How many labels had the largest logit, a scalar.
            num_tokens: How many labels were not ignored, a scalar.
        """
        # Without tokens the mean is 0 / 0; it must not reach the sums.
        loss = torch.where(num_tokens > 0, loss.detach(), 0.0)
        accuracy = num_correct / num_tokens.clamp(min=1)
        self["loss"].update(loss, num_tokens)
        self["perplexity"].update(loss, num_tokens)
        self["accuracy"].update(accuracy, num_tokens)
