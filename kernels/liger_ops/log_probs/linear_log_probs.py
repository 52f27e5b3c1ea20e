"""Scores of a linear head's tokens, of which no logits are materialized: log-probabilities, entropies and others.

Chunks of tokens are projected and reduced to their scores; see :mod:`liger_ops.log_probs.scores` for the formulas. In
matrix products of the size ``num_tokens * hidden_size * vocab_size``, a call without gradients costs one, and with
backward

* two with a frozen head, for log-probabilities alone; see :mod:`liger_ops.loss.head_functions`.
* four with a trained head, three with a frozen one whose other scores are differentiated: backward computes the logits
  again, but for chunks that a budget lets forward save. Tokens whose upstream gradients are all zero are left out.

:func:`~liger_ops.linear_token_loss` takes three products, two with a frozen head, for a loss that is a function of each
token's own scores.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from liger_ops.arguments import check_floating_tensors, check_integer
from liger_ops.log_probs.scores import (
    DIFFERENTIABLE,
    OUTPUTS,
    TokenScores,
    check_outputs,
    check_temperature,
    with_temperature,
)
from liger_ops.loss.groups import Groups, is_grouped, join_groups, join_values
from liger_ops.loss.head_functions import FrozenHeadFunction, token_values
from liger_ops.loss.head_passes import ForwardArguments
from liger_ops.loss.linear_head import LinearHead, check_head, is_trained
from liger_ops.loss.options import IGNORE_INDEX, TokenLossOptions, check_labels, check_tensors
from liger_ops.loss.vocab_parallel import VocabShard


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
) -> tuple[LinearHead, ForwardArguments, tuple[str, ...], Callable[[Sequence[Tensor]], Any]]:
    """Checks the arguments and joins groups of tokens.

    Returns the head, the arguments of the op, which outputs are differentiable, and a function that makes the result of
    the outputs, ``[num_tokens]`` each: their scores in the target's shape, or a tuple of those of each group.
    """
    groups: Groups | None = None
    if is_grouped(input):
        groups, input, target, adapter = join_groups(input, target, adapter)
        if isinstance(temperature, list | tuple):
            temperature = join_values("temperature", temperature, groups, input)
    check_floating_tensors("input", input, optional=False, linear_weight=linear_weight)
    check_floating_tensors("input", input, linear_bias=linear_bias)
    check_tensors(input, target, None, None)
    if target.is_floating_point():
        raise ValueError(f"target must hold class indices of dtype torch.int64, got {target.dtype}")
    options = TokenLossOptions.checked(ignore_index, 0.0, softcap, logit_scale)
    names = check_outputs("outputs", outputs, OUTPUTS, at_least=1)
    detached = check_outputs("detach", detach, DIFFERENTIABLE)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_integer("saved_logits_bytes", saved_logits_bytes, at_least=0)
    check_integer("max_valid_tokens", max_valid_tokens, at_least=0, optional=True)
    head = check_head(input, linear_weight, linear_bias, target, adapter, vocab_shard)
    check_temperature(temperature, target, ignore_index)
    check_labels("target", target, head.vocab_size, ignore_index)

    labels = target.reshape(-1).contiguous()
    options, temperatures = with_temperature(options, temperature, labels, head.dtype)
    arguments = ForwardArguments._make(
        (
            *head.tensors, labels, None, None, temperatures, None, *head.chunks(chunk_bytes), max_valid_tokens,
            [False] * len(head.needs_gradient), "none", ",".join(names), "", *options,
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
    with head.products_dtype():
        if differentiable == ("log_probs",) and not is_trained(head.needs_gradient):
            arguments = arguments._replace(gradients="losses", needs_gradient=head.needs_gradient)
            scores = FrozenHeadFunction.apply(vocab_shard, differentiable, *arguments)
        else:
            scores = token_values(head, arguments, differentiable, saved_logits_bytes, vocab_shard)
    return restore(scores)
