"""Expert parallelism: the experts of a layer are split over a group of ranks, which exchange tokens.

A group are consecutive ranks. Each has the next part of a layer's experts, as DTensors on ``expert``; FSDP2 shards them
over ``expert_data``, the ranks with the same part. Gradients hold what the tokens of the whole group add, divided by
the group's size, so that the mean over ``expert_data`` is the one over all ranks, as of other parameters.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from liger_ops.arguments import wrong_value
from liger_ops.moe.exchange import ExpertGroup
from lightning_liger.patching.rules.base import Patched
from lightning_liger.patching.rules.experts import ExpertsReplacement, group_of, share_experts


class ExpertParallel:
    """Splits the experts of models over groups of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mesh: DeviceMesh | None = None
        self._group: ExpertGroup | None = None

    def split(self, model: nn.Module, device: torch.device) -> tuple[list[nn.Module], set[nn.Parameter]]:
        """Splits all experts in ``model``; returns them, and those of their parameters that need no FSDP unit.

        Raises ValueError, before it changes anything, if ``model`` has none that kernels replace, or they cannot be
        divided.
        """
        if self.size == 1:
            return [], set()
        names: dict[Any, str] = {module: name for name, module in model.named_modules() if isinstance(module, Patched)}
        experts = [each for each in names if isinstance(each.liger_replacement, ExpertsReplacement)]
        if not experts:
            raise ValueError(
                f"expert_parallel_size={self.size} needs experts that the kernel 'moe_experts' replaces, but"
                f" {type(model).__name__} has none: the strategy's patch_report says why"
            )
        for module in model.modules():
            base: Any = getattr(module, "get_base_layer", None)  # of modules of peft
            adapted = base() if callable(base) else None
            if adapted in experts and not isinstance(module, Patched):
                raise ValueError(
                    f"expert_parallel_size={self.size} cannot split {names[adapted]}, which has an adapter that is not"
                    " replaced: the strategy's patch_report says why"
                )
        num_copies = dist.get_world_size() // self.size
        for module in experts:
            for name, parameter in module.named_parameters(recurse=False):
                place = f"{names[module]}.{name} of {tuple(parameter.shape)}"
                if module.liger_replacement.has_identity:
                    raise ValueError(f"expert_parallel_size={self.size}: {place} counts experts without weights")
                if parameter.shape[0] % self.size:
                    raise wrong_value("expert_parallel_size", f"a divisor of the experts of {place}", self.size)
                if not any(size % num_copies == 0 for size in parameter.shape[1:]):
                    raise ValueError(
                        f"expert_parallel_size={self.size} leaves {num_copies} ranks to shard {place} over, which"
                        " divide none of its sizes after the first"
                    )
        if self._mesh is None or self._group is None:
            shape, axes = (num_copies, self.size), ("expert_data", "expert")
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes)
            ranks = torch.arange(num_copies * self.size).view(shape).tolist()
            hosts, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")
            self._group = ExpertGroup(self._mesh.get_group("expert"), hosts)
        mesh, group = self._mesh, self._group
        for module in experts:
            for name, parameter in module.named_parameters(recurse=False):
                local = parameter.detach().chunk(self.size)[group.ranks.rank()]
                local = local.clone() if local.is_meta else local.to(device, copy=True)
                split = DTensor.from_local(local, mesh["expert"], [Shard(0)], run_check=False)
                module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
            share_experts(module, group)
        if num_copies == 1:
            return experts, {each for module in experts for each in module.parameters(recurse=False)}

        def placement(each: nn.Parameter) -> Shard:  # the first dimension after that of experts which can be divided
            return Shard(next(dim for dim in range(1, each.dim()) if each.shape[dim] % num_copies == 0))

        for module in experts:
            fully_shard(module, mesh=mesh["expert_data"], shard_placement_fn=placement)
        return experts, set()


def is_split(model: nn.Module) -> bool:
    """Whether experts in ``model`` are split over ranks."""
    return any(group_of(module) is not None for module in model.modules())
