"""Autograd of a linear head's losses and scores, of which no logits are materialized.

A sum or a mean has its gradients from forward (three products of ``num_tokens * hidden_size * vocab_size``) and scales
them in backward. Values of single tokens wait for backward to bring each token's factor: the logits are computed again
then, but for chunks that a budget lets forward save.

Scores of a frozen head take two products: the gradient of a token's log-probability with respect to its hidden states
does not depend on the loss, so forward computes it from the logits at hand (``[num_tokens, hidden_size]``) and backward
multiplies it by the upstream gradient. For given classes forward keeps the mean of the head's rows by probability,
without those of these classes, which backward adds with their factors: confident tokens' gradients do not cancel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.chunked_loss import SavedLogits
from liger_ops.loss.given_classes import GivenIds, rows_sum
from liger_ops.loss.head_passes import (
    GRADIENTS,
    NUM_TENSORS,
    ForwardArguments,
    run_backward,
    run_forward,
    split_names,
)
from liger_ops.loss.linear_head import LinearHead
from liger_ops.loss.options import Targets, TokenLossOptions
from liger_ops.loss.rows import TokenRows, own_classes
from liger_ops.loss.scale_gradient import scale_gradient
from liger_ops.loss.vocab_parallel import VocabShard

NUM_ARGUMENTS = len(ForwardArguments._fields)


def dtypes_of_gradients(values: Sequence[Any]) -> list[torch.dtype | None]:
    """The dtypes of the tensors that may get a gradient."""
    return [None if tensor is None else tensor.dtype for tensor in values[: len(GRADIENTS)]]


def token_values(
    head: LinearHead,
    arguments: ForwardArguments,
    differentiable: Sequence[str],
    saved_logits_bytes: int,
    shard: VocabShard | None = None,
) -> Sequence[Tensor]:
    """The outputs of the arguments, of which these are differentiable if a tensor of the head needs a gradient."""
    if not differentiable or not any(head.needs_gradient):
        with torch.no_grad():
            found = run_forward(arguments, shard)
        return [found[name] for name in split_names(arguments.outputs)]
    max_saved = 0
    if shard is None and backend.runs_directly(*head.tensors):  # else a tracer must see what an op saves
        rows = min(arguments.chunk_size, max(1, head.input.shape[0]))
        max_saved = saved_logits_bytes // (rows * head.num_columns * head.dtype.itemsize)
    return TokenValuesFunction.apply(shard, max_saved, head.needs_gradient, differentiable, *arguments)


Computed = tuple[Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor]]
"""A loss, a factor that its gradients still lack (None for 1), those of the first five arguments, and other outputs."""


def reduced_loss(shard: VocabShard | None, *values: Any) -> Computed:
    """A sum or a mean of losses by the op of forward."""
    arguments = ForwardArguments(*values)
    found = run_forward(values, shard)
    # Float16 gradients of a mean could underflow before they meet the loss scale: those are of the sum.
    is_sum_of_mean = arguments.reduction == "mean" and arguments.gradients == "losses"
    factor = found["mean_scale"] if is_sum_of_mean else None
    outputs = [found[name] for name in split_names(arguments.outputs)]
    return found["loss"], factor, [found[name] for name in GRADIENTS], outputs


class ReducedLossFunction(torch.autograd.Function):
    """The loss that ``compute(*values)`` returns with its gradients, then the outputs, which are constants."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Computed], *values: Any) -> tuple[Tensor, ...]:
        loss, factor, gradients, outputs = compute(*values)
        ctx.save_for_backward(factor, *gradients)
        ctx.dtypes, ctx.needs_gradient = dtypes_of_gradients(values), ForwardArguments(*values).needs_gradient
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        missing, *gradients = ctx.saved_tensors
        factor = grad_loss if missing is None else grad_loss * missing
        in_place = backend.graph_ends()  # needs no second buffer of the head's size
        scaled = [
            scale_gradient(gradient, factor, dtype, in_place=in_place) if needed and dtype is not None else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs_gradient, strict=True)
        ]
        return None, *scaled, *[None] * (NUM_ARGUMENTS - len(GRADIENTS))


