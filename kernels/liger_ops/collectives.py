"""Collectives of torch.distributed, whose names changed in torch 2.13: the former ones are deprecated."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks of a group, ``[group's size, *shape]``, which have the same shape. Without gradient."""
    size, rows = group.size(), tensor.shape[0]
    gathered = tensor.new_empty(size * rows, *tensor.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, tensor.contiguous(), group=group)
    return gathered.unflatten(0, (size, rows))


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of their parts for this rank, of tensors ``[group's size * rows, ...]``. Without gradient."""
    reduced = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(reduced, tensor.contiguous(), group=group)
    return reduced


def all_to_all(
    tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """What ranks sent this one, in their order: of ``tensor`` rank r gets the next ``num_sent[r]`` rows."""
    received = tensor.new_empty(sum(num_received), *tensor.shape[1:])
    dist.all_to_all_single(received, tensor.contiguous(), list(num_received), list(num_sent), group=group)
    return received
