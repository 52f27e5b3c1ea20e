"""Scores of a head that needs no gradient: two matrix products, as forward takes the gradients of its input.

The gradient of a token's log-probability with respect to its hidden states does not depend on the loss, so forward
computes it from the logits at hand (``[num_tokens, hidden_size]``) and backward multiplies it by the upstream gradient.
The gradient of the entropy is another product and another such tensor; those of lse and the mean logit follow from the
weight, if there is no soft-cap. For given classes forward keeps the mean of the head's rows by probability, without
those of these classes, which backward adds with their factors: confident tokens' gradients do not cancel.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.given_classes import GivenIds, rows_sum
from liger_ops.loss.head_functions import NUM_ARGUMENTS, given_gradient
from liger_ops.loss.head_passes import GRADIENTS, OTHER_GRADIENTS, ForwardArguments, run_forward, split_names
from liger_ops.loss.vocab_parallel import VocabShard


class FrozenHeadFunction(torch.autograd.Function):
    """Outputs of tokens, some of which are differentiable with respect to the input and the adapter's input."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: VocabShard | None,
        needs_gradient: list[bool],
        differentiable: Sequence[str],
        *values: Any,
    ) -> tuple[Tensor, ...]:
        """The gradients that forward takes are among the ``values``."""
        arguments = ForwardArguments(*values)
        names = split_names(arguments.outputs)
        found = run_forward(values, shard)
        gradients = [found[name] for name in (*GRADIENTS[::3], *OTHER_GRADIENTS) if name in found]
        if arguments.gradients == "entropy":
            gradients = [*(arguments.input.new_empty(0) for _ in range(2)), *gradients]
        given = [] if arguments.ids is None else [found["given_log_probs"].clone(), found["lse"].clone()]
        needs_weight = bool(given) or "lse" in differentiable or "mean_logit" in differentiable
        weights = (arguments.weight, arguments.adapter_weight) if needs_weight else (None, None)
        ctx.save_for_backward(arguments.labels, arguments.temperature, arguments.ids, *weights, *gradients, *given)
        ctx.num_gradients = len(gradients)
        ctx.shard, ctx.names, ctx.differentiable, ctx.needs_gradient = shard, names, differentiable, needs_gradient
        ctx.options, ctx.dtype = arguments.options, arguments.input.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(found[name] for name in names if name not in differentiable))
        return tuple(found[name] for name in names)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        labels, temperature, ids, weight, adapter_weight, *tensors = ctx.saved_tensors
        gradients, given = tensors[: ctx.num_gradients], tensors[ctx.num_gradients :]
        options = ctx.options
        upstream = {name: grad_outputs[ctx.names.index(name)] for name in ctx.differentiable}
        grad_inputs: list[Tensor | None] = []
        if ids is not None:
            log_probs, lse = given
            kept = torch.ones_like(lse, dtype=torch.bool) if labels is None else labels != options.ignore_index
            some = GivenIds.of(ids, weight.shape[0], kept)
            grad_given, factor, share = given_gradient(some, log_probs, lse, upstream, options)
            factors = grad_given + factor[:, None] * share * some.is_first()
            for rest, rows in ((gradients[0], weight), (gradients[1], adapter_weight)):
                wanted = rest.numel() > 0 or rows is weight
                grad_inputs.append(
                    rows_sum(rows, some.safe, factors).addcmul(rest, factor[:, None].to(rest.dtype)) if wanted else None
                )
        else:
            kept = labels != options.ignore_index
            upstream = {name: None if each is None else each.where(kept, 0.0) for name, each in upstream.items()}
            scale = options.logit_scale if temperature is None else options.logit_scale / temperature
            more = labels, upstream, scale, ctx.dtype, ctx.shard, backend.graph_ends()
            grad_inputs = [
                _input_gradient(gradients[0::2], weight, *more),
                _input_gradient(gradients[1::2], adapter_weight, *more) if ctx.needs_gradient[3] else None,
            ]
        grad_input, grad_adapter = (
            each if ctx.needs_gradient[place] else None for each, place in zip(grad_inputs, (0, 3), strict=True)
        )
        return None, None, None, grad_input, None, None, grad_adapter, *[None] * (NUM_ARGUMENTS - 4)


def _input_gradient(
    gradients: Sequence[Tensor],
    weight: Tensor | None,
    labels: Tensor,
    upstream: Mapping[str, Tensor | None],
    scale: Tensor | float,
    dtype: torch.dtype,
    shard: VocabShard | None,
    in_place: bool,
) -> Tensor | None:
    """The gradient of the input, from those of the negative log-probabilities and perhaps the entropies.

    Args:
        gradients: ``[num_tokens, size]`` each, empty if their upstream gradients are None; overwritten if ``in_place``.
        weight: ``[vocab_size, size]``, if lse or the mean logit have an upstream gradient and there is no soft-cap.
        labels, upstream: ``[num_tokens]``.
        scale: Of the logits, a number or one for each token.
        dtype: Of the gradient.
        shard: The weight's place in the vocabulary, if it is part of one.
        in_place: Whether the gradients are not used again.
    """
    grad_log_probs, grad_entropy, grad_lse, grad_mean = (
        upstream.get(name) for name in ("log_probs", "entropy", "lse", "mean_logit")
    )
    first = gradients[0]
    terms: list[tuple[Tensor, Tensor]] = []
    if grad_log_probs is not None or grad_lse is not None:  # d lse = d z[label] - d log_prob
        both = [each for each in (grad_lse, None if grad_log_probs is None else -grad_log_probs) if each is not None]
        terms.append((first, sum(both[1:], both[0])))
    if grad_entropy is not None:
        terms.append((gradients[1], grad_entropy))
    if grad_lse is not None and weight is not None:
        own = labels if shard is None else labels - shard.start
        is_own = (own >= 0) & (own < weight.shape[0])
        rows = weight.index_select(0, own.where(is_own, 0)) if len(weight) else torch.zeros_like(first)
        terms.append((rows, (grad_lse * scale).where(is_own, 0.0)))
    if grad_mean is not None and weight is not None:
        vocab_size = weight.shape[0] if shard is None else shard.vocab_size
        mean = weight.sum(0, dtype=grad_mean.dtype) / vocab_size
        terms.append((mean.expand(len(labels), -1), grad_mean * scale))
    if not terms:
        return None
    rows, factors = terms[0]
    if len(terms) == 1 and in_place and rows is first:  # without a temporary in the factors' dtype
        total = torch.mul(rows, factors[:, None], out=rows)
    else:
        total = rows * factors[:, None]
        for rows, factors in terms[1:]:
            total.addcmul_(rows, factors[:, None])
        total = total.to(dtype)
    if shard is not None:
        shard.sum_input_gradients(total)
    return total
