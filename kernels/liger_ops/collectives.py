"""Collectives of torch.distributed, whose names changed in torch 2.13: the former ones are deprecated."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks of a group, ``[group's size, *shape]``, which have the same shape. Without gradient."""
    size, rows = group.size(), tensor.shape[0]
    gathered = tensor.new_empty(size * rows, *tensor.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, tensor.contiguous(), group=group)
    return gathered.unflatten(0, (size, rows))
