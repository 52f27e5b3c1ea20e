"""Cross entropy of a linear head without materialized logits: ``cross_entropy(input @ linear_weight.T + bias)``.

Chunks of tokens are projected, turned into their loss and gradient in place, and reduced to the gradients of the
hidden states and the head at once, so a training step costs the same three matrix products as without fusion and
the memory of one chunk. Forward therefore saves gradients, not activations, and they include the mean's 1 / n (but not
in float16, where they could underflow). ``reduction="none"``, whose upstream gradient is not known in forward, saves
the logits of as many chunks as a budget allows, and projects the others once more in backward. The idea of taking the
gradient in forward is from Liger Kernel (arXiv:2410.10989); see :mod:`liger_ops.loss.cross_entropy` for the formula and
its options, :mod:`liger_ops.loss.head_passes` for the passes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import check_bool, check_choice, check_floating_tensors, check_integer, wrong_type, wrong_value
from liger_ops.loss.chunked_loss import MAX_CHUNK_BYTES, choose_accumulate_dtype
from liger_ops.loss.cross_entropy import cross_entropy
from liger_ops.loss.groups import is_grouped, join_groups, join_values
from liger_ops.loss.head_functions import ReducedLossFunction, reduced_loss, token_values
from liger_ops.loss.head_passes import ForwardArguments, run_forward
from liger_ops.loss.linear_head import check_head
from liger_ops.loss.options import (
    IGNORE_INDEX,
    REDUCTIONS,
    TokenLossOptions,
    TokenStats,
    check_labels,
    check_tensors,
    check_weights,
    flat_targets,
)
from liger_ops.loss.vocab_parallel import VocabShard

_ACCUMULATE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WITH_LOGITS = "for class probabilities and heads of more than two dimensions"


def linear_cross_entropy(
    input: Tensor | Sequence[Tensor],
    linear_weight: Tensor,
    target: Tensor | Sequence[Tensor],
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    token_weight: Tensor | Sequence[Tensor | float] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss_weight: float = 0.0,
    chunk_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    saved_logits_bytes: int | None = None,
    max_valid_tokens: int | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    return_stats: bool = False,
) -> Any:
    """Cross entropy of ``input @ linear_weight.T + linear_bias``, call-compatible with PyTorch's function of that name.

    Several groups of tokens over one head, such as Medusa's heads with a shared projection, are sequences of the same
    length: ``input``, ``target``, ``token_weight`` (a tensor or a number for each group) and the adapter's input. They
    are concatenated, so the head gets one gradient, and a mean is over the tokens of all groups. Losses of single
    tokens and stats are tuples of one for each group.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        target: Class indices, int64, ``[...]`` as ``input`` without its last dimension. Class probabilities, and heads
            of more dimensions, materialize the logits, as PyTorch does; ``chunk_bytes`` has no effect on them.
        linear_bias: The head's bias, ``[vocab_size]``.
        weight, reduction, label_smoothing, token_weight, softcap, logit_scale, z_loss_weight, return_stats: As for
            :func:`~liger_ops.cross_entropy`.
        ignore_index: Label of tokens that contribute nothing and cost nothing; None means -100.
        options: PyTorch's ``LinearCrossEntropyOptions``; its ``batch_chunk_size`` and ``acc_dtype`` are followed.
        chunk_bytes: Budget for one chunk of logits, which never holds all tokens. By default chunks are chosen for
            speed on a GPU (see :func:`~liger_ops.loss.chunked_loss.default_chunk_size`), and 8 MiB on a CPU.
        accumulate_dtype: Dtype in which chunks' gradients of the head are summed. By default bfloat16 heads sum in
            bfloat16 over at most 4 chunks, everything else in at least float32.
        saved_logits_bytes: Budget for logits that ``reduction="none"`` saves from forward for backward, in whole
            chunks; backward computes the others again, for a third of the loss's time if it is all of them. By default
            2 GiB on a GPU, but 0 if chunks are given by ``chunk_bytes`` or ``options``, and on other devices. Nothing
            is saved under ``torch.compile`` and with ``vocab_shard``.
        max_valid_tokens: How many labels are not ``ignore_index``, at most, if the caller knows. On a GPU the host then
            need not wait, once the first of several chunks is queued, for the device to count them. A bound that is so
            small that tokens are left out gives a NaN loss.
        adapter: A low-rank update of the logits, as LoRA makes it: ``[..., rank]``, already scaled, and ``[vocab_size,
            rank]``, in input's dtype; ``adapter[0] @ adapter[1].T`` is added to the logits before anything else.
        vocab_shard: This rank's part of the vocabulary, if each rank of a process group holds a part of the head:
            ``linear_weight``, ``linear_bias`` and the adapter's weight are its rows. Everything else is the same on
            all ranks, with ``weight`` and the labels of the whole vocabulary. All ranks get the same loss and stats;
            logits are never gathered. Every rank has to call, and with ``reduction="none"`` to run backward.

    Returns:
        The loss in at least float32, with the stats (shaped as ``target``) on request. Under autocast the products run
        in the autocast dtype, as a linear layer's would.

    Raises:
        TypeError: For arguments of another type, and for tensors that are not floating point where they should be.
        ValueError: For shapes, dtypes, devices or options that do not fit; for weights that require a gradient; for
            labels out of range if they are on the CPU (on the GPU the loss is NaN instead).
    """
    groups = None
    if is_grouped(input):
        groups, input, target, adapter = join_groups(input, target, adapter)
        token_weight = join_values("token_weight", token_weight, groups, input)
    input, target, token_weight = cast(Tensor, input), cast(Tensor, target), cast("Tensor | None", token_weight)
    check_floating_tensors("input", input, optional=False, linear_weight=linear_weight)
    check_floating_tensors("input", input, linear_bias=linear_bias)
    check_tensors(input, target, weight, token_weight)
    check_choice("reduction", reduction, REDUCTIONS)
    check_bool("return_stats", return_stats)
    if options is not None and not hasattr(options, "batch_chunk_size"):
        raise wrong_type("options", "a torch.nn.LinearCrossEntropyOptions or None", options)
    chunk_size, acc_dtype = getattr(options, "batch_chunk_size", None), getattr(options, "acc_dtype", None)
    check_integer("options.batch_chunk_size", chunk_size, at_least=1, optional=True)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_integer("max_valid_tokens", max_valid_tokens, at_least=0, optional=True)
    for name, value in {"accumulate_dtype": accumulate_dtype, "options.acc_dtype": acc_dtype}.items():
        if value is not None and not isinstance(value, torch.dtype):
            raise wrong_type(name, "a torch.dtype or None", value)
        if value is not None and value not in _ACCUMULATE_DTYPES:
            raise wrong_value(name, "torch.float32, torch.float64, torch.bfloat16 or torch.float16", value)
    check_integer("saved_logits_bytes", saved_logits_bytes, at_least=0, optional=True)
    ignore_index = IGNORE_INDEX if ignore_index is None else ignore_index
    if linear_weight.dim() < 2:
        raise ValueError(f"linear_weight must be [vocab_size, hidden_size], got shape {tuple(linear_weight.shape)}")
    if target.is_floating_point() or linear_weight.dim() > 2:
        if input.dim() > 2 or input.dim() < min(linear_weight.dim() - 1, 2):
            raise wrong_value("input", f"[num_tokens, hidden_size] {_WITH_LOGITS}", input)
        for name, given in {"adapter": adapter, "vocab_shard": vocab_shard}.items():
            if given is not None:
                raise wrong_value(name, f"None {_WITH_LOGITS}", given)
        bias = None if linear_bias is None else linear_bias.flatten()
        logits = F.linear(input, linear_weight.flatten(0, -2), bias).unflatten(-1, linear_weight.shape[:-1])
        return cross_entropy(
            logits, target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
            token_weight=token_weight, softcap=softcap, logit_scale=logit_scale, z_loss_weight=z_loss_weight,
            return_stats=return_stats,
        )  # fmt: skip
    token_options = TokenLossOptions.checked(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)
    head = check_head(input, linear_weight, linear_bias, target, adapter, vocab_shard)
    dtype, vocab_size = head.dtype, head.vocab_size
    check_weights(weight, token_weight, target, vocab_size, token_options, reduction)
    check_labels("target", target, vocab_size, ignore_index)
    if saved_logits_bytes is None:
        saved_logits_bytes = MAX_CHUNK_BYTES if input.is_cuda and chunk_size is None and chunk_bytes is None else 0
    chunk_size = head.chunks(chunk_bytes)[0] if chunk_size is None else chunk_size
    accumulate_dtype = accumulate_dtype or acc_dtype or choose_accumulate_dtype(dtype, -(-target.numel() // chunk_size))
    if torch.promote_types(accumulate_dtype, dtype) != accumulate_dtype:
        raise wrong_value("accumulate_dtype", f"at least as wide as the products' {dtype}", accumulate_dtype)
    targets = flat_targets(target, weight, token_weight, dtype)
    names = TokenStats._fields if return_stats else ("losses",) if reduction == "none" else ()
    gradients = ""
    if any(head.needs_gradient) and reduction != "none":
        gradients = "mean" if reduction == "mean" and dtype != torch.float16 else "losses"
    needed = head.needs_gradient if gradients else [False] * len(head.needs_gradient)
    arguments = ForwardArguments._make(
        (
            *head.tensors, *targets, None, None, chunk_size, accumulate_dtype, max_valid_tokens, needed, reduction,
            ",".join(names), gradients, *token_options,
        )
    )  # fmt: skip
    with head.products_dtype():
        loss: Any
        if reduction == "none":
            loss, *stats = token_values(head, arguments, ("losses",), saved_logits_bytes, vocab_shard)
        elif gradients:
            loss, *stats = ReducedLossFunction.apply(partial(reduced_loss, vocab_shard), *arguments)
        else:
            found = run_forward(arguments, vocab_shard)
            loss, stats = found["loss"], [found[name] for name in names]
    if reduction == "none":
        stats = [loss.detach(), *stats]
        loss = loss.view(target.shape) if groups is None else tuple(groups.split(loss))
    if not return_stats:
        return loss
    all_stats = TokenStats(*stats)
    if groups is not None:
        return loss, groups.split_fields(all_stats)
    return loss, TokenStats(*(stat.view(target.shape) for stat in all_stats))
