"""Lazy logits of a head whose weight is a DTensor, as in tensor parallelism.

Where each rank holds some rows of the head, the loss is computed over the vocabulary of all ranks without gathering
logits; operations that need the real logits gather them as DTensor would. The hidden states are replicated, and each
rank's gradient of them is a partial sum, which DTensor reduces where the hidden states came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from liger_ops import VocabShard
from lightning_liger.lazy.expression import Expression
from lightning_liger.lazy.head import FusionCounters, HeadParameters, LogitTransform
from lightning_liger.lazy.logits import LazyLogits


@dataclass(kw_only=True, eq=False)
class DistributedHead(HeadParameters):
    """The rows of a linear head, a DTensor over one mesh dimension, that this rank holds."""

    device_mesh: DeviceMesh

    def project(self, hidden_states: Tensor) -> Tensor:
        return self.project_distributed(hidden_states).redistribute(placements=[Replicate()]).to_local()

    def project_distributed(self, hidden_states: Tensor) -> DTensor:
        """The real logits, sharded or replicated as the head is."""
        logits = super().project(hidden_states)
        if self.shard is None:
            return DTensor.from_local(logits, self.device_mesh, [Replicate()], run_check=False)
        shape = torch.Size((*logits.shape[:-1], self.vocab_size))
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(logits.ndim - 1)]
        return DTensor.from_local(logits, self.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    def project_to(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        if self.shard is None:
            return super().project_to(hidden_states, labels)
        own_labels = labels - self.shard.start
        is_own = (own_labels >= 0) & (own_labels < self.weight.shape[0])
        # A row of zeros, also on ranks without rows, stands for the labels of other ranks.
        padded = self.map(lambda rows: F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, 1)))
        own = HeadParameters.project_to(padded, hidden_states, own_labels.where(is_own, self.weight.shape[0]))
        return DTensor.from_local(own, self.device_mesh, [Partial()], run_check=False).full_tensor()


class DistributedExpression(Expression):
    """How logits that are a DTensor are computed."""

    head: DistributedHead
    is_replicated: bool
    """Whether every rank has all logits; otherwise they are sharded over the vocabulary."""

    def _project(self) -> DTensor:
        logits = self.head.project_distributed(self.tokens)
        return logits.redistribute(placements=[Replicate()]) if self.is_replicated else logits


class DistributedLazyLogits(LazyLogits):
    """Lazy logits instead of a DTensor, with its placements until :meth:`to_local`.

    Where an operation reads the real logits, or returns a view, they are the DTensor that the head would have returned.
    Operations that need it in the place of these are refused, and everything after a write to such a view.
    """

    is_local = False
    expression: DistributedExpression

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.expression.head.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (Replicate(),) if self.expression.is_replicated else (Shard(self.vocab_dim % self.ndim),)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DistributedLazyLogits | DTensor:
        """As DTensor's; lazy if the result is replicated or sharded over the vocabulary."""
        if device_mesh in (None, self.device_mesh) and placements is not None and len(placements) == 1:
            (placement,) = placements
            if placement == Replicate():
                return self.same(is_replicated=True)
            if isinstance(placement, Shard) and placement.dim % self.ndim == self.vocab_dim % self.ndim:
                return self.same(is_replicated=False)
        return cast(DTensor, self.real_values("redistribute")).redistribute(device_mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> LazyLogits | Tensor:
        """As DTensor's: lazy logits if replicated, this rank's real logits if sharded."""
        expression = self.expression
        if expression.is_replicated and grad_placements in (None, self.placements):
            local = Expression(expression.hidden_states, expression.head, expression.transform, expression.vocab_dim)
            return LazyLogits.of(local, self.twin)
        self.notice("to_local")
        return cast(DTensor, expression.compute("to_local")).to_local(grad_placements=grad_placements)

    def full_tensor(self) -> LazyLogits | Tensor:
        """As DTensor's, lazy."""
        return self.same(is_replicated=True).to_local()

    def cross_entropy(self, target: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
        """As that of :class:`LazyLogits`; a replicated DTensor if ``target`` is one."""
        if not isinstance(target, DTensor):
            return super().cross_entropy(target, weight, **options)
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        loss: Any = super().cross_entropy(target.full_tensor(), weight, **options)
        return DTensor.from_local(loss, self.device_mesh, [Replicate()], run_check=False)

    def real_values(self, operation: str) -> Tensor:
        values = super().real_values(operation)
        if values._version > 0:
            raise RuntimeError(
                f"{operation} comes after a write to a view of a sharded LM head's output, which its lazy output does"
                " not see. Call full_tensor() before the write, or choose kernels without 'linear_cross_entropy'"
            )
        return values

    def notice(self, operation: str) -> None:
        if self._real_values is not None:
            self.real_values(operation)
        super().notice(operation)

    def become_real(self, operation: str, warn: bool = True) -> None:
        raise RuntimeError(
            f"{operation} needs a real DTensor instead of a sharded LM head's lazy output. Use an operation that"
            " returns a new tensor, call full_tensor() before, or choose kernels without 'linear_cross_entropy'"
        )


def distributed_logits(
    module: nn.Linear, input: Tensor, dtype: torch.dtype, counters: FusionCounters, options: Mapping[str, Any]
) -> DistributedLazyLogits | None:
    """Lazy logits of a head whose weight is a DTensor.

    Returns:
        None for layouts other than tensor parallelism's: replicated hidden states, with a weight and a bias that are
        both sharded over the vocabulary or both replicated.
    """
    weight = cast(DTensor, module.weight)
    bias = None if module.bias is None else cast(DTensor, module.bias)
    mesh, vocab_size = weight.device_mesh, weight.shape[0]
    if not isinstance(input, DTensor) or input.device_mesh != mesh or input.placements != (Replicate(),):
        return None
    if mesh.ndim != 1 or weight.placements not in ((Shard(0),), (Replicate(),)):
        return None
    if bias is not None and bias.placements != weight.placements:
        return None
    shard = None
    if weight.placements == (Shard(0),):
        per_rank = -(-vocab_size // mesh.size())  # only DTensor's last shards are smaller
        start = min(per_rank * mesh.get_local_rank(), vocab_size)
        # The hidden states come from a DTensor, which sums their gradients over ranks.
        shard = VocabShard(mesh.get_group(), start, vocab_size, sums_input_gradient=False)
    own: dict[str, Any] = {"weight": weight.to_local(), "bias": None if bias is None else bias.to_local()}
    own |= {"compute_dtype": dtype, "counters": counters, "options": options, "shard": shard}
    head = DistributedHead(device_mesh=mesh, **own)
    hidden_states = input.to_local(grad_placements=[Partial()] if shard else None)
    expression = DistributedExpression(hidden_states, head, LogitTransform(dtype))
    return DistributedLazyLogits.of(expression.changed(is_replicated=shard is None))
