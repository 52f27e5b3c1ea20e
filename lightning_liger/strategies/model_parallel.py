"""``liger_model_parallel``: FSDP2 and tensor parallelism on a device mesh with fused kernels."""

from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import lightning.fabric.strategies.model_parallel as fabric_model_parallel
import lightning.pytorch.strategies.model_parallel as pytorch_model_parallel
import torch
import torch.distributed as dist
from lightning.fabric.strategies import _StrategyRegistry
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Module
from typing_extensions import override

from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.parts.clipping import TrainerClipping
from lightning_liger.strategies.parts.head_units import check_tied_units, enter_backward_at_heads
from lightning_liger.strategies.parts.kernels import FabricKernels, TrainerKernels
from lightning_liger.strategies.parts.policies import check_policy, decoder_layer_classes, resolve_policy
from lightning_liger.strategies.parts.shared_sequences import SharesSequences
from lightning_liger.strategies.parts.tensor_parallel import is_distributed, parallelize
from lightning_liger.weights.materialize import has_meta_tensors, materialize

_NAME = "liger_model_parallel"
_DESCRIPTION = "Fully sharded data parallelism by FSDP2 with fused kernels and a loss without logits"


class _FullySharded:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    materializes = True
    """Whether models may be built on the meta device."""

    root_device: torch.device
    num_nodes: int
    num_processes: int
    _data_parallel_size: Any
    _tensor_parallel_size: int

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | None = None,
        activation_checkpointing_policy: list[str] | set[type[Module]] | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        check_policy("auto_wrap_policy", auto_wrap_policy)
        check_policy("activation_checkpointing_policy", activation_checkpointing_policy)
        self._layers_to_wrap = auto_wrap_policy
        self._layers_to_checkpoint = activation_checkpointing_policy
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

    def _shard(self, model: Module, roots: list[Module], mesh: DeviceMesh) -> None:
        """Shards a whole ``model`` over both dimensions of ``mesh``.

        Of the data-parallel one it shards the layers of ``auto_wrap_policy`` one by one, and ``roots`` around them.
        """
        layers = self._layer_classes(model)
        units = [module for module in model.modules() if isinstance(module, layers)] + roots
        check_tied_units(model, set(units))
        to_checkpoint = ()
        if self._layers_to_checkpoint is not None:
            to_checkpoint = resolve_policy("activation_checkpointing_policy", self._layers_to_checkpoint, model)
        if mesh["tensor_parallel"].size() > 1 and not is_distributed(model):
            parallelize(model, mesh["tensor_parallel"])
        for module in [module for module in model.modules() if isinstance(module, tuple(to_checkpoint))]:
            checkpoint(module)
        for unit in units:
            fully_shard(unit, mesh=mesh["data_parallel"])

    def _layer_classes(self, model: Module) -> tuple[type[Module], ...]:
        return tuple(resolve_policy("auto_wrap_policy", self._layers_to_wrap, model) or decoder_layer_classes(model))

    def _materialize(self, model: Module) -> None:
        """Gives a sharded model that is on the meta device memory and values, one layer or unit at a time."""
        layers = self._layer_classes(model)
        units = [module for module in model.modules() if isinstance(module, (FSDPModule, *layers))]
        materialize(model, self.root_device, units)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if dist.is_available() and _NAME not in strategy_registry:
            strategy_registry.register(_NAME, cls, description=_DESCRIPTION)


class _ShardsOnMeta:
    """Placed right before Lightning's class of the Trainer, whose set-up would give models memory before sharding."""

    model: Any

    def setup(self, trainer: L.Trainer) -> None:
        if has_meta_tensors(self.model):
            self.model = self.precision_plugin.convert_module(self.model)  # type: ignore[attr-defined]
            self._apply_kernels(self.model)  # type: ignore[attr-defined]
            self._shard_children()  # type: ignore[attr-defined]
            self._materialize(self.model)  # type: ignore[attr-defined]
        super().setup(trainer)  # type: ignore[misc]


