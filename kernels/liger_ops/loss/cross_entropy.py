"""Cross entropy over class indices.

With z = softcap * tanh(logit_scale * logits / softcap) (no tanh without softcap), lse = log(sum(exp(z))) and
label smoothing e over V classes with weights w, one token of label y costs

    loss = (1 - e) * w[y] * (lse - z[y]) + e / V * sum_c(w[c] * (lse - z[c])) + z_loss_weight * lse**2

The first two terms are ``torch.nn.functional.cross_entropy``; soft-capping is Gemma 2's (arXiv:2408.00118), the z-loss
PaLM's (arXiv:2204.02311). Arithmetic is float32 whatever the logits' dtype.

With token weights t, the sum is that of t times these losses, and the mean over the tokens that are not ignored is

    sum(t * cross entropy) / sum(t * w[y]) + z_loss_weight * sum(t * lse**2) / sum(t)

Class weights are about labels, of which lse knows nothing: neither they nor their scale, which the first term does not
depend on, change the second. The class weights are divided by their mean for this, so both terms divide by sum(t).

A sum or a mean computes its gradient together with the loss, while the logits are at hand, and saves that instead
of the logits; backward multiplies it by the upstream gradient, which costs nothing if that is 1. Losses of single
tokens, float16 logits (whose gradient could underflow before it meets the loss scale) and ``inplace_backward`` save the
logits, and lse with its rounding error (8 bytes a token): float32 alone holds an lse of 12 to 5e-7, ten times the error
of PyTorch's probabilities.

Labels outside [0, V) other than ``ignore_index`` raise on the CPU and give a NaN loss and gradient on the GPU, where
checking them would make the host wait for the device.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_bool, check_floating, check_shape
from liger_ops.loss.column_launch import launch_column_loss
from liger_ops.loss.launch import launch_gradient, launch_loss
from liger_ops.loss.options import (
    IGNORE_INDEX,
    REDUCTIONS,
    Targets,
    TokenLossOptions,
    TokenStats,
    check_labels,
    check_reduction,
    check_tensors,
    check_weights,
    flat_targets,
)
from liger_ops.loss.scale_gradient import scale_gradient
from liger_ops.loss.token_plan import balance_class_weight, plan_tokens, reduce_losses, unbalance_losses


def transform_logits(logits: Tensor, options: TokenLossOptions, temperature: Tensor | None = None) -> Tensor:
    """Scales and soft-caps logits of any shape, in at least float32; divides them by each row's temperature."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z if options.logit_scale == 1.0 else z * options.logit_scale
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    return z if temperature is None else z / temperature[..., None]


def cross_entropy_reference(logits: Tensor, targets: Targets, options: TokenLossOptions) -> TokenStats:
    """Losses and stats of ``[num_tokens, vocab_size]`` logits in plain PyTorch; the losses are differentiable."""
    labels, class_weight, token_weight = targets
    vocab_size = logits.shape[-1]
    z = transform_logits(logits, options)
    kept = labels != options.ignore_index
    in_range = (labels >= 0) & (labels < vocab_size)
    safe_labels = labels.where(in_range, 0)
    weight = z.new_ones(vocab_size) if class_weight is None else class_weight.to(z.dtype)

    log_probs = torch.log_softmax(z, dim=-1)
    maximum, predictions = z.max(dim=-1)
    lse = maximum - log_probs.gather(-1, predictions[:, None])[:, 0]
    of_label = log_probs.gather(-1, safe_labels[:, None])[:, 0]
    nan_unless_class = torch.ones_like(of_label).where(in_range | ~kept, torch.nan)
    losses = -weight[safe_labels] * nan_unless_class * of_label
    if options.label_smoothing:
        smoothing = options.label_smoothing
        losses = (1 - smoothing) * losses - smoothing / vocab_size * (log_probs * weight).sum(-1)
    if options.z_loss_weight:
        losses = losses + options.z_loss_weight * lse**2
    if token_weight is not None:
        losses = losses * token_weight.to(losses.dtype)
    probabilities = log_probs.detach().exp()
    return TokenStats(
        losses=losses.where(kept, 0.0),
        log_probs=(nan_unless_class * of_label.detach()).where(kept, 0.0),
        lse=lse.detach().where(kept, 0.0),
        entropy=-torch.xlogy(probabilities, probabilities).sum(-1).where(kept, 0.0),
        predictions=predictions.where(kept, options.ignore_index),
        correct=kept & (predictions == labels),
    )


