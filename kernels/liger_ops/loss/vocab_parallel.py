"""Cross entropy over a vocabulary whose logits are spread over the ranks of a process group.

Each rank holds some rows of the head and computes their logits, for the same tokens. With V_i classes on rank i, the
whole distribution follows from a few numbers for each token and rank, and only these are exchanged:

    lse      = log(sum_i(exp(lse_i)))
    entropy  = sum_i(p_i * (entropy_i + lse - lse_i))        p_i = exp(lse_i - lse), the probability of rank i's classes
    sum_c(w[c] * (lse - z[c])) = sum(w) * lse - sum_i(weighted_i)

The gradient of a rank's logits then needs nothing but lse, so logits are never sent. There is one collective for each
chunk of tokens, in float64, in which sums over a few ranks add no error that matters; and one for the gradient of the
hidden states, of which each rank has a part. The split is that of Megatron-LM
(arXiv:1909.08053); see :mod:`liger_ops.loss.cross_entropy` for the loss and its options.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_bool, check_integer, wrong_type
from liger_ops.collectives import all_gather
from liger_ops.loss.cross_entropy import transform_logits
from liger_ops.loss.launch import GradientRows, launch_loss, launch_shard_gradient
from liger_ops.loss.options import Targets, TokenLossOptions, TokenStats


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head that this rank holds; the other ranks of the group hold the others.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For a vocabulary without classes.
    """

    group: dist.ProcessGroup
    """The ranks that share the head; each has the same tokens."""
    start: int
    """The class of this rank's first row."""
    vocab_size: int
    """Classes of all ranks together."""
    sums_input_gradient: bool = True
    """Whether the gradient of the hidden states is summed over ranks. Otherwise it is this rank's part, and the caller
    sums it."""

    def __post_init__(self) -> None:
        if not isinstance(self.group, dist.ProcessGroup):
            raise wrong_type("group", "a torch.distributed.ProcessGroup", self.group)
        check_integer("start", self.start)
        check_integer("vocab_size", self.vocab_size, at_least=1)
        check_bool("sums_input_gradient", self.sums_input_gradient)

    def check(self, num_rows: int) -> None:
        """Raises a ValueError if a shard of ``num_rows`` rows is not inside the vocabulary."""
        if not 0 <= self.start <= self.start + num_rows <= self.vocab_size:
            raise ValueError(
                f"vocab_shard must lie within its vocab_size = {self.vocab_size}, got {num_rows} rows of linear_weight"
                f" from start = {self.start} on"
            )

    def sum_input_gradients(self, *gradients: Tensor) -> None:
        """Sums gradients over ranks in place; skips empty tensors."""
        for gradient in gradients:
            if self.sums_input_gradient and gradient.numel():
                dist.all_reduce(gradient, group=self.group)


