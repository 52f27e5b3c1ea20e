"""Weights in float8: those of linear layers that share an input, as one payload with a scale for each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_ops.fp8.rows import E4M3, quantize_rows
from liger_ops.fp8.transpose import transpose


def quantize_weights(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weights ``[N_i, K]`` one below the other: the payload ``[N, K]`` and the scales ``[N]``."""
    sizes = [weight.shape[0] for weight in weights]
    payload = weights[0].new_empty((sum(sizes), weights[0].shape[1]), dtype=E4M3)
    scale = weights[0].new_empty(sum(sizes), dtype=torch.float32)
    for weight, rows, scales in zip(weights, payload.split(sizes), scale.split(sizes), strict=True):
        quantize_rows(weight, payload=rows, scale=scales)
    return payload, scale


def transpose_weights(weights: Sequence[Tensor], scale: Tensor) -> Tensor:
    """The same payload transposed, ``[K, N]``, made anew with known scales."""
    sizes = [weight.shape[0] for weight in weights]
    target = weights[0].new_empty((weights[0].shape[1], sum(sizes)), dtype=E4M3)
    for weight, columns, scales in zip(weights, target.split(sizes, dim=1), scale.split(sizes), strict=True):
        transpose(weight, scales, inverse=True, target=columns)
    return target
