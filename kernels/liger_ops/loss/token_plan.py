"""Order and number of the tokens that are not ignored, and the factor of the mean, all computed on the device."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.options import Targets, TokenStats


class TokenPlan(NamedTuple):
    """Tensors on the device, which the host has not read."""

    mean_scale: Tensor
    """``[]``, at least float32: 1 / (summed weight of the tokens that are not ignored), 0 if that weight is 0."""
    order: Tensor | None
    """``[num_tokens]``, int64: the tokens that are not ignored in their order, then the others."""
    num_kept: Tensor | None
    """``[]``, int64: how many are not ignored."""


_BLOCK_SIZE = 2048


@triton.jit
def count_tokens(
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    token_weight_ptr,  # [num_tokens] or None
    num_tokens,
    vocab_size,
    ignore_index,
    BLOCK_SIZE: tl.constexpr,
):
    """How many tokens are not ignored, and 1 / their summed weight (0 if that is 0); every program gets the same."""
    offsets = tl.arange(0, BLOCK_SIZE).to(tl.int64)
    counts = tl.zeros([BLOCK_SIZE], dtype=tl.int64)
    totals = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, num_tokens, BLOCK_SIZE):
        tokens = start + offsets
        labels = tl.load(labels_ptr + tokens, mask=tokens < num_tokens, other=ignore_index)
        kept = labels != ignore_index
        counts += kept.to(tl.int64)
        weights = kept.to(tl.float32)
        if class_weight_ptr is not None:
            is_class = kept & (labels >= 0) & (labels < vocab_size)
            weights *= tl.load(class_weight_ptr + labels, mask=is_class, other=0.0).to(tl.float32)
        if token_weight_ptr is not None:
            weights *= tl.load(token_weight_ptr + tokens, mask=kept, other=0.0).to(tl.float32)
        totals += weights
    num_kept = tl.sum(counts, axis=0)
    total = num_kept.to(tl.float32)
    if (class_weight_ptr is not None) or (token_weight_ptr is not None):
        total = tl.sum(totals, axis=0)
    return num_kept, tl.where(total == 0.0, 0.0, 1.0 / total)


@backend.Kernel
def _plan_kernel(
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    token_weight_ptr,  # [num_tokens] or None
    mean_scale_ptr,  # [], float32
    order_ptr,  # [num_tokens], int64, or None
    num_kept_ptr,  # [], int64, or None
    num_tokens,
    vocab_size,
    ignore_index,
    BLOCK_SIZE: tl.constexpr,
):
    """A single program counts and weighs the tokens, then writes their order."""
    num_kept, mean_scale = count_tokens(
        labels_ptr, class_weight_ptr, token_weight_ptr, num_tokens, vocab_size, ignore_index, BLOCK_SIZE
    )
    tl.store(mean_scale_ptr, mean_scale)
    if order_ptr is not None:
        tl.store(num_kept_ptr, num_kept)
        offsets = tl.arange(0, BLOCK_SIZE).to(tl.int64)
        kept_before = num_kept - num_kept
        for start in range(0, num_tokens, BLOCK_SIZE):
            tokens = start + offsets
            mask = tokens < num_tokens
            labels = tl.load(labels_ptr + tokens, mask=mask, other=ignore_index)
            kept = (labels != ignore_index).to(tl.int64)
            kept_so_far = kept_before + tl.cumsum(kept, axis=0)
            places = tl.where(kept == 1, kept_so_far - 1, num_kept + tokens - kept_so_far)
            tl.store(order_ptr + places, tokens, mask=mask)
            kept_before += tl.sum(kept, axis=0)


def plan_tokens(targets: Targets, vocab_size: int, ignore_index: int, like: Tensor, *, with_order: bool) -> TokenPlan:
    """The plan of the tokens, made without waiting for the device.

    Args:
        targets: Labels and weights, contiguous.
        vocab_size: Number of classes.
        ignore_index: Label of tokens that do not count.
        like: The logits or hidden states; their device and dtype choose the path and the dtype.
        with_order: Whether to return ``order`` and ``num_kept``.
    """
    labels, class_weight, token_weight = targets
    if not backend.use_triton(like):
        return _plan_tokens_reference(targets, vocab_size, ignore_index, like.dtype, with_order)
    plan = TokenPlan(
        torch.empty((), dtype=torch.float32, device=labels.device),
        torch.empty_like(labels) if with_order else None,
        labels.new_empty(()) if with_order else None,
    )
    _plan_kernel.launch(
        1,
        labels_ptr=labels,
        class_weight_ptr=class_weight,
        token_weight_ptr=token_weight,
        mean_scale_ptr=plan.mean_scale,
        order_ptr=plan.order,
        num_kept_ptr=plan.num_kept,
        num_tokens=labels.shape[0],
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        BLOCK_SIZE=_BLOCK_SIZE,
        num_warps=8,
    )
    return plan


def _plan_tokens_reference(
    targets: Targets, vocab_size: int, ignore_index: int, dtype: torch.dtype, with_order: bool
) -> TokenPlan:
    labels, class_weight, token_weight = targets
    kept = labels != ignore_index
    weights = kept.to(torch.promote_types(dtype, torch.float32))
    if class_weight is not None:
        is_class = (labels >= 0) & (labels < vocab_size)
        weights = weights * class_weight.to(weights.dtype)[labels.where(is_class, 0)].where(is_class, 0.0)
    if token_weight is not None:
        weights = weights * token_weight.to(weights.dtype).where(kept, 0.0)
    total = weights.sum()
    mean_scale = total.reciprocal().masked_fill(total == 0, 0.0)
    if not with_order:
        return TokenPlan(mean_scale, None, None)
    return TokenPlan(mean_scale, torch.argsort(kept, descending=True, stable=True), kept.sum())


def balance_class_weight(
    targets: Targets, vocab_size: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Targets, Tensor | None]:
    """``targets`` with class weights of mean 1 over the tokens that are not ignored, and the factor that makes them so.

    By the tokens' own weights: then a mean does not change, but divides by the tokens' weights alone, so it is also the
    mean of a term without class weights. In plain PyTorch, which the compiler can see. Weights that sum to zero stay.
    """
    weight = targets.class_weight
    if weight is None:
        return targets, None
    by_class, by_token = (
        _plan_tokens_reference(each, vocab_size, ignore_index, dtype, False).mean_scale
        for each in (targets, targets._replace(class_weight=None))
    )
    factor = (by_class / by_token).masked_fill((by_class == 0) | (by_token == 0), 1.0)
    return targets._replace(class_weight=weight.to(factor.dtype) * factor), factor


def unbalance_losses(
    stats: TokenStats, token_weight: Tensor | None, z_loss_weight: float, factor: Tensor
) -> TokenStats:
    """``stats`` with the losses that the class weights give without the factor of :func:`balance_class_weight`."""
    z_losses = z_loss_weight * stats.lse**2 * (1.0 if token_weight is None else token_weight)
    return stats._replace(losses=(stats.losses - z_losses) / factor + z_losses)


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
