"""Token-wise modules in tiles of tokens, so that their wide intermediate tensors exist for one tile at a time.

Forward keeps its input only. Backward computes one tile after the other again, with the same random state and autocast,
and takes its gradients; those of parameters are summed in float32 and rounded once. Where a layer is recomputed in
backward anyway, this costs no additional product of matrices: its recompute leaves the module out if nothing after it
is needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import get_device_states, set_device_states

from liger_ops import backend
from liger_ops.recipes import listening
from lightning_liger.activations.cheap import CheapTensors, Kept, Recomputed, unpack
from lightning_liger.activations.frames import rest_is_unneeded
from lightning_liger.activations.layers import LayerRun, current_run

_MODES = ("recompute", "offload")
_MIN_TILE_TOKENS = 8192
"""Each tile reads and writes the parameters' gradients once: 10 bytes for each parameter, next to 6 floating-point
operations for each parameter and token. At 4 TB/s and 700 TFLOP/s that is 3.6% of a tile of this size."""
_TILE_BYTES = 2 * 2**30
"""Less than attention's backward adds from 65536 tokens of Llama 3 8B on, so it is not what limits the length."""
_TENSORS_OF_WIDTH = 6  # of a gated MLP in backward: gate, up, their product, and the gradient of each
_ROW_MULTIPLE = 128

Compute = Callable[[nn.Module, Tensor], Tensor]
Place = tuple[nn.Module, str]


def choose_tile_size(num_tokens: int, bytes_per_token: int) -> int:
    """Tokens a tile, evenly spread: within ``_TILE_BYTES``, or ``_MIN_TILE_TOKENS``; all unless that makes three tiles.

    Args:
        num_tokens: Number of all tokens.
        bytes_per_token: What the module's intermediate tensors and their gradients take for each token.
    """
    largest = max(_MIN_TILE_TOKENS, _TILE_BYTES // max(1, bytes_per_token))
    if num_tokens <= 2 * largest:
        return max(1, num_tokens)
    size = -(-num_tokens // -(-num_tokens // largest))
    return size + -size % _ROW_MULTIPLE


def run_in_tiles(compute: Compute, module: nn.Module, x: Tensor, width: int) -> Tensor:
    """``compute(module, x)``: in tiles if ``x`` is long and its layer is recomputed in backward, else at once.

    Args:
        compute: Treats each token by itself, without side effects, with parameters of ``module`` and its children only.
        module: What it gets as first argument. It is not tiled if a child has hooks, parameters of a tensor parallel or
            sharded kind, or floating-point buffers, which may be statistics that a forward changes.
        x: ``[..., hidden_size]``.
        width: Columns of the widest intermediate tensor.

    Returns:
        ``[..., columns of compute's result]``.
    """
    run = None if torch.compiler.is_compiling() else current_run()
    if run is None or run.mode not in _MODES:
        return compute(module, x)
    num_tokens = x.shape[:-1].numel()
    tile_size = choose_tile_size(num_tokens, _TENSORS_OF_WIDTH * width * _compute_dtype(x).itemsize)
    places = None if tile_size >= num_tokens else _find_places(module)
    if places is None:
        return compute(module, x)
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *places))
    tiled = _Tiled(run, compute, module, tile_size, [places[tensor] for tensor in places], is_recorded)
    output: Tensor = _TiledFunction.apply(tiled, x, *places)
    return output


