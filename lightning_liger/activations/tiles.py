"""Token-wise modules in tiles of tokens, so that their wide intermediate tensors exist for one tile at a time.

Forward keeps its input only. Backward computes one tile after the other again, with the same random state and autocast,
and takes its gradients; those of parameters are summed in float32 and rounded once. Where a layer is recomputed in
backward anyway, this costs no additional product of matrices: its recomputation ends before the module if nothing
after it is needed. Tiles of a sequence are the idea of ALST (arXiv:2506.13996).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from liger_ops import backend
from liger_ops.arguments import check_floating, check_integer, shown, wrong_type, wrong_value
from lightning_liger.activations.frames import Surroundings, end_recomputation_with
from lightning_liger.activations.layers import current_run

_MIN_TILE_TOKENS = 8192
"""Each tile reads and writes the parameters' gradients once: 10 bytes for each parameter, next to 6 floating-point
operations for each parameter and token. At 4 TB/s and 700 TFLOP/s that is 3.6% of a tile of this size."""
_TILE_BYTES = 2 * 2**30
"""Less than attention's backward adds from 65536 tokens of Llama 3 8B on, so it is not what limits the length."""
_TENSORS_OF_WIDTH = 6  # of a gated MLP in backward: gate, up, their product, and the gradient of each
_STORED_OF_WIDTH = 2  # gate and up, if it does not run in tiles; their product is cheap
_ROW_MULTIPLE = 128

Compute = Callable[[nn.Module, Tensor], Tensor]
Place = tuple[nn.Module, str]


