"""Scores of tokens whose logits are given: log-probabilities of labels, entropies and others.

Formulas are in :mod:`liger_ops.log_probs.scores`, kernels those of cross entropy: forward reads the logits once,
backward again, and writes the gradient. Arithmetic is float32 for half precision. Saved: the logits, which the backward
of a head does not need, and at most 12 bytes per token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating, check_shape, wrong_value
from liger_ops.log_probs.scores import (
    DIFFERENTIABLE,
    OUTPUTS,
    TokenScores,
    check_outputs,
    check_temperature,
    scores_reference,
    with_temperature,
)
from liger_ops.loss.launch import GradientRows, launch_gradient
from liger_ops.loss.options import IGNORE_INDEX, Targets, TokenLossOptions, check_labels, check_tensors
from liger_ops.loss.rows import TokenRows, dtype_of, transform_logits


@backend.register_op(
    "token_scores_forward(Tensor logits, Tensor labels, Tensor? temperature, str outputs, int ignore_index,"
    " float? softcap, float logit_scale) -> Tensor[]",
    fake=lambda logits, labels, temperature, outputs, *_: [
        labels.new_empty(labels.shape, dtype=dtype_of(name, torch.float32)) for name in outputs.split(",")
    ],
)
def _forward(logits: Tensor, labels: Tensor, temperature: Tensor | None, outputs: str, *scalars: Any) -> list[Tensor]:
    names, targets = outputs.split(","), Targets(labels, None, None)
    rows = TokenRows.allocate(targets, _options(*scalars), names, torch.float32, temperature)
    rows.write(logits, None)
    return [rows.values(name) for name in names]


@backend.register_op(
    "token_scores_backward(Tensor logits, Tensor labels, Tensor lse, Tensor lse_error, Tensor probability_factor,"
    " Tensor label_term, Tensor? smoothing_term, Tensor? entropy_factor, Tensor? temperature, Tensor? kept,"
    " float? softcap, float logit_scale) -> Tensor",
    fake=lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
def _backward(logits: Tensor, *values: Any) -> Tensor:
    *rows, softcap, logit_scale = values
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    launch_gradient(logits, gradient, _options(0, softcap, logit_scale), **GradientRows(*rows)._asdict())
    return gradient


def _options(ignore_index: int, softcap: float | None, logit_scale: float) -> TokenLossOptions:
    return TokenLossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)


class _TokenScoresFunction(torch.autograd.Function):
    """The scores ``names``, of which some are differentiable."""

    @staticmethod
    def forward(ctx, logits, labels, temperature, names, differentiable, scalars):
        needed = ["lse", "lse_error", *(["entropy"] if "entropy" in differentiable else [])]
        all_names = list(dict.fromkeys([*names, *needed]))
        values = _forward(logits, labels, temperature, ",".join(all_names), *scalars)
        found = dict(zip(all_names, values, strict=True))
        # Copies of those that the caller may write to.
        mine = [found[name].clone() if name in names else found[name] for name in needed]
        ctx.save_for_backward(logits, labels, temperature, *mine)
        ctx.names, ctx.differentiable, ctx.scalars = names, differentiable, scalars
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(found[name] for name in names if name not in differentiable))
        return tuple(found[name] for name in names)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx, *grad_outputs):
        logits, labels, temperature, lse, lse_error, *entropy = ctx.saved_tensors
        pairs = zip(ctx.names, grad_outputs, strict=True)
        upstream = {name: grad for name, grad in pairs if name in ctx.differentiable}
        tokens = TokenRows(Targets(labels, None, None), _options(*ctx.scalars), {}, temperature)
        rows = tokens.gradient_rows(lse, lse_error, upstream, logits.shape[1], entropy=entropy[0] if entropy else None)
        return _backward(logits, *rows, *ctx.scalars[1:]), *[None] * 5


def token_log_probs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
) -> TokenScores:
    """Log-probabilities of labels under given logits, and other scores; :func:`~liger_ops.linear_log_probs` of logits.

    Args:
        logits: ``[..., vocab_size]``.
        target: Labels, int64, ``[...]``.
        temperature, softcap, logit_scale, ignore_index, outputs, detach: As for :func:`~liger_ops.linear_log_probs`.

    Returns:
        The scores in ``target``'s shape, None for those that are not among ``outputs``; at least float32.

    Raises:
        TypeError: For arguments of another type, and for logits that are not floating point.
        ValueError: For shapes, dtypes, devices, names or options that do not fit; for a temperature that requires a
            gradient; for labels out of range if they are on the CPU (on the GPU their log-probability is NaN instead).
    """
    check_floating("logits", logits)
    check_tensors(logits, target, None, None)
    options = TokenLossOptions.checked(ignore_index, 0.0, softcap, logit_scale)
    names = check_outputs("outputs", outputs, OUTPUTS, at_least=1)
    detached = check_outputs("detach", detach, DIFFERENTIABLE)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise wrong_value("logits", "of at least one class in the last dimension", logits)
    check_shape("target", target, logits.shape[:-1], "logits' without the last dimension")
    check_temperature(temperature, target, ignore_index)
    check_labels("target", target, logits.shape[-1], ignore_index)

    labels, rows = target.reshape(-1).contiguous(), backend.as_rows(logits, logits.shape[-1])
    options, temperatures = with_temperature(options, temperature, labels, logits.dtype)
    differentiable = [name for name in names if name in DIFFERENTIABLE and name not in detached]
    scalars = options.ignore_index, options.softcap, options.logit_scale
    if not backend.runs_on_triton(logits):
        found = scores_reference(transform_logits(rows, options, temperatures), labels, ignore_index, names)._asdict()
        found = {name: found[name] if name in differentiable else found[name].detach() for name in names}
    elif differentiable and backend.needs_graph(logits):
        values = _TokenScoresFunction.apply(rows, labels, temperatures, names, differentiable, scalars)
        found = dict(zip(names, values, strict=True))
    else:
        found = dict(zip(names, _forward(rows, labels, temperatures, ",".join(names), *scalars), strict=True))
    return TokenScores(**{name: score.view(target.shape) for name, score in found.items()})
