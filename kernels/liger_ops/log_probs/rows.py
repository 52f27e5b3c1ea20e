"""Rows of logits to scores, and to their gradient."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.collectives import all_gather
from liger_ops.log_probs.scores import TokenScores
from liger_ops.loss.cross_entropy import transform_logits
from liger_ops.loss.launch import GradientRows, launch_loss
from liger_ops.loss.options import Targets, TokenLossOptions, TokenStats
from liger_ops.loss.vocab_parallel import VocabShard, gradient_of_rows_in_place

_OF_STATS = frozenset(("entropy", "predictions", "correct"))


class ScoreBuffers(NamedTuple):
    """Output buffers for the scores of tokens, ``[num_tokens]`` each, at least float32."""

    losses: Tensor
    """The negative log-probability of the label."""
    lse: Tensor
    lse_error: Tensor
    """The rounding error of ``lse``."""
    stats: TokenStats | None
    """Entropy, predictions and correct are used; ``losses`` and ``lse`` are those above."""
    mean_logit: Tensor | None
    log_sum_sq_probs: Tensor | None

    @classmethod
    def zeros(cls, labels: Tensor, dtype: torch.dtype, outputs: Collection[str]) -> "ScoreBuffers":
        """Scores of ignored tokens."""
        stats = TokenStats.zeros_like(labels, dtype) if _OF_STATS.intersection(outputs) else None
        losses, lse, lse_error = (torch.zeros_like(labels, dtype=dtype) for _ in range(3))
        if stats is not None:
            losses, lse = stats.losses, stats.lse
        more = (torch.zeros_like(lse) if name in outputs else None for name in ("mean_logit", "log_sum_sq_probs"))
        return cls(losses, lse, lse_error, stats, *more)

    def mark_unknown(self, labels: Tensor, ignore_index: int) -> None:
        """Fills floating-point scores of tokens that are not ignored with NaN."""
        for each in (self.losses, self.lse, *(self.stats or ())[:4], self.mean_logit, self.log_sum_sq_probs):
            if each is not None:
                each.masked_fill_(labels != ignore_index, torch.nan)

    def scores(self, outputs: Collection[str], index: Tensor | None = None) -> TokenScores:
        """The scores, of some tokens if an index is given."""
        stats = self.stats
        found = {
            "log_probs": self.losses,
            "entropy": stats and stats.entropy,
            "lse": self.lse,
            "mean_logit": self.mean_logit,
            "predictions": stats and stats.predictions,
            "correct": stats and stats.correct,
            "log_sum_sq_probs": self.log_sum_sq_probs,
        }
        some: dict[str, Tensor] = {}
        for name in outputs:
            score = found[name]
            assert score is not None  # every output has its buffer
            score = score.clone() if index is None else score[index]
            # Rounding must not make a certain token more than certain.
            score = (0.0 - score).clamp_(max=0.0) if name == "log_probs" else score
            some[name] = score.clamp_(min=0.0) if name == "entropy" else score
        return TokenScores(**some)


def score_rows(
    logits: Tensor,
    labels: Tensor,
    options: TokenLossOptions,
    buffers: ScoreBuffers,
    *,
    temperature: Tensor | None,
    token_index: Tensor | None,
    with_gradient: bool = False,
) -> None:
    """Writes the scores of some tokens to the buffers.

    Args:
        logits: ``[num_rows, vocab_size]``, unit stride in the last dimension.
        labels: Of all tokens, ``[num_tokens]``.
        options: Their ``ignore_index``, ``softcap`` and ``logit_scale`` are used.
        buffers: Written at these tokens.
        temperature: Of all tokens, ``[num_tokens]`` in the buffers' dtype, or None.
        token_index: The token of each row; None if rows are all tokens in order.
        with_gradient: Whether to overwrite the logits with the gradient of their summed ``losses``.
    """
    if backend.use_triton(logits):
        launch_loss(
            logits, Targets(labels, None, None), None, options, losses=buffers.losses, lse=buffers.lse,
            lse_error=buffers.lse_error, stats=buffers.stats, mean_logit=buffers.mean_logit,
            log_sum_sq_probs=buffers.log_sum_sq_probs, temperature=temperature,
            grad_logits=logits if with_gradient else None, token_index=token_index,
        )  # fmt: skip
        return
    some = _score_rows_reference(logits, at(labels, token_index), options, buffers, at(temperature, token_index))
    store_rows(buffers, some, token_index)
    if with_gradient:
        rows = gradient_rows(
            at(labels, token_index), options, some.lse, some.lse_error, None, Coefficients(-torch.ones_like(some.lse)),
            temperature=at(temperature, token_index), num_columns=logits.shape[1],
        )  # fmt: skip
        gradient_of_rows_in_place(logits, rows, None, options)


def at(tensor: Any, index: Tensor | None) -> Any:
    """The tensor at an index, if there are both."""
    return tensor if tensor is None or index is None else tensor[index]


def store_rows(buffers: ScoreBuffers, rows: ScoreBuffers, token_index: Tensor | None) -> None:
    """Copies the scores of some tokens to those of all."""

    def store(whole: Tensor | None, part: Tensor | None) -> None:
        if whole is not None and part is not None:
            if token_index is None:
                whole.copy_(part)
            else:
                whole.index_copy_(0, token_index, part.to(whole.dtype))

    for name, whole in buffers._asdict().items():
        if name != "stats":
            store(whole, getattr(rows, name))
    for whole, part in zip((buffers.stats or ())[1:], (rows.stats or ())[1:], strict=True):
        store(whole, part)


def _score_rows_reference(
    logits: Tensor, labels: Tensor, options: TokenLossOptions, buffers: ScoreBuffers, temperature: Tensor | None
) -> ScoreBuffers:
    """The rows' scores, with sums and lse in float64."""
    z = transform_logits(logits, options, temperature)
    kept = labels != options.ignore_index
    in_range = (labels >= 0) & (labels < z.shape[1])
    maximum, predictions = z.max(-1)
    shift = maximum.where(maximum > -torch.inf, 0.0)
    excess = z - shift[:, None]
    numerator = excess.exp()
    normaliser = numerator.sum(-1, dtype=torch.float64)
    lse = shift + normaliser.log()
    of_label = z.gather(1, labels.where(in_range, 0)[:, None])[:, 0]
    losses = (lse - of_label).where(in_range, torch.nan)
    rounded = lse.to(z.dtype)
    stats = mean = squares = None
    if buffers.stats is not None:
        excess = torch.where(numerator > 0, numerator * excess, 0.0).sum(-1, dtype=torch.float64)
        entropy = normaliser.log() - excess / normaliser
        predictions = predictions.where(kept, options.ignore_index)
        floats = (each.where(kept, 0.0).to(z.dtype) for each in (losses, -losses, lse, entropy))
        stats = TokenStats._make((*floats, predictions, kept & (predictions == labels)))
    if buffers.mean_logit is not None:
        mean = (z.sum(-1, dtype=torch.float64) / z.shape[1]).where(kept, 0.0).to(z.dtype)
    if buffers.log_sum_sq_probs is not None:
        squares = numerator.square().sum(-1, dtype=torch.float64).log() - 2 * normaliser.log()
        squares = squares.where(kept, 0.0).to(z.dtype)
    known = (each.where(kept, 0.0).to(z.dtype) for each in (losses, lse, (lse - rounded).nan_to_num(0.0)))
    return ScoreBuffers._make((*known, stats, mean, squares))