def _gradient_reference(
    logits: Tensor, targets: Targets, lse: Tensor, grad_scale: Tensor | None, options: TokenLossOptions
) -> Tensor:
    """The gradient of :func:`cross_entropy_reference`'s losses written out, in at least float32."""
    labels, class_weight, token_weight = targets
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
    for factor in (grad_scale, token_weight):
        if factor is not None:
            grad *= factor.to(grad.dtype).expand(labels.shape)[:, None]
    return grad.masked_fill_(~kept[:, None], 0.0)


def loss_and_gradient_in_place(
    logits: Tensor,
    targets: Targets,
    grad_scale: Tensor | None,
    options: TokenLossOptions,
    *,
    token_index: Tensor | None,
    with_gradient: bool,
    losses: Tensor,
    stats: TokenStats | None,
    lse: Tensor | None = None,
    lse_error: Tensor | None = None,
) -> None:
    """Writes losses and stats of some tokens, and overwrites their logits, which the caller owns, with the gradient.

    Args:
        logits: ``[num_rows, vocab_size]``, unit stride in the last dimension; or in the first, then without ``lse``.
        targets: Labels and weights of all tokens, ``[num_tokens]``.
        grad_scale: Factor of the gradient, ``[]`` or ``[num_tokens]``; None for 1.
        options: Of the loss.
        token_index: The token of each row, ``[num_rows]``; None if rows are all tokens in order.
        with_gradient: Whether to overwrite ``logits`` with the gradient of ``sum(losses * grad_scale)``.
        losses: ``[num_tokens]``, written at these tokens.
        stats: The same, or None; its ``losses`` and ``lse`` are the arguments of those names.
        lse, lse_error: ``[num_tokens]``, log-sum-exp and its rounding error, written at these tokens; or None.
    """
    if backend.use_triton(logits):
        grad_logits = logits if with_gradient else None
        if logits.stride(1) > 1:
            assert lse is None
            assert lse_error is None
            launch_column_loss(
                logits, targets, grad_scale, options, losses=losses, stats=stats, grad_logits=grad_logits,
                token_index=token_index,
            )  # fmt: skip
            return
        launch_loss(
            logits, targets, grad_scale, options, losses=losses, lse=lse, lse_error=lse_error, stats=stats,
            grad_logits=grad_logits, token_index=token_index,
        )  # fmt: skip
        return
    some, token_index = _targets_of(token_index, targets)
    known = cross_entropy_reference(logits, some, options)
    losses.index_copy_(0, token_index, known.losses)
    if lse is not None and lse_error is not None:
        lse.index_copy_(0, token_index, known.lse)
        lse_error.index_fill_(0, token_index, 0.0)
    if stats is not None:
        for whole, part in zip(stats[1:], known[1:], strict=True):
            whole.index_copy_(0, token_index, part)
    if with_gradient:
        scale = grad_scale[token_index] if grad_scale is not None and grad_scale.dim() else grad_scale
        logits.copy_(_gradient_reference(logits, some, known.lse, scale, options))