class TokenValuesFunction(torch.autograd.Function):
    """Outputs of tokens, some of which are differentiable; backward computes or reads the logits again.

    Tokens whose scores' upstream gradients are all zero are left out, unless their logits are saved.
    """

    @staticmethod
    def forward(ctx: Any, shard: VocabShard | None, max_saved: int, *args: Any) -> tuple[Tensor, ...]:
        """``max_saved`` chunks of logits may be saved."""
        needs_gradient, differentiable, *values = args
        arguments = ForwardArguments(*values)
        names = split_names(arguments.outputs)
        needed = ["lse", "lse_error", *(["entropy"] if "entropy" in differentiable else [])]
        all_names = ",".join(dict.fromkeys([*names, *needed]))
        saved = SavedLogits(max_saved) if max_saved else None
        found = run_forward(arguments._replace(outputs=all_names), shard, saved)
        # Copies of those that the caller may write to.
        mine = [found[name].clone() if name in names else found[name] for name in needed]
        given = None if arguments.ids is None else found["given_log_probs"].clone()
        chunks = [] if saved is None else saved.chunks
        ctx.save_for_backward(*values[:NUM_TENSORS], given, *mine, *chunks)
        ctx.num_mine = len(mine)
        ctx.shard, ctx.names, ctx.differentiable, ctx.needs_gradient = shard, names, differentiable, needs_gradient
        ctx.dtypes, ctx.settings = dtypes_of_gradients(values), values[NUM_TENSORS:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(found[name] for name in names if name not in differentiable))
        return tuple(found[name] for name in names)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved_tensors = ctx.saved_tensors  # once: checkpointing lets no tensor be read twice
        values = (*saved_tensors[:NUM_TENSORS], *ctx.settings)
        given, lse, lse_error, *others = saved_tensors[NUM_TENSORS:]
        num_others = ctx.num_mine - 2
        entropy, chunks = others[0] if num_others else None, others[num_others:]
        a, shard = ForwardArguments(*values), ctx.shard
        options = a.options
        upstream = {name: grad_outputs[ctx.names.index(name)] for name in ctx.differentiable}
        labels = torch.zeros(lse.shape, dtype=torch.int64, device=lse.device) if a.labels is None else a.labels
        num_columns = a.weight.shape[0]
        ids = grad_given = None
        if given is not None:
            some = GivenIds.of(a.ids, num_columns, labels != options.ignore_index)  # type: ignore[arg-type]
            ids, (grad_given, factor, _) = some.safe, given_gradient(some, given, lse, upstream, options)
            upstream = {"lse": factor}
        tokens = TokenRows(Targets(labels, a.class_weight, a.token_weight), options, {}, a.temperature, shard)
        skips_zeros = given is None and "losses" not in upstream
        rows = tokens.gradient_rows(lse, lse_error, upstream, num_columns, entropy=entropy, skips_zeros=skips_zeros)
        if a.labels is None:
            rows = rows._replace(kept=None)
        saved = visited = None
        if chunks:
            saved = SavedLogits(0, chunks, are_needed_again=not backend.graph_ends())
            if rows.kept is not None:
                visited = kept = labels != options.ignore_index
                if a.chunk_size < len(kept):  # those that are alive, and all whose logits are saved
                    order = torch.argsort(kept, descending=True, stable=True)  # as in forward
                    visited = rows.kept.index_fill(0, order[: sum(map(len, chunks))], True) & kept
        gradients = run_backward(
            (
                *values[: len(GRADIENTS)], *rows, own_classes(a.class_weight, num_columns, shard), ids, grad_given,
                a.chunk_size, a.accumulate_dtype, a.max_valid_tokens, ctx.needs_gradient, options.softcap,
                options.logit_scale,
            ),
            shard, saved, visited,
        )  # fmt: skip
        triples = zip(gradients, ctx.needs_gradient, ctx.dtypes, strict=True)
        found = [gradient.to(dtype) if needed and dtype is not None else None for gradient, needed, dtype in triples]
        return None, None, None, None, *found, *[None] * (NUM_ARGUMENTS - len(found))