class Coefficients(NamedTuple):
    """Upstream gradients of the differentiable scores, ``[num_rows]`` each; None for zeros."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logit: Tensor | None = None

    def any(self, like: Tensor) -> Tensor:
        """Which rows have one that is not zero, in the shape of ``like``."""
        found = torch.zeros_like(like, dtype=torch.bool)
        for each in self:
            if each is not None:
                found |= each != 0
        return found


def gradient_rows(
    labels: Tensor,
    options: TokenLossOptions,
    lse: Tensor,
    lse_error: Tensor,
    entropy: Tensor | None,
    coefficients: Coefficients,
    *,
    temperature: Tensor | None,
    num_columns: int,
    shard: VocabShard | None = None,
) -> GradientRows:
    """The factors of the gradient of rows of logits.

    Args:
        labels: Of the rows, ``[num_rows]``, as all others.
        options: As for :func:`score_rows`.
        lse, lse_error: See :class:`ScoreBuffers`.
        entropy: Known if it has a coefficient.
        coefficients: Those of ignored tokens have no effect.
        temperature: Of the rows, or None.
        num_columns: Classes of the rows.
        shard: Their place in the vocabulary, if they are part of one.
    """
    first, vocab_size = (0, num_columns) if shard is None else (shard.start, shard.vocab_size)
    own_labels = labels - first
    has_label = (labels != options.ignore_index) & (own_labels >= 0) & (own_labels < num_columns)
    kept = (labels != options.ignore_index) & coefficients.any(labels)
    of_log_probs, of_entropy, of_lse, of_mean = (None if each is None else each.to(lse.dtype) for each in coefficients)
    zeros = torch.zeros_like(lse)
    scale = zeros + options.logit_scale if temperature is None else options.logit_scale / temperature
    label_term = probability_factor = smoothing_term = zeros
    entropy_factor = None
    if of_log_probs is not None:
        of_log_probs = of_log_probs.where((labels >= 0) & (labels < vocab_size), torch.nan)
        probability_factor = label_term = -of_log_probs
    if of_lse is not None:
        probability_factor = probability_factor + of_lse
    if of_entropy is not None:
        assert entropy is not None
        probability_factor = probability_factor - of_entropy * entropy
        entropy_factor = -of_entropy * scale
    if of_mean is not None:
        smoothing_term = of_mean / -vocab_size
    return GradientRows(
        own_labels.where(has_label, -1),
        kept,
        lse,
        lse_error,
        probability_factor * scale,
        label_term * scale,
        smoothing_term * scale,
        entropy_factor,
        temperature,
    )


def rows_at(rows: GradientRows, index: Tensor | None) -> GradientRows:
    """The rows of an index."""
    return rows if index is None else GradientRows(*(at(each, index) for each in rows))


def options_of_gradient(options: TokenLossOptions, coefficients: Coefficients) -> TokenLossOptions:
    """The options by which a gradient of these coefficients is taken."""
    ignore_index, _, *others = options.as_scalars()
    return TokenLossOptions.from_scalars(ignore_index, float(coefficients.mean_logit is not None), *others)


@dataclass
class RowScorer:
    """Scores the rows of chunks, and turns them into their gradient."""

    labels: Tensor
    """Of all tokens, as the temperature."""
    options: TokenLossOptions
    temperature: Tensor | None
    buffers: ScoreBuffers
    shard: VocabShard | None

    def score(self, logits: Tensor, index: Tensor | None, *, with_gradient: bool = False) -> None:
        """:func:`score_rows`, of a shard if there is one."""
        if self.shard is None:
            score_rows(
                logits, self.labels, self.options, self.buffers, temperature=self.temperature, token_index=index,
                with_gradient=with_gradient,
            )  # fmt: skip
            return
        score_rows_of_shard(
            logits, at(self.labels, index), self.options, self.buffers, self.shard,
            temperature=at(self.temperature, index), token_index=index,
        )  # fmt: skip
        if with_gradient:
            minus_ones = logits.new_full(logits.shape[:1], -1.0, dtype=self.buffers.lse.dtype)
            self.to_gradient(logits, index, Coefficients(log_probs=minus_ones))

    def to_gradient(self, logits: Tensor, index: Tensor | None, coefficients: Coefficients) -> None:
        """Overwrites scored logits with their gradient, for coefficients of these rows."""
        stats = self.buffers.stats
        rows = gradient_rows(
            at(self.labels, index), self.options, at(self.buffers.lse, index), at(self.buffers.lse_error, index),
            None if stats is None else at(stats.entropy, index), coefficients, temperature=at(self.temperature, index),
            num_columns=logits.shape[1], shard=self.shard,
        )  # fmt: skip
        gradient_of_rows_in_place(logits, rows, None, options_of_gradient(self.options, coefficients))


def score_rows_of_shard(
    logits: Tensor,
    labels: Tensor,
    options: TokenLossOptions,
    buffers: ScoreBuffers,
    shard: VocabShard,
    *,
    temperature: Tensor | None,
    token_index: Tensor | None,
) -> None:
    """:func:`score_rows` for a shard of the logits; ``labels`` and ``temperature`` are those of the rows.

    Ranks exchange a few float64 numbers for each token, as in :mod:`liger_ops.loss.vocab_parallel`.
    """
    num_columns = logits.shape[1]
    kept = labels != options.ignore_index
    own_labels = labels - shard.start
    has_label = kept & (own_labels >= 0) & (own_labels < num_columns)
    # Each kept row's label is its first class, as the kernels want one.
    own_options = TokenLossOptions(-1, 0.0, options.softcap, options.logit_scale)
    wanted = {"entropy": buffers.stats, "mean_logit": buffers.mean_logit, "log_sum_sq_probs": buffers.log_sum_sq_probs}
    names = [name for name, buffer in wanted.items() if buffer is not None]
    own = ScoreBuffers.zeros(labels, buffers.lse.dtype, names)
    if num_columns:
        score_rows(logits, kept.long() - 1, own_options, own, temperature=temperature, token_index=None)

    def value_of(classes: Tensor) -> Tensor:
        """The transformed logit of a class of each row."""
        if not num_columns:
            return torch.full_like(own.lse, -torch.inf)
        return transform_logits(logits.gather(1, classes[:, None]), options, temperature)[:, 0]

    lse = own.lse.double() + own.lse_error.double().masked_fill(own.lse == -torch.inf, 0.0)
    lse = lse if num_columns else torch.full_like(lse, -torch.inf)
    sent = [lse, value_of(own_labels.where(has_label, 0)).where(has_label, 0.0)]
    if own.stats is not None:
        predictions = own.stats.predictions.clamp(min=0)
        sent += [own.stats.entropy, value_of(predictions), shard.start + predictions]
    if own.mean_logit is not None:
        sent.append(own.mean_logit.double() * num_columns)
    if own.log_sum_sq_probs is not None:
        sent.append((own.log_sum_sq_probs + 2 * lse).where(lse > -torch.inf, -torch.inf))
    of_rank = torch.stack([each.double() for each in sent])
    lse_of_ranks, of_label, *details = all_gather(of_rank, shard.group).unbind(1)

    lse = lse_of_ranks.logsumexp(0)
    rounded = lse.to(own.lse.dtype)
    in_range = (labels >= 0) & (labels < shard.vocab_size)
    losses = (lse - of_label.sum(0)).where(in_range, torch.nan)
    stats = mean = squares = None
    if buffers.stats is not None:
        entropies, maxima, predictions = details[:3]
        share = (lse_of_ranks - lse).exp()
        entropy = (share * (entropies + lse - lse_of_ranks)).where(share > 0, 0.0).sum(0)
        first = predictions.where(maxima == maxima.amax(0), shard.vocab_size - 1).amin(0).long()
        floats = (each.where(kept, 0.0) for each in (losses, -losses, lse, entropy))
        stats = TokenStats._make((*floats, first.where(kept, options.ignore_index), kept & (first == labels)))
    if buffers.mean_logit is not None:
        mean = (details[3 if stats else 0].sum(0) / shard.vocab_size).where(kept, 0.0)
    if buffers.log_sum_sq_probs is not None:
        squares = (details[-1].logsumexp(0) - 2 * lse).where(kept, 0.0)
    known = (each.where(kept, 0.0) for each in (losses, lse, (lse - rounded).nan_to_num(0.0)))
    store_rows(buffers, ScoreBuffers._make((*known, stats, mean, squares)), token_index)
