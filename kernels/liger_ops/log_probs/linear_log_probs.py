"""Scores of a linear head's tokens, of which no logits are materialized: log-probabilities, entropies and others.

Chunks of tokens are projected and reduced to their scores; see :mod:`liger_ops.log_probs.scores` for the formulas. In
matrix products of the size ``num_tokens * hidden_size * vocab_size``, a call without gradients costs one, and with
backward

* two with a frozen head: the gradient of a token's log-probability with respect to its hidden states does not depend
  on the loss, so forward computes it from the logits at hand (``[num_tokens, hidden_size]``) and backward multiplies
  it by the upstream gradient. The gradient of the entropy is another product and another such tensor; those of lse and
  the mean logit follow from the weight, if there is no soft-cap.
* four with a trained head: backward computes the logits again, but for chunks that a budget lets forward save, which
  cost three. Tokens whose upstream gradients are all zero are left out. A frozen head with a soft-cap goes this way too
  where the gradient of lse or of the mean logit is wanted, without the product for the head.

:func:`~liger_ops.linear_token_loss` takes three products, two with a frozen head, for a loss that is a function of each
token's own scores.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating, check_integer
from liger_ops.log_probs.passes import (
    GradientArguments,
    ScoreArguments,
    gradients_op,
    score_op,
    score_tokens,
    token_gradients,
)
from liger_ops.log_probs.rows import Coefficients
from liger_ops.log_probs.scores import (
    DIFFERENTIABLE,
    OUTPUTS,
    TokenScores,
    check_outputs,
    check_temperature,
    check_transform,
)
from liger_ops.loss.chunked_loss import SavedLogits, choose_accumulate_dtype
from liger_ops.loss.groups import Groups, is_grouped, join_groups, join_values
from liger_ops.loss.linear_head import NUM_GRADIENTS, LinearHead, check_head
from liger_ops.loss.options import IGNORE_INDEX, check_labels, check_tensors
from liger_ops.loss.vocab_parallel import VocabShard


class _LinearLogProbsFunction(torch.autograd.Function):
    """The scores; their gradient from logits that are computed again, or were saved."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: VocabShard | None,
        saved_chunks: int,
        needs_gradient: list[bool],
        differentiable: tuple[str, ...],
        *values: Any,
    ) -> tuple[Tensor, ...]:
        arguments = ScoreArguments(*values)
        saved = SavedLogits(saved_chunks) if saved_chunks else None
        if shard is None and saved is None:
            lse, lse_error, *found = score_op(*values)
        else:
            lse, lse_error, *found = score_tokens(shard, *values, saved=saved)
        names = arguments.outputs.split(",")
        outputs = found[: len(names)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(output for name, output in zip(names, outputs, strict=True) if name not in differentiable)
        )
        entropy = outputs[names.index("entropy")] if "entropy" in differentiable else None
        chunks = () if saved is None else saved.chunks
        ctx.save_for_backward(*values[: ScoreArguments._fields.index("chunk_size")], lse, lse_error, entropy, *chunks)
        ctx.shard, ctx.names, ctx.needs_gradient = shard, names, needs_gradient
        ctx.sizes, ctx.options = (arguments.chunk_size, arguments.max_valid_tokens), values[-3:]
        return tuple(outputs)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        num_tensors = GradientArguments._fields.index("grad_log_probs")
        saved_tensors = ctx.saved_tensors  # once: checkpointing lets no tensor be read twice
        tensors, chunks = saved_tensors[:num_tensors], saved_tensors[num_tensors:]
        upstream = dict(zip(ctx.names, grad_outputs, strict=True))
        coefficients = [upstream.get(name) for name in DIFFERENTIABLE]
        chunk_size, max_valid_tokens = ctx.sizes
        num_chunks = -(-tensors[0].shape[0] // chunk_size)
        values = (
            *tensors, *coefficients, chunk_size, max_valid_tokens, ctx.needs_gradient,
            choose_accumulate_dtype(tensors[0].dtype, num_chunks), *ctx.options,
        )  # fmt: skip
        if ctx.shard is None and not chunks:
            gradients = gradients_op(*values)
        else:
            saved = SavedLogits(0, list(chunks), are_needed_again=not backend.graph_ends()) if chunks else None
            gradients = token_gradients(ctx.shard, *values, saved=saved)
        return None, None, None, None, *_needed(gradients, ctx.needs_gradient, tensors), *[None] * _NUM_OTHERS


def _needed(gradients: Sequence[Tensor], needed: list[bool], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in their tensors' dtypes, None where not needed."""
    triples = zip(gradients, needed, tensors, strict=False)
    return [gradient.to(tensor.dtype) if need and tensor is not None else None for gradient, need, tensor in triples]


_NUM_OTHERS = len(ScoreArguments._fields) - NUM_GRADIENTS


class _FrozenHeadFunction(torch.autograd.Function):
    """The scores of a head that needs no gradient, with the gradients of its input taken in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: VocabShard | None,
        needs_gradient: list[bool],
        differentiable: tuple[str, ...],
        *values: Any,
    ) -> tuple[Tensor, ...]:
        arguments = ScoreArguments(*values)
        found = (score_op(*values) if shard is None else score_tokens(shard, *values))[2:]
        names = arguments.outputs.split(",")
        outputs, gradients = found[: len(names)], found[len(names) :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(output for name, output in zip(names, outputs, strict=True) if name not in differentiable)
        )
        needs_weight = "lse" in differentiable or "mean_logit" in differentiable
        weights = (arguments.weight, arguments.adapter_weight) if needs_weight else (None, None)
        ctx.save_for_backward(arguments.labels, arguments.temperature, *weights, *gradients)
        ctx.shard, ctx.names, ctx.needs_gradient = shard, names, needs_gradient
        ctx.ignore_index, ctx.logit_scale, ctx.dtype = arguments.ignore_index, arguments.logit_scale, values[0].dtype
        return tuple(outputs)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        labels, temperature, weight, adapter_weight, *gradients = ctx.saved_tensors
        kept = labels != ctx.ignore_index
        upstream = {
            name: None if grad is None else grad.where(kept, 0.0)
            for name, grad in zip(ctx.names, grad_outputs, strict=True)
        }
        coefficients = Coefficients(*(upstream.get(name) for name in DIFFERENTIABLE))
        scale = ctx.logit_scale if temperature is None else ctx.logit_scale / temperature
        more = labels, coefficients, scale, ctx.dtype, ctx.shard, backend.graph_ends()
        of_input = _input_gradient(gradients[0::2], weight, *more)
        of_adapter = _input_gradient(gradients[1::2], adapter_weight, *more) if ctx.needs_gradient[3] else None
        of_input = of_input if ctx.needs_gradient[0] else None
        return None, None, None, of_input, None, None, of_adapter, None, *[None] * _NUM_OTHERS


def _input_gradient(
    gradients: Sequence[Tensor],
    weight: Tensor | None,
    labels: Tensor,
    coefficients: Coefficients,
    scale: Tensor | float,
    dtype: torch.dtype,
    shard: VocabShard | None,
    in_place: bool,
) -> Tensor | None:
    """The gradient of the input, from those of the negative log-probabilities and the entropies.

    Args:
        gradients: ``[num_tokens, size]`` each, empty if their coefficients are None; overwritten if ``in_place``.
        weight: ``[vocab_size, size]``, if lse or the mean logit have a coefficient and there is no soft-cap.
        labels, coefficients: ``[num_tokens]``.
        scale: Of the logits, a number or one for each token.
        dtype: Of the gradient.
        shard: The weight's place in the vocabulary, if it is part of one.
        in_place: Whether the gradients are not used again.
    """
    of_log_probs, of_entropy, of_lse, of_mean = coefficients
    first, second = gradients
    terms: list[tuple[Tensor, Tensor]] = []
    if of_log_probs is not None or of_lse is not None:  # d lse = d z[label] - d log_prob
        both = [each for each in (of_lse, None if of_log_probs is None else -of_log_probs) if each is not None]
        terms.append((first, sum(both[1:], both[0])))
    if of_entropy is not None:
        terms.append((second, of_entropy))
    if of_lse is not None and weight is not None:
        own = labels if shard is None else labels - shard.start
        is_own = (own >= 0) & (own < weight.shape[0])
        rows = weight.index_select(0, own.where(is_own, 0)) if len(weight) else torch.zeros_like(first)
        terms.append((rows, (of_lse * scale).where(is_own, 0.0)))
    if of_mean is not None and weight is not None:
        vocab_size = weight.shape[0] if shard is None else shard.vocab_size
        mean = weight.sum(0, dtype=of_mean.dtype) / vocab_size
        terms.append((mean.expand(len(labels), -1), of_mean * scale))
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


def prepare(
    input: Any,
    linear_weight: Tensor,
    target: Any,
    *,
    linear_bias: Tensor | None,
    temperature: Any,
    softcap: float | None,
    logit_scale: float,
    adapter: Any,
    vocab_shard: VocabShard | None,
    ignore_index: int,
    outputs: Sequence[str],
    detach: Sequence[str],
    chunk_bytes: int | None,
    saved_logits_bytes: int,
    max_valid_tokens: int | None,
) -> tuple[LinearHead, ScoreArguments, tuple[str, ...], Callable[[Sequence[Tensor]], Any]]:
    """Checks the arguments and joins groups of tokens.

    Returns:
        The head, the arguments of the op, which outputs are differentiable, and a function that makes the result of the
        outputs, ``[num_tokens]`` each: their scores in the target's shape, or a tuple of those of each group.

    Raises:
        TypeError, ValueError: As :func:`linear_log_probs`.
    """
    groups: Groups | None = None
    if is_grouped(input):
        groups, input, target, adapter = join_groups(input, target, adapter)
        if isinstance(temperature, list | tuple):
            temperature = join_values("temperature", temperature, groups, input)
    check_floating("input", input)
    check_floating("linear_weight", linear_weight)
    check_floating("linear_bias", linear_bias, optional=True)
    check_tensors(input, target, None, None, linear_weight=linear_weight, linear_bias=linear_bias)
    if target.is_floating_point():
        raise ValueError(f"target must hold class indices of dtype torch.int64, got {target.dtype}")
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight must be [vocab_size, hidden_size], got shape {tuple(linear_weight.shape)}")
    check_transform(softcap, logit_scale, ignore_index)
    names = check_outputs("outputs", outputs, OUTPUTS, at_least=1)
    detached = check_outputs("detach", detach, DIFFERENTIABLE)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_integer("saved_logits_bytes", saved_logits_bytes, at_least=0)
    check_integer("max_valid_tokens", max_valid_tokens, at_least=0, optional=True)
    head = check_head(input, linear_weight, linear_bias, target, adapter, vocab_shard)
    check_temperature(temperature, target, ignore_index)
    check_labels("target", target, head.vocab_size, ignore_index)

    labels, temperatures = target.reshape(-1).contiguous(), None
    if isinstance(temperature, Tensor):
        each = temperature.detach().reshape(-1).to(torch.promote_types(head.dtype, torch.float32))
        temperatures, temperature = each.where(labels != ignore_index, 1.0), 1.0  # those of ignored tokens may be 0
    scale, cap = float(logit_scale) / temperature, float(softcap or 0.0) / temperature
    arguments = ScoreArguments._make(
        (
            *head.tensors, labels, temperatures, head.chunk_size(chunk_bytes), max_valid_tokens, ",".join(names), "",
            int(ignore_index), cap, scale,
        )
    )  # fmt: skip
    differentiable = [name for name in names if name in DIFFERENTIABLE and name not in detached]

    def restore(found: Sequence[Tensor]) -> Any:
        scores = TokenScores(**{name: score.view(target.shape) for name, score in zip(names, found, strict=True)})
        return scores if groups is None else groups.split_fields(scores)

    return head, arguments, tuple(differentiable) if any(head.needs_gradient) else (), restore


def linear_log_probs(
    input: Tensor | Sequence[Tensor],
    linear_weight: Tensor,
    target: Tensor | Sequence[Tensor],
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor | Sequence[float | Tensor] = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor | Sequence[Tensor], Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    ignore_index: int = IGNORE_INDEX,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
    chunk_bytes: int | None = None,
    saved_logits_bytes: int = 0,
    max_valid_tokens: int | None = None,
) -> Any:
    """Log-probabilities of labels under ``input @ linear_weight.T + linear_bias``, and other scores of tokens.

    Several groups of tokens over one head are sequences of the same length: ``input``, ``target``, the adapter's input
    and, if they differ, the temperatures (a number or a tensor for each group). They are concatenated, so the head gets
    one gradient; the scores are a tuple of one for each group.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        target: Labels, int64, ``[...]`` as ``input`` without its last dimension.
        linear_bias: The head's bias, ``[vocab_size]``.
        temperature: Divides the logits, after scale and soft-cap: a positive number, or a tensor of one for each token
            in ``target``'s shape, which is not differentiable.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale: Factor of the logits.
        adapter: A low-rank update of the logits, as for :func:`~liger_ops.linear_cross_entropy`.
        vocab_shard: This rank's part of the vocabulary, as for :func:`~liger_ops.linear_cross_entropy`. All ranks get
            the same scores; every rank has to call, and to run backward with the same upstream gradients.
        ignore_index: Label of tokens that have no scores and cost nothing.
        outputs: The scores to compute, names of :class:`~liger_ops.TokenScores`.
        detach: Differentiable outputs whose gradient is not wanted, so that nothing is saved for it.
        chunk_bytes: Budget for one chunk of logits, as for :func:`~liger_ops.linear_cross_entropy`.
        saved_logits_bytes: Budget for logits that are saved for backward, in whole chunks; backward computes the others
            again. A frozen head needs none. Nothing is saved under ``torch.compile`` and with ``vocab_shard``.
        max_valid_tokens: How many labels are not ``ignore_index``, at most, if the caller knows: on a GPU the host then
            need not wait for the device, and backward leaves no tokens out for their zero gradients. A bound that is
            too small gives NaN.

    Returns:
        The scores in ``target``'s shape, None for those that are not among ``outputs``. Under autocast the products run
        in the autocast dtype, as a linear layer's would.

    Raises:
        TypeError: For arguments of another type, and for tensors that are not floating point where they should be.
        ValueError: For shapes, dtypes, devices, names or options that do not fit; for a temperature that requires a
            gradient; for labels out of range if they are on the CPU (on the GPU their log-probability is NaN instead).
    """
    head, arguments, differentiable, restore = prepare(
        input, linear_weight, target, linear_bias=linear_bias, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, adapter=adapter, vocab_shard=vocab_shard, ignore_index=ignore_index, outputs=outputs,
        detach=detach, chunk_bytes=chunk_bytes, saved_logits_bytes=saved_logits_bytes,
        max_valid_tokens=max_valid_tokens,
    )  # fmt: skip
    is_frozen = not any(needed for index, needed in enumerate(head.needs_gradient) if index not in (0, 3))
    follows_from_weight = softcap is None or not {"lse", "mean_logit"}.intersection(differentiable)
    with head.products_dtype():
        if not differentiable:
            with torch.no_grad():
                scores = (score_op(*arguments) if vocab_shard is None else score_tokens(vocab_shard, *arguments))[2:]
        elif is_frozen and follows_from_weight:
            gradients = ["log_probs"] if {"log_probs", "lse"}.intersection(differentiable) else []
            gradients += ["entropy"] if "entropy" in differentiable else []
            arguments = arguments._replace(gradients=",".join(gradients))
            scores = _FrozenHeadFunction.apply(vocab_shard, head.needs_gradient, differentiable, *arguments)
        else:
            saved = head.saved_chunks(saved_logits_bytes, arguments.chunk_size) if vocab_shard is None else 0
            scores = _LinearLogProbsFunction.apply(vocab_shard, saved, head.needs_gradient, differentiable, *arguments)
    return restore(scores[: len(arguments.outputs.split(","))])