class LigerModelParallelStrategy(
    _FullySharded,
    SharesSequences,
    TrainerKernels,
    TrainerClipping,
    _ShardsOnMeta,
    pytorch_model_parallel.ModelParallelStrategy,
):
    """Lightning's :class:`~lightning.pytorch.strategies.ModelParallelStrategy` with fused kernels and a fused loss.

    What ``configure_model`` leaves whole is sharded by FSDP2 over the data-parallel ranks: the layers that must not be
    split one by one, and around them each child of the LightningModule, whose parameters, the LM head's among them,
    stay gathered from its forward to the end of backward. The loss of an LM head that tensor parallelism spread over
    the vocabulary is computed where its rows are.

    Args:
        kernels: ``"auto"``, ``"none"``, a list of names or a dict with options; see
            :func:`~lightning_liger.apply_liger_kernels`.
        auto_wrap_policy: The layers to shard one by one: their classes or names of these; by default those that the
            Hugging Face model in the module says must not be split.
        activation_checkpointing_policy: The layers to recompute in backward, named in the same way. By default none.
        data_parallel_size: By default all processes, divided by ``tensor_parallel_size``.
        tensor_parallel_size: Ranks that share each layer. What ``configure_model`` leaves without DTensors is spread
            over them by the plan that the Hugging Face model carries, the embeddings and the LM head over the
            vocabulary; otherwise ``configure_model`` parallelizes, on ``self.device_mesh["tensor_parallel"]``.
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN, as in
            :class:`~lightning_liger.LigerStrategy`. The norm before clipping is logged as ``grad_norm``.
        context_parallel_size: Ranks that share each sequence; see :class:`~lightning_liger.ContextParallel`.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel, layer class or ``on_nonfinite_grad``; with a ``tensor_parallel_size`` for a
            model without a plan, or sizes that cannot be divided by it.
    """

    @property
    @override
    def saves_folders(self) -> bool:
        return self._save_distributed_checkpoint

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        self._shard_children()
        enter_backward_at_heads(self.model)

    def _shard_children(self) -> None:
        if not any(isinstance(module, FSDPModule) for module in self.model.modules()):
            children = [child for child in self.model.children() if any(True for _ in child.parameters())]
            self._shard(self.model, children, self.device_mesh)


class FabricLigerModelParallelStrategy(_FullySharded, FabricKernels, fabric_model_parallel.ModelParallelStrategy):
    """:class:`LigerModelParallelStrategy` for Fabric.

    Args:
        parallelize_fn: As in Lightning's strategy; by default modules are sharded as
            :class:`LigerModelParallelStrategy` shards the children of a LightningModule.
        kernels: As there.
        auto_wrap_policy: As there.
        activation_checkpointing_policy: As there.
        data_parallel_size: As there.
        tensor_parallel_size: As there, or for ``parallelize_fn`` to use.
        **kwargs: As in Lightning's strategy.
    """

    _writes_by_itself = True

    def __init__(
        self,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | None = None,
        activation_checkpointing_policy: list[str] | set[type[Module]] | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kernels,
            auto_wrap_policy,
            activation_checkpointing_policy,
            data_parallel_size,
            tensor_parallel_size,
            parallelize_fn=self._parallelize_and_materialize,
            **kwargs,
        )
        self._parallelize = parallelize_fn or self._shard_whole

    def _shard_whole(self, module: Module, mesh: DeviceMesh) -> Module:
        self._shard(module, [module], mesh)
        return module

    def _parallelize_and_materialize(self, module: Module, mesh: DeviceMesh) -> Module:
        module = self._parallelize(module, mesh)
        if isinstance(module, Module):  # Lightning refuses anything else
            self._materialize(module)
            enter_backward_at_heads(module)
        return module

    @override
    def module_to_device(self, module: Module) -> None:
        """Nothing: sharding brings a module to its device."""
