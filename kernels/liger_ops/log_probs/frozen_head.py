"""Scores of a head that needs no gradient: two matrix products, as forward takes the gradients of its input.

The gradient of a token's log-probability with respect to its hidden states does not depend on the loss, so forward
computes it from the logits at hand (``[num_tokens, hidden_size]``) and backward multiplies it by the upstream gradient.
For given classes forward keeps the mean of the head's rows by probability, without those of these classes, which
backward adds with their factors: confident tokens' gradients do not cancel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.given_classes import GivenIds, rows_sum
from liger_ops.loss.head_functions import NUM_ARGUMENTS, given_gradient
from liger_ops.loss.head_passes import ForwardArguments, run_forward, split_names
from liger_ops.loss.vocab_parallel import VocabShard


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
