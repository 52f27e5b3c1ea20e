"""Cross entropy of a linear head's logits that are never whole: ``cross_entropy(input @ linear_weight.T + bias)``.

Chunks of tokens are projected, turned into their loss and gradient in place, and reduced to the gradients of the
hidden states and the head at once, so a training step costs the three matrix products it would cost anyway and the
memory of one chunk. Forward therefore saves gradients, not activations; ``reduction="none"``, whose upstream gradient
is not known in forward, projects once more in backward. The idea of taking the gradient in forward is from Liger
Kernel (arXiv:2410.10989); see :mod:`liger_ops.cross_entropy` for the formula and its options.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.chunked_loss import (
    KeptTokens,
    choose_accumulate_dtype,
    choose_chunk_size,
    chunked_linear_loss,
    default_chunk_bytes,
    scale_gradient,
)
from liger_ops.cross_entropy import cross_entropy, loss_and_gradient_in_place
from liger_ops.token_loss import (
    IGNORE_INDEX,
    TokenLossOptions,
    TokenStats,
    check_labels,
    check_reduction,
    mean_denominator,
)


def linear_cross_entropy_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """The same through whole logits: class probabilities and several sets of classes for each token work too."""
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias).unflatten(-1, linear_weight.shape[:-1])
    return cross_entropy(logits, target, **kwargs)


def _fake_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    grad_losses: Tensor | None,
    chunk_size: int,
    accumulate_dtype: torch.dtype,
    needs_gradient: list[bool],
    *scalars: float,
) -> tuple[Tensor, ...]:
    losses = input.new_empty(input.shape[:1], dtype=torch.promote_types(input.dtype, torch.float32))
    needs_input, needs_weight, needs_bias = needs_gradient
    return (
        losses,
        torch.empty_like(losses),
        torch.empty_like(labels),
        input.new_empty(input.shape if needs_input else 0),
        weight.new_empty(weight.shape if needs_weight else 0, dtype=accumulate_dtype),
        weight.new_empty(weight.shape[0] if needs_bias else 0, dtype=accumulate_dtype),
    )


@backend.register_op(
    "linear_cross_entropy(Tensor input, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight,"
    " Tensor? grad_losses, SymInt chunk_size, ScalarType accumulate_dtype, bool[] needs_gradient, int ignore_index,"
    " float label_smoothing, float softcap, float logit_scale, float z_loss_weight)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_linear_cross_entropy,
)
def _linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    grad_losses: Tensor | None,
    chunk_size: int,
    accumulate_dtype: torch.dtype,
    needs_gradient: list[bool],
    *scalars: float,
) -> tuple[Tensor, ...]:
    """Losses, lse, predictions, and the gradients of ``sum(losses * grad_losses)`` that ``needs_gradient`` names."""
    options = TokenLossOptions.from_scalars(*scalars)
    losses = input.new_zeros(input.shape[:1], dtype=torch.promote_types(input.dtype, torch.float32))
    lse = torch.zeros_like(losses)
    predictions = torch.full_like(labels, options.ignore_index)

    def chunk_loss(logits: Tensor, index: Tensor) -> None:
        stats = loss_and_gradient_in_place(
            logits,
            labels[index],
            class_weight,
            None if grad_losses is None else grad_losses[index],
            options,
            any(needs_gradient),
        )
        for whole, part in zip((losses, lse, predictions), stats, strict=True):
            whole.index_copy_(0, index, part)

    gradients = chunked_linear_loss(
        input,
        weight,
        bias,
        KeptTokens.of(labels, options.ignore_index),
        chunk_loss,
        chunk_size=chunk_size,
        accumulate_dtype=accumulate_dtype,
        needs_gradient=(needs_gradient[0], needs_gradient[1], needs_gradient[2]),
    )
    return losses, lse, predictions, *gradients


class _LossSumFunction(torch.autograd.Function):
    """The summed loss, whose gradients are taken in forward and only scaled in backward."""

    @staticmethod
    def forward(ctx, input, weight, bias, labels, class_weight, options, chunk_size, accumulate_dtype, needs_gradient):
        losses, lse, predictions, *gradients = _linear_cross_entropy(
            input, weight, bias, labels, class_weight, None, chunk_size, accumulate_dtype, needs_gradient,
            *options.as_scalars(),
        )  # fmt: skip
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.needs_gradient = needs_gradient
        ctx.mark_non_differentiable(losses, lse, predictions)
        return losses.sum(), losses, lse, predictions

    @staticmethod
    @backend.once_differentiable
    def backward(ctx, grad_loss, *_):
        # A graph that ends with this pass needs no second buffer of the head's size.
        compiling = torch.compiler.is_compiling()
        in_place = not compiling and not torch._C._autograd._get_current_graph_task_keep_graph()
        scaled = (
            scale_gradient(gradient, grad_loss, dtype, in_place=in_place) if needed else None
            for gradient, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_gradient, strict=True)
        )
        return *scaled, None, None, None, None, None, None


class _TokenLossFunction(torch.autograd.Function):
    """Per-token losses, whose gradients wait for backward to bring each token's factor."""

    @staticmethod
    def forward(ctx, input, weight, bias, labels, class_weight, options, chunk_size, accumulate_dtype, needs_gradient):
        losses, lse, predictions, *_ = _linear_cross_entropy(
            input, weight, bias, labels, class_weight, None, chunk_size, accumulate_dtype, (False, False, False),
            *options.as_scalars(),
        )  # fmt: skip
        ctx.save_for_backward(input, weight, bias, labels, class_weight)
        ctx.arguments = (chunk_size, accumulate_dtype, needs_gradient, *options.as_scalars())
        ctx.needs_gradient = needs_gradient
        ctx.mark_non_differentiable(lse, predictions)
        return losses, lse, predictions

    @staticmethod
    @backend.once_differentiable
    def backward(ctx, grad_losses, *_):
        input, weight, bias, labels, class_weight = ctx.saved_tensors
        gradients = _linear_cross_entropy(input, weight, bias, labels, class_weight, grad_losses, *ctx.arguments)[3:]
        cast = (
            gradient.to(tensor.dtype) if needed else None
            for gradient, tensor, needed in zip(gradients, (input, weight, bias), ctx.needs_gradient, strict=True)
        )
        return *cast, None, None, None, None, None, None


