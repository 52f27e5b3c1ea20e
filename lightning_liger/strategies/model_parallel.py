"""``liger_model_parallel``: FSDP2 and tensor parallelism on a device mesh with fused kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import lightning.fabric.strategies.model_parallel as fabric_model_parallel
import lightning.pytorch.strategies.model_parallel as pytorch_model_parallel
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Module, ModuleDict, ModuleList
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from liger_ops.arguments import wrong_value
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.parts.activations import FabricActivations, TrainerActivations
from lightning_liger.strategies.parts.adoption import FabricKernels, TrainerKernels
from lightning_liger.strategies.parts.early_release import EarlyRelease
from lightning_liger.strategies.parts.fault_tolerance import FabricFaultTolerance, TrainerFaultTolerance
from lightning_liger.strategies.parts.head_units import check_tied_units, gather_heads
from lightning_liger.strategies.parts.optimizer_states import (
    FabricOptimizerStates,
    TrainerOptimizerStates,
    states_left_empty,
)
from lightning_liger.strategies.parts.policies import check_policy, decoder_layer_classes, resolve_policy
from lightning_liger.strategies.parts.shared_sequences import SharesSequences
from lightning_liger.strategies.parts.tensor_parallel import is_distributed, parallelize
from lightning_liger.strategies.parts.visible_logits import HIDDEN_STATES
from lightning_liger.weights.materialize import has_meta_tensors, materialize

if TYPE_CHECKING:
    _Strategy = Any  # Lightning's for the Trainer or for Fabric, which have no common base
else:
    _Strategy = object


_SETUP_ORDER = (
    "call model = fabric.setup_module(model), then make the optimizer of model.parameters(), then call optimizer ="
    " fabric.setup_optimizers(optimizer)"
)


class _FullySharded(_Strategy):
    """Shards models by FSDP2 and tensor parallelism. A mixin for strategies of Trainer and Fabric."""

    materializes = True
    _data_parallel_size: Literal["auto"] | int

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | None = None,
        activation_checkpointing_policy: list[str] | set[type[Module]] | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        check_policy("auto_wrap_policy", auto_wrap_policy, takes_functions=False)
        check_policy("activation_checkpointing_policy", activation_checkpointing_policy, takes_functions=False)
        self._layers_to_wrap = auto_wrap_policy
        self._layers_to_checkpoint = activation_checkpointing_policy
        super().__init__(
            kernels=kernels,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            **kwargs,
        )

    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":
            num_processes, size = self.num_nodes * self.num_processes, self._tensor_parallel_size
            if num_processes % size:
                raise wrong_value(
                    "tensor_parallel_size", f"a divisor of the number of processes, {num_processes}", size
                )
            self._data_parallel_size = num_processes // size
        super().setup_environment()

    def _shard(self, model: Module, roots: list[Module], mesh: DeviceMesh) -> None:
        """Shards a whole ``model`` over both dimensions of ``mesh``.

        Over the data-parallel dimension, it shards the layers of ``auto_wrap_policy`` one by one, then ``roots``.
        """
        layers = self._layer_classes(model)
        units = [module for module in model.modules() if isinstance(module, layers) and module not in roots] + roots
        check_tied_units(model, set(units))
        if mesh["tensor_parallel"].size() > 1 and not is_distributed(model):
            parallelize(model, mesh["tensor_parallel"])
        for unit in units:
            fully_shard(unit, mesh=mesh["data_parallel"])

    def _layer_classes(self, model: Module) -> tuple[type[Module], ...]:
        return tuple(resolve_policy("auto_wrap_policy", self._layers_to_wrap, model) or decoder_layer_classes(model))

    def _materialize(self, model: Module) -> None:
        """Gives a sharded model that is on the meta device memory and values, one layer or unit at a time."""
        layers = self._layer_classes(model)
        units = [module for module in model.modules() if isinstance(module, (FSDPModule, *layers))]
        materialize(model, self.root_device, units)

    def _expose_lazy_logits(self, model: Module) -> None:
        """Shows the tensors of lazy logits to FSDP2, which waits for the gradients of what its modules return.

        A head's weight stays gathered until then, also if the head is a separate FSDP unit.
        """
        heads = set(gather_heads(model))
        for unit in model.modules():
            if isinstance(unit, FSDPModule) and not heads.isdisjoint(unit.modules()):
                unit.set_reshard_after_forward(False, recurse=False)
                HIDDEN_STATES.expose(unit)


class _ShardsOnMeta(_Strategy):
    """Shards models on the meta device before they get memory. A mixin to list right before Lightning's class."""

    model: Any

    def setup(self, trainer: L.Trainer) -> None:
        if has_meta_tensors(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
            self._shard_children(self.model)
            self._materialize(self.model)
        with _configured(self.lightning_module):
            super().setup(trainer)  # which would give the model memory before it is sharded


@contextmanager
def _configured(module: Any) -> Iterator[None]:
    """Lets Lightning, which insists on a ``configure_model`` that parallelizes, accept a module without one."""
    if is_overridden("configure_model", module):
        yield
        return
    module.configure_model = _do_nothing
    try:
        yield
    finally:
        del module.configure_model


def _do_nothing() -> None:
    """Stands for a ``configure_model`` that has been called."""


class LigerModelParallelStrategy(
    _FullySharded,
    SharesSequences,
    TrainerFaultTolerance,
    TrainerActivations,
    EarlyRelease,
    TrainerKernels,
    _ShardsOnMeta,
    TrainerOptimizerStates,
    pytorch_model_parallel.ModelParallelStrategy,
):
    """Lightning's :class:`~lightning.pytorch.strategies.ModelParallelStrategy` with fused kernels and a fused loss.

    FSDP2 shards what ``configure_model`` leaves whole over the data-parallel ranks: the layers that must not be split
    one by one, then each child of the LightningModule around them. The parameters of a child, with the LM head's, stay
    gathered from its forward to the end of backward. The loss of an LM head that tensor parallelism shards over the
    vocabulary is computed where its rows are.

    Args:
        kernels: ``"auto"``, ``"none"``, a name, a list of names or a dict of changes to ``"auto"``; see
            :func:`~lightning_liger.apply_liger_kernels`.
        auto_wrap_policy: The layers to shard one by one: their classes or names of these; by default those that the
            Hugging Face model in the module says must not be split.
        activation_checkpointing_policy: The layers to recompute in backward, chosen in the same way. Only one of this
            and the next two arguments may be given.
        activation_checkpointing: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        memory_budget: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        data_parallel_size: By default all processes, divided by ``tensor_parallel_size``.
        tensor_parallel_size: Ranks that share each layer. What ``configure_model`` leaves without DTensors is spread
            over them by the plan that the Hugging Face model carries, the embeddings and the LM head over the
            vocabulary; otherwise ``configure_model`` parallelizes, on ``self.device_mesh["tensor_parallel"]``.
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN, as in
            :class:`~lightning_liger.LigerFSDPStrategy`. The norm before clipping is logged as ``grad_norm``.
        context_parallel_size: Ranks that share each sequence; see :class:`~lightning_liger.ContextParallel`.
        fault_tolerance: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel, layer class or ``on_nonfinite_grad``; with a ``tensor_parallel_size`` for a
            model without a plan, or sizes that cannot be divided by it.
    """

    _reads_by_itself = True

    @property
    @override
    def saves_folders(self) -> bool:
        return self._save_distributed_checkpoint

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with states_left_empty([optimizer]):
            return super().optimizer_state(optimizer)

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        assert self.model is not None
        self._shard_children(self.model)
        self._expose_lazy_logits(self.model)

    def _shard_children(self, model: Module) -> None:
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            units = list(dict.fromkeys(_units_below(model)))
            inside = {module for unit in units for module in unit.modules() if module is not unit}
            self._shard(model, [unit for unit in units if unit not in inside], self.device_mesh)


def _units_below(model: Module) -> Iterator[Module]:
    """The children with parameters; in place of lists and dictionaries of modules, which FSDP2 refuses, their items."""
    for child in model.children():
        if isinstance(child, ModuleList | ModuleDict):
            yield from _units_below(child)
        elif any(True for _ in child.parameters()):
            yield child


class FabricLigerModelParallelStrategy(
    _FullySharded,
    FabricFaultTolerance,
    FabricActivations,
    FabricKernels,
    FabricOptimizerStates,
    fabric_model_parallel.ModelParallelStrategy,
):
    """:class:`LigerModelParallelStrategy` for Fabric.

    Args:
        parallelize_fn: As in Lightning's strategy; by default modules are sharded as
            :class:`LigerModelParallelStrategy` shards the children of a LightningModule.
        kernels: As in :class:`LigerModelParallelStrategy`.
        auto_wrap_policy: As in :class:`LigerModelParallelStrategy`.
        activation_checkpointing_policy: As in :class:`LigerModelParallelStrategy`.
        data_parallel_size: As in :class:`LigerModelParallelStrategy`.
        tensor_parallel_size: As in :class:`LigerModelParallelStrategy`, or for ``parallelize_fn`` to use.
        **kwargs: ``activation_checkpointing``, ``memory_budget``, ``fault_tolerance``, and as in
            Lightning's strategy.

    Raises:
        RuntimeError: When an optimizer has parameters from before the model was sharded: set up the model with
            ``fabric.setup_module``, make the optimizer of its parameters, then call ``fabric.setup_optimizers``.
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
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def _shard_whole(self, module: Module, mesh: DeviceMesh) -> Module:
        self._shard(module, [module], mesh)
        return module

    def _parallelize_and_materialize(self, module: Module, mesh: DeviceMesh) -> Module:
        module = self._parallelize(module, mesh)
        if isinstance(module, Module):  # Lightning refuses anything else
            self._materialize(module)
            self._expose_lazy_logits(module)
        return module

    @override
    def setup_module_and_optimizers(self, module: Module, *args: Any, **kwargs: Any) -> Any:
        if not is_distributed(module):
            raise RuntimeError(
                f"fabric.setup(model, optimizer) is not supported by {type(self).__name__}, which replaces the model's"
                f" parameters: {_SETUP_ORDER}"
            )
        return super().setup_module_and_optimizers(module, *args, **kwargs)

    @override
    def setup_module(self, module: Module) -> Module:
        before = list(module.parameters())
        module = super().setup_module(module)
        after = set(module.parameters())
        self._replaced.update((parameter, None) for parameter in before if parameter not in after)
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        num_replaced = sum(parameter in self._replaced for parameter in parameters)
        if num_replaced:
            raise RuntimeError(
                f"{type(optimizer).__name__} has {num_replaced} of {len(parameters)} parameters that sharding has"
                f" replaced, so its steps would not train the model: {_SETUP_ORDER}"
            )
        return super().setup_optimizer(optimizer)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        with states_left_empty(part for part in state.values() if isinstance(part, Optimizer)):
            super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def module_to_device(self, module: Module) -> None:
        """Does nothing: sharding moves a module to its device."""
