"""Lazy logits of a head whose weight is a DTensor, as tensor parallelism makes it.

Where each rank holds some rows of the head, the loss is computed over the vocabulary of all of them without gathering
logits; operations that need whole logits gather them as DTensor would. Each rank's hidden states are the same, and
their gradients a part of the whole, which DTensor adds up where the hidden states came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from liger_ops import VocabShard
from lightning_liger.lazy.logits import HeadParameters, LazyLogits, LogitsLedger, LogitTransform


class DistributedHead(HeadParameters):
    """The rows of a linear head that this rank holds, which are all of them if the head is replicated.

    Args:
        weight: A DTensor over one mesh dimension, ``[vocab_size, hidden_size]``, ``Shard(0)`` or ``Replicate()``.
        bias: Likewise, ``[vocab_size]``, or None.
        *others: As those of :class:`~lightning_liger.lazy.logits.HeadParameters`.
    """

    __slots__ = ("device_mesh", "is_sharded", "start", "whole_vocab_size")

    def __init__(self, weight: DTensor, bias: DTensor | None, *others: Any) -> None:
        self.device_mesh = weight.device_mesh
        self.whole_vocab_size = weight.shape[0]
        self.is_sharded = weight.placements == (Shard(0),)
        super().__init__(weight.to_local(), None if bias is None else bias.to_local(), *others)
        per_rank = -(-self.whole_vocab_size // self.device_mesh.size())  # DTensor's last shards are the smaller ones
        self.start = min(per_rank * self.device_mesh.get_local_rank(), self.whole_vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.whole_vocab_size if self.is_sharded else self.weight.shape[0]

    @property
    def is_whole(self) -> bool:
        return not self.is_sharded

    def loss_options(self) -> Mapping[str, Any]:
        if not self.is_sharded:
            return self.options
        # The hidden states are DTensor's, which adds up their gradients itself.
        shard = VocabShard(self.device_mesh.get_group(), self.start, self.vocab_size, sums_input_gradient=False)
        return {**self.options, "vocab_shard": shard}

    def project(self, hidden_states: Tensor) -> Tensor:
        return self.project_distributed(hidden_states).redistribute(placements=[Replicate()]).to_local()

    def project_distributed(self, hidden_states: Tensor) -> DTensor:
        """The real logits, spread over ranks as the head is."""
        logits = super().project(hidden_states)
        if not self.is_sharded:
            return DTensor.from_local(logits, self.device_mesh, [Replicate()], run_check=False)
        shape = torch.Size((*logits.shape[:-1], self.vocab_size))
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(logits.ndim - 1)]
        return DTensor.from_local(logits, self.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    def project_to(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        if not self.is_sharded:
            return super().project_to(hidden_states, labels)
        own_labels = labels - self.start
        is_own = (own_labels >= 0) & (own_labels < self.weight.shape[0])
        # A row of zeros for labels of other ranks, so that a rank without rows has one.
        padded = self.map(lambda rows: F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, 1)))
        own = HeadParameters.project_to(padded, hidden_states, own_labels.where(is_own, self.weight.shape[0]))
        return DTensor.from_local(own, self.device_mesh, [Partial()], run_check=False).full_tensor()


@dataclass(eq=False, repr=False)
class DistributedLazyLogits(LazyLogits):
    """Lazy logits in the place of a DTensor: they have its placements until :meth:`to_local`.

    Real logits, should they be needed, are the DTensor that the head would have returned.

    Args:
        is_replicated: Whether every rank has all logits; otherwise they are sharded over the vocabulary.
        **others: As those of :class:`~lightning_liger.lazy.logits.LazyLogits`.
    """

    is_replicated: bool = False

    @property
    def is_local(self) -> bool:
        return False

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.head.device_mesh  # type: ignore[attr-defined]

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (Replicate(),) if self.is_replicated else (Shard(self.vocab_dim % self.ndim),)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DistributedLazyLogits | DTensor:
        """As DTensor's; still lazy if logits are replicated, or sharded over the vocabulary, afterwards."""
        if device_mesh in (None, self.device_mesh) and placements is not None and len(placements) == 1:
            (placement,) = placements
            if placement == Replicate():
                return self.changed(is_replicated=True)
            if isinstance(placement, Shard) and placement.dim % self.ndim == self.vocab_dim % self.ndim:
                return self.changed(is_replicated=False)
        return self.materialize("redistribute").redistribute(device_mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> LazyLogits | Tensor:
        """As DTensor's: lazy logits if every rank has all, this rank's real logits if each has some."""
        if self.is_replicated and grad_placements in (None, self.placements):
            own = {field.name: getattr(self, field.name) for field in fields(LazyLogits)}
            return LazyLogits(**{**own, "_whole": None, "_origin": None, "_has_views": False})
        return self._distributed().to_local(grad_placements=grad_placements)

    def full_tensor(self) -> LazyLogits:
        """As DTensor's, lazy."""
        return self.changed(is_replicated=True).to_local()

    def cross_entropy(self, target: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
        """As that of :class:`LazyLogits`; a replicated DTensor if ``target`` is one."""
        if not isinstance(target, DTensor):
            return super().cross_entropy(target, weight, **options)
        target, weight = target.full_tensor(), weight.full_tensor() if isinstance(weight, DTensor) else weight
        loss = super().cross_entropy(target, weight, **options)
        return DTensor.from_local(loss, self.device_mesh, [Replicate()], run_check=False)

    def _distributed(self) -> DTensor:
        return self.transform.apply(self._project()).movedim(-1, self.vocab_dim)

    def _project(self) -> Tensor:
        logits = self.head.project_distributed(self.tokens)  # type: ignore[attr-defined]
        return logits.redistribute(placements=[Replicate()]) if self.is_replicated else logits


def distributed_logits(
    module: nn.Linear, input: Tensor, dtype: torch.dtype, ledger: LogitsLedger, options: Mapping[str, Any]
) -> DistributedLazyLogits | None:
    """Lazy logits of a head whose weight is a DTensor.

    Args:
        module: The head.
        input: ``[..., hidden_size]``.
        dtype: Of the projection.
        ledger: As :class:`~lightning_liger.lazy.logits.HeadParameters`'s.
        options: As there.

    Returns:
        None for layouts other than those of tensor parallelism: hidden states that are the same on all ranks, a weight
        and a bias that are sharded alike over the vocabulary, or whole on each rank.
    """
    weight, bias = module.weight, module.bias
    alike = isinstance(input, DTensor) and input.device_mesh == weight.device_mesh
    if not alike or weight.device_mesh.ndim != 1 or weight.placements not in ((Shard(0),), (Replicate(),)):
        return None
    if input.placements != (Replicate(),) or (bias is not None and bias.placements != weight.placements):
        return None
    head = DistributedHead(weight, bias, dtype, ledger, options)
    partial_gradient = [Partial()] if head.is_sharded else None
    hidden_states = input.to_local(grad_placements=partial_gradient)
    return DistributedLazyLogits(hidden_states, head, LogitTransform(dtype), is_replicated=not head.is_sharded)