def gradient_in_place(
    logits: Tensor,
    targets: Targets,
    grad_scale: Tensor,
    options: TokenLossOptions,
    *,
    token_index: Tensor | None,
    lse: Tensor,
    lse_error: Tensor,
) -> None:
    """Overwrites some tokens' logits with their gradient, as :func:`loss_and_gradient_in_place` does, given their lse.

    Args:
        logits, targets, options, token_index: As there.
        grad_scale: Factor of the gradient, ``[num_tokens]``.
        lse, lse_error: ``[num_tokens]``, as it wrote them.
    """
    if backend.use_triton(logits):
        launch_gradient(
            logits, targets, grad_scale, options,
            lse=lse, lse_error=lse_error, grad_logits=logits, token_index=token_index,
        )  # fmt: skip
        return
    some, token_index = _targets_of(token_index, targets)
    logits.copy_(_gradient_reference(logits, some, lse[token_index], grad_scale[token_index], options))


def _targets_of(token_index: Tensor | None, targets: Targets) -> tuple[Targets, Tensor]:
    """The targets of some tokens, and the tokens; of all if there is no index."""
    labels, class_weight, token_weight = targets
    if token_index is None:
        token_index = torch.arange(labels.shape[0], device=labels.device)
    weight = None if token_weight is None else token_weight[token_index]
    return Targets(labels[token_index], class_weight, weight), token_index


def _list_outputs(reduction: str, gradient: str, with_stats: bool) -> tuple[str, ...]:
    names = ["losses"]
    if reduction != "none":
        names.append("loss")
    if reduction == "mean":
        names.append("mean_scale")
    if gradient == "now":
        names.append("grad_logits")
    if gradient == "later":
        names += ["lse", "lse_error"]
    if with_stats:
        names += ["log_probs", "lse", "entropy", "predictions", "correct"]
    return tuple(dict.fromkeys(names))


# Names of the op's outputs, in order, by its reduction, gradient and with_stats.
_OUTPUTS = {key: _list_outputs(*key) for key in itertools.product(REDUCTIONS, ("now", "later", "never"), (False, True))}
_NOT_FLOAT = {"predictions": torch.int64, "correct": torch.bool}


def _allocate(name: str, logits: Tensor) -> Tensor:
    if name == "grad_logits":
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    shape = () if name in ("loss", "mean_scale") else logits.shape[:1]
    return logits.new_empty(shape, dtype=_NOT_FLOAT.get(name, torch.float32))


def _fake_forward(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    reduction: str,
    gradient: str,
    with_stats: bool,
    *scalars: float,
) -> list[Tensor]:
    return [_allocate(name, logits) for name in _OUTPUTS[reduction, gradient, with_stats]]


@backend.register_op(
    "cross_entropy_forward(Tensor logits, Tensor labels, Tensor? class_weight, Tensor? token_weight, str reduction,"
    " str gradient, bool with_stats, int ignore_index, float label_smoothing, float softcap, float logit_scale,"
    " float z_loss_weight) -> Tensor[]",
    fake=_fake_forward,
)
def _cross_entropy_forward(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    reduction: str,
    gradient: str,
    with_stats: bool,
    *scalars: float,
) -> list[Tensor]:
    """The tensors of ``_OUTPUTS``; ``gradient`` is "now", "later" (saves what that needs) or "never"."""
    options = TokenLossOptions.from_scalars(*scalars)
    targets = Targets(labels, class_weight, token_weight)
    names = _OUTPUTS[reduction, gradient, with_stats]
    outputs = {name: _allocate(name, logits) for name in names if name != "loss"}
    mean_scale = outputs.get("mean_scale")
    launch_loss(
        logits,
        targets,
        None,
        options,
        losses=outputs["losses"],
        mean_scale=mean_scale,
        lse=outputs.get("lse"),
        lse_error=outputs.get("lse_error"),
        stats=TokenStats(*(outputs[field] for field in TokenStats._fields)) if with_stats else None,
        grad_logits=outputs.get("grad_logits"),
    )
    if reduction != "none":
        outputs["loss"] = reduce_losses(outputs["losses"], mean_scale)
    return [outputs[name] for name in names]


