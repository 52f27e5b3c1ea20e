"""Rows of logits to statistics, losses and gradients: by kernels, in plain PyTorch, of all or of a part of the classes.

Losses and scores of a token are functions of a few statistics of its logits z (scaled, soft-capped and divided by the
temperature): lse = log(sum(exp(z))), the label's z, the entropy, the sum of z by class weight, log(sum(exp(2 * z))) and
the largest z. Their gradients are those of :class:`~liger_ops.loss.launch.GradientRows`.

Ranks of a :class:`~liger_ops.loss.vocab_parallel.VocabShard` exchange these statistics of their classes, in float64, in
which sums over a few ranks add no error that matters:

    lse     = log(sum_i(exp(lse_i)))
    entropy = sum_i(p_i * (entropy_i + lse - lse_i))        p_i = exp(lse_i - lse), the probability of rank i's classes
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.collectives import all_gather
from liger_ops.loss.launch import GradientRows, launch_gradient, launch_loss
from liger_ops.loss.options import Targets, TokenLossOptions
from liger_ops.loss.vocab_parallel import VocabShard

_DTYPES = {"predictions": torch.int64, "correct": torch.bool}


def transform_logits(logits: Tensor, options: TokenLossOptions, temperature: Tensor | None = None) -> Tensor:
    """Scales and soft-caps logits of any shape, in at least float32; divides them by each row's temperature."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z if options.logit_scale == 1.0 else z * options.logit_scale
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    return z if temperature is None else z / temperature[..., None]


