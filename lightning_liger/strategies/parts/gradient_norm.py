"""The norm of the gradients of all ranks, whichever way they are sharded, and clipping by it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module

from liger_ops.optim.gradients import Batch, joined_norm


@torch.no_grad()
def gradient_norm(model: Module, parameters: Iterable[Tensor], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """The p-norm of the gradients of ``parameters`` over all ranks, which must all call this.

    Gradients are whole on each rank, or sharded by FSDP in ``model`` or as DTensors; missing ones count 0. The result
    is a scalar on ``device``, which is not waited for: in float32, or in float64 if a parameter is.
    """
    parameters = list(parameters)
    return _norm_over_ranks(_parts(model, parameters), parameters, device, norm_type)


def _parts(model: Module, parameters: Sequence[Tensor]) -> dict[tuple[Any, ...], Batch]:
    """This rank's parts of the gradients, by the process groups over which they are spread."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    units = _sharded(model)
    for parameter in parameters:
        gradient = parameter.grad
        key: tuple[Any, ...] = (units[parameter],) if parameter in units else ()
        if isinstance(gradient, DTensor):
            placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
            if placements != list(gradient.placements):  # there are parts still to be added up over ranks
                parameter.grad = gradient = gradient.redistribute(placements=placements)
            mesh, spread = gradient.device_mesh, [not each.is_replicate() for each in gradient.placements]
            key = tuple(mesh.get_group(dim) for dim, is_spread in enumerate(spread) if is_spread)
            gradient = gradient.to_local()
        # A rank without a part of any gradient takes part in the sum all the same.
        groups.setdefault(key, []).extend([] if gradient is None else [gradient])
    return {key: Batch(gradients) for key, gradients in groups.items()}


def _norm_over_ranks(
    parts: Mapping[tuple[Any, ...], Batch], parameters: Sequence[Tensor], device: torch.device, norm_type: float
) -> Tensor:
    dtype = torch.float32
    for each in {parameter.dtype for parameter in parameters}:  # the same on all ranks, whoever has no gradient
        dtype = torch.promote_types(dtype, each.to_real())
    norms = []
    for key, batch in parts.items():
        norms.append(batch.norm(device, norm_type).to(dtype))
        for group in key:
            if math.isinf(norm_type):
                dist.all_reduce(norms[-1], dist.ReduceOp.MAX, group=group)
            else:
                power = norms[-1] ** norm_type
                dist.all_reduce(power, group=group)
                norms[-1] = power ** (1 / norm_type)
    return joined_norm(norms, norm_type) if norms else torch.zeros((), device=device)


@torch.no_grad()
def clip_gradient_norm(model: Module, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales the gradients of ``parameters`` so that their p-norm over all ranks is at most ``max_norm``.

    Gradients of other parameters neither count nor change. ``model`` holds the FSDP units, if there are any.

    Returns:
        The norm before clipping, as :func:`gradient_norm`.
    """
    parameters = list(parameters)
    roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
    if roots and dist.get_world_size() > 1:
        units: set[Tensor] = {parameter for root in roots for parameter in root.parameters()}
        outside = [parameter for parameter in parameters if parameter.requires_grad and parameter not in units]
        if outside:  # their gradients differ between ranks, and so would the norm
            names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
            first = names.get(outside[0], "one of another model")
            raise ValueError(
                f"clipping by norm needs every trained parameter in an FSDP unit of {type(model).__name__}, but"
                f" {len(outside)} of {len(parameters)} are in none, such as {first!r} of shape"
                f" {tuple(outside[0].shape)}: ranks do not average their gradients. Wrap or freeze them."
            )
    parts = _parts(model, parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _norm_over_ranks(parts, parameters, _device_of(roots, gradients), norm_type)
    if not math.isinf(max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for batch in parts.values():
            batch.multiply_(factor)
    return norm


def _device_of(roots: list[FullyShardedDataParallel], gradients: list[Tensor]) -> torch.device:
    """Where ranks add up their parts, which may lie in host memory."""
    if roots and (device := roots[0].compute_device) is not None:
        return device
    for each in gradients:
        if isinstance(each, DTensor) and each.device_mesh.device_type != each.device.type:
            kind = each.device_mesh.device_type
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return gradients[0].device if gradients else torch.device("cpu")


def _sharded(model: Module) -> dict[Tensor, Any]:
    """The process group over which FSDP shards each parameter, for those that it shards."""
    found: dict[Tensor, Any] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):  # outer units first
        group = None if unit.sharding_strategy == ShardingStrategy.NO_SHARD else unit.process_group
        found |= dict.fromkeys(unit.parameters(), group)
    return {parameter: group for parameter, group in found.items() if group is not None}
