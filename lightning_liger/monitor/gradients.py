"""The norm of the gradients of all ranks, whichever way they are sharded. Nothing is clipped or changed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import Module, Parameter

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def gradient_norm(units: Mapping[Parameter, Any], parameters: Iterable[Parameter], device: torch.device) -> Tensor:
    """The 2-norm of the gradients of ``parameters`` over all ranks, which must all call this.

    Args:
        units: Those of :func:`sharded_units`.
        parameters: Their gradients are whole on each rank, or sharded by FSDP or as DTensors; those without gradient
            count 0.
        device: Where ranks exchange numbers.

    Returns:
        A scalar in float32 on ``device``, without waiting for it.
    """
    groups: dict[tuple[Any, ...], list[Tensor]] = {}  # by the process groups over which squares are added up
    for parameter in parameters:
        gradient = parameter.grad
        key: tuple[Any, ...] = (units[parameter],) if units and parameter in units else ()
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                gradient, key = gradient.full_tensor(), ()
            else:
                mesh = gradient.device_mesh
                key = tuple(mesh.get_group(dim) for dim, p in enumerate(gradient.placements) if isinstance(p, Shard))
                gradient = gradient.to_local()
        # A rank without a part of any gradient takes part in the sum all the same.
        groups.setdefault(key, []).extend([] if gradient is None or not gradient.numel() else [_plain(gradient)])
    norms = []
    for key, gradients in groups.items():
        norm = _norm(gradients, device)
        if key:
            squares = norm.square()
            for group in key:
                dist.all_reduce(squares, group=group)
            norm = squares.sqrt()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else joined_norm(norms, device)


def joined_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of all numbers of several tensors with these norms."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros((), device=device)


def _norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    norms: list[Tensor] = list(torch._foreach_norm(gradients, 2, dtype=torch.float32)) if gradients else []
    if any(norm.device != device for norm in norms):  # of offloaded parameters
        norms = [norm.to(device) for norm in norms]
    return joined_norm(norms, device)


def _plain(gradient: Tensor) -> Tensor:
    """Real numbers with the norm of a gradient, in a dtype of at most 32 bits and without the zeros of a sparse one."""
    if gradient.dtype in _NARROW and gradient.layout == torch.strided:
        return gradient
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.float() if gradient.dtype == torch.float64 else gradient


def sharded_units(model: Module) -> dict[Parameter, Any]:
    """The process group over which FSDP shards each parameter, for those that it shards.

    Args:
        model: A plain module, or one with FSDP inside whose parameters are sharded now. It is walked through.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    found = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):  # outer units first
        group = None if unit.sharding_strategy == ShardingStrategy.NO_SHARD else unit.process_group
        for parameter in unit.parameters():
            found[parameter] = group
    return {parameter: group for parameter, group in found.items() if group is not None}
