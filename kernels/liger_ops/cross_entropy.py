"""Cross entropy over class indices.

With z = softcap * tanh(logit_scale * logits / softcap) (no tanh without softcap), lse = log(sum(exp(z))) and
label smoothing e over V classes with weights w, one token of label y costs

    loss = (1 - e) * w[y] * (lse - z[y]) + e / V * sum_c(w[c] * (lse - z[c])) + z_loss_weight * lse**2

The first two terms are ``torch.nn.functional.cross_entropy``; soft-capping is Gemma 2's (arXiv:2408.00118), the z-loss
PaLM's (arXiv:2204.02311). The normaliser is gathered online in one pass (Milakov and Gimelshein, arXiv:1805.02867).
Arithmetic is float32 whatever the logits' dtype. Saved for backward: the logits, and lse with its rounding error (8
bytes a token): float32 alone holds an lse of 12 to 5e-7, ten times the error of PyTorch's probabilities.
Labels outside [0, V) other than ``ignore_index`` raise on the CPU and give a NaN loss and gradient on the GPU, where
looking at them would stall the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.token_loss import (
    IGNORE_INDEX,
    TokenLossOptions,
    TokenStats,
    check_labels,
    check_reduction,
    reduce_losses,
)


def transform_logits(logits: Tensor, options: TokenLossOptions) -> Tensor:
    """Scales and soft-caps logits of any shape, in at least float32."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z if options.logit_scale == 1.0 else z * options.logit_scale
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, options: TokenLossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """``(losses, lse, predictions)`` of ``[num_tokens, vocab_size]`` logits in plain PyTorch, differentiable."""
    vocab_size = logits.shape[-1]
    z = transform_logits(logits, options)
    kept = labels != options.ignore_index
    in_range = (labels >= 0) & (labels < vocab_size)
    safe_labels = labels.where(in_range, 0)
    weight = z.new_ones(vocab_size) if class_weight is None else class_weight.to(z.dtype)

    log_probabilities = torch.log_softmax(z, dim=-1)
    maximum, predictions = z.max(dim=-1)
    lse = maximum - log_probabilities.gather(-1, predictions[:, None])[:, 0]
    label_weight = weight[safe_labels].where(in_range | ~kept, torch.nan)
    losses = -label_weight * log_probabilities.gather(-1, safe_labels[:, None])[:, 0]
    if options.label_smoothing:
        smoothing = options.label_smoothing
        losses = (1 - smoothing) * losses - smoothing / vocab_size * (log_probabilities * weight).sum(-1)
    if options.z_loss_weight:
        losses = losses + options.z_loss_weight * lse**2
    predictions = predictions.where(kept, options.ignore_index)
    return losses.where(kept, 0.0), lse.detach().where(kept, 0.0), predictions


def _cross_entropy_gradient_reference(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    grad_losses: Tensor | None,
    options: TokenLossOptions,
) -> Tensor:
    """The gradient of :func:`cross_entropy_reference`'s losses written out, in at least float32."""
    vocab_size = logits.shape[-1]
    z = transform_logits(logits, options)
    kept = labels != options.ignore_index
    in_range = (labels >= 0) & (labels < vocab_size)
    safe_labels = labels.where(in_range, 0)
    weight = z.new_ones(vocab_size) if class_weight is None else class_weight.to(z.dtype)
    label_weight = ((1 - options.label_smoothing) * weight[safe_labels]).where(in_range, torch.nan)
    smoothing = options.label_smoothing / vocab_size

    grad = torch.softmax(z, dim=-1)
    grad *= (label_weight + smoothing * weight.sum() + 2 * options.z_loss_weight * lse)[:, None]
    if smoothing:
        grad -= smoothing * weight
    grad.scatter_add_(-1, safe_labels[:, None], -label_weight[:, None])
    if options.logit_scale != 1.0:
        grad *= options.logit_scale
    if options.softcap is not None:
        grad *= 1 - (z / options.softcap) ** 2
    if grad_losses is not None:
        grad *= grad_losses[:, None]
    return grad.masked_fill_(~kept[:, None], 0.0)


@dataclass(frozen=True)
class CrossEntropyLaunch:
    """How one program walks over a row of logits."""

    block_size: int
    num_warps: int


