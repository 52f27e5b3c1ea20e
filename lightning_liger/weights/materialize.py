"""Memory and values for modules on the meta device, one unit at a time, after they were sharded."""

import hashlib
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from lightning_liger.weights.pretrained import own_part, take_pretrained

_INITIALIZED = "_is_hf_initialized"
"""Marks what transformers' initialization leaves alone."""

Place = tuple[nn.Module, str]
"""A module and the name in it of one of its own tensors."""


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether parameters or buffers of ``module`` are on the meta device."""
    return any(tensor.is_meta for child in module.modules() for _, tensor in _own_tensors(child))


def materialize(root: nn.Module, device: torch.device, units: Collection[nn.Module] = ()) -> None:
    """Gives what of ``root`` is on the meta device memory on ``device``, and values.

    Values are those of :func:`~lightning_liger.load_pretrained`, or random: as the Hugging Face model around them
    initializes its weights, or as their module's ``reset_parameters`` does. Random values depend on torch's seed and
    the module's name only, so they are the same on all ranks, however many there are and however they shard the model.

    Args:
        root: May be sharded into DTensors.
        device: Where the tensors are to be.
        units: Modules in ``root``. Sharded tensors are made whole to draw random values for them, those of one unit at
            a time, which are the ones in it and in no other unit.

    Raises:
        TypeError: For tensors that nothing initializes; nothing is changed then.
        RuntimeError: For tensors that the Hugging Face model should initialize and does not.
    """
    if has_meta_tensors(root):
        materializer = Materializer(root, device, units)
        for unit in [module for module in root.modules() if module in materializer.units][::-1]:
            materializer(unit)


class Materializer:
    """Does what :func:`materialize` does for one unit at each call, as ``param_init_fn`` of FSDP.

    Args:
        root: Not wrapped yet.
        device: Where the tensors are to be.
        units: As there; those that FSDP wrapped need not be given.

    Raises:
        TypeError: As there.
    """

    def __init__(self, root: nn.Module, device: torch.device, units: Collection[nn.Module] = ()) -> None:
        self.units = {root, *units}
        self._device = device
        self._names = {module: name for name, module in root.named_modules()}
        self._models = dict(_innermost_models(root))
        self._tied = set(_tied_places(root))
        self._lora_initializations = dict(_lora_initializations(root))
        self._weights = take_pretrained(root)
        self._check_known()
        self._seed = _seed_of_all_ranks()

    @torch.no_grad()
    def __call__(self, unit: nn.Module) -> None:
        """Gives all of ``unit`` memory and values, but for the units in it, which have theirs already.

        Raises:
            RuntimeError: As there.
        """
        modules = list(self._inside_first(unit))
        blank: set[int] = set()
        for module in modules:
            for name, tensor in _own_tensors(module):
                if not tensor.is_meta:
                    continue
                self._give_memory(tensor)
                weights = next((weights for weights in self._weights if (module, name) in weights), None)
                if weights is None:
                    blank.add(id(tensor))
                else:
                    weights.fill(module, name)
        places = {
            (module, name): tensor for module in modules for name, tensor in _own_tensors(module) if id(tensor) in blank
        }
        devices = [self._device] if self._device.type == "cuda" else []
        with self._unset(places) as unset, torch.random.fork_rng(devices=devices), guard_torch_init_functions():
            with _protected(unit, except_for=unset.values()):
                self._initialize(modules, {id(tensor) for tensor in unset.values()})
            self._check_values(unset)

    def _give_memory(self, tensor: Tensor) -> None:
        memory = torch.empty_like(tensor, device=self._device)
        if isinstance(tensor, nn.Parameter):
            memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
        vars(memory).update(vars(tensor))
        torch.utils.swap_tensors(tensor, memory)  # the same object still, wherever it is used

    @contextmanager
    def _unset(self, places: dict[Place, Tensor]) -> Iterator[dict[Place, Tensor]]:
        """Whole tensors of NaN in these places; in the end each rank keeps its part of what was written into them."""
        unset: dict[Place, Tensor] = {}
        sharded: dict[Tensor, Tensor] = {}
        others = {id(tensor) for place, tensor in places.items() if place not in self._tied}
        for place, tensor in places.items():
            if place in self._tied and id(tensor) in others:
                # Has the values of the place that it is tied to: what would be drawn here is not wanted.
                self._put(place, nn.Parameter(torch.empty(tensor.shape, device="meta"), requires_grad=False))
                continue
            if isinstance(tensor, DTensor):
                if tensor not in sharded:
                    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                    sharded[tensor] = nn.Parameter(whole, requires_grad=tensor.requires_grad)
                self._put(place, sharded[tensor])
            unset[place] = sharded.get(tensor, tensor)
        for tensor in unset.values():
            tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        try:
            yield unset
        finally:
            for place, tensor in places.items():
                self._put(place, tensor)
        for tensor, whole in sharded.items():
            local, index = own_part(tensor)
            if local.numel():
                local.copy_(whole[index])

    def _put(self, place: Place, tensor: Tensor) -> None:
        module, name = place
        (module._parameters if name in module._parameters else module._buffers)[name] = tensor

    def _initialize(self, modules: list[nn.Module], unset: set[int]) -> None:
        for module in modules:
            if not any(id(tensor) in unset for child in module.modules() for _, tensor in _own_tensors(child)):
                continue
            name = f"{self._seed}/{self._names.get(module, '')}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1)
            if module in self._models:
                self._models[module]._init_weights(module)
            elif any(id(tensor) in unset for _, tensor in _own_tensors(module)):
                module.reset_parameters()
            if callable(getattr(module, "reset_lora_parameters", None)):
                # Of peft's: to transformers, the two parts of an adapter are linear layers as any other.
                for adapter in {**module.lora_A, **module.lora_embedding_A}:
                    module.reset_lora_parameters(adapter, self._lora_initializations.get(adapter, True))

    def _check_values(self, unset: dict[Place, Tensor]) -> None:
        for (module, name), tensor in unset.items():
            if tensor.is_floating_point() and tensor.isnan().any():
                raise RuntimeError(
                    f"{type(self._models.get(module, module)).__name__} leaves {name!r} of"
                    f" {self._names.get(module)!r} without initial values: build the model whole, not on the meta"
                    " device, or give it weights by load_pretrained"
                )

    def _inside_first(self, module: nn.Module) -> Iterator[nn.Module]:
        """``module`` after what is in it, without other units."""
        seen = {module}

        def walk(parent: nn.Module) -> Iterator[nn.Module]:
            for child in parent.children():
                if child not in seen and child not in self.units and not isinstance(child, FullyShardedDataParallel):
                    seen.add(child)
                    yield from walk(child)
            yield parent

        yield from walk(module)

    def _check_known(self) -> None:
        unknown = {
            f"{self._names[module]} ({type(module).__name__})"
            for module in self._names
            if module not in self._models and not callable(getattr(module, "reset_parameters", None))
            for name, tensor in _own_tensors(module)
            if tensor.is_meta and not any((module, name) in weights for weights in self._weights)
        }
        if unknown:
            raise TypeError(
                f"nothing gives values to the tensors on the meta device of {', '.join(sorted(unknown))}: expected a"
                " method reset_parameters, or weights by load_pretrained"
            )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (module._parameters | module._buffers).items():
        if tensor is not None:
            yield name, tensor


def _innermost_models(root: nn.Module) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    """Modules in Hugging Face models with the model; of nested ones the innermost comes last."""
    for model in root.modules():
        if isinstance(model, PreTrainedModel):
            for module in model.modules():
                yield module, model


def _tied_places(root: nn.Module) -> Iterator[Place]:
    """Where Hugging Face models put a tensor of another place, if their configuration says so."""
    for model in root.modules():
        if isinstance(model, PreTrainedModel):
            for target in model.all_tied_weights_keys:
                parent, _, name = target.rpartition(".")
                yield model.get_submodule(parent), name


def _lora_initializations(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each adapter of peft's, and how it is to be initialized."""
    for module in root.modules():
        for adapter, config in (vars(module).get("peft_config") or {}).items():
            if hasattr(config, "init_lora_weights"):
                yield adapter, config.init_lora_weights


def _seed_of_all_ranks() -> int:
    """The same on all ranks, another one at each call."""
    seed: list[Any] = [torch.randint(2**62, (1,), device="cpu").item()]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(seed)
    return seed[0]


@contextmanager
def _protected(unit: nn.Module, except_for: Collection[Tensor]) -> Iterator[None]:
    """Marks all in ``unit`` as initialized, except for some."""
    free = {id(tensor) for tensor in except_for}
    tensors = [tensor for module in unit.modules() for _, tensor in _own_tensors(module)]
    before = [(tensor, getattr(tensor, _INITIALIZED, None)) for tensor in tensors]
    for tensor in tensors:
        setattr(tensor, _INITIALIZED, id(tensor) not in free)
    try:
        yield
    finally:
        for tensor, value in before:
            if value is None:
                vars(tensor).pop(_INITIALIZED, None)
            else:
                setattr(tensor, _INITIALIZED, value)