def _attributes(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module may hold a tensor: its own attributes, which are found first, and its parameters."""
    return vars(part), part._parameters


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # its data's address would be 0 on the meta device


def _compute_dtype(x: Tensor) -> torch.dtype:
    return backend.autocast_dtype(x.device.type) or x.dtype


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs hooks of its own."""
    # Private to torch, which has no public way to see them.
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _find_places(module: nn.Module) -> dict[Tensor, list[Place]] | None:
    """Each parameter of ``module`` and where its modules hold it; None if the module cannot be tiled.

    Engines put tensors that require a gradient in place of parameters: FSDP views of its flat ones, as attributes.
    """
    places: dict[Tensor, list[Place]] = {}
    for part in module.modules():
        # The module's own hooks run outside of the tiles.
        if part is not module and (has_hooks(part) or isinstance(part, FullyShardedDataParallel)):
            return None
        if any(buffer is not None and buffer.is_floating_point() for buffer in part._buffers.values()):
            return None
        own = {name: value for name, value in vars(part).items() if isinstance(value, Tensor) and value.requires_grad}
        for name, tensor in (part._parameters | own).items():
            if isinstance(tensor, DTensor) or (tensor is not None and not tensor.numel()):
                return None
            if isinstance(tensor, Tensor):
                places.setdefault(tensor, []).append((part, name))
    return places


@dataclass(frozen=True, eq=False)
class _Tiled:
    """A computation in tiles, where the module holds each of its parameters, and whether autograd saves anything."""

    run: LayerRun
    compute: Compute
    module: nn.Module
    tile_size: int
    places: list[list[Place]]
    is_recorded: bool

    def __call__(self, rows: Tensor) -> Tensor:
        return self.compute(self.module, rows)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tiles of ``[..., columns]``, each ``[1, tile_size or fewer, columns]``."""
        return tensor.reshape(1, -1, tensor.shape[-1]).split(self.tile_size, dim=1)

    def noting_kept_bytes(self, num_tokens: int) -> Callable[[Tensor], Tensor]:
        """This computation of one tile; notes what autograd would keep of ``num_tokens`` tokens at once."""

        def compute(tile: Tensor) -> Tensor:
            others = (value for part in self.module.modules() for own in _attributes(part) for value in own.values())
            known = {_address(value) for value in (tile, *others) if isinstance(value, Tensor)}
            kept: dict[int, int] = {}  # bytes by address: what is kept lives on, so no two have one address
            cheap = CheapTensors(tile.device.type, drops=False)

            def pack(tensor: Tensor) -> Kept | Recomputed:
                if _address(tensor) not in known:
                    kept[_address(tensor)] = tensor.untyped_storage().nbytes()
                return cheap.pack(tensor)

            with listening(cheap.listener), saved_tensors_hooks(pack, unpack):
                output = self(tile)
            cheap.close()
            scale = num_tokens / tile.shape[:-1].numel()
            stored = max(0, sum(kept.values()) - cheap.dropped_bytes)
            self.run.add_tiled_bytes(int(scale * stored), int(scale * cheap.dropped_bytes))
            return output

        return compute

    @contextmanager
    def with_parameters(self, parameters: Mapping[int, Tensor]) -> Iterator[None]:
        """Puts other tensors in the place of some parameters, by their indices in ``places``."""
        # Not torch.func.functional_call, which does not see attributes that hide a parameter, as FSDP's.
        replaced = [
            (own, name, own[name], parameter)
            for index, parameter in parameters.items()
            for part, name in self.places[index]
            for own in _attributes(part)
            if name in own
        ]
        try:
            for own, name, _, parameter in replaced:
                own[name] = parameter
            yield
        finally:
            for own, name, original, _ in replaced:
                own[name] = original


class _TiledFunction(torch.autograd.Function):
    """The computation as one function of the input and the parameters."""

    @staticmethod
    def forward(ctx: Any, tiled: _Tiled, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.tiled = tiled
        ctx.autocast = _autocast_settings(x.device.type)
        ctx.random_state = torch.get_rng_state(), *get_device_states(x)
        tiles = list(tiled.split(x))
        if tiled.is_recorded and rest_is_unneeded(1 + len(parameters)):
            tiles = [tiles[0][:, :1]]  # one token tells the output's columns and dtype
        result = tiled(tiles[0])
        output = result.new_empty(*x.shape[:-1], result.shape[-1])
        for index, target in enumerate(tiled.split(output)[: len(tiles)]):
            target[:, : result.shape[1]] = result if index == 0 else tiled(tiles[index])
        return output

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tiled: _Tiled = ctx.tiled
        x, *parameters = ctx.saved_tensors
        _, needs_x, *needs = ctx.needs_input_grad
        wanted = {index: parameters[index].detach().requires_grad_() for index, need in enumerate(needs) if need}
        sums: dict[int, Tensor] = {}
        grad_x = x.new_zeros(x.shape) if needs_x else None
        grad_tiles = [None] * len(tiled.split(x)) if grad_x is None else tiled.split(grad_x)
        cpu_state, devices, states = ctx.random_state
        with torch.random.fork_rng(devices), torch.autocast(*ctx.autocast), tiled.with_parameters(wanted):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, states)
            compute = tiled.noting_kept_bytes(x.shape[:-1].numel()) if tiled.run.is_observed else tiled
            for tile, grad, grad_tile in zip(tiled.split(x), tiled.split(grad_output), grad_tiles, strict=True):
                _add_gradients(compute, tile, grad, grad_tile, wanted, sums)
                compute = tiled
        rounded = (
            sums.pop(index).to(parameter.dtype) if index in sums else None for index, parameter in enumerate(parameters)
        )
        return None, grad_x, *rounded


def _add_gradients(
    compute: Callable[[Tensor], Tensor],
    tile: Tensor,
    grad: Tensor,
    grad_tile: Tensor | None,
    parameters: Mapping[int, Tensor],
    sums: dict[int, Tensor],
) -> None:
    """Computes a tile again, adds its gradient to ``grad_tile`` unless None, and those of parameters to ``sums``."""
    tile = tile.detach().requires_grad_(grad_tile is not None)
    with torch.enable_grad():
        output = compute(tile)
    inputs = [*parameters.values(), *([] if grad_tile is None else [tile])]
    gradients = list(torch.autograd.grad(output, inputs, grad, allow_unused=True))
    own = None if grad_tile is None else gradients.pop()
    if grad_tile is not None and own is not None:
        grad_tile.copy_(own)
    for index, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if index in sums:
            sums[index] += gradient
        else:  # a copy, because a gradient may be a view of something else
            sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)


def _autocast_settings(device_type: str) -> tuple[Any, ...]:
    """The arguments of ``torch.autocast`` that make it as it is now."""
    device_type = "cpu" if device_type == "meta" else device_type  # which has none
    is_enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return device_type, dtype, is_enabled, torch.is_autocast_cache_enabled()