def choose_launch(vocab_size: int) -> CrossEntropyLaunch:
    """Launch parameters for rows of ``vocab_size`` logits.

    On an H200, loss and gradient of 2048 rows of 128256 bfloat16 logits took 0.43 ms in blocks of 4096 with 4 warps,
    0.44 to 0.59 ms in blocks of 2048 to 32768 with 4 to 32 warps.
    """
    block_size = min(triton.next_power_of_2(max(vocab_size, 16)), 4096)
    return CrossEntropyLaunch(block_size, num_warps=max(1, block_size // 1024))


@triton.jit
def _tanh(x):
    # The exponential form cancels near zero, where the series is exact to float32.
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _transform(logits, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    z = logits.to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def _store_row_gradient(
    logits_row_ptr,  # [vocab_size]
    grad_row_ptr,  # [vocab_size], may be logits_row_ptr
    class_weight_ptr,  # [vocab_size] or unused
    label,
    label_weight,  # class weight of the label, NaN when the label is out of range
    class_weight_sum,
    lse,
    lse_error,
    grad_loss,
    vocab_size,
    label_smoothing,
    softcap,
    logit_scale,
    z_loss_weight,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Writes d loss / d logits of one row."""
    label_weight = (1.0 - label_smoothing) * label_weight
    smoothing = label_smoothing / vocab_size
    probability_factor = label_weight + smoothing * class_weight_sum + 2.0 * z_loss_weight * lse
    for start in range(0, vocab_size, BLOCK_SIZE):
        columns = start + tl.arange(0, BLOCK_SIZE)
        mask = columns < vocab_size
        z = _transform(tl.load(logits_row_ptr + columns, mask=mask, other=0.0), logit_scale, softcap, HAS_SOFTCAP)
        grad = tl.exp(z - lse - lse_error) * probability_factor
        if HAS_SMOOTHING:
            if HAS_CLASS_WEIGHT:
                grad -= smoothing * tl.load(class_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            else:
                grad -= smoothing
        grad = tl.where(columns == label, grad - label_weight, grad) * logit_scale * grad_loss
        if HAS_SOFTCAP:
            capped = z / softcap
            grad *= 1.0 - capped * capped
        tl.store(grad_row_ptr + columns, grad.to(grad_row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_row_zeros(row_ptr, vocab_size, BLOCK_SIZE: tl.constexpr):
    for start in range(0, vocab_size, BLOCK_SIZE):
        columns = start + tl.arange(0, BLOCK_SIZE)
        zeros = tl.zeros([BLOCK_SIZE], dtype=row_ptr.dtype.element_ty)
        tl.store(row_ptr + columns, zeros, mask=columns < vocab_size)


@triton.jit
def _cross_entropy_forward_kernel(
    logits_ptr,  # [num_tokens, vocab_size], overwritten with its gradient when WITH_GRADIENT
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or unused
    class_weight_sum_ptr,  # [] or unused
    grad_losses_ptr,  # [num_tokens] or unused
    losses_ptr,  # [num_tokens], float32
    lse_ptr,  # [num_tokens], float32
    lse_error_ptr,  # [num_tokens], float32: what rounding took from lse
    predictions_ptr,  # [num_tokens], int64
    logits_row_stride,
    vocab_size,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    z_loss_weight,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_LOSSES: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes one token's loss, lse and prediction, and may turn its logits into their gradient."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        tl.store(lse_error_ptr + row, 0.0)
        tl.store(predictions_ptr + row, label)
        if WITH_GRADIENT:
            _store_row_zeros(row_ptr, vocab_size, BLOCK_SIZE)
        return

    # Read before the first barrier below: afterwards another warp may already have overwritten the label's logit.
    in_range = (label >= 0) & (label < vocab_size)
    label_z = _transform(tl.load(row_ptr + label, mask=in_range, other=0.0), logit_scale, softcap, HAS_SOFTCAP)
    label_weight = 1.0
    class_weight_sum = 1.0 * vocab_size  # no method call: the compiler makes a vocab_size of 1 a plain int
    if HAS_CLASS_WEIGHT:
        label_weight = tl.load(class_weight_ptr + label, mask=in_range, other=0.0).to(tl.float32)
        class_weight_sum = tl.load(class_weight_sum_ptr).to(tl.float32)
    label_weight = tl.where(in_range, label_weight, float("nan"))

    maximum = -float("inf")
    normaliser = 0.0
    weighted_sum = 0.0
    best_start = 0
    for start in range(0, vocab_size, BLOCK_SIZE):
        columns = start + tl.arange(0, BLOCK_SIZE)
        mask = columns < vocab_size
        z = _transform(tl.load(row_ptr + columns, mask=mask, other=0.0), logit_scale, softcap, HAS_SOFTCAP)
        if HAS_SMOOTHING:
            weight = tl.where(mask, 1.0, 0.0)
            if HAS_CLASS_WEIGHT:
                weight = tl.load(class_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            weighted_sum += tl.sum(weight * z, axis=0)
        z = tl.where(mask, z, -float("inf"))
        block_maximum = tl.max(z, axis=0)
        best_start = tl.where(block_maximum > maximum, start, best_start)
        new_maximum = tl.maximum(maximum, block_maximum)
        # While every logit so far is -inf, subtracting their maximum would give NaN.
        shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        normaliser = normaliser * tl.exp(maximum - shift) + tl.sum(tl.exp(z - shift), axis=0)
        maximum = new_maximum
    # Looking for the largest logit's place once, in the block that has it, is cheaper than in every block.
    columns = best_start + tl.arange(0, BLOCK_SIZE)
    z = _transform(tl.load(row_ptr + columns, mask=columns < vocab_size, other=0.0), logit_scale, softcap, HAS_SOFTCAP)
    prediction = tl.min(tl.where((z == maximum) & (columns < vocab_size), columns, vocab_size), axis=0)
    prediction = tl.minimum(prediction, vocab_size - 1)
    log_normaliser = tl.log(normaliser)
    lse = maximum + log_normaliser
    # Exact, since the larger summand is taken away first.
    larger = tl.maximum(maximum, log_normaliser)
    lse_error = tl.minimum(maximum, log_normaliser) - (lse - larger)

    loss = label_weight * (lse - label_z + lse_error)
    if HAS_SMOOTHING:
        spread = class_weight_sum * lse - weighted_sum
        loss = (1.0 - label_smoothing) * loss + label_smoothing / vocab_size * spread
    tl.store(losses_ptr + row, loss + z_loss_weight * lse * lse)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_error_ptr + row, lse_error)
    tl.store(predictions_ptr + row, prediction.to(tl.int64))
    if WITH_GRADIENT:
        grad_loss = 1.0
        if HAS_GRAD_LOSSES:
            grad_loss = tl.load(grad_losses_ptr + row).to(tl.float32)
        _store_row_gradient(
            row_ptr, row_ptr, class_weight_ptr, label, label_weight, class_weight_sum, lse, lse_error, grad_loss,
            vocab_size, label_smoothing, softcap, logit_scale, z_loss_weight,
            HAS_SOFTCAP, HAS_SMOOTHING, HAS_CLASS_WEIGHT, BLOCK_SIZE,
        )  # fmt: skip


@triton.jit
def _cross_entropy_backward_kernel(
    logits_ptr,  # [num_tokens, vocab_size]
    grad_logits_ptr,  # [num_tokens, vocab_size]
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or unused
    class_weight_sum_ptr,  # [] or unused
    lse_ptr,  # [num_tokens], float32
    lse_error_ptr,  # [num_tokens], float32
    grad_losses_ptr,  # [num_tokens]
    logits_row_stride,
    grad_logits_row_stride,
    vocab_size,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    z_loss_weight,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program writes the gradient of one token's logits."""
    row = tl.program_id(0).to(tl.int64)
    grad_row_ptr = grad_logits_ptr + row * grad_logits_row_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        _store_row_zeros(grad_row_ptr, vocab_size, BLOCK_SIZE)
        return

    in_range = (label >= 0) & (label < vocab_size)
    label_weight = 1.0
    class_weight_sum = 1.0 * vocab_size  # no method call: the compiler makes a vocab_size of 1 a plain int
    if HAS_CLASS_WEIGHT:
        label_weight = tl.load(class_weight_ptr + label, mask=in_range, other=0.0).to(tl.float32)
        class_weight_sum = tl.load(class_weight_sum_ptr).to(tl.float32)
    label_weight = tl.where(in_range, label_weight, float("nan"))
    lse = tl.load(lse_ptr + row)
    lse_error = tl.load(lse_error_ptr + row)
    grad_loss = tl.load(grad_losses_ptr + row).to(tl.float32)
    _store_row_gradient(
        logits_ptr + row * logits_row_stride, grad_row_ptr, class_weight_ptr, label, label_weight, class_weight_sum,
        lse, lse_error, grad_loss, vocab_size, label_smoothing, softcap, logit_scale, z_loss_weight,
        HAS_SOFTCAP, HAS_SMOOTHING, HAS_CLASS_WEIGHT, BLOCK_SIZE,
    )  # fmt: skip


def _launch_arguments(vocab_size: int, class_weight: Tensor | None, options: TokenLossOptions) -> dict[str, Any]:
    """What both kernels are launched with."""
    launch = choose_launch(vocab_size)
    return {
        "class_weight_ptr": class_weight,
        "class_weight_sum_ptr": None if class_weight is None else class_weight.sum(dtype=torch.float32),
        "vocab_size": vocab_size,
        "ignore_index": options.ignore_index,
        "label_smoothing": options.label_smoothing,
        "softcap": options.softcap or 0.0,
        "logit_scale": options.logit_scale,
        "z_loss_weight": options.z_loss_weight,
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_SMOOTHING": options.label_smoothing > 0.0,
        "HAS_CLASS_WEIGHT": class_weight is not None,
        "BLOCK_SIZE": launch.block_size,
        "num_warps": launch.num_warps,
    }


def _launch_forward(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    grad_losses: Tensor | None,
    options: TokenLossOptions,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, vocab_size = logits.shape
    losses = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    lse_error = torch.empty_like(losses)
    predictions = torch.empty(num_tokens, dtype=torch.int64, device=logits.device)
    if num_tokens == 0:
        return losses, lse, predictions, lse_error
    _cross_entropy_forward_kernel[(num_tokens,)](
        logits_ptr=logits,
        labels_ptr=labels.contiguous(),
        grad_losses_ptr=None if grad_losses is None else grad_losses.contiguous(),
        losses_ptr=losses,
        lse_ptr=lse,
        lse_error_ptr=lse_error,
        predictions_ptr=predictions,
        logits_row_stride=logits.stride(0),
        HAS_GRAD_LOSSES=grad_losses is not None,
        WITH_GRADIENT=with_gradient,
        **_launch_arguments(vocab_size, class_weight, options),
    )
    return losses, lse, predictions, lse_error


def loss_and_gradient_in_place(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    grad_losses: Tensor | None,
    options: TokenLossOptions,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(losses, lse, predictions)`` of logits that the caller owns, which become their own gradient on request.

    Args:
        logits: ``[num_tokens, vocab_size]``, unit stride in the last dimension.
        labels: ``[num_tokens]``, int64.
        class_weight: ``[vocab_size]`` or None.
        grad_losses: ``[num_tokens]``, the factor of each token's gradient, or None for 1.
        options: What the loss is made of.
        with_gradient: Whether to overwrite ``logits`` with the gradient of ``sum(losses * grad_losses)``.
    """
    if backend.use_triton(logits):
        return _launch_forward(logits, labels, class_weight, grad_losses, options, with_gradient)[:3]
    losses, lse, predictions = cross_entropy_reference(logits, labels, class_weight, options)
    if with_gradient:
        logits.copy_(_cross_entropy_gradient_reference(logits, labels, class_weight, lse, grad_losses, options))
    return losses, lse, predictions


def _fake_forward(logits: Tensor, labels: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses = logits.new_empty(logits.shape[:1], dtype=torch.float32)
    predictions = logits.new_empty(logits.shape[:1], dtype=torch.int64)
    return losses, torch.empty_like(losses), predictions, torch.empty_like(losses)


@backend.register_op(
    "cross_entropy_forward(Tensor logits, Tensor labels, Tensor? class_weight, int ignore_index, float label_smoothing,"
    " float softcap, float logit_scale, float z_loss_weight) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)
def _cross_entropy_forward(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, *scalars: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _launch_forward(logits, labels, class_weight, None, TokenLossOptions.from_scalars(*scalars), False)


@backend.register_op(
    "cross_entropy_backward(Tensor logits, Tensor labels, Tensor? class_weight, Tensor lse, Tensor lse_error,"
    " Tensor grad_losses, int ignore_index, float label_smoothing, float softcap, float logit_scale,"
    " float z_loss_weight) -> Tensor",
    fake=lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
def _cross_entropy_backward(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    lse_error: Tensor,
    grad_losses: Tensor,
    *scalars: float,
) -> Tensor:
    options = TokenLossOptions.from_scalars(*scalars)
    num_tokens, vocab_size = logits.shape
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return grad_logits
    _cross_entropy_backward_kernel[(num_tokens,)](
        logits_ptr=logits,
        grad_logits_ptr=grad_logits,
        labels_ptr=labels.contiguous(),
        lse_ptr=lse,
        lse_error_ptr=lse_error,
        grad_losses_ptr=grad_losses.contiguous(),
        logits_row_stride=logits.stride(0),
        grad_logits_row_stride=grad_logits.stride(0),
        **_launch_arguments(vocab_size, class_weight, options),
    )
    return grad_logits


class _CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, class_weight, options):
        losses, lse, predictions, lse_error = _cross_entropy_forward(
            logits, labels, class_weight, *options.as_scalars()
        )
        ctx.save_for_backward(logits, labels, class_weight, lse, lse_error)
        ctx.options = options
        ctx.mark_non_differentiable(lse, predictions)
        return losses, lse, predictions

    @staticmethod
    @backend.once_differentiable
    def backward(ctx, grad_losses, *_):
        grad_logits = _cross_entropy_backward(*ctx.saved_tensors, grad_losses, *ctx.options.as_scalars())
        return grad_logits, None, None, None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss_weight: float = 0.0,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, TokenStats]:
    """Cross entropy, call-compatible with :func:`torch.nn.functional.cross_entropy`.

    Args:
        input: Logits, ``[num_tokens, vocab_size]``, ``[vocab_size]`` or ``[batch_size, vocab_size, ...]``.
        target: Class indices, int64, ``input``'s shape without the class dimension. Class probabilities (a floating
            point tensor of ``input``'s shape) are passed on to PyTorch.
        weight: Class weights, ``[vocab_size]``; not differentiable.
        size_average, reduce: PyTorch's deprecated spellings of ``reduction``.
        ignore_index: Label of tokens that contribute neither loss nor gradient.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that are not ignored, by class weight.
        label_smoothing: Share of the target that is spread over all classes, between 0 and 1.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale: Factor of the logits.
        z_loss_weight: Factor of ``lse ** 2``, added to each token's loss.
        return_stats: Whether to also return :class:`TokenStats`.

    Returns:
        The loss in at least float32, with :class:`TokenStats` (shaped as ``target``) on request.

    Raises:
        ValueError: For shapes, dtypes or options that do not fit; for labels out of range if they are on the CPU (on
            the GPU the loss is NaN instead).
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    check_reduction(reduction)
    options = TokenLossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)
    class_dim = 1 if input.dim() > 1 else 0
    if target.is_floating_point():
        if return_stats or (softcap, logit_scale, z_loss_weight) != (None, 1.0, 0.0):
            raise ValueError(
                f"target must be class indices (torch.int64) with softcap, logit_scale, z_loss_weight or return_stats,"
                f" got {target.dtype}"
            )
        return F.cross_entropy(input, target, weight, reduction=reduction, label_smoothing=label_smoothing)
    if input.dim() == 0 or target.shape != input.shape[:class_dim] + input.shape[class_dim + 1 :]:
        raise ValueError(
            f"target must have input's shape without its class dimension {class_dim}: input has shape"
            f" {tuple(input.shape)}, target {tuple(target.shape)}"
        )
    vocab_size = input.shape[class_dim]
    if weight is not None and weight.shape != (vocab_size,):
        raise ValueError(f"weight must have shape {(vocab_size,)}, got {tuple(weight.shape)}")
    check_labels("target", target, vocab_size, ignore_index)

    logits = input.movedim(class_dim, -1).reshape(-1, vocab_size)
    labels = target.reshape(-1)
    class_weight = None if weight is None else weight.detach().contiguous()
    if backend.use_triton(input):
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        losses, lse, predictions = _CrossEntropyFunction.apply(logits, labels, class_weight, options)
    else:
        losses, lse, predictions = cross_entropy_reference(logits, labels, class_weight, options)
    loss = reduce_losses(losses, labels, class_weight, options, reduction)
    if reduction == "none":
        loss = loss.view(target.shape)
    if not return_stats:
        return loss
    return loss, TokenStats(*(stat.detach().view(target.shape) for stat in (losses, lse, predictions)))
