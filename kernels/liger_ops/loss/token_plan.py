"""The factor of the mean over tokens that are not ignored, and the sum of losses."""

import torch
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.options import Targets

_BLOCK_SIZE = 2048


def mean_scale_of(targets: Targets, vocab_size: int, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """``[]``, float32 or ``dtype`` if that is wider: 1 / the summed weight of tokens that count, 0 if that is 0."""
    labels, class_weight, token_weight = targets
    kept = labels != ignore_index
    weights = kept.to(torch.promote_types(dtype, torch.float32))
    if class_weight is not None:
        is_class = (labels >= 0) & (labels < vocab_size)
        weights = weights * class_weight.to(weights.dtype)[labels.where(is_class, 0)].where(is_class, 0.0)
    if token_weight is not None:
        weights = weights * token_weight.to(weights.dtype).where(kept, 0.0)
    total = weights.sum()
    return total.reciprocal().masked_fill(total == 0, 0.0)


@backend.Kernel
def _reduce_kernel(
    losses_ptr,  # [num_tokens], float32
    mean_scale_ptr,  # [], float32, or None for the sum
    loss_ptr,  # [], float32
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
):
    """A single program adds up the losses in a fixed order."""
    offsets = tl.arange(0, BLOCK_SIZE).to(tl.int64)
    sums = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, num_tokens, BLOCK_SIZE):
        tokens = start + offsets
        sums += tl.load(losses_ptr + tokens, mask=tokens < num_tokens, other=0.0)
    loss = tl.sum(sums, axis=0)
    if mean_scale_ptr is not None:
        scale = tl.load(mean_scale_ptr)
        loss = tl.where(scale == 0.0, float("nan"), loss * scale)
    tl.store(loss_ptr, loss)


def reduce_losses(losses: Tensor, mean_scale: Tensor | None) -> Tensor:
    """The sum of ``[num_tokens]`` losses, times ``mean_scale``; the mean of nothing is NaN, as PyTorch's."""
    if not backend.use_triton(losses):
        total = losses.sum()
        return total if mean_scale is None else (total * mean_scale).masked_fill(mean_scale == 0, torch.nan)
    loss = torch.empty((), dtype=losses.dtype, device=losses.device)
    _reduce_kernel.launch(
        1,
        losses_ptr=losses,
        mean_scale_ptr=mean_scale,
        loss_ptr=loss,
        num_tokens=losses.shape[0],
        BLOCK_SIZE=_BLOCK_SIZE,
        num_warps=8,
    )
    return loss
