"""``liger_model_parallel``: FSDP2 on a device mesh with fused kernels, and room for a user's own tensor parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning.fabric.strategies.model_parallel as fabric_model_parallel
import lightning.pytorch.strategies.model_parallel as pytorch_model_parallel
import torch.distributed as dist
from lightning.fabric.strategies import _StrategyRegistry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Module
from typing_extensions import override

from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.kernels import FabricKernels, TrainerKernels
from lightning_liger.strategies.policies import check_policy, decoder_layer_classes, resolve_policy

_NAME = "liger_model_parallel"
_DESCRIPTION = "Fully sharded data parallelism by FSDP2 with fused kernels and a loss without logits"


class _FullySharded:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    num_nodes: int
    num_processes: int
    _data_parallel_size: Any
    _tensor_parallel_size: int

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        check_policy("auto_wrap_policy", auto_wrap_policy)
        self._layers_to_wrap = auto_wrap_policy
        super().__init__(  # type: ignore[call-arg]
            kernels=kernels,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            **kwargs,
        )

    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":
            self._data_parallel_size = max(1, self.num_nodes * self.num_processes // self._tensor_parallel_size)
        super().setup_environment()  # type: ignore[misc]

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if dist.is_available() and _NAME not in strategy_registry:
            strategy_registry.register(_NAME, cls, description=_DESCRIPTION)


class LigerModelParallelStrategy(_FullySharded, TrainerKernels, pytorch_model_parallel.ModelParallelStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.ModelParallelStrategy` with fused kernels and a fused loss.

    What ``configure_model`` leaves whole is sharded by FSDP2 over the data-parallel ranks: the layers that must not be
    split one by one, and around them each child of the LightningModule, whose parameters, the LM head's among them,
    stay gathered from its forward to the end of backward. A head that ``configure_model`` distributed computes real
    logits.

    Args:
        kernels: ``"auto"``, ``"none"``, a list of names or a dict with options; see
            :func:`~lightning_liger.apply_liger_kernels`.
        auto_wrap_policy: The layers to shard one by one: their classes or names of these; by default those that the
            Hugging Face model in the module says must not be split.
        data_parallel_size: By default all processes, divided by ``tensor_parallel_size``.
        tensor_parallel_size: For ``configure_model`` to use, on ``self.device_mesh["tensor_parallel"]``.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel or layer class.
    """

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        if not any(isinstance(module, FSDPModule) for module in self.model.modules()):
            children = [child for child in self.model.children() if any(True for _ in child.parameters())]
            _shard(self.model, children, self.device_mesh, self._layers_to_wrap)


class FabricLigerModelParallelStrategy(_FullySharded, FabricKernels, fabric_model_parallel.ModelParallelStrategy):
    """:class:`LigerModelParallelStrategy` for Fabric.

    Args:
        parallelize_fn: As in Lightning's strategy; by default modules are sharded as
            :class:`LigerModelParallelStrategy` shards the children of a LightningModule.
        kernels: As there.
        auto_wrap_policy: As there.
        data_parallel_size: As there.
        tensor_parallel_size: For ``parallelize_fn`` to use.
        **kwargs: As in Lightning's strategy.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kernels,
            auto_wrap_policy,
            data_parallel_size,
            tensor_parallel_size,
            parallelize_fn=parallelize_fn or partial(_shard_whole, policy=auto_wrap_policy),
            **kwargs,
        )


def _shard(model: Module, roots: list[Module], mesh: DeviceMesh, policy: Any) -> None:
    """Shards the layers of ``model`` that ``policy`` names one by one, and ``roots`` around them."""
    layers = tuple(resolve_policy("auto_wrap_policy", policy, model) or decoder_layer_classes(model))
    for module in [module for module in model.modules() if isinstance(module, layers)] + roots:
        fully_shard(module, mesh=mesh["data_parallel"])


def _shard_whole(module: Module, mesh: DeviceMesh, policy: Any) -> Module:
    _shard(module, [module], mesh, policy)
    return module
