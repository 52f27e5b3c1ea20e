"""A loss of a linear head that is a function of each token's or unit's own scores, with its gradient taken in forward.

Each chunk of logits is reduced to its scores, the loss is called on them under autograd, and the gradients that it has
for the scores turn the same logits into their gradient. So whatever the loss is, a step costs three matrix products of
the size ``num_tokens * hidden_size * vocab_size``, two with a frozen head, and saves gradients instead of logits, as
:mod:`liger_ops.loss.linear_cross_entropy` does.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from liger_ops.arguments import check_same_device, check_shape, check_tensor, shown, wrong_type, wrong_value
from liger_ops.log_probs.linear_log_probs import prepare
from liger_ops.log_probs.scores import TokenScores
from liger_ops.loss.chunked_loss import KeptTokens, visit_tokens
from liger_ops.loss.groups import is_grouped
from liger_ops.loss.head_functions import Computed, ReducedLossFunction
from liger_ops.loss.head_passes import ForwardArguments, run_loop, split_names
from liger_ops.loss.options import IGNORE_INDEX, Targets
from liger_ops.loss.rows import TokenRows
from liger_ops.loss.token_plan import reduce_losses
from liger_ops.loss.vocab_parallel import VocabShard

TokenLoss = Callable[[TokenScores, Tensor], Tensor]
"""From the scores of some tokens and their indices, ``[n]`` each, to their losses, ``[n]``."""


def join_units(units: Any, target: Any) -> Tensor:
    """The unit of each token, ``[num_tokens]``, of labels that may come in groups.

    Raises:
        TypeError, ValueError: For units that are not int64 tensors like the labels.
    """
    groups = is_grouped(target)
    if groups and (not isinstance(units, list | tuple) or len(units) != len(target)):
        raise wrong_value("units", f"a sequence of {len(target)} tensors, one for each group of target", units)
    pairs = list(zip(units, target, strict=True)) if groups else [(units, target)]
    for number, (each, labels) in enumerate(pairs):
        name = f"units[{number}]" if groups else "units"
        check_tensor(name, each)
        if each.dtype != torch.int64:
            raise wrong_value(name, "an int64 tensor", each)
        check_shape(name, each, labels.shape, "target's")
        check_same_device(name, each, target=labels)
    return torch.cat([each.reshape(-1) for each, _ in pairs])


def plan_units(units: Tensor, kept: Tensor, chunk_size: int) -> KeptTokens:
    """The tokens by their units, in chunks of as many units as fit, at least one. The host waits for the device.

    Args:
        units: ``[num_tokens]``, int64.
        kept: ``[num_tokens]``, bool: tokens that are not ignored.
        chunk_size: Tokens of a chunk of more than one unit, at most.
    """
    order = torch.argsort(units.where(kept, torch.iinfo(units.dtype).max), stable=True)
    _, counts = torch.unique_consecutive(units[order[: int(kept.sum())]], return_counts=True)
    ends = counts.cumsum(0).tolist()
    bounds = [0]
    for end, following in pairwise(ends):
        if following - bounds[-1] > chunk_size:
            bounds.append(end)
    # Without tokens the loop still runs once, to write gradients of zero.
    bounds.append(ends[-1] if ends else min(1, len(units)))
    return KeptTokens(order, len(units), list(pairwise(bounds)))


def _losses_and_gradients(
    token_loss: TokenLoss, scores: TokenScores, index: Tensor, kept: Tensor, differentiable: Sequence[str]
) -> tuple[Tensor, Mapping[str, Tensor | None]]:
    """The losses of some tokens, zero where not kept, and the gradient of their sum with respect to the scores."""
    leaves = {name: getattr(scores, name).requires_grad_() for name in differentiable}
    with torch.set_grad_enabled(bool(leaves)):
        losses: Any = token_loss(scores, index)
        if not isinstance(losses, Tensor) or not losses.is_floating_point():
            raise wrong_type("token_loss", "a function that returns a floating-point tensor", losses)
        if losses.shape != index.shape:
            raise ValueError(
                f"token_loss must return one loss for each of its {len(index)} tokens, of shape {tuple(index.shape)},"
                f" got {shown(losses)}"
            )
        if leaves and not losses.requires_grad and bool(kept.any()):
            raise ValueError(
                "token_loss must return losses that depend on differentiable scores, got"
                f" {shown(losses)} that requires no gradient; with no_grad, or detach=, nothing is asked to have one"
            )
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32)).where(kept, 0.0)
    if not leaves or not losses.requires_grad:
        return losses, {}
    _check_graph(losses, leaves.values())
    ones = torch.ones_like(losses)  # of their sum
    gradients = torch.autograd.grad(losses, list(leaves.values()), ones, allow_unused=True)
    return losses.detach(), dict(zip(leaves, gradients, strict=True))


def _check_graph(losses: Tensor, leaves: Any) -> None:
    """Raises a ValueError if the losses depend on other tensors that require a gradient, which would get none."""
    known = {id(leaf) for leaf in leaves}
    seen, nodes = set(), [losses.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in known:
            raise ValueError(
                "token_loss must not depend on tensors that require a gradient, except the scores, got"
                f" {shown(variable)}; detach it, or take the loss of linear_log_probs' scores"
            )
        nodes += [next_node for next_node, _ in node.next_functions]


def _compute(
    shard: VocabShard | None,
    token_loss: TokenLoss,
    units: Tensor | None,
    differentiable: Sequence[str],
    *values: Any,
) -> Computed:
    """The sum of the losses, its gradients and the scores."""
    arguments = ForwardArguments(*values)
    input, labels, chunk_size = arguments.input, arguments.labels, arguments.chunk_size
    assert labels is not None
    names, options = split_names(arguments.outputs), arguments.options
    targets = Targets(labels, None, None)
    may_be_left_out = arguments.max_valid_tokens is not None and chunk_size < labels.shape[0]
    rows = TokenRows.allocate(
        targets, options, dict.fromkeys([*names, "lse", "lse_error"]),
        torch.promote_types(input.dtype, torch.float32), arguments.temperature, shard, are_unknown=may_be_left_out,
    )  # fmt: skip
    kept = labels != arguments.ignore_index
    all_losses = torch.zeros_like(rows.buffers["lse"])
    if may_be_left_out:
        all_losses.masked_fill_(kept, torch.nan)
    positions = torch.arange(labels.shape[0], device=labels.device)

    def chunk_loss(logits: Tensor, index: Tensor | None) -> None:
        rows.write(logits, index)
        tokens = positions if index is None else index
        scores = TokenScores(**{name: rows.values(name, tokens) for name in names})
        # With a copy of the indices, since those of the loop are not the caller's to write to.
        losses, upstream = _losses_and_gradients(token_loss, scores, tokens.clone(), kept[tokens], differentiable)
        all_losses.index_copy_(0, tokens, losses.to(all_losses.dtype))
        if any(arguments.needs_gradient):
            rows.to_gradient(logits, index, upstream)

    if units is not None:
        visited = plan_units(units, kept, chunk_size)
    else:
        visited, _ = visit_tokens(targets, 1, arguments.ignore_index, input, chunk_size, arguments.max_valid_tokens)
    gradients = run_loop(arguments, visited, chunk_loss, shard=shard)
    scores = [rows.values(name) for name in names]
    return reduce_losses(all_losses, None), None, gradients, scores


@torch.compiler.disable
def linear_token_loss(
    input: Tensor | Sequence[Tensor],
    linear_weight: Tensor,
    target: Tensor | Sequence[Tensor],
    token_loss: TokenLoss,
    *,
    units: Tensor | Sequence[Tensor] | None = None,
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
    """The sum of a loss over tokens, each a function of that token's (or its unit's) scores under a linear head.

    Groups of tokens over one head are given as for :func:`~liger_ops.linear_log_probs`; indices are those of their
    concatenation. Under ``torch.compile`` the call breaks the graph, since the loss is called in the loop over chunks.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        target: Labels, int64, ``[...]`` as ``input`` without its last dimension.
        token_loss: Called for each chunk of tokens with their scores, ``[n]`` each, and their indices in the flat
            ``target``, ``[n]``, by which it may look up advantages or weights. Returns their losses, ``[n]``. The loss
            of a token must depend on no other token (or unit), and no other tensor gets a gradient. There may be
            ignored tokens among them, whose losses do not count. In float16 it should leave out small constant factors,
            such as 1 / the number of tokens: they belong to the sum.
        units: A number for each token, int64, in ``target``'s shape, such as that of its preference pair: tokens of one
            number are never apart, so a loss may depend on the scores of all tokens of its unit that are not ignored.
            How the unit's loss is divided among its tokens does not matter, as they are added up. A chunk holds one
            unit at least, even if that exceeds ``chunk_bytes``. On a GPU the host waits for the device once.
        linear_bias, temperature, softcap, logit_scale, adapter, vocab_shard, ignore_index, chunk_bytes: As for
            :func:`~liger_ops.linear_log_probs`.
        outputs: The scores that ``token_loss`` gets, names of :class:`~liger_ops.TokenScores`.
        detach: Differentiable outputs that ``token_loss`` gets without gradient.
        saved_logits_bytes: Has no effect, as no logits are computed twice.
        max_valid_tokens: How many labels are not ``ignore_index``, at most, if the caller knows: on a GPU the host then
            need not wait for the device. A bound that is too small gives NaN. Has no effect with ``units``.

    Returns:
        The sum in at least float32, and the detached scores of all tokens in ``target``'s shape.

    Raises:
        TypeError, ValueError: As :func:`~liger_ops.linear_log_probs`, and for a ``token_loss`` that does not return one
            loss for each token, or whose losses depend on other tensors that require a gradient.
    """
    if not callable(token_loss):
        raise wrong_type("token_loss", "a function of scores and indices", token_loss)
    head, arguments, differentiable, restore = prepare(
        input, linear_weight, target, linear_bias=linear_bias, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, adapter=adapter, vocab_shard=vocab_shard, ignore_index=ignore_index, outputs=outputs,
        detach=detach, chunk_bytes=chunk_bytes, saved_logits_bytes=saved_logits_bytes,
        max_valid_tokens=None if units is not None else max_valid_tokens,
    )  # fmt: skip
    unit_of_token = None if units is None else join_units(units, target)
    with head.products_dtype():
        compute = partial(_compute, vocab_shard, token_loss, unit_of_token, differentiable)
        loss, *scores = ReducedLossFunction.apply(compute, *arguments._replace(needs_gradient=head.needs_gradient))
    return loss, restore(scores)
