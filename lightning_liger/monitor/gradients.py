"""The norm of the gradients of all ranks, whichever way they are sharded. Nothing is clipped or changed."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import Module, Parameter


@torch.no_grad()
def gradient_norm(model: Module, parameters: Iterable[Parameter], device: torch.device) -> Tensor:
    """The 2-norm of the gradients of ``parameters`` over all ranks, which must all call this.

    Gradients are whole on each rank, or sharded by FSDP in ``model`` or as DTensors; missing ones count 0. The result
    is a scalar in float32 on ``device``, which is not waited for.
    """
    groups: dict[tuple[Any, ...], list[Tensor]] = {}  # by the process groups over which squares are added up
    units = _sharded(model)
    for parameter in parameters:
        gradient = parameter.grad
        key: tuple[Any, ...] = (units[parameter],) if parameter in units else ()
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                gradient, key = gradient.full_tensor(), ()
            else:
                mesh = gradient.device_mesh
                key = tuple(mesh.get_group(dim) for dim, p in enumerate(gradient.placements) if isinstance(p, Shard))
                gradient = gradient.to_local()
        # A rank without a part of any gradient takes part in the sum all the same.
        groups.setdefault(key, []).extend([] if gradient is None else [_norm(gradient).to(device, torch.float32)])
    squares = []
    for key, norms in groups.items():
        squares.append(joined_norm(norms, device).square())
        for group in key:
            dist.all_reduce(squares[-1], group=group)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device=device)


def joined_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of all numbers of several tensors with these norms."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros((), device=device)


def _norm(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


def _sharded(model: Module) -> dict[Parameter, Any]:
    """The process group over which FSDP shards each parameter, for those that it shards."""
    found: dict[Parameter, Any] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):  # outer units first
        group = None if unit.sharding_strategy == ShardingStrategy.NO_SHARD else unit.process_group
        found |= dict.fromkeys(unit.parameters(), group)
    return {parameter: group for parameter, group in found.items() if group is not None}
