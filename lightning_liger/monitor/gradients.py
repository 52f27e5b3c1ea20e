"""The norm of the gradients of all ranks, whichever way they are sharded. Nothing is clipped or changed."""

from collections.abc import Iterable
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

    Args:
        model: Holds the parameters: a plain module, or one with DTensors (FSDP2, tensor parallelism) or FSDP inside.
        parameters: Their gradients are whole on each rank, or sharded; those without gradient count 0.
        device: Where ranks exchange numbers.

    Returns:
        A scalar in float32 on ``device``, without waiting for it.
    """
    units = _sharded_units(model)
    groups: dict[tuple[Any, ...], list[Tensor]] = {}  # by the process groups over which squares are added up
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                gradient = gradient.full_tensor()
                key: tuple[Any, ...] = ()
            else:
                mesh = gradient.device_mesh
                key = tuple(mesh.get_group(dim) for dim, p in enumerate(gradient.placements) if isinstance(p, Shard))
                gradient = gradient.to_local()
        else:
            key = (units[parameter],) if parameter in units else ()
        # A rank without a part of any gradient takes part in the sum all the same.
        groups.setdefault(key, []).extend([] if gradient is None or not gradient.numel() else [_plain(gradient)])
    total = torch.zeros((), device=device)
    for key, gradients in groups.items():
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else []
        squares = torch.stack([norm.to(device) for norm in norms]).square().sum() if norms else total.new_zeros(())
        for group in key:
            dist.all_reduce(squares, group=group)
        total = total + squares
    return total.sqrt()


def _plain(gradient: Tensor) -> Tensor:
    """Real numbers with the norm of a gradient, in a dtype of at most 32 bits and without the zeros of a sparse one."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.float() if gradient.dtype == torch.float64 else gradient


def _sharded_units(model: Module) -> dict[Parameter, Any]:
    """The process group over which FSDP shards each parameter, for those that it shards."""
    found = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):  # outer units first
        group = None if unit.sharding_strategy == ShardingStrategy.NO_SHARD else unit.process_group
        for parameter in unit.parameters():
            found[parameter] = group
    return {parameter: group for parameter, group in found.items() if group is not None}
