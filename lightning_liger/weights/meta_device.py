"""Values for modules on the meta device, one unit at a time, after they were sharded."""

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

from lightning_liger.weights.pretrained import Place, own_part, take_pretrained


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether parameters or buffers of ``module`` are on the meta device."""
    return any(tensor.is_meta for child in module.modules() for _, tensor in _own_tensors(child))


def initialize(root: nn.Module, device: torch.device, units: Collection[nn.Module] = ()) -> None:
    """Moves the tensors of ``root`` that are on the meta device to ``device``, with values.

    Values are those of :func:`~lightning_liger.load_pretrained`, or random: from the weight initialization of the
    Hugging Face model that the tensors are in, or from their module's ``reset_parameters``. Random values depend on
    torch's seed and the module's name only, so they are the same for any number of ranks and any sharding.

    Args:
        root: May be sharded into DTensors.
        units: Modules in ``root``. Random values of a sharded tensor are drawn for the whole tensor; the whole tensors
            of one unit, without those of units inside it, are in memory at a time.

    Raises:
        TypeError: For tensors that nothing initializes; nothing is changed then.
        RuntimeError: For tensors that the Hugging Face model should initialize and does not.
    """
    if has_meta_tensors(root):
        initializer = Initializer(root, device, units)
        for unit in [module for module in root.modules() if module in initializer.units][::-1]:
            initializer(unit)


class Initializer:
    """Callable that initializes one unit, for FSDP's ``param_init_fn``; see :func:`initialize`.

    ``root`` is not wrapped yet, and units that FSDP wraps need not be given.
    """

    def __init__(self, root: nn.Module, device: torch.device, units: Collection[nn.Module] = ()) -> None:
        self.units = {root, *units}
        self._device = device
        self._names = {module: name for name, module in root.named_modules()}
        self._models: dict[nn.Module, PreTrainedModel] = {}  # of nested models the innermost one
        self._tied: set[Place] = set()  # where models reuse a tensor of another place
        self._lora_initializations: dict[str, Any] = {}
        for module in self._names:
            if isinstance(module, PreTrainedModel):
                self._models |= dict.fromkeys(module.modules(), module)
                targets = (target.rpartition(".") for target in module.all_tied_weights_keys)
                self._tied |= {(module.get_submodule(parent), name) for parent, _, name in targets}
            for adapter, config in (vars(module).get("peft_config") or {}).items():
                self._lora_initializations[adapter] = getattr(config, "init_lora_weights", True)
        self._weights = take_pretrained(root)
        self._check_known()
        self._seed = _seed_of_all_ranks()

    @torch.no_grad()
    def __call__(self, unit: nn.Module) -> None:
        """Initializes ``unit``, except for units inside it, which were initialized before."""
        inside = list(unit.modules())
        units = (each for each in inside[1:] if each in self.units or isinstance(each, FullyShardedDataParallel))
        others = {module for each in units for module in each.modules()}
        modules = [module for module in reversed(inside) if module not in others]  # children before parents
        blank: set[int] = set()
        for module in modules:
            for name, tensor in _own_tensors(module):
                if not tensor.is_meta:
                    continue
                self._allocate(tensor)
                if (module, name) in self._weights:
                    self._weights[module, name].fill(module, name)
                else:
                    blank.add(id(tensor))
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._replaced(unit, blank) as drawn:
            self._initialize(modules, {module for module, _ in drawn})
            self._check_values(drawn)

    def _allocate(self, tensor: Tensor) -> None:
        memory = torch.empty_like(tensor, device=self._device)
        if isinstance(tensor, nn.Parameter):
            memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
        vars(memory).update(vars(tensor))
        torch.utils.swap_tensors(tensor, memory)  # keeps the object, and so its ties

    @contextmanager
    def _replaced(self, unit: nn.Module, blank: set[int]) -> Iterator[dict[Place, Tensor]]:
        """Replaces the tensors in ``unit``: blank ones by whole tensors of NaN, whose values each rank copies its shard
        of at the end; all others by tensors on the meta device, so that initializing these changes nothing."""
        before = {(module, name): tensor for module in unit.modules() for name, tensor in _own_tensors(module)}
        untied = {id(tensor) for place, tensor in before.items() if place not in self._tied}
        whole: dict[int, Tensor] = {}
        drawn: dict[Place, Tensor] = {}
        for place, tensor in before.items():
            # The values of a tied tensor are drawn at its other place.
            is_drawn = id(tensor) in blank and not (place in self._tied and id(tensor) in untied)
            value = whole.get(id(tensor), tensor) if is_drawn else tensor
            if value is tensor and (not is_drawn or isinstance(tensor, DTensor)):
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device if is_drawn else "meta")
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            if is_drawn:
                whole[id(tensor)] = drawn[place] = value.fill_(math.nan if value.is_floating_point() else 0)
            setattr(*place, value)
        try:
            yield drawn
        finally:
            for place, tensor in before.items():
                setattr(*place, tensor)
        for tensor in before.values():
            if id(tensor) in whole and whole[id(tensor)] is not tensor:
                local, index = own_part(tensor)
                if local.numel():
                    local.copy_(whole[id(tensor)][index])

    def _initialize(self, modules: list[Any], drawn: set[nn.Module]) -> None:
        for module in modules:
            if drawn.isdisjoint(module.modules()):
                continue
            name = f"{self._seed}/{self._names.get(module, '')}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1)
            if module in self._models:
                self._models[module]._init_weights(module)
            elif module in drawn:
                module.reset_parameters()
            if callable(getattr(module, "reset_lora_parameters", None)):
                # An adapter of peft, whose two parts transformers initialized as ordinary linear layers.
                for adapter in {**module.lora_A, **module.lora_embedding_A}:
                    module.reset_lora_parameters(adapter, self._lora_initializations.get(adapter, True))

    def _check_values(self, drawn: dict[Place, Tensor]) -> None:
        for (module, name), tensor in drawn.items():
            if tensor.is_floating_point() and tensor.isnan().any():
                raise RuntimeError(
                    f"{type(self._models.get(module, module)).__name__} leaves {name!r} of"
                    f" {self._names.get(module)!r} without initial values: build the model on a real device instead of"
                    " the meta device, or load weights with load_pretrained"
                )

    def _check_known(self) -> None:
        unknown = {
            f"{self._names[module]} ({type(module).__name__})"
            for module in self._names
            if module not in self._models and not callable(getattr(module, "reset_parameters", None))
            for name, tensor in _own_tensors(module)
            if tensor.is_meta and (module, name) not in self._weights
        }
        if unknown:
            raise TypeError(
                f"nothing initializes the tensors on the meta device of {', '.join(sorted(unknown))}: expected a"
                " method reset_parameters, or weights from load_pretrained"
            )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _seed_of_all_ranks() -> int:
    """A random seed that is the same on all ranks, and another one at each call."""
    seed: list[Any] = [torch.randint(2**62, (1,), device="cpu").item()]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(seed)
    return seed[0]