def given_gradient(
    ids: GivenIds, log_probs: Tensor, lse: Tensor, upstream: dict[str, Tensor | None], options: TokenLossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """From the upstream gradients of given classes' log-probabilities and of lse to those of logits.

    Returns:
        What the gradient has at the given classes, ``[num_tokens, K]``; the factor of the gradient of lse,
        ``[num_tokens]``; and each class's probability times its logit's derivative, ``[num_tokens, K]``.
    """
    counts = ids.is_class & ids.kept[:, None]
    grad_log_probs, grad_lse = upstream["given_log_probs"], upstream.get("lse")
    given = torch.zeros_like(log_probs) if grad_log_probs is None else grad_log_probs.where(counts, 0.0)
    factor = (torch.zeros_like(lse) if grad_lse is None else grad_lse.where(ids.kept, 0.0)) - given.sum(1)
    slope = torch.full_like(log_probs, options.logit_scale)
    if options.softcap is not None:
        z = (log_probs + lse[:, None]).where(counts, 0.0)
        slope = slope * (1.0 - (z / options.softcap) ** 2)
    return given * slope, factor, log_probs.exp().where(counts, 0.0) * slope


class FrozenHeadFunction(torch.autograd.Function):
    """Outputs of tokens, of which ``log_probs``, or given classes' and lse, are differentiable with respect to inputs.

    Inputs are the hidden states and the adapter's input; the gradients that forward takes are among the ``values``.
    """

    @staticmethod
    def forward(ctx: Any, shard: VocabShard | None, differentiable: Sequence[str], *values: Any) -> tuple[Tensor, ...]:
        arguments = ForwardArguments(*values)
        names = split_names(arguments.outputs)
        found = run_forward(values, shard)
        given: list[Tensor | None] = []
        if arguments.ids is not None:  # copies of outputs that the caller may write to
            given = [arguments.weight, arguments.adapter_weight, *(found[name].clone() for name in names)]
        gradients = found["grad_input"], found["grad_adapter_input"]
        ctx.save_for_backward(arguments.labels, arguments.ids, *gradients, *given)
        ctx.shard, ctx.names, ctx.differentiable = shard, names, differentiable
        ctx.options, ctx.needs_gradient = arguments.options, arguments.needs_gradient
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(found[name] for name in names if name not in differentiable))
        return tuple(found[name] for name in names)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        labels, ids, *gradients = ctx.saved_tensors
        options, wanted = ctx.options, (ctx.needs_gradient[0], ctx.needs_gradient[3])
        upstream = {name: grad_outputs[ctx.names.index(name)] for name in ctx.differentiable}
        found: list[Tensor | None] = [None, None]
        if ids is not None:
            *gradients, weight, adapter_weight, log_probs, lse = gradients
            kept = torch.ones_like(lse, dtype=torch.bool) if labels is None else labels != options.ignore_index
            some = GivenIds.of(ids, weight.shape[0], kept)
            grad_given, factor, share = given_gradient(some, log_probs, lse, upstream, options)
            factors = grad_given + factor[:, None] * share * some.is_first()
            for place, rows in enumerate((weight, adapter_weight)):
                if wanted[place]:
                    rest = gradients[place]
                    found[place] = rows_sum(rows, some.safe, factors).addcmul(rest, factor[:, None].to(rest.dtype))
        elif (grad_log_probs := upstream["log_probs"]) is not None:
            factor = grad_log_probs.where(labels != options.ignore_index, 0.0).neg()[:, None]
            in_place = backend.graph_ends()  # without a temporary in the factors' dtype
            for place, rows in enumerate(gradients):
                if wanted[place]:
                    found[place] = torch.mul(rows, factor, out=rows) if in_place else (rows * factor).to(rows.dtype)
                    if ctx.shard is not None:
                        ctx.shard.sum_input_gradients(found[place])
        return None, None, found[0], None, None, found[1], *[None] * (NUM_ARGUMENTS - 4)
