"""Passes over the logits of a linear head, chunk by chunk: to statistics, losses and gradients of tokens.

One op computes outputs of tokens, and at once those gradients whose factors are known: of the sum or the mean of the
losses, or of each token's log-probability, entropy or lse. Another turns logits, computed again or saved, into their
gradient once backward has brought each token's factors.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.chunked_loss import (
    ChunkLoss,
    Gradients,
    KeptTokens,
    SavedLogits,
    chunked_linear_loss,
    visit_tokens,
)
from liger_ops.loss.given_classes import GivenIds, add_at
from liger_ops.loss.launch import ROW_OUTPUTS, GradientRows
from liger_ops.loss.options import Targets, TokenLossOptions
from liger_ops.loss.rows import TokenRows, at, dtype_of, gradient_in_place, transform_logits
from liger_ops.loss.token_plan import reduce_losses
from liger_ops.loss.vocab_parallel import VocabShard


class ForwardArguments(NamedTuple):
    """The arguments of the op of forward."""

    input: Tensor  # [num_tokens, hidden_size]
    weight: Tensor  # [vocab_size, hidden_size]
    bias: Tensor | None
    adapter_input: Tensor | None  # [num_tokens, rank]
    adapter_weight: Tensor | None
    labels: Tensor | None  # [num_tokens]; None if all tokens count and their labels have no part in what is computed
    class_weight: Tensor | None
    token_weight: Tensor | None
    temperature: Tensor | None  # [num_tokens], at least float32; None if it is in the options
    ids: Tensor | None  # [num_tokens, K]: classes whose log-probabilities are an output; negative ones are padding
    chunk_size: int
    accumulate_dtype: torch.dtype
    max_valid_tokens: int | None
    needs_gradient: list[bool]  # which gradients to take at once, for each of the first five tensors
    reduction: str  # "none" or of the losses, which is an output then, before the mean's factor and all others
    outputs: str  # names of ROW_OUTPUTS and given_log_probs, separated by commas
    gradients: str
    """What has its gradient taken at once: ``mean`` or ``losses`` (the sum), ``lse`` without the given classes' part;
    empty for nothing."""
    ignore_index: int
    label_smoothing: float
    softcap: float | None  # divided by the temperature, as the next, if it is one number
    logit_scale: float
    z_loss_weight: float

    @property
    def options(self) -> TokenLossOptions:
        """The last fields."""
        return TokenLossOptions(*self[-5:])


GRADIENTS = tuple(f"grad_{name}" for name in ForwardArguments._fields[:5])
NUM_TENSORS = ForwardArguments._fields.index("chunk_size")
_OF_HEAD = (1, 2, 4)  # whose gradients are sums over chunks


def split_names(names: str) -> list[str]:
    """The names of a list that is separated by commas."""
    return names.split(",") if names else []


def _result_names(arguments: ForwardArguments) -> list[str]:
    scalars = [] if arguments.reduction == "none" else ["loss", "mean_scale"]
    return [*scalars, *split_names(arguments.outputs), *GRADIENTS]


def _fake_forward(*values: Any) -> list[Tensor]:
    arguments = ForwardArguments(*values)
    input, needed = arguments.input, arguments.needs_gradient
    dtype = torch.promote_types(input.dtype, torch.float32)

    def empty(name: str) -> Tensor:
        if name in GRADIENTS:
            place = GRADIENTS.index(name)
            shape = values[place].shape if needed[place] else (0,)
            return input.new_empty(shape, dtype=arguments.accumulate_dtype if place in _OF_HEAD else input.dtype)
        if name == "given_log_probs":
            return torch.empty_like(values[ForwardArguments._fields.index("ids")], dtype=dtype)
        return input.new_empty(() if name in ("loss", "mean_scale") else input.shape[:1], dtype=dtype_of(name, dtype))

    return [empty(name) for name in _result_names(arguments)]


def _compute(*values: Any, shard: VocabShard | None = None, saved: SavedLogits | None = None) -> list[Tensor]:
    """The results of the op of forward, over the vocabulary of the ranks of a ``shard``; saves logits on request."""
    arguments = ForwardArguments(*values)
    input, weight, ids, chunk_size = arguments.input, arguments.weight, arguments.ids, arguments.chunk_size
    options = arguments.options
    outputs = split_names(arguments.outputs)
    dtype = torch.promote_types(input.dtype, torch.float32)
    labels = arguments.labels
    if labels is None:
        labels = torch.zeros(input.shape[:1], dtype=torch.int64, device=input.device)
    targets = Targets(labels, arguments.class_weight, arguments.token_weight)
    tokens, mean_scale = visit_tokens(
        targets, weight.shape[0] if shard is None else shard.vocab_size, options.ignore_index, input, chunk_size,
        arguments.max_valid_tokens, are_all_kept=arguments.labels is None,
    )  # fmt: skip
    wanted = dict.fromkeys(name for name in outputs if name in ROW_OUTPUTS)
    wanted |= dict.fromkeys(["losses"] if arguments.reduction != "none" else [])
    wanted |= dict.fromkeys(["lse", "lse_error"] if ids is not None else [])
    may_be_left_out = arguments.max_valid_tokens is not None and chunk_size < len(labels)
    rows = TokenRows.allocate(
        targets, options, wanted, dtype, arguments.temperature, shard, are_unknown=may_be_left_out
    )
    given = None if ids is None else torch.zeros_like(ids, dtype=dtype)
    grad_scale = mean_scale if arguments.gradients == "mean" else None

    def chunk_loss(logits: Tensor, index: Tensor | None) -> None:
        rows.write(logits, index, grad_scale, with_gradient=arguments.gradients in ("losses", "mean"))
        if given is None:
            return
        some = GivenIds.of(at(ids, index), logits.shape[1], at(labels, index) != options.ignore_index)
        lse, lse_error = (at(rows.buffers[name], index) for name in ("lse", "lse_error"))
        z = transform_logits(logits.gather(1, some.safe), options)
        values = some.show(z - lse[:, None] - lse_error[:, None])
        if index is None:
            given.copy_(values)
        else:
            given.index_copy_(0, index, values)
        if arguments.gradients == "lse":
            rows.to_gradient(logits, index, {"lse": torch.ones_like(lse)})
            # All of a class's occurrences write the same.
            without = logits.gather(1, some.safe).masked_fill(some.has_class[:, None], 0.0)
            logits.scatter_(1, some.safe, without)

    # Gradients of single tokens' losses are summed once they have their factors.
    found = run_loop(arguments, tokens, chunk_loss, saved, None if arguments.reduction == "none" else shard)
    results: dict[str, Any] = dict(zip(GRADIENTS, found, strict=True))
    results |= {"given_log_probs": given, "mean_scale": mean_scale}
    if arguments.reduction != "none":
        results["loss"] = reduce_losses(rows.buffers["losses"], mean_scale if arguments.reduction == "mean" else None)
    results |= {name: rows.values(name) for name in outputs if name in ROW_OUTPUTS}
    return [results[name] for name in _result_names(arguments)]


def run_loop(
    arguments: Any,
    tokens: KeptTokens,
    chunk_loss: ChunkLoss,
    saved: SavedLogits | None = None,
    shard: VocabShard | None = None,
) -> Gradients:
    """The loop over chunks for the arguments of either op; sums gradients of inputs over the ranks of a ``shard``."""
    has_adapter = arguments.adapter_input is not None
    gradients = chunked_linear_loss(
        arguments.input,
        arguments.weight,
        arguments.bias,
        tokens,
        chunk_loss,
        chunk_size=arguments.chunk_size,
        accumulate_dtype=arguments.accumulate_dtype,
        needs_gradient=arguments.needs_gradient,
        adapter=(arguments.adapter_input, arguments.adapter_weight) if has_adapter else None,
        saved=saved,
    )
    if shard is not None:
        shard.sum_input_gradients(gradients.hidden_states, gradients.adapter_input)
    return gradients


_forward_op = backend.register_op(
    f"linear_head({backend.schema_of(ForwardArguments)}) -> Tensor[]", fake=_fake_forward
)(_compute)


def run_forward(
    values: Sequence[Any], shard: VocabShard | None = None, saved: SavedLogits | None = None
) -> dict[str, Tensor]:
    """The results of the op of forward by their names; without the op for shards, and where logits are saved."""
    is_op = shard is None and saved is None
    found = _forward_op(*values) if is_op else _compute(*values, shard=shard, saved=saved)
    return dict(zip(_result_names(ForwardArguments(*values)), found, strict=True))


class BackwardArguments(NamedTuple):
    """The arguments of the op of backward."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    adapter_input: Tensor | None
    adapter_weight: Tensor | None
    labels: Tensor  # as the next eight, a field of loss.launch.GradientRows
    lse: Tensor
    lse_error: Tensor
    probability_factor: Tensor
    label_term: Tensor
    smoothing_term: Tensor | None
    entropy_factor: Tensor | None
    temperature: Tensor | None
    kept: Tensor | None
    class_weight: Tensor | None  # of the columns
    ids: Tensor | None  # [num_tokens, K], all of them classes
    grad_given: Tensor | None  # [num_tokens, K]: what is added to the gradient of these classes' logits
    chunk_size: int
    accumulate_dtype: torch.dtype
    max_valid_tokens: int | None
    needs_gradient: list[bool]
    softcap: float | None
    logit_scale: float