def sharded_loss_and_gradient_in_place(
    logits: Tensor,
    targets: Targets,
    grad_scale: Tensor | None,
    options: TokenLossOptions,
    *,
    shard: VocabShard,
    token_index: Tensor | None,
    with_gradient: bool,
    losses: Tensor,
    stats: TokenStats | None,
) -> None:
    """:func:`~liger_ops.loss.cross_entropy.loss_and_gradient_in_place` for a shard of the logits.

    Args:
        logits: ``[num_rows, shard's rows]``, unit stride in the last dimension.
        targets: Labels and class weights of the whole vocabulary.
        grad_scale, options, token_index, with_gradient, losses, stats: As for ``loss_and_gradient_in_place``.
        shard: The columns' place in the vocabulary, and the ranks that have the others.
    """

    def of_rows(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 0 or token_index is None else tensor[token_index]

    labels, class_weight = of_rows(targets.labels), targets.class_weight
    token_weight = None if targets.token_weight is None else of_rows(targets.token_weight)
    kept = labels != options.ignore_index
    in_range = (labels >= 0) & (labels < shard.vocab_size)
    own_weight = None if class_weight is None else class_weight[shard.start : shard.start + logits.shape[1]]
    own_labels = labels - shard.start
    own_labels = own_labels.where(kept & (own_labels >= 0) & (own_labels < logits.shape[1]), -1)

    own = _summarise(logits, own_labels, kept, own_weight, options, shard.start, stats is not None)
    lse_of_ranks, of_label, weighted, *details = all_gather(own, shard.group).unbind(1)

    lse = lse_of_ranks.logsumexp(0)
    log_probability = (of_label.sum(0) - lse).where(in_range, torch.nan)
    label_weight, weight_sum = torch.ones_like(lse), torch.full_like(lse, shard.vocab_size)
    if class_weight is not None:
        label_weight, weight_sum = class_weight.double()[labels.where(in_range, 0)], class_weight.sum(dtype=own.dtype)
    smoothing = options.label_smoothing / shard.vocab_size
    label_weight = ((1.0 - options.label_smoothing) * label_weight).where(in_range, torch.nan)
    values = options.z_loss_weight * lse**2 - label_weight * log_probability
    if smoothing:
        values += smoothing * (weight_sum * lse - weighted.sum(0))
    if token_weight is not None:
        values *= token_weight
    known = [values]
    if stats is not None:
        entropies, maxima, predictions = details
        share = (lse_of_ranks - lse).exp()
        entropy = (share * (entropies + lse - lse_of_ranks)).where(share > 0, 0.0).sum(0)
        first = predictions.where(maxima == maxima.amax(0), shard.vocab_size - 1).amin(0).long()
        known += [log_probability, lse, entropy, first, first == labels]
    ignored = (0.0, 0.0, 0.0, 0.0, options.ignore_index, False)
    for whole, part, value in zip((losses, *(stats or ())[1:]), known, ignored, strict=False):
        part = part.where(kept, value).to(whole.dtype)
        if token_index is None:
            whole.copy_(part)
        else:
            whole.index_copy_(0, token_index, part)

    if with_gradient:
        factor = torch.full_like(lse, options.logit_scale)
        if grad_scale is not None:
            factor = factor * of_rows(grad_scale)
        if token_weight is not None:
            factor = factor * token_weight
        probability_factor = (label_weight + smoothing * weight_sum + 2.0 * options.z_loss_weight * lse) * factor
        rounded = lse.to(losses.dtype)
        floats = lse - rounded, probability_factor, label_weight * factor, smoothing * factor
        rows = GradientRows(own_labels, kept, rounded, *(each.to(losses.dtype) for each in floats))
        gradient_of_rows_in_place(logits, rows, own_weight, options)


def _summarise(
    logits: Tensor,
    labels: Tensor,
    kept: Tensor,
    class_weight: Tensor | None,
    options: TokenLossOptions,
    start: int,
    with_stats: bool,
) -> Tensor:
    """The numbers of each row that are sent to the other ranks: ``[3, num_rows]``, or 6 with stats, float64.

    Its lse; the transformed logit of its label, 0 if another rank has it; the sum of transformed logits by class
    weight, 0 without label smoothing. Then its entropy, its largest transformed logit and the class of that.
    """
    num_rows, num_classes = logits.shape
    if num_classes == 0:
        nothing = [-torch.inf, 0.0, 0.0, 0.0, -torch.inf, 0.0][: 6 if with_stats else 3]
        return torch.tensor(nothing, dtype=torch.float64, device=logits.device)[:, None].repeat(1, num_rows)
    summarise = _summarise_by_kernel if backend.use_triton(logits) else _summarise_reference
    lse, weighted, *details = summarise(logits, kept, class_weight, options, with_stats)

    def value_of(classes: Tensor) -> Tensor:
        return transform_logits(logits.gather(1, classes[:, None])[:, 0], options)

    of_label = value_of(labels.clamp(min=0)).where(labels >= 0, 0.0)
    if with_stats:
        entropy, predictions = details
        details = [entropy, value_of(predictions), start + predictions]
    return torch.stack([each.double() for each in (lse, of_label, weighted, *details)])


def _summarise_by_kernel(
    logits: Tensor, kept: Tensor, class_weight: Tensor | None, options: TokenLossOptions, with_stats: bool
) -> list[Tensor]:
    """As :func:`_summarise_reference`, by the kernel of whole rows, for which each kept row's label is its first."""
    smoothed = float(options.label_smoothing > 0.0)  # fully, so that the loss yields the sum of logits by class weight
    of_shard = TokenLossOptions(-1, smoothed, options.softcap, options.logit_scale)
    labels = kept.long() - 1
    stats = TokenStats.zeros_like(labels, torch.float32)
    lse_error = torch.zeros_like(stats.lse)
    launch_loss(
        logits, Targets(labels, class_weight, None), None, of_shard,
        losses=stats.losses, lse=stats.lse, lse_error=lse_error, stats=stats if with_stats else None,
    )  # fmt: skip
    is_empty = stats.lse == -torch.inf  # of classes that are all impossible; the error is NaN then
    lse = stats.lse.double() + lse_error.double().masked_fill(is_empty, 0.0)
    weighted = torch.zeros_like(lse)
    if smoothed:
        num_classes = logits.shape[1]
        weight_sum = num_classes if class_weight is None else class_weight.sum(dtype=torch.float64)
        weighted = (weight_sum * lse - stats.losses.double() * num_classes).masked_fill(is_empty, -torch.inf)
    return [lse, weighted, *((stats.entropy, stats.predictions.clamp(min=0)) if with_stats else ())]


def _summarise_reference(
    logits: Tensor, kept: Tensor, class_weight: Tensor | None, options: TokenLossOptions, with_stats: bool
) -> list[Tensor]:
    """Of each row its lse, the sum of transformed logits by class weight, its entropy and its prediction."""
    z = transform_logits(logits, options)
    maximum, predictions = z.max(-1)
    shift = maximum.where(maximum > -torch.inf, 0.0)
    numerator = (z - shift[:, None]).exp()
    normaliser = numerator.sum(-1, dtype=torch.float64)
    lse = shift + normaliser.log()
    weighted = torch.zeros_like(lse)
    if options.label_smoothing:
        weighted = (z if class_weight is None else z * class_weight.to(z.dtype)).sum(-1, dtype=torch.float64)
    if not with_stats:
        return [lse, weighted]
    expected_excess = torch.xlogy(numerator, numerator).sum(-1, dtype=torch.float64)
    return [lse, weighted, normaliser.log() - expected_excess / normaliser, predictions]


def _gradient_reference(
    logits: Tensor, rows: GradientRows, class_weight: Tensor | None, options: TokenLossOptions
) -> Tensor:
    """The gradient of some rows or parts of rows of logits, in at least float32."""
    z = transform_logits(logits, options, rows.temperature)
    log_probs = z - rows.lse[:, None] - rows.lse_error[:, None]
    grad = log_probs.exp() * rows.probability_factor[:, None]
    if rows.entropy_factor is not None:
        grad += torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0) * rows.entropy_factor[:, None]
    if options.label_smoothing:
        grad -= rows.smoothing_term[:, None] * (1.0 if class_weight is None else class_weight.to(z.dtype))
    is_label = rows.labels[:, None] == torch.arange(z.shape[1], device=z.device)
    grad -= is_label * rows.label_term[:, None]
    if options.softcap is not None:
        capped = z if rows.temperature is None else z * rows.temperature[:, None]
        grad *= 1 - (capped / options.softcap) ** 2
    return grad.masked_fill_(~rows.kept[:, None], 0.0)


def gradient_of_rows_in_place(
    logits: Tensor, rows: GradientRows, class_weight: Tensor | None, options: TokenLossOptions
) -> None:
    """Overwrites some rows or parts of rows of logits with their gradient; ``class_weight`` is that of the columns."""
    if backend.use_triton(logits):
        launch_shard_gradient(logits, rows, class_weight, options)
    else:
        logits.copy_(_gradient_reference(logits, rows, class_weight, options))
