"""Log-probabilities of several given classes of each token, of a linear head without materialized logits.

With z the tempered logits of a token, L_k = z[ids_k] - lse and upstream gradients G_k of L_k and g of lse,

    d / dz_j = sum_k(G_k * [j = ids_k]) + (g - sum_k G_k) * exp(z_j - lse).

Every sparse divergence is a function of the L_k that autograd differentiates. A frozen head takes two products of
[num_tokens, hidden_size, vocab_size] (see :mod:`liger_ops.loss.head_functions`), a trained head four, or three where
forward keeps the logits. Renormalized probabilities, which are those among the given classes, read K rows of the head a
token.
"""

import torch
from torch import Tensor

from liger_ops.arguments import (
    check_bool,
    check_floating_tensors,
    check_integer,
    check_number,
    check_same_device,
    check_tensor,
    wrong_value,
)
from liger_ops.loss.given_classes import GivenIds, given_logits
from liger_ops.loss.head_functions import FrozenHeadFunction, token_values
from liger_ops.loss.head_passes import ForwardArguments
from liger_ops.loss.linear_head import LinearHead, check_head, is_trained
from liger_ops.loss.options import IGNORED, TokenLossOptions, check_tokens, flat_tokens
from liger_ops.loss.rows import transform_logits
from liger_ops.loss.vocab_parallel import VocabShard

_OUTPUTS = "given_log_probs", "lse"


def linear_topk_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    renormalize: bool = False,
    mask: Tensor | None = None,
    with_lse: bool = False,
    chunk_bytes: int | None = None,
    saved_logits_bytes: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of given classes of each token, differentiable; sparse distillation is made of them.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        ids: Classes of each token, int64, ``[..., K]``. A class may occur more than once; gradients of its places add
            up. Negative ids are padding, for supports of different sizes: their log-probability is -inf, so that they
            add nothing to a sum of probabilities, and what reaches them in backward is ignored.
        linear_bias, softcap, logit_scale, adapter: As for :func:`~liger_ops.linear_log_probs`.
        temperature: Divides the logits, after the soft cap.
        vocab_shard: Not supported; must be None.
        renormalize: Whether probabilities are those among the K classes. Then no other class is looked at: K rows of
            the head are read for each token. A class that occurs twice counts twice.
        mask: bool, ``[...]``: True at tokens that are scored. The others are 0, and cost nothing but with
            ``renormalize``.
        with_lse: Whether to also return the log-sum-exp that log-probabilities are relative to, ``[...]``,
            differentiable.
        chunk_bytes: Budget for one chunk of logits (with ``renormalize``, on a CPU, of rows of the head); by default as
            for :func:`~liger_ops.linear_cross_entropy`.
        saved_logits_bytes: Budget for logits that forward keeps for backward, in whole chunks, if the head is trained;
            backward computes the others again.

    Returns:
        ``[..., K]``, at least float32; with ``with_lse`` a pair. NaN for ids that are no class, on a GPU.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For shapes, dtypes, devices or options that do not fit, and for ids that are no class, if they are
            on the CPU.
    """
    check_floating_tensors("input", input, optional=False, linear_weight=linear_weight)
    check_floating_tensors("input", input, linear_bias=linear_bias)
    check_tensor("ids", ids)
    check_same_device("input", input, ids=ids)
    check_number("temperature", temperature, above=0)
    check_number("softcap", softcap, above=0, optional=True)
    check_number("logit_scale", logit_scale)
    check_bool("renormalize", renormalize)
    check_bool("with_lse", with_lse)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_integer("saved_logits_bytes", saved_logits_bytes, at_least=0)
    if vocab_shard is not None:
        raise wrong_value("vocab_shard", "None", vocab_shard)
    tokens = input.shape[:-1]
    check_tokens(mask, None, input, tokens, "input")
    labels, _ = flat_tokens(mask, None, input, tokens.numel())
    head = check_head(input, linear_weight, linear_bias, labels.view(tokens), adapter, None)
    vocab_size = linear_weight.shape[0]
    if ids.dtype != torch.int64:
        raise wrong_value("ids", "class indices of dtype torch.int64", ids)
    if ids.dim() == 0 or ids.shape[:-1] != tokens or ids.shape[-1] == 0:
        raise wrong_value("ids", f"at least one class for each token of input, of shape {(*tokens, 'K')}", ids)
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and (ids >= vocab_size).any():
        wrong = ids[ids >= vocab_size]
        raise ValueError(
            f"ids must be between 0 and vocab_size - 1 = {vocab_size - 1}, or negative for padding; got"
            f" {wrong[0].item()} ({wrong.numel()} of {ids.numel()} ids are out of range)"
        )
    ids = ids.reshape(-1, ids.shape[-1]).contiguous()
    cap = None if softcap is None else float(softcap / temperature)
    options = TokenLossOptions(IGNORED, softcap=cap, logit_scale=float(logit_scale / temperature))
    needed = head.needs_gradient
    is_frozen = any(needed) and not is_trained(needed)
    arguments = ForwardArguments._make(
        (
            *head.tensors, None if mask is None else labels, None, None, None, ids,
            *head.chunks(chunk_bytes), None, needed if is_frozen else [False] * len(needed), "none",
            ",".join(_OUTPUTS), "lse" if is_frozen else "", *options,
        )
    )  # fmt: skip
    with head.products_dtype():
        if renormalize:
            log_probs, lse = _renormalized(head, ids, labels != IGNORED, options, chunk_bytes)
        elif is_frozen:
            log_probs, lse = FrozenHeadFunction.apply(None, _OUTPUTS, *arguments)
        else:
            log_probs, lse = token_values(head, arguments, _OUTPUTS, saved_logits_bytes)
    log_probs = log_probs.view(*tokens, ids.shape[1])
    return (log_probs, lse.view(tokens)) if with_lse else log_probs


def _renormalized(
    head: LinearHead, ids: Tensor, kept: Tensor, options: TokenLossOptions, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities among the given classes, and the log-sum-exp of these."""
    given = GivenIds.of(ids, head.vocab_size, kept)
    logits = given_logits(head.input, head.weight, given.safe, chunk_bytes)
    if head.adapter_input is not None and head.adapter_weight is not None:
        logits = logits + given_logits(head.adapter_input, head.adapter_weight, given.safe, chunk_bytes)
    if head.bias is not None:
        logits = logits + head.bias.to(logits.dtype)[given.safe]
    z = transform_logits(logits, options)
    # A token without classes has no distribution: places that cannot be seen keep its gradient finite.
    counts = given.is_class | ~given.has_class[:, None]
    z = z.masked_fill(~counts, -torch.inf)
    lse = z.logsumexp(1).masked_fill(~given.has_class, -torch.inf)
    return given.show(z.log_softmax(1)), lse.masked_fill(~kept, 0.0)