@backend.register_op(
    "cross_entropy_backward(Tensor logits, Tensor labels, Tensor? class_weight, Tensor? token_weight, Tensor lse,"
    " Tensor lse_error, Tensor grad_scale, int ignore_index, float label_smoothing, float softcap, float logit_scale,"
    " float z_loss_weight) -> Tensor",
    fake=lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
def _cross_entropy_backward(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    lse: Tensor,
    lse_error: Tensor,
    grad_scale: Tensor,
    *scalars: float,
) -> Tensor:
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    targets, options = Targets(labels, class_weight, token_weight), TokenLossOptions.from_scalars(*scalars)
    launch_gradient(logits, targets, grad_scale, options, lse=lse, lse_error=lse_error, grad_logits=grad_logits)
    return grad_logits


class _CrossEntropyFunction(torch.autograd.Function):
    """Losses or their reduction, then the stats."""

    @staticmethod
    def forward(ctx, logits, labels, class_weight, token_weight, settings):
        options, reduction, with_stats, inplace_backward = settings
        targets = (labels, class_weight, token_weight)
        one_factor = reduction != "none" and logits.dtype != torch.float16 and not inplace_backward
        gradient = "now" if one_factor else "later"
        values = _cross_entropy_forward(logits, *targets, reduction, gradient, with_stats, *options.as_scalars())
        outputs = dict(zip(_OUTPUTS[reduction, gradient, with_stats], values, strict=True))
        ctx.inplace_backward = inplace_backward
        ctx.options = options
        ctx.gradient = gradient
        if gradient == "now":
            ctx.save_for_backward(outputs["grad_logits"])
        else:
            saved = (logits, *targets, outputs["lse"], outputs["lse_error"], outputs.get("mean_scale"))
            ctx.save_for_backward(*saved)
        loss = outputs["losses" if reduction == "none" else "loss"]
        if not with_stats:
            return loss
        # Without a reduction the losses are the loss, whose gradient they must not lose.
        fields = [field for field in TokenStats._fields if reduction != "none" or field != "losses"]
        stats = [outputs[field] for field in fields]
        ctx.mark_non_differentiable(*stats)
        return loss, *stats

    @staticmethod
    @backend.once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradient == "now":
            (gradient,) = ctx.saved_tensors
            return (
                scale_gradient(gradient, grad_loss, gradient.dtype, in_place=backend.graph_ends()),
                None,
                None,
                None,
                None,
            )
        logits, *targets, lse, lse_error, mean_scale = ctx.saved_tensors
        grad_scale = grad_loss if mean_scale is None else grad_loss * mean_scale
        if ctx.inplace_backward and not backend.is_traced():
            launch_gradient(
                logits, Targets(*targets), grad_scale, ctx.options, lse=lse, lse_error=lse_error, grad_logits=logits
            )
            # Any other use of the logits, as in a second backward pass, now raises.
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), None, None, None, None
        scalars = ctx.options.as_scalars()
        return _cross_entropy_backward(logits, *targets, lse, lse_error, grad_scale, *scalars), None, None, None, None


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
    token_weight: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss_weight: float = 0.0,
    inplace_backward: bool = False,
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
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that are not ignored, by their weight.
        label_smoothing: Share of the target that is spread over all classes, between 0 and 1.
        token_weight: Factor of each token's loss, ``target``'s shape; the mean divides by its sum (times the labels'
            class weights). Not differentiable.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale: Factor of the logits.
        z_loss_weight: Factor of ``lse ** 2``, added to each token's loss. Class weights do not apply to it: in the mean
            it is divided by the tokens' number, or their summed ``token_weight``.
        inplace_backward: Whether backward may write the gradient over ``input``'s storage, so that no second tensor of
            that size ever exists. Only for logits that nothing else reads afterwards; autograd raises where it can
            tell. On the CPU, and while compiling, it has no effect.
        return_stats: Whether to also return :class:`~liger_ops.TokenStats`.

    Returns:
        The loss in at least float32, with :class:`~liger_ops.TokenStats` (shaped as ``target``) on request.

    Raises:
        TypeError: For arguments of another type, and for logits or class weights that are not floating point.
        ValueError: For shapes, dtypes, devices or options that do not fit; for weights that require a gradient; for
            labels out of range if they are on the CPU (on the GPU the loss is NaN instead).
    """
    check_floating("input", input)
    check_tensors(input, target, weight, token_weight)
    check_bool("size_average", size_average, optional=True)
    check_bool("reduce", reduce, optional=True)
    check_bool("inplace_backward", inplace_backward)
    check_bool("return_stats", return_stats)
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
        message = f"size_average and reduce args are deprecated, please use reduction={reduction!r} instead"
        warnings.warn(message, stacklevel=2)
    check_reduction(reduction)
    options = TokenLossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)
    class_dim = 1 if input.dim() > 1 else 0
    if target.is_floating_point():
        extras = (token_weight, softcap, logit_scale, z_loss_weight, inplace_backward)
        if return_stats or extras != (None, None, 1.0, 0.0, False):
            raise ValueError(
                "target must be class indices (torch.int64) with token_weight, softcap, logit_scale, z_loss_weight,"
                f" inplace_backward or return_stats, got {target.dtype}"
            )
        check_shape("target", target, input.shape, "input's, for class probabilities")
        return F.cross_entropy(
            input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    if input.dim() == 0 or target.shape != input.shape[:class_dim] + input.shape[class_dim + 1 :]:
        raise ValueError(
            f"target must have input's shape without its class dimension {class_dim}: input has shape"
            f" {tuple(input.shape)}, target {tuple(target.shape)}"
        )
    vocab_size = input.shape[class_dim]
    if vocab_size == 0:
        raise ValueError(f"input must have at least one class in dimension {class_dim}, got shape {tuple(input.shape)}")
    check_weights(weight, token_weight, target, vocab_size, ignore_index)
    check_labels("target", target, vocab_size, ignore_index)

    logits = input if input.dim() == 2 else input.movedim(class_dim, -1).reshape(-1, vocab_size)
    targets = flat_targets(target, weight, token_weight, input.dtype)
    factor = None
    if reduction == "mean" and options.z_loss_weight:
        targets, factor = balance_class_weight(targets, vocab_size, ignore_index, input.dtype)
    stats: Sequence[Tensor]
    if backend.use_triton(input):
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        inplace_backward = inplace_backward and logits.stride(0) >= vocab_size  # rows that share no memory
        loss, *stats = _run_kernels(logits, targets, options, reduction, return_stats, inplace_backward)
    else:
        stats = cross_entropy_reference(logits, targets, options)
        loss = stats[0]
        if reduction != "none":
            mean_scale = None
            if reduction == "mean":
                mean_scale = plan_tokens(targets, vocab_size, ignore_index, logits, with_order=False).mean_scale
            loss = reduce_losses(loss, mean_scale)
    if reduction == "none":
        loss = loss.view(target.shape)
    if not return_stats:
        return loss
    found = TokenStats(*(stat.detach() for stat in stats))
    if factor is not None:
        found = unbalance_losses(found, targets.token_weight, z_loss_weight, factor)
    return loss, TokenStats(*(stat.view(target.shape) for stat in found))


def _run_kernels(
    logits: Tensor, targets: Targets, options: TokenLossOptions, reduction: str, with_stats: bool, inplace: bool
) -> tuple[Tensor, ...]:
    """The loss, then the stats if they are wanted."""
    if backend.needs_graph(logits):
        results = _CrossEntropyFunction.apply(logits, *targets, (options, reduction, with_stats, inplace))
        if not with_stats:
            return (results,)
        return (results[0], *results) if reduction == "none" else results
    values = _cross_entropy_forward(logits, *targets, reduction, "never", with_stats, *options.as_scalars())
    outputs: dict[str, Any] = dict(zip(_OUTPUTS[reduction, "never", with_stats], values, strict=True))
    loss = outputs["losses" if reduction == "none" else "loss"]
    return loss, *([outputs[field] for field in TokenStats._fields] if with_stats else [])
