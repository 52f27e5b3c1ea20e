"""Clipping by the norm of gradients that are whole on each rank or sharded over ranks."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module


@torch.no_grad()
def clip_gradient_norm(
    model: Module | None, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scales the gradients of ``parameters`` so that their p-norm over all ranks is at most ``max_norm``.

    Gradients of other parameters neither count nor change. ``model`` holds FSDP roots; without it parameters are the
    same on every rank, or ``DTensor`` on any device meshes.

    Returns:
        The norm before clipping, a plain tensor, the same on every rank; 0 without any gradient. Under FSDP it has the
        dtype of the gradients.
    """
    parameters = list(parameters)
    if model is None or dist.get_world_size() == 1:
        return _clip_whole_norm(parameters, max_norm, norm_type)
    roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
    units: set[Tensor] = {parameter for root in roots for parameter in root.parameters()}
    outside = [parameter for parameter in parameters if parameter.requires_grad and parameter not in units]
    if outside:  # their gradients differ between ranks, and so would the norm
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        first = names.get(outside[0], "one of another model")
        raise ValueError(
            f"clipping by norm needs every trained parameter in an FSDP unit of {type(model).__name__}, but"
            f" {len(outside)} of {len(parameters)} are in none, such as {first!r} of shape {tuple(outside[0].shape)}:"
            " ranks do not average their gradients. Wrap or freeze them."
        )
    with _without_gradients(units.difference(parameters)):
        if len(roots) == 1:
            return roots[0].clip_grad_norm_(max_norm, norm_type)
        norms = [root.clip_grad_norm_(math.inf, norm_type).float() for root in roots]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _clip_whole_norm(parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    on_meshes: dict[object, list[Tensor]] = {}  # PyTorch computes no norm over several meshes at once
    for parameter in parameters:
        if parameter.grad is not None:
            on_meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [
        torch.nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None], norm_type)
        for group in on_meshes.values()
    ]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
    for group in on_meshes.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


@contextmanager
def _without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
