"""Divergences over a vocabulary whose logits, of both models, are spread over the ranks of a process group.

Each rank takes the steps of :mod:`liger_ops.divergence.rows` for its classes. Between them the ranks exchange the sums
of each row, six numbers after the first step and two after the second, in float64; logits are never sent.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import backend
from liger_ops.collectives import all_gather
from liger_ops.divergence.launch import launch_shard_step
from liger_ops.divergence.options import IGNORED, DivergenceOptions
from liger_ops.divergence.rows import (
    OF_LOGITS,
    ONE_STEP,
    RowSums,
    divergence_of,
    gradient_of,
    row_dtype,
    sum_logits,
    sum_mixtures,
    transform_logits,
    unless_nan,
)
from liger_ops.loss.vocab_parallel import VocabShard

_SMALLEST_DECAY = 1e-300  # an infinite sum stays infinite


def write_sharded_rows(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    grad_scale: Tensor | None,
    options: DivergenceOptions,
    *,
    shard: VocabShard,
    token_index: Tensor | None,
    losses: Tensor,
    grad_logits: Tensor | None,
) -> None:
    """:func:`~liger_ops.divergence.divergence.write_rows` for a shard of both models' logits, on every rank of it."""

    def of_rows(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 0 or token_index is None else tensor[token_index]

    kind, beta = options.resolved_kind, float(options.beta)
    kept = of_rows(labels) != IGNORED
    steps = _Steps(student, teacher, kept, options, shard.vocab_size)

    own = torch.stack(steps.sum_logits()).double()
    sums = _merge(RowSums(*all_gather(own, shard.group).unbind(1)), kind)
    if kind not in ONE_STEP:
        both = torch.stack(steps.sum_mixtures(sums)).double()
        dist.all_reduce(both, group=shard.group)
        sums = sums._replace(first=both[0], second=both[1])

    factor = unless_nan(torch.full_like(sums.first, options.factor), sums, kind)
    if token_weight is not None:
        factor = factor * of_rows(token_weight)
    values = (divergence_of(sums, kind, beta, shard.vocab_size) * factor).where(kept, 0.0).to(losses.dtype)
    if token_index is None:
        losses.copy_(values)
    else:
        losses.index_copy_(0, token_index, values)
    if grad_logits is not None:
        factor = factor * options.of_student.scale
        steps.write_gradient(sums, factor if grad_scale is None else factor * of_rows(grad_scale), grad_logits)


def _merge(parts: RowSums, kind: str) -> RowSums:
    """The sums of whole rows from those of their shards, ``[num_ranks, num_rows]`` each."""
    if kind in OF_LOGITS:
        return RowSums(*(part.sum(0) for part in parts))

    def decays(maxima: Tensor, totals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maxima = maxima.where(totals != 0, -torch.inf)  # of shards without classes, or of impossible ones
        maximum = maxima.amax(0)
        maximum = maximum.where(maximum > -torch.inf, 0.0)
        moved = maxima - maximum
        return maximum, moved.exp(), moved.where(moved > -torch.inf, 0.0)

    student_max, of_student, student_moved = decays(parts.student_max, parts.student_sum)
    teacher_max, of_teacher, teacher_moved = decays(parts.teacher_max, parts.teacher_sum)
    moved = teacher_moved - student_moved  # what each c_t - c_s, of the shard's maxima, becomes more
    first = parts.first * of_teacher.clamp(min=_SMALLEST_DECAY) + moved * parts.teacher_sum * of_teacher
    second = parts.second * of_student.clamp(min=_SMALLEST_DECAY) - moved * parts.student_sum * of_student
    return RowSums(
        student_max,
        (parts.student_sum * of_student).sum(0),
        teacher_max,
        (parts.teacher_sum * of_teacher).sum(0),
        first.sum(0),
        second.sum(0),
    )


class _Steps:
    """The steps of a shard's rows, by kernels or in plain PyTorch."""

    def __init__(
        self, student: Tensor, teacher: Tensor, kept: Tensor, options: DivergenceOptions, vocab_size: int
    ) -> None:
        self.logits, self.kept, self.options, self.vocab_size = (student, teacher), kept, options, vocab_size
        self.kind, self.beta = options.resolved_kind, float(options.beta)
        self.by_kernels = backend.runs_on_triton(student, teacher)
        self.dtype = row_dtype(student, teacher)
        self.z: tuple[Tensor, Tensor] | None = None
        if not self.by_kernels:
            transforms = options.of_student, options.of_teacher
            z_s, z_t = (
                transform_logits(each, transform, self.dtype)
                for each, transform in zip(self.logits, transforms, strict=True)
            )
            self.z = z_s, z_t

    def _launch(
        self, step: int, sums: RowSums | None, factor: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The fields of ``RowSums``, ``[6, num_rows]``, with what the step writes."""
        if sums is None:
            values, delta = self.kept.new_zeros(6, len(self.kept), dtype=torch.float32), None
        else:
            values, delta = torch.stack(sums).float(), self._delta(sums).float()
        launch_shard_step(
            step, *self.logits, self.kept, values, delta, self.options, self.vocab_size,
            factor=None if factor is None else factor.float(), grad_logits=out,
        )  # fmt: skip
        return values

    def _delta(self, sums: RowSums) -> Tensor:
        return torch.zeros_like(sums.first) if self.kind in OF_LOGITS else sums.delta

    def sum_logits(self) -> list[Tensor]:
        """The fields of this shard's ``RowSums``."""
        if self.z is None:
            return list(self._launch(1, None))
        if not self.z[0].shape[1]:
            return [self.z[0].new_zeros(len(self.kept)) for _ in RowSums._fields]
        return list(sum_logits(*self.z, self.kind))

    def sum_mixtures(self, sums: RowSums) -> list[Tensor]:
        """What this shard adds to ``first`` and ``second``, given the sums of whole rows."""
        if self.z is None:
            zeroed = sums._replace(first=torch.zeros_like(sums.first), second=torch.zeros_like(sums.second))
            return list(self._launch(2, zeroed)[4:])
        own = sum_mixtures(*self.z, self._in_dtype(sums), self.kind, self.beta)
        return [own.first, own.second]

    def write_gradient(self, sums: RowSums, factor: Tensor, out: Tensor) -> None:
        """Writes the gradient times ``factor``; zeros at ignored tokens."""
        if self.z is None:
            self._launch(3, sums, factor, out)
            return
        if not self.z[0].shape[1]:
            return
        grad = gradient_of(*self.z, self._in_dtype(sums), self.kind, self.beta, self.vocab_size)
        grad *= factor.to(grad.dtype)[:, None]
        if self.options.of_student.softcap is not None:
            grad *= 1.0 - (self.z[0] / self.options.of_student.softcap) ** 2
        out.copy_(grad.masked_fill_(~self.kept[:, None], 0.0))

    def _in_dtype(self, sums: RowSums) -> RowSums:
        return RowSums(*(each.to(self.dtype) for each in sums))
