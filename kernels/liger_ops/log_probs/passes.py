"""Passes over the logits of a linear head, chunk by chunk: to scores, and from upstream gradients to gradients."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.log_probs.rows import (
    Coefficients,
    RowScorer,
    ScoreBuffers,
    gradient_rows,
    options_of_gradient,
    rows_at,
)
from liger_ops.loss.chunked_loss import (
    KeptTokens,
    OtherGradient,
    SavedLogits,
    adapter_pair,
    chunked_linear_loss,
)
from liger_ops.loss.options import Targets, TokenLossOptions
from liger_ops.loss.token_plan import plan_tokens
from liger_ops.loss.vocab_parallel import VocabShard, gradient_of_rows_in_place


class ScoreArguments(NamedTuple):
    """The arguments of the op, in its schema's order; see :func:`linear_log_probs`."""

    input: Tensor
    """``[num_tokens, hidden_size]``."""
    weight: Tensor
    bias: Tensor | None
    adapter_input: Tensor | None
    """``[num_tokens, rank]``."""
    adapter_weight: Tensor | None
    labels: Tensor
    temperature: Tensor | None
    """``[num_tokens]``, at least float32; None if it is in the options."""
    chunk_size: int
    max_valid_tokens: int | None
    outputs: str
    """Names separated by commas, as the next."""
    gradients: str
    """Which of log_probs and entropy have their gradient of the hidden states taken at once."""
    ignore_index: int
    softcap: float
    """0 for none; divided by the temperature, as the next."""
    logit_scale: float

    @property
    def options(self) -> TokenLossOptions:
        """The last fields."""
        return TokenLossOptions.from_scalars(self.ignore_index, 0.0, self.softcap, self.logit_scale, 0.0)

    @property
    def adapter(self) -> tuple[Tensor, Tensor] | None:
        """The adapter's tensors."""
        return adapter_pair(self.adapter_input, self.adapter_weight)


_FAKE_DTYPES = {"predictions": torch.int64, "correct": torch.bool}


def _fake_scores(*values: Any) -> list[Tensor]:
    arguments = ScoreArguments(*values)
    dtype = torch.promote_types(arguments.input.dtype, torch.float32)
    names = ["lse", "lse_error", *arguments.outputs.split(",")]
    scores = [torch.empty_like(arguments.labels, dtype=_FAKE_DTYPES.get(name, dtype)) for name in names]
    gradients = []
    for name in ("log_probs", "entropy"):
        for tensor in (arguments.input, arguments.adapter_input):
            shape = tensor.shape if name in arguments.gradients and tensor is not None else (0,)
            gradients.append(arguments.input.new_empty(shape))
    return [*scores, *gradients]


def plan_visits(
    labels: Tensor, ignore_index: int, input: Tensor, chunk_size: int, max_valid_tokens: int | None
) -> KeptTokens:
    """The order of the tokens, and how many are visited: a bound, if the host shall not wait to know."""
    in_order = chunk_size >= labels.shape[0]
    plan = plan_tokens(Targets(labels, None, None), 0, ignore_index, input, with_order=not in_order)
    if in_order or (max_valid_tokens is None and input.is_cuda and torch.cuda.is_current_stream_capturing()):
        max_valid_tokens = labels.shape[0]
    return KeptTokens(plan.order, plan.num_kept if max_valid_tokens is None else max_valid_tokens)


def make_scorer(arguments: ScoreArguments, shard: VocabShard | None, outputs: Sequence[str]) -> RowScorer:
    """The scorer of the tokens, all of which its buffers hold as ignored ones."""
    labels, options = arguments.labels, arguments.options
    buffers = ScoreBuffers.zeros(labels, torch.promote_types(arguments.input.dtype, torch.float32), outputs)
    if arguments.max_valid_tokens is not None and arguments.chunk_size < labels.shape[0]:
        buffers.mark_unknown(labels, options.ignore_index)  # what the bound leaves out by mistake
    return RowScorer(labels, options, arguments.temperature, buffers, shard)


def score_tokens(shard: VocabShard | None, *values: Any, saved: SavedLogits | None = None) -> list[Tensor]:
    """Lse, its error and the outputs, ``[num_tokens]`` each; then the gradients of the hidden states and the adapter's
    input of the summed negative log-probabilities, and those of the summed entropies, empty if not asked for.
    """
    arguments = ScoreArguments(*values)
    outputs, gradients = arguments.outputs.split(","), arguments.gradients.split(",")
    scorer = make_scorer(arguments, shard, outputs)
    with_log_probs, with_entropy = "log_probs" in gradients, "entropy" in gradients

    def entropy_gradient(logits: Tensor, index: Tensor | None) -> None:
        ones = torch.ones(logits.shape[0], dtype=scorer.buffers.lse.dtype, device=logits.device)
        scorer.to_gradient(logits, index, Coefficients(entropy=ones))

    def chunk_loss(logits: Tensor, index: Tensor | None) -> None:
        scorer.score(logits, index, with_gradient=with_log_probs)
        if with_entropy and not with_log_probs:
            entropy_gradient(logits, index)

    other = OtherGradient(entropy_gradient) if with_log_probs and with_entropy else None
    needs_input = with_log_probs or with_entropy
    visited = plan_visits(
        arguments.labels, arguments.ignore_index, arguments.input, arguments.chunk_size, arguments.max_valid_tokens
    )
    found = chunked_linear_loss(
        arguments.input,
        arguments.weight,
        arguments.bias,
        visited,
        chunk_loss,
        chunk_size=arguments.chunk_size,
        accumulate_dtype=arguments.input.dtype,
        needs_gradient=[needs_input, False, False, needs_input and arguments.adapter is not None, False],
        adapter=arguments.adapter,
        saved=saved,
        other=other,
    )
    nothing = [arguments.input.new_empty(0) for _ in range(4)]
    of_input = [found.hidden_states, found.adapter_input, *([] if other is None else other.gradients)]
    of_input = [*of_input, *nothing][:4] if with_log_probs else [*nothing[:2], *of_input]
    scores = (score for score in scorer.buffers.scores(outputs) if score is not None)
    return [scorer.buffers.lse, scorer.buffers.lse_error, *scores, *of_input]


