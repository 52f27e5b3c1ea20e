"""Layers of ranking models: crosses of features, gated linear layers, and a calibration that keeps the order."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualCross(nn.Module):
    """A cross layer of DCN-v2 (arXiv:2008.13535) with a product of two narrow matrices: ``x0 * (U V x + b) + x``.

    Each layer makes products of one more feature, and adds them to its input.

    Args:
        size: Number of features.
        rank: Width between the matrices.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(size, rank, bias=False)
        self.wide = nn.Linear(rank, size)

    def forward(self, first: Tensor, input: Tensor) -> Tensor:
        """All are ``[batch_size, size]``; ``first`` is the input of the first of several layers."""
        return first * self.wide(self.narrow(input)) + input


class DenseGating(nn.Module):
    """A linear layer times a gate of the same input, as in LiRank (arXiv:2402.06859).

    The gate is between 0 and 2, so it begins near 1.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.value = nn.Linear(in_features, out_features)
        self.gate = nn.Linear(in_features, out_features)

    def forward(self, input: Tensor) -> Tensor:
        """``[batch_size, in_features]`` to ``[batch_size, out_features]``."""
        return self.value(input) * (2 * self.gate(input).sigmoid())


class IsotonicCalibration(nn.Module):
    """An increasing, piecewise linear function of logits, as the isotonic layer of LiRank (arXiv:2402.06859).

    The range is divided into bins of one width; the logit's way through each counts by the slope of the bin. Slopes are
    positive (a softplus; the paper's ReLU may make logits equal), so the order of logits and with it the AUC stay. The
    first and the last bin go on for ever. It starts as the identity.

    Args:
        num_bins: Number of bins, at least 2.
        limit: The bins divide ``[-limit, limit]``.
    """

    def __init__(self, num_bins: int = 20, limit: float = 6.0) -> None:
        super().__init__()
        if num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {num_bins}")
        self.limit, self.width = limit, 2 * limit / num_bins
        self.slopes = nn.Parameter(torch.full((num_bins,), math.log(math.e - 1)))  # softplus is 1
        self.bias = nn.Parameter(torch.tensor(-float(limit)))

    def forward(self, logits: Tensor) -> Tensor:
        """Calibrated logits, ``[...]`` in float32."""
        starts = torch.arange(len(self.slopes), device=logits.device) * self.width - self.limit
        way = logits.float().unsqueeze(-1) - starts
        first, last = way[..., :1].clamp(max=self.width), way[..., -1:].clamp(min=0)
        inside = torch.cat((first, way[..., 1:-1].clamp(0, self.width), last), dim=-1)
        return (inside * F.softplus(self.slopes)).sum(dim=-1) + self.bias  # a matrix product may run in 16 bits

    @torch.enable_grad()
    def fit(self, logits: Tensor, labels: Tensor, penalty: float = 1e-3) -> None:
        """Minimizes the log loss of ``labels``, ``[num_rows]`` as ``logits``, over slopes and bias.

        Args:
            logits: Of any model, without gradient.
            labels: 0 or 1, floating point.
            penalty: Factor of the squared differences of neighboring slopes, which bins without rows follow.
        """
        optimizer = torch.optim.LBFGS(self.parameters(), max_iter=50, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.binary_cross_entropy_with_logits(self(logits), labels)
            value = value + penalty * F.softplus(self.slopes).diff().square().mean()
            value.backward()
            return value

        optimizer.step(loss)
        optimizer.zero_grad()
