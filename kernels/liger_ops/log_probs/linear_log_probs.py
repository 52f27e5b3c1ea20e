"""Scores of a linear head's tokens, of which no logits are materialized."""

from collections.abc import Sequence

from torch import Tensor

from liger_ops.arguments import check_floating, check_integer
from liger_ops.log_probs.reference import TokenLoss, linear_log_probs_reference, linear_token_loss_reference
from liger_ops.log_probs.scores import (
    DIFFERENTIABLE,
    OUTPUTS,
    TokenScores,
    check_outputs,
    check_temperature,
    check_transform,
)
from liger_ops.loss.linear_head import LinearHead, check_head
from liger_ops.loss.options import IGNORE_INDEX, check_labels, check_tensors
from liger_ops.loss.vocab_parallel import VocabShard


def check_call(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    adapter: tuple[Tensor, Tensor] | None,
    vocab_shard: VocabShard | None,
    ignore_index: int,
    chunk_bytes: int | None,
    saved_logits_bytes: int,
    max_valid_tokens: int | None,
) -> LinearHead:
    """Raises for arguments of :func:`linear_log_probs` that do not fit."""
    check_floating("input", input)
    check_floating("linear_weight", linear_weight)
    check_floating("linear_bias", linear_bias, optional=True)
    check_tensors(input, target, None, None, linear_weight=linear_weight, linear_bias=linear_bias)
    if target.is_floating_point():
        raise ValueError(f"target must hold class indices of dtype torch.int64, got {target.dtype}")
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight must be [vocab_size, hidden_size], got shape {tuple(linear_weight.shape)}")
    check_transform(softcap, logit_scale, ignore_index)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_integer("saved_logits_bytes", saved_logits_bytes, at_least=0)
    check_integer("max_valid_tokens", max_valid_tokens, at_least=0, optional=True)
    head = check_head(input, linear_weight, linear_bias, target, adapter, vocab_shard)
    check_temperature(temperature, target)
    check_labels("target", target, head.vocab_size, ignore_index)
    return head


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    ignore_index: int = IGNORE_INDEX,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
    chunk_bytes: int | None = None,
    saved_logits_bytes: int = 0,
    max_valid_tokens: int | None = None,
) -> TokenScores:
    """Scores of each token."""
    check_call(
        input, linear_weight, target, linear_bias, temperature, softcap, logit_scale, adapter, vocab_shard,
        ignore_index, chunk_bytes, saved_logits_bytes, max_valid_tokens,
    )  # fmt: skip
    outputs = check_outputs("outputs", outputs, OUTPUTS, at_least=1)
    detach = check_outputs("detach", detach, DIFFERENTIABLE)
    return linear_log_probs_reference(
        input, linear_weight, target, linear_bias=linear_bias, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, adapter=adapter, ignore_index=ignore_index, outputs=outputs, detach=detach,
    )  # fmt: skip


def linear_token_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    token_loss: TokenLoss,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    ignore_index: int = IGNORE_INDEX,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
    chunk_bytes: int | None = None,
    saved_logits_bytes: int = 0,
    max_valid_tokens: int | None = None,
) -> tuple[Tensor, TokenScores]:
    """The sum of a loss over tokens."""
    check_call(
        input, linear_weight, target, linear_bias, temperature, softcap, logit_scale, adapter, vocab_shard,
        ignore_index, chunk_bytes, saved_logits_bytes, max_valid_tokens,
    )  # fmt: skip
    outputs = check_outputs("outputs", outputs, OUTPUTS, at_least=1)
    detach = check_outputs("detach", detach, DIFFERENTIABLE)
    return linear_token_loss_reference(
        input, linear_weight, target, token_loss, linear_bias=linear_bias, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, adapter=adapter, ignore_index=ignore_index, outputs=outputs, detach=detach,
    )  # fmt: skip
