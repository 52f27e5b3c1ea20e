"""Cross entropy over class indices.

With z = softcap * tanh(logit_scale * logits / softcap) (no tanh without softcap), lse = log(sum(exp(z))) and
label smoothing e over V classes with weights w, one token of label y costs

    loss = (1 - e) * w[y] * (lse - z[y]) + e / V * sum_c(w[c] * (lse - z[c])) + z_loss_weight * lse**2

The first two terms are ``torch.nn.functional.cross_entropy``; soft-capping is Gemma 2's (arXiv:2408.00118), the z-loss
PaLM's (arXiv:2204.02311). Arithmetic is float32 whatever the logits' dtype.

With token weights t, the sum is that of t times these losses, and the mean over the tokens that are not ignored is

    sum(t * cross entropy) / sum(t * w[y]) + z_loss_weight * sum(t * lse**2) / sum(t)

Class weights are about labels, of which lse knows nothing; a mean with both them and the z-loss is refused.

A sum or a mean computes its gradient together with the loss, while the logits are at hand, and saves that instead
of the logits; backward multiplies it by the upstream gradient, which costs nothing if that is 1. Losses of single
tokens, float16 logits (whose gradient could underflow before it meets the loss scale) and ``inplace_backward`` save the
logits, and lse with its rounding error (8 bytes per token): float32 alone holds an lse of 12 to 5e-7, ten times the
error of PyTorch's probabilities.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_bool, check_choice, check_floating, check_shape, wrong_value
from liger_ops.loss.launch import ROW_OUTPUTS, launch_gradient, launch_loss
from liger_ops.loss.options import (
    IGNORE_INDEX,
    REDUCTIONS,
    Targets,
    TokenLossOptions,
    TokenStats,
    check_labels,
    check_tensors,
    check_weights,
    flat_targets,
)
from liger_ops.loss.rows import TokenRows, dtype_of
from liger_ops.loss.scale_gradient import scale_gradient
from liger_ops.loss.token_plan import mean_scale_of, reduce_losses


def _allocate(name: str, logits: Tensor) -> Tensor:
    if name == "grad_logits":
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    shape = () if name in ("loss", "mean_scale") else logits.shape[:1]
    return logits.new_empty(shape, dtype=dtype_of(name, torch.promote_types(logits.dtype, torch.float32)))


@backend.register_op(
    "cross_entropy_forward(Tensor logits, Tensor labels, Tensor? class_weight, Tensor? token_weight, str outputs,"
    f" {backend.schema_of(TokenLossOptions)}) -> Tensor[]",
    fake=lambda logits, labels, class_weight, token_weight, outputs, *_: [
        _allocate(name, logits) for name in outputs.split(",")
    ],
)
def _cross_entropy_forward(logits: Tensor, *values: Any) -> list[Tensor]:
    """The tensors that ``outputs`` names: the reduced ``loss``, ``mean_scale`` if it is the mean, ``grad_logits`` of
    it, and ``ROW_OUTPUTS``."""
    *tensors, outputs = values[:4]
    targets, options, names = Targets(*tensors), TokenLossOptions(*values[4:]), outputs.split(",")
    buffers = {name: _allocate(name, logits) for name in names if name != "loss"}
    mean_scale, grad_logits = buffers.get("mean_scale"), buffers.get("grad_logits")
    if backend.use_triton(logits):
        launch_loss(logits, targets, options, buffers, mean_scale=mean_scale, grad_logits=grad_logits)
    else:
        if mean_scale is not None:
            mean_scale.copy_(mean_scale_of(targets, logits.shape[1], options.ignore_index, logits.dtype))
        rows = TokenRows(targets, options, {name: buffers[name] for name in ROW_OUTPUTS if name in buffers})
        overwritten = logits if grad_logits is None else grad_logits.copy_(logits)
        rows.write(overwritten, None, mean_scale, with_gradient=grad_logits is not None)
    if "loss" in names:
        buffers["loss"] = reduce_losses(buffers["losses"], mean_scale)
    return [buffers[name] for name in names]


@backend.register_op(
    "cross_entropy_backward(Tensor logits, Tensor labels, Tensor? class_weight, Tensor? token_weight, Tensor lse,"
    f" Tensor lse_error, Tensor grad_scale, {backend.schema_of(TokenLossOptions)}) -> Tensor",
    fake=lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
def _cross_entropy_backward(logits: Tensor, *values: Any) -> Tensor:
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(logits, grad_logits, *values)
    return grad_logits


def _write_gradient(logits: Tensor, grad_logits: Tensor, *values: Any) -> None:
    labels, class_weight, token_weight, lse, lse_error, grad_scale, *scalars = values
    options = TokenLossOptions(*scalars)
    if backend.use_triton(logits):
        launch_gradient(
            logits, grad_logits, options, class_weight=class_weight, token_weight=token_weight, grad_scale=grad_scale,
            labels=labels, lse=lse, lse_error=lse_error,
        )  # fmt: skip
    else:
        rows = TokenRows(Targets(labels, class_weight, token_weight), options, {})
        rows.loss_to_gradient(grad_logits.copy_(logits), lse, lse_error, grad_scale)


def _output_names(reduction: str, gradient: str, with_stats: bool) -> tuple[str, ...]:
    """What forward computes; ``gradient`` is "now", "later" (with what that needs) or "never"."""
    names = {"none": ["losses"], "sum": ["loss", "losses"], "mean": ["loss", "losses", "mean_scale"]}[reduction]
    names += {"now": ["grad_logits"], "later": ["lse", "lse_error"], "never": []}[gradient]
    return tuple(dict.fromkeys([*names, *(TokenStats._fields if with_stats else ())]))


class _CrossEntropyFunction(torch.autograd.Function):
    """Losses or their reduction, then the stats."""

    @staticmethod
    def forward(ctx, logits, labels, class_weight, token_weight, settings):
        scalars, reduction, with_stats, inplace_backward = settings
        targets = (labels, class_weight, token_weight)
        one_factor = reduction != "none" and logits.dtype != torch.float16 and not inplace_backward
        names = _output_names(reduction, "now" if one_factor else "later", with_stats)
        values = _cross_entropy_forward(logits, *targets, ",".join(names), *scalars)
        outputs = dict(zip(names, values, strict=True))
        ctx.inplace_backward, ctx.one_factor, ctx.scalars = inplace_backward, one_factor, scalars
        if one_factor:
            ctx.save_for_backward(outputs["grad_logits"])
        else:
            saved = (logits, *targets, outputs["lse"], outputs["lse_error"], outputs.get("mean_scale"))
            ctx.save_for_backward(*saved)
        # Without a reduction the losses are the loss, whose gradient they must not lose.
        stats = [outputs[name] for name in TokenStats._fields[reduction == "none" :]] if with_stats else []
        ctx.mark_non_differentiable(*stats)
        return outputs[names[0]], *stats

    @staticmethod
    @backend.once_differentiable
    def backward(ctx, grad_loss, *_):
        others = (None,) * 4
        if ctx.one_factor:
            (gradient,) = ctx.saved_tensors
            return scale_gradient(gradient, grad_loss, gradient.dtype, in_place=backend.graph_ends()), *others
        logits, *saved, mean_scale = ctx.saved_tensors
        values = (*saved, grad_loss if mean_scale is None else grad_loss * mean_scale, *ctx.scalars)
        if ctx.inplace_backward and not backend.is_traced():
            _write_gradient(logits, logits, *values)
            # Any other use of the logits, as in a second backward pass, now raises.
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), *others
        return _cross_entropy_backward(logits, *values), *others


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
        z_loss_weight: Factor of ``lse ** 2``, added to each token's loss. Class weights do not apply to it; there may
            be none in a mean.
        inplace_backward: Whether backward may write the gradient over ``input``'s storage, so that no second tensor of
            that size ever exists. Only for logits that nothing else reads afterward; autograd raises where it can
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
    check_choice("reduction", reduction, REDUCTIONS)
    options = TokenLossOptions.checked(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)
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
    vocab_size = input.shape[class_dim] if input.dim() else 0
    if vocab_size == 0:
        raise wrong_value("input", f"of at least one class in dimension {class_dim}", input)
    expected = f"input's without its class dimension {class_dim}"
    check_shape("target", target, input.shape[:class_dim] + input.shape[class_dim + 1 :], expected)
    check_weights(weight, token_weight, target, vocab_size, options, reduction)
    check_labels("target", target, vocab_size, ignore_index)

    logits = input if input.dim() == 2 else input.movedim(class_dim, -1).reshape(-1, vocab_size)
    targets = flat_targets(target, weight, token_weight, input.dtype)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    # In place only in rows that share no memory.
    inplace_backward = inplace_backward and backend.use_triton(logits) and logits.stride(0) >= vocab_size
    if backend.needs_graph(logits):
        settings = options, reduction, return_stats, inplace_backward
        loss, *stats = _CrossEntropyFunction.apply(logits, *targets, settings)
        stats = [loss, *stats] if reduction == "none" else stats
    else:
        names = _output_names(reduction, "never", return_stats)
        found = dict(zip(names, _cross_entropy_forward(logits, *targets, ",".join(names), *options), strict=True))
        loss, stats = found[names[0]], [found[name] for name in TokenStats._fields if return_stats]
    if reduction == "none":
        loss = loss.view(target.shape)
    if not return_stats:
        return loss
    all_stats = TokenStats(*(stat.detach() for stat in stats))
    return loss, TokenStats(*(stat.view(target.shape) for stat in all_stats))