def _fake_backward(*values: Any) -> list[Tensor]:
    arguments = BackwardArguments(*values)
    dtypes = (arguments.accumulate_dtype if place in _OF_HEAD else arguments.input.dtype for place in range(5))
    return [
        arguments.input.new_empty(tensor.shape if needed else 0, dtype=dtype)
        for tensor, needed, dtype in zip(values, arguments.needs_gradient, dtypes, strict=False)
    ]


def _compute_gradients(
    *values: Any, shard: VocabShard | None = None, saved: SavedLogits | None = None, visited: Tensor | None = None
) -> list[Tensor]:
    """The gradients that ``needs_gradient`` names, empty tensors for others.

    ``visited`` says which tokens to visit, if not those that are kept: as saved chunks hold others too.
    """
    arguments = BackwardArguments(*values)
    rows = GradientRows(*values[5:14])
    options = TokenLossOptions(softcap=arguments.softcap, logit_scale=arguments.logit_scale)
    visited = rows.kept if visited is None else visited
    labels = rows.labels if visited is None else visited.long() - 1
    tokens, _ = visit_tokens(
        Targets(labels, None, None), 1, -1, arguments.input, arguments.chunk_size, arguments.max_valid_tokens,
        are_all_kept=visited is None,
    )  # fmt: skip

    def to_gradient(logits: Tensor, index: Tensor | None) -> None:
        gradient_in_place(logits, rows, options, arguments.class_weight, index)
        if arguments.grad_given is not None:
            add_at(logits, at(arguments.ids, index), at(arguments.grad_given, index).to(logits.dtype))

    return list(run_loop(arguments, tokens, to_gradient, saved, shard))


_backward_op = backend.register_op(
    f"linear_head_backward({backend.schema_of(BackwardArguments)}) -> Tensor[]", fake=_fake_backward
)(_compute_gradients)


def run_backward(
    values: Sequence[Any], shard: VocabShard | None, saved: SavedLogits | None, visited: Tensor | None
) -> Sequence[Tensor]:
    """The op of backward, or the same without it for shards and saved logits; see :func:`_compute_gradients`."""
    if shard is None and saved is None:
        return _backward_op(*values)
    return _compute_gradients(*values, shard=shard, saved=saved, visited=visited)