def _check_arguments(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> None:
    vocab_size, hidden_size = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != hidden_size:
        raise ValueError(
            f"input must end in linear_weight's hidden_size = {hidden_size}, got shape {tuple(input.shape)}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target must hold one label for each token of input: input has {tuple(input.shape[:-1])} tokens, target"
            f" has shape {tuple(target.shape)}"
        )
    for name, tensor in (("linear_bias", linear_bias), ("weight", weight)):
        if tensor is not None and tensor.shape != (vocab_size,):
            raise ValueError(f"{name} must have shape {(vocab_size,)}, got {tuple(tensor.shape)}")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss_weight: float = 0.0,
    chunk_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, TokenStats]:
    """Cross entropy of ``input @ linear_weight.T + linear_bias``, call-compatible with PyTorch's function of that name.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        target: Class indices, int64, ``[...]`` as ``input`` without its last dimension. Class probabilities, and heads
            of more dimensions, are computed through whole logits, as PyTorch does.
        linear_bias: The head's bias, ``[vocab_size]``.
        weight: Class weights, ``[vocab_size]``; not differentiable.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that are not ignored, by class weight.
        ignore_index: Label of tokens that contribute nothing and cost nothing; None means -100.
        label_smoothing: Share of the target that is spread over all classes, between 0 and 1.
        options: PyTorch's ``LinearCrossEntropyOptions``; its ``batch_chunk_size`` and ``acc_dtype`` are followed.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale: Factor of the logits.
        z_loss_weight: Factor of ``lse ** 2``, added to each token's loss.
        chunk_bytes: Budget for one chunk of logits; by default 512 MiB on a GPU and 8 MiB on a CPU. A chunk never
            holds all tokens (unless there is only one).
        accumulate_dtype: Dtype in which chunks' gradients of the head are summed. By default bfloat16 heads sum in
            bfloat16 over at most 8 chunks, everything else in at least float32.
        return_stats: Whether to also return :class:`~liger_ops.token_loss.TokenStats`.

    Returns:
        The loss in at least float32, with the stats (shaped as ``target``) on request. Under autocast the products run
        in the autocast dtype, as a linear layer's would.

    Raises:
        ValueError: For shapes, dtypes or options that do not fit; for labels out of range if they are on the CPU (on
            the GPU the loss is NaN instead).
    """
    check_reduction(reduction)
    ignore_index = IGNORE_INDEX if ignore_index is None else ignore_index
    if linear_weight.dim() < 2:
        raise ValueError(f"linear_weight must be [vocab_size, hidden_size], got shape {tuple(linear_weight.shape)}")
    if target.is_floating_point() or linear_weight.dim() > 2:
        if input.dim() > 2 or input.dim() < min(linear_weight.dim() - 1, 2):
            raise ValueError(
                "input must be [num_tokens, hidden_size] for class probabilities and heads of more than two dimensions,"
                f" got shape {tuple(input.shape)}"
            )
        return linear_cross_entropy_reference(
            input, linear_weight, target, linear_bias=linear_bias, weight=weight, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale,
            z_loss_weight=z_loss_weight, return_stats=return_stats,
        )  # fmt: skip
    token_options = TokenLossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)
    _check_arguments(input, linear_weight, target, linear_bias, weight)
    check_labels("target", target, linear_weight.shape[0], ignore_index)
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be a positive number of bytes, got {chunk_bytes}")

    needs_gradient = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (input, linear_weight, linear_bias)
    )
    hidden_states = input.reshape(-1, input.shape[-1])
    tensors = [hidden_states, linear_weight, linear_bias]
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    elif linear_weight.dtype != input.dtype:
        raise ValueError(f"linear_weight must have input's dtype {input.dtype}, got {linear_weight.dtype}")

    labels = target.reshape(-1)
    num_tokens, vocab_size = labels.shape[0], linear_weight.shape[0]
    chunk_size = getattr(options, "batch_chunk_size", None) or choose_chunk_size(
        num_tokens,
        vocab_size,
        tensors[0].element_size(),
        default_chunk_bytes(input.device) if chunk_bytes is None else chunk_bytes,
    )
    accumulate_dtype = (
        accumulate_dtype
        or getattr(options, "acc_dtype", None)
        or choose_accumulate_dtype(tensors[1].dtype, -(-num_tokens // chunk_size))
    )
    class_weight = None if weight is None else weight.detach().contiguous()
    function = _TokenLossFunction if reduction == "none" else _LossSumFunction
    with torch.autocast(input.device.type, enabled=False):
        loss, *stats = function.apply(
            *tensors, labels, class_weight, token_options, chunk_size, accumulate_dtype, needs_gradient
        )
    if reduction == "none":
        stats = [loss.detach(), *stats]
        loss = loss.view(target.shape)
    elif reduction == "mean":
        denominator = mean_denominator(labels, class_weight, token_options, loss.dtype)
        # The mean of nothing is NaN but, as in PyTorch, its gradient is zero.
        nothing = denominator == 0
        loss = (loss / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, torch.nan)
    return (loss, TokenStats(*(stat.view(target.shape) for stat in stats))) if return_stats else loss