def at(tensor: Any, index: Tensor | None) -> Any:
    """The tensor at an index, if there are both and it has a dimension."""
    return tensor if tensor is None or index is None or tensor.dim() == 0 else tensor[index]


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a statistic, where floating-point ones have ``dtype``."""
    return _DTYPES.get(name, dtype)


@dataclass(frozen=True)
class TokenRows:
    """Tokens whose logits come in rows: what their loss is made of, and buffers for what is computed of them."""

    targets: Targets
    options: TokenLossOptions
    buffers: Mapping[str, Tensor]  # [num_tokens] by names of loss.launch.ROW_OUTPUTS, at least float32
    temperature: Tensor | None = None  # [num_tokens], at least float32, or None: divides logit_scale and softcap
    shard: VocabShard | None = None
    """The rows' place in the vocabulary, if they are a part of one; labels and class weights are of all of it."""

    @classmethod
    def allocate(
        cls,
        targets: Targets,
        options: TokenLossOptions,
        names: Collection[str],
        dtype: torch.dtype,
        temperature: Tensor | None = None,
        shard: VocabShard | None = None,
        *,
        are_unknown: bool = False,
    ) -> "TokenRows":
        """Buffers with the values of ignored tokens; NaN at all others if these ``are_unknown``, as some may stay."""
        labels = targets.labels
        buffers = {name: torch.zeros_like(labels, dtype=dtype_of(name, dtype)) for name in names}
        for name, buffer in buffers.items():
            if name == "predictions":
                buffer.copy_(labels)
            elif are_unknown and buffer.is_floating_point():
                buffer.masked_fill_(labels != options.ignore_index, torch.nan)
        return cls(targets, options, buffers, temperature, shard)

    def values(self, name: str, index: Tensor | None = None) -> Tensor:
        """A buffer, of some tokens if an index is given; rounding makes no token more than certain."""
        value: Tensor = at(self.buffers[name], index)
        bounds = {"log_probs": {"max": 0.0}, "entropy": {"min": 0.0}}.get(name)
        return value if bounds is None else value.clamp(**bounds)

    def write(
        self, logits: Tensor, index: Tensor | None, grad_scale: Tensor | None = None, *, with_gradient: bool = False
    ) -> None:
        """Computes the buffers' values of some tokens; arguments as for :func:`~liger_ops.loss.launch.launch_loss`.

        ``with_gradient`` overwrites the logits with the gradient of ``sum(losses * grad_scale)``.
        """
        if self.shard is None and backend.use_triton(logits):
            launch_loss(
                logits, self.targets, self.options, self.buffers, grad_scale=grad_scale, temperature=self.temperature,
                grad_logits=logits if with_gradient else None, token_index=index,
            )  # fmt: skip
            return
        own = self.at(index)
        found = own._statistics(logits, self.buffers.keys())
        kept = own.targets.labels != self.options.ignore_index
        for name, buffer in self.buffers.items():
            value = found[name].where(kept, self.options.ignore_index if name == "predictions" else 0).to(buffer.dtype)
            if index is None:
                buffer.copy_(value)
            else:
                buffer.index_copy_(0, index, value)
        if with_gradient:
            lse = found["lse"].to(torch.promote_types(logits.dtype, torch.float32))
            scale = torch.ones_like(lse) if grad_scale is None else at(grad_scale, index)
            own.loss_to_gradient(logits, lse, found["lse_error"].to(lse.dtype), scale)

    def at(self, index: Tensor | None) -> "TokenRows":
        """Some tokens, without buffers."""
        labels, class_weight, token_weight = self.targets
        targets = Targets(at(labels, index), class_weight, at(token_weight, index))
        return TokenRows(targets, self.options, {}, at(self.temperature, index), self.shard)

    def to_gradient(self, logits: Tensor, index: Tensor | None, upstream: Mapping[str, Tensor | None]) -> None:
        """Overwrites logits whose lse, its error and, if need be, entropy are in the buffers with their gradient.

        ``upstream`` has the gradients of these rows' scores, by name; see :meth:`gradient_rows`.
        """
        lse, lse_error, entropy = (at(self.buffers.get(name), index) for name in ("lse", "lse_error", "entropy"))
        rows = self.at(index).gradient_rows(lse, lse_error, upstream, logits.shape[1], entropy=entropy)
        gradient_in_place(logits, rows, self.options, None)

    def loss_to_gradient(self, logits: Tensor, lse: Tensor, lse_error: Tensor, grad_scale: Tensor) -> None:
        """Overwrites the logits of all tokens with the gradient of ``sum(losses * grad_scale)``."""
        upstream, num_columns = {"losses": grad_scale.expand_as(lse)}, logits.shape[1]
        rows = self.gradient_rows(lse, lse_error, upstream, num_columns, skips_zeros=False)
        own = own_classes(self.targets.class_weight, num_columns, self.shard)
        gradient_in_place(logits, rows, self.options, own)

    def gradient_rows(
        self,
        lse: Tensor,
        lse_error: Tensor,
        upstream: Mapping[str, Tensor | None],
        num_columns: int,
        *,
        entropy: Tensor | None = None,
        skips_zeros: bool = True,
    ) -> GradientRows:
        """What the gradient of tokens' logits is made of.

        Args:
            lse, lse_error, entropy: ``[num_tokens]``; the last if it has an upstream gradient.
            upstream: Gradients of ``losses``, ``log_probs``, ``entropy``, ``lse`` and ``mean_logit``, ``[num_tokens]``
                each; None and those that are left out are zeros, and those of ignored tokens have no effect.
            num_columns: Classes of the logits.
            skips_zeros: Whether tokens that have no upstream gradient but zeros are left out, as ignored ones are.
        """
        (labels, _, token_weight), options = self.targets, self.options
        shard, temperature = self.shard, self.temperature
        first, vocab_size = (0, num_columns) if shard is None else (shard.start, shard.vocab_size)
        given = {name: gradient.to(lse.dtype) for name, gradient in upstream.items() if gradient is not None}
        probability_factor = label_term = torch.zeros_like(lse)
        smoothing_term = entropy_factor = None
        if "losses" in given:
            label_weight, weight_sum = self._label_weights(vocab_size, lse)
            grad_loss = given["losses"] if token_weight is None else given["losses"] * token_weight.to(lse.dtype)
            label_term = label_weight * grad_loss
            smoothing = options.label_smoothing / vocab_size * grad_loss
            probability_factor = label_term + weight_sum * smoothing + 2.0 * options.z_loss_weight * lse * grad_loss
            smoothing_term = smoothing if options.label_smoothing else None
        if "log_probs" in given:
            grad_label = given["log_probs"].where((labels >= 0) & (labels < vocab_size), torch.nan)
            probability_factor = label_term = -grad_label
        if "lse" in given:
            probability_factor = probability_factor + given["lse"]
        if "entropy" in given:
            assert entropy is not None
            probability_factor = probability_factor - given["entropy"] * entropy
            entropy_factor = -given["entropy"]
        if "mean_logit" in given:
            smoothing_term = given["mean_logit"] / -vocab_size
        own_labels = labels - first
        kept = labels != options.ignore_index
        is_own = kept & (own_labels >= 0) & (own_labels < num_columns)
        if skips_zeros:
            is_wanted = torch.zeros_like(kept)
            for gradient in given.values():
                is_wanted |= gradient != 0
            kept = kept & is_wanted
        scale = options.logit_scale if temperature is None else options.logit_scale / temperature
        factors = probability_factor, label_term, smoothing_term, entropy_factor
        scaled = (None if each is None else each * scale for each in factors)
        return GradientRows._make((own_labels.where(is_own, -1), lse, lse_error, *scaled, temperature, kept))

    def _statistics(self, logits: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """All ``ROW_OUTPUTS`` that follow from what ``names`` take, of each row, float64; of ignored rows anything."""
        (labels, class_weight, token_weight), options, shard = self.targets, self.options, self.shard
        num_columns = logits.shape[1]
        first, vocab_size = (0, num_columns) if shard is None else (shard.start, shard.vocab_size)
        own_labels = labels - first
        own_labels = own_labels.where((own_labels >= 0) & (own_labels < num_columns), -1)
        wanted = {"lse", "label_z"}
        wanted |= {"weighted"} if options.label_smoothing or "mean_logit" in names else set()
        if {"entropy", "predictions", "correct"}.intersection(names):
            wanted |= {"entropy", "largest", "predictions"}
        wanted |= {"lse_of_squares"} if "log_sum_sq_probs" in names else set()
        weight = own_classes(class_weight, num_columns, shard)
        own = TokenRows(Targets(own_labels, weight, None), options, {}, self.temperature)
        by_kernel = shard is not None and num_columns > 0 and backend.use_triton(logits)
        sent = (_sum_classes_by_kernel if by_kernel else _sum_classes)(logits, own, wanted)
        if shard is not None:
            sent["predictions"] = sent.get("predictions", sent["lse"]) + first
            sent = _merge({name: value for name, value in sent.items() if name in wanted}, shard)
        lse, in_range = sent["lse"], (labels >= 0) & (labels < vocab_size)
        found = {"lse": lse, "log_probs": (sent["label_z"] - lse).where(in_range, torch.nan)}
        rounded = lse.to(torch.promote_types(logits.dtype, torch.float32))
        found["lse_error"] = (lse - rounded).nan_to_num(0.0)  # of classes that are all impossible
        if "predictions" in wanted:
            predictions = sent["predictions"].long()
            found |= {"entropy": sent["entropy"], "predictions": predictions, "correct": predictions == labels}
        if "weighted" in wanted:
            found["mean_logit"] = sent["weighted"] / vocab_size
        if "lse_of_squares" in wanted:
            found["log_sum_sq_probs"] = sent["lse_of_squares"] - 2.0 * lse
        label_weight, weight_sum = self._label_weights(vocab_size, lse)
        losses = options.z_loss_weight * lse**2 - label_weight * found["log_probs"]
        if options.label_smoothing:
            losses = losses + options.label_smoothing / vocab_size * (weight_sum * lse - sent["weighted"])
        found["losses"] = losses if token_weight is None else losses * token_weight
        return found

    def _label_weights(self, vocab_size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """``(1 - label_smoothing)`` times each label's weight, NaN if it is no class; the sum of all weights."""
        labels, class_weight, _ = self.targets
        in_range = (labels >= 0) & (labels < vocab_size)
        weight, total = torch.ones_like(like), torch.full_like(like, vocab_size)
        if class_weight is not None:
            weight, total = class_weight.to(like.dtype)[labels.where(in_range, 0)], class_weight.sum(dtype=like.dtype)
        return ((1.0 - self.options.label_smoothing) * weight).where(in_range, torch.nan), total


def own_classes(class_weight: Tensor | None, num_columns: int, shard: VocabShard | None) -> Tensor | None:
    """The class weights of a shard's columns."""
    if class_weight is None or shard is None:
        return class_weight
    return class_weight[shard.start : shard.start + num_columns]


def _sum_classes(logits: Tensor, rows: TokenRows, wanted: Set[str]) -> dict[str, Tensor]:
    """Statistics of the classes of these columns: those of an empty sum if there are none; float64.

    Labels are columns, or -1 where the label is none of them.
    """
    (labels, class_weight, _), options = rows.targets, rows.options
    if not logits.shape[1]:
        nothing = {"label_z": 0.0, "weighted": 0.0, "entropy": 0.0, "predictions": 0.0}
        return {name: torch.full_like(labels, nothing.get(name, -torch.inf), dtype=torch.float64) for name in wanted}
    z = transform_logits(logits, options, rows.temperature)
    largest, predictions = z.max(-1)
    shift = largest.where(largest > -torch.inf, 0.0)
    excess = z - shift[:, None]
    numerator = excess.exp()
    normalizer = numerator.sum(-1, dtype=torch.float64)
    found = {"lse": shift + normalizer.log(), "largest": largest, "predictions": predictions}
    found["label_z"] = z.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(labels >= 0, 0.0)
    if "weighted" in wanted:
        found["weighted"] = (z if class_weight is None else z * class_weight.to(z.dtype)).sum(-1, dtype=torch.float64)
    if "entropy" in wanted:
        excess = torch.where(numerator > 0.0, numerator * excess, 0.0).sum(-1, dtype=torch.float64)
        found["entropy"] = normalizer.log() - excess / normalizer
    if "lse_of_squares" in wanted:
        found["lse_of_squares"] = numerator.square().sum(-1, dtype=torch.float64).log() + 2.0 * shift
    return {name: value.double() for name, value in found.items()}


def _sum_classes_by_kernel(logits: Tensor, rows: TokenRows, wanted: Set[str]) -> dict[str, Tensor]:
    """As :func:`_sum_classes`, by the kernel of whole rows, for which each row's label is its first class."""
    (labels, class_weight, _), options, temperature = rows.targets, rows.options, rows.temperature
    names = {"lse", "lse_error", "predictions"}
    names |= {"entropy"} & wanted | ({"mean_logit"} if "weighted" in wanted else set())
    names |= {"log_sum_sq_probs"} if "lse_of_squares" in wanted else set()
    column_options = TokenLossOptions(-1, softcap=options.softcap, logit_scale=options.logit_scale)
    targets = Targets(torch.zeros_like(labels), class_weight, None)
    found = dict(TokenRows.allocate(targets, column_options, names, torch.float32).buffers)
    launch_loss(logits, targets, column_options, found, temperature=temperature)

    def value_of(classes: Tensor) -> Tensor:
        return transform_logits(logits.gather(1, classes[:, None]), options, temperature)[:, 0]

    is_empty = found["lse"] == -torch.inf  # of classes that are all impossible; the error is NaN then
    found["lse"] = found["lse"].double() + found["lse_error"].double().masked_fill(is_empty, 0.0)
    found["label_z"] = value_of(labels.clamp(min=0)).where(labels >= 0, 0.0)
    found["predictions"] = found["predictions"].clamp(min=0)
    found["largest"] = value_of(found["predictions"])
    if "weighted" in wanted:
        found["weighted"] = found["mean_logit"].double() * logits.shape[1]
    if "lse_of_squares" in wanted:
        squares = found["log_sum_sq_probs"].double() + 2.0 * found["lse"]
        found["lse_of_squares"] = squares.where(~is_empty, -torch.inf)
    return {name: value.double() for name, value in found.items()}


def _merge(sums: dict[str, Tensor], shard: VocabShard) -> dict[str, Tensor]:
    """The statistics of all classes from those of each rank's."""
    gathered = all_gather(torch.stack([sums[name] for name in sorted(sums)]), shard.group).unbind(1)
    parts = dict(zip(sorted(sums), gathered, strict=True))
    whole: dict[str, Tensor] = {name: parts[name].logsumexp(0) for name in ("lse", "lse_of_squares") if name in parts}
    whole |= {name: parts[name].sum(0) for name in ("label_z", "weighted") if name in parts}
    if "entropy" in parts:
        share = (parts["lse"] - whole["lse"]).exp()
        entropy = share * (parts["entropy"] + whole["lse"] - parts["lse"])
        whole["entropy"] = entropy.where(share > 0.0, 0.0).sum(0)
        is_largest = parts["largest"] == parts["largest"].amax(0)
        whole["predictions"] = parts["predictions"].where(is_largest, shard.vocab_size - 1).amin(0)
    return whole


def gradient_in_place(
    logits: Tensor,
    rows: GradientRows,
    options: TokenLossOptions,
    class_weight: Tensor | None,
    index: Tensor | None = None,
) -> None:
    """Overwrites logits of some tokens with their gradient; ``class_weight`` is that of the columns."""
    if backend.use_triton(logits):
        launch_gradient(logits, logits, options, class_weight=class_weight, token_index=index, **rows._asdict())
        return
    rows = GradientRows(*(at(each, index) for each in rows))
    z = transform_logits(logits, options, rows.temperature)
    log_probs = z - rows.lse[:, None] - rows.lse_error[:, None]
    probabilities = log_probs.exp()
    grad = probabilities * rows.probability_factor[:, None]
    if rows.entropy_factor is not None:
        grad += torch.where(log_probs > -torch.inf, probabilities * log_probs, 0.0) * rows.entropy_factor[:, None]
    if rows.smoothing_term is not None:
        grad -= rows.smoothing_term[:, None] * (1.0 if class_weight is None else class_weight.to(z.dtype))
    if logits.shape[1]:
        grad_label = rows.label_term.where(rows.labels >= 0, 0.0)
        grad.scatter_add_(1, rows.labels.clamp(min=0)[:, None], -grad_label[:, None])
    if options.softcap is not None:
        capped = z if rows.temperature is None else z * rows.temperature[:, None]
        grad *= 1 - (capped / options.softcap) ** 2
    logits.copy_(grad if rows.kept is None else grad.masked_fill_(~rows.kept[:, None], 0.0))