def choose_tile_size(num_tokens: int, bytes_per_token: int) -> int:
    """Tokens per tile, evenly spread, within ``_TILE_BYTES`` or ``_MIN_TILE_TOKENS``; all unless it makes three tiles.

    ``bytes_per_token`` are those of the module's intermediate tensors and their gradients.
    """
    largest = max(_MIN_TILE_TOKENS, _TILE_BYTES // max(1, bytes_per_token))
    if num_tokens <= 2 * largest:
        return max(1, num_tokens)
    size = -(-num_tokens // -(-num_tokens // largest))
    return size + -size % _ROW_MULTIPLE


def may_run_in_tiles() -> bool:
    """Whether :func:`run_in_tiles` may do so here: in a layer that is recomputed in backward."""
    run = None if torch.compiler.is_compiling() else current_run()
    return run is not None and run.mode not in ("store", "cheap")


def run_in_tiles(compute: Compute, module: nn.Module, x: Tensor, width: int) -> Tensor:
    """``compute(module, x)``: in tiles if ``x`` is long and its layer is recomputed in backward, else at once.

    The module is not tiled if a child has hooks, parameters of a tensor parallel or sharded kind, or floating-point
    buffers, which may be statistics that a forward changes.

    Args:
        compute: Treats each token by itself, without side effects, with parameters of ``module`` and its children only.
        module: What it gets as first argument.
        x: ``[..., hidden_size]``.
        width: Columns of the widest intermediate tensor.
    """
    run = current_run() if may_run_in_tiles() else None
    if run is None:
        return compute(module, x)
    num_tokens = x.shape[:-1].numel()
    dtype = backend.autocast_dtype(x.device.type) or x.dtype
    bytes_of_width = width * dtype.itemsize
    tile_size = choose_tile_size(num_tokens, _TENSORS_OF_WIDTH * bytes_of_width)
    places = None if tile_size >= num_tokens else _find_places(module)
    if places is None:
        return compute(module, x)
    if run.control.observer is not None:
        run.sizes.tiled += _STORED_OF_WIDTH * bytes_of_width * num_tokens
        run.sizes.tiled_cheap += bytes_of_width * num_tokens
    return _run(compute, module, x, tile_size, places)


def run_tiled(module: nn.Module, input: Tensor, *, tile_size: int = _MIN_TILE_TOKENS) -> Tensor:
    """``module(input)`` in tiles of tokens, so that intermediate tensors, as wide as an MLP's, exist for one at a time.

    Forward saves the input and the parameters; backward computes each tile again, with the same random state and
    autocast. Gradients are those of ``module(input)`` but for rounding: parameters' are summed in float32. Under
    ``torch.compile`` the module runs at once. Patched MLPs run in tiles by themselves in layers that are recomputed.

    Args:
        module: Treats each token by itself, without side effects: an MLP. Uses its own parameters only.
        input: ``[..., hidden_size]``; the module gets ``[1, tile_size or fewer, hidden_size]``.
        tile_size: Tokens of a tile. Each tile reads and writes the gradients of all parameters: few tiles are fast.

    Returns:
        ``[..., columns]``, with the columns and the dtype of the module's output.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For a module with hooks, floating-point buffers, parameters that are sharded, or an output that has
            not one row for each token.
    """
    if not isinstance(module, nn.Module):
        raise wrong_type("module", "a torch.nn.Module", module)
    check_floating("input", input)
    if input.dim() == 0:
        raise wrong_value("input", "a tensor of at least one dimension", input)
    check_integer("tile_size", tile_size, at_least=1)
    places = None if has_hooks(module) else _find_places(module)
    if places is None:
        raise wrong_value("module", "without hooks, floating-point buffers and sharded parameters", module)
    return _call(module, input) if torch.compiler.is_compiling() else _run(_call, module, input, tile_size, places)


def _call(module: nn.Module, x: Tensor) -> Tensor:
    output = module(x)
    if not isinstance(output, Tensor) or output.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"module must return one row for each token, got {shown(output)} for {shown(x)}")
    return output


def _run(compute: Compute, module: nn.Module, x: Tensor, tile_size: int, places: dict[Tensor, list[Place]]) -> Tensor:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *places)):
        end_recomputation_with((x, *places))
    return _TiledFunction.apply(_Tiled(compute, module, tile_size, list(places.values())), x, *places)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs hooks of its own."""
    # Private to torch, which has no public way to see them.
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _find_places(module: nn.Module) -> dict[Tensor, list[Place]] | None:
    """Each parameter of ``module`` and where its modules hold it; None if the module cannot be tiled.

    Engines put tensors that require a gradient in place of parameters: FSDP views of its flat ones, as attributes.
    """
    places: dict[Tensor, list[Place]] = {}
    for part in module.modules():
        # The module's own hooks run outside of the tiles.
        if part is not module and (has_hooks(part) or isinstance(part, FullyShardedDataParallel)):
            return None
        if any(buffer.is_floating_point() for buffer in part.buffers(recurse=False)):
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
    """A computation in tiles, and where the module holds each of its parameters."""

    compute: Compute
    module: nn.Module
    tile_size: int
    places: list[list[Place]]

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tiles of ``[..., columns]``, each ``[1, tile_size or fewer, columns]``."""
        return tensor.reshape(1, -1, tensor.shape[-1]).split(self.tile_size, dim=1)

    @contextmanager
    def with_parameters(self, parameters: Mapping[int, Tensor]) -> Iterator[None]:
        """Puts other tensors in the place of some parameters, by their indices in ``places``."""
        # Not torch.func.functional_call, which does not see attributes that hide a parameter, as FSDP's.
        replaced: list[tuple[dict[str, Any], str, Any, Tensor]] = [
            (own, name, own[name], parameter)
            for index, parameter in parameters.items()
            for part, name in self.places[index]
            for own in (vars(part), part._parameters)  # as an attribute it is found first
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
        ctx.surroundings = Surroundings(x.device)
        first, *rest = tiled.split(x)
        result = tiled.compute(tiled.module, first)
        output = result.new_empty(*x.shape[:-1], result.shape[-1])
        own, *others = tiled.split(output)
        own.copy_(result)
        del result
        for tile, target in zip(rest, others, strict=True):
            target.copy_(tiled.compute(tiled.module, tile))
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
        grad_tiles = () if grad_x is None else tiled.split(grad_x)
        with ctx.surroundings.again(), tiled.with_parameters(wanted):
            for number, (tile, grad) in enumerate(zip(tiled.split(x), tiled.split(grad_output), strict=True)):
                leaf = tile.detach().requires_grad_(needs_x)
                with torch.enable_grad():
                    output = tiled.compute(tiled.module, leaf)
                inputs = wanted | ({-1: leaf} if needs_x else {})
                gradients = torch.autograd.grad(output, list(inputs.values()), grad, allow_unused=True)
                del output
                for index, gradient in zip(inputs, gradients, strict=True):
                    if gradient is None:
                        continue
                    if index == -1:
                        grad_tiles[number].copy_(gradient)
                    elif index in sums:
                        sums[index] += gradient
                    else:  # a copy, because a gradient may be a view of something else
                        sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
                del gradients
        rounded = (sums.pop(index).to(each.dtype) if index in sums else None for index, each in enumerate(parameters))
        return None, grad_x, *rounded