@backend.register_op(
    "linear_log_probs(Tensor input, Tensor weight, Tensor? bias, Tensor? adapter_input, Tensor? adapter_weight,"
    " Tensor labels, Tensor? temperature, SymInt chunk_size, SymInt? max_valid_tokens, str outputs, str gradients,"
    " int ignore_index, float softcap, float logit_scale) -> Tensor[]",
    fake=_fake_scores,
)
def score_op(*values: Any) -> list[Tensor]:
    return score_tokens(None, *values)


class GradientArguments(NamedTuple):
    """The arguments of the op of backward, in its schema's order."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    adapter_input: Tensor | None
    adapter_weight: Tensor | None
    labels: Tensor
    temperature: Tensor | None
    lse: Tensor
    """``[num_tokens]``, as are the following."""
    lse_error: Tensor
    entropy: Tensor | None
    grad_log_probs: Tensor | None
    """Upstream gradients, None for zeros."""
    grad_entropy: Tensor | None
    grad_lse: Tensor | None
    grad_mean_logit: Tensor | None
    chunk_size: int
    max_valid_tokens: int | None
    needs_gradient: list[bool]
    accumulate_dtype: torch.dtype
    ignore_index: int
    softcap: float
    logit_scale: float


def _fake_gradients(*values: Any) -> list[Tensor]:
    arguments = GradientArguments(*values)
    of_tokens, of_head = arguments.input.dtype, arguments.accumulate_dtype
    dtypes = (of_tokens, of_head, of_head, of_tokens, of_head)
    return [
        arguments.input.new_empty(tensor.shape if needed else 0, dtype=dtype)
        for tensor, needed, dtype in zip(values, arguments.needs_gradient, dtypes, strict=False)
    ]


def token_gradients(shard: VocabShard | None, *values: Any, saved: SavedLogits | None = None) -> list[Tensor]:
    """The gradients that ``needs_gradient`` names, empty tensors for others."""
    arguments = GradientArguments(*values)
    input, labels, ignore_index = arguments.input, arguments.labels, arguments.ignore_index
    chunk_size, max_valid_tokens = arguments.chunk_size, arguments.max_valid_tokens
    options = TokenLossOptions.from_scalars(ignore_index, 0.0, arguments.softcap, arguments.logit_scale, 0.0)
    coefficients = Coefficients(*values[GradientArguments._fields.index("grad_log_probs") :][:4])
    rows = gradient_rows(
        labels, options, arguments.lse, arguments.lse_error, arguments.entropy, coefficients,
        temperature=arguments.temperature, num_columns=arguments.weight.shape[0], shard=shard,
    )  # fmt: skip
    alive = rows.kept
    if saved is not None:  # their chunks stay as they were in forward
        order = plan_visits(labels, ignore_index, input, chunk_size, labels.shape[0]).order
        num_saved = sum(map(len, saved.chunks))
        is_saved = torch.ones_like(alive) if order is None else alive.index_fill(0, order[:num_saved], True)
        alive = is_saved & (labels != ignore_index)
    visited = plan_visits(labels.where(alive, ignore_index), ignore_index, input, chunk_size, max_valid_tokens)
    row_options = options_of_gradient(options, coefficients)

    def to_gradient(logits: Tensor, index: Tensor | None) -> None:
        gradient_of_rows_in_place(logits, rows_at(rows, index), None, row_options)

    gradients = chunked_linear_loss(
        input,
        arguments.weight,
        arguments.bias,
        visited,
        to_gradient,
        chunk_size=chunk_size,
        accumulate_dtype=arguments.accumulate_dtype,
        needs_gradient=arguments.needs_gradient,
        adapter=adapter_pair(arguments.adapter_input, arguments.adapter_weight),
        saved=None if saved is None else dataclasses.replace(saved, to_gradient=to_gradient),
    )
    if shard is not None:
        shard.sum_input_gradients(gradients.hidden_states, gradients.adapter_input)
    return list(gradients)


@backend.register_op(
    "linear_log_probs_backward(Tensor input, Tensor weight, Tensor? bias, Tensor? adapter_input,"
    " Tensor? adapter_weight, Tensor labels, Tensor? temperature, Tensor lse, Tensor lse_error, Tensor? entropy,"
    " Tensor? grad_log_probs, Tensor? grad_entropy, Tensor? grad_lse, Tensor? grad_mean_logit, SymInt chunk_size,"
    " SymInt? max_valid_tokens, bool[] needs_gradient, ScalarType accumulate_dtype, int ignore_index, float softcap,"
    " float logit_scale) -> Tensor[]",
    fake=_fake_gradients,
)
def gradients_op(*values: Any) -> list[Tensor]:
    return token_gradients(None, *values)
