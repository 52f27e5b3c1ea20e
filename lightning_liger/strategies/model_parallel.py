"""``liger_model_parallel``: FSDP2 and tensor parallelism on a device mesh with fused kernels."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import lightning as L
import lightning.fabric.strategies.model_parallel as fabric_model_parallel
import lightning.pytorch.strategies.model_parallel as pytorch_model_parallel
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleDict, ModuleList
from torch.optim import Optimizer
from typing_extensions import override

from liger_ops.arguments import check_integer, wrong_type, wrong_value
from lightning_liger.activations.layers import unsplit_classes
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.patching.rules.linear import gather_in_float8
from lightning_liger.strategies.common import CommonStrategy
from lightning_liger.strategies.fabric import FabricStrategy
from lightning_liger.strategies.parts.expert_parallel import ExpertParallel, is_split
from lightning_liger.strategies.parts.head_units import check_tied_units, gather_heads, tied_pairs
from lightning_liger.strategies.parts.packed import check_split, whole_parameters
from lightning_liger.strategies.parts.policies import LayerPolicy, check_policy, resolve_policy
from lightning_liger.strategies.parts.tensor_parallel import is_distributed, parallelize
from lightning_liger.strategies.parts.visible_logits import HIDDEN_STATES
from lightning_liger.strategies.trainer import TrainerStrategy
from lightning_liger.weights.meta_device import has_meta_tensors, initialize

_SETUP_ORDER = (
    "call model = fabric.setup_module(model), then make the optimizer of model.parameters(), then call optimizer ="
    " fabric.setup_optimizers(optimizer)"
)


class _Shards(CommonStrategy):
    """Shards models by FSDP2, tensor and expert parallelism when they are set up. A mixin for both strategies."""

    _gathers_float8 = True
    root_device: Any

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kernels,
            activation_checkpointing_policy=activation_checkpointing_policy,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            **kwargs,
        )
        check_policy("auto_wrap_policy", auto_wrap_policy, takes_functions=False)
        if data_parallel_size != "auto":
            check_integer("data_parallel_size", data_parallel_size, at_least=1)
        check_integer("tensor_parallel_size", tensor_parallel_size, at_least=1)
        check_integer("expert_parallel_size", expert_parallel_size, at_least=1)
        if expert_parallel_size > 1 and tensor_parallel_size > 1:
            expected = f"1 with tensor_parallel_size={tensor_parallel_size}"
            raise wrong_value("expert_parallel_size", expected, expert_parallel_size)
        compiled = self._activations.compilation.name
        if compiled and tensor_parallel_size > 1:
            raise ValueError(f"{compiled} needs tensor_parallel_size=1, got {tensor_parallel_size}")
        self._wrapped_layers = auto_wrap_policy
        self._checkpoints.are_sharded = True
        saves_shards = kwargs.get("save_distributed_checkpoint", True)
        self._checkpoints.writes_itself = saves_shards or isinstance(self, FabricStrategy)
        self._experts = ExpertParallel(expert_parallel_size)
        self._activations.layers_communicate |= max(tensor_parallel_size, expert_parallel_size) > 1

    def setup_environment(self) -> None:
        """Raises ValueError if the ranks that share layers do not divide the processes, before they start."""
        strategy: Any = self
        num_processes, size = strategy.num_nodes * strategy.num_processes, strategy._tensor_parallel_size
        if num_processes % self._experts.size:
            expected = f"a divisor of the number of processes, {num_processes}"
            raise wrong_value("expert_parallel_size", expected, self._experts.size)
        if strategy._data_parallel_size == "auto":
            if num_processes % size:
                raise wrong_value(
                    "tensor_parallel_size", f"a divisor of the number of processes, {num_processes}", size
                )
            strategy._data_parallel_size = num_processes // size
        super().setup_environment()  # type: ignore[misc]  # of the next class

    def _shard(self, model: Module, roots: list[Module], mesh: DeviceMesh) -> None:
        """Shards a whole ``model``; over data-parallel ranks, layers of the policy one by one, then ``roots``."""
        sizes = {"tensor_parallel_size": mesh["tensor_parallel"].size(), "expert_parallel_size": self._experts.size}
        check_split(model, **sizes)
        layers = self._layer_classes(model)
        units = [module for module in model.modules() if isinstance(module, layers) and module not in roots] + roots
        in_order = [module for module in model.modules() if module in units]
        check_tied_units(model, in_order, tied_pairs(model))
        if mesh["tensor_parallel"].size() > 1 and not is_distributed(model):
            parallelize(model, mesh["tensor_parallel"])
        if (num_ranks := mesh["data_parallel"].size()) > 1:  # one rank gathers nothing
            gather_in_float8(model, num_ranks)
        experts, whole = self._experts.split(model, self.root_device)
        whole |= whole_parameters(model)
        for unit in units:
            if unit not in experts:
                fully_shard(unit, mesh=mesh["data_parallel"], ignored_params=whole)

    def _check_experts(self, model: Module) -> None:
        """Raises ValueError if experts should be split, but someone else sharded the model."""
        if self._experts.size > 1 and not is_split(model):
            raise ValueError(
                f"expert_parallel_size={self._experts.size} needs a model that is not sharded yet, but"
                f" {type(model).__name__} has FSDP units or DTensors: leave sharding to the strategy"
            )

    def _layer_classes(self, model: Module) -> tuple[type[Module], ...]:
        return tuple(resolve_policy("auto_wrap_policy", self._wrapped_layers, model) or unsplit_classes(model))

    def _initialize(self, model: Module) -> None:
        """Gives a sharded model that is on the meta device memory and values, one layer or unit at a time."""
        layers = self._layer_classes(model)
        units = [module for module in model.modules() if isinstance(module, (FSDPModule, *layers))]
        initialize(model, self.root_device, units)


def _expose_lazy_logits(model: Module) -> None:
    """Shows the tensors of lazy logits to FSDP2, which waits for the gradients of what its modules return.

    A head's weight stays gathered until then, also if the head is a separate FSDP unit.
    """
    heads = set(gather_heads(model))
    for unit in model.modules():
        if isinstance(unit, FSDPModule) and not heads.isdisjoint(unit.modules()):
            unit.set_reshard_after_forward(False, recurse=False)
            HIDDEN_STATES.expose(unit)


class LigerModelParallelStrategy(_Shards, TrainerStrategy, pytorch_model_parallel.ModelParallelStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.ModelParallelStrategy` with fused kernels and a fused loss.

    FSDP2 shards what ``configure_model`` did not shard over the data-parallel ranks: the layers that must not be split
    one by one, then each child of the LightningModule around them. The parameters of a child, with the LM head's, stay
    gathered from its forward to the end of backward. The loss of an LM head that tensor parallelism shards over the
    vocabulary is computed where its rows are.

    Args:
        kernels: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        auto_wrap_policy: The layers to shard one by one: their classes or names of these; by default those that the
            Hugging Face model in the module says must not be split.
        activation_checkpointing_policy: The layers to recompute in backward, chosen in the same way. Only one of this,
            ``activation_checkpointing`` and ``memory_budget`` may be given.
        data_parallel_size: By default all processes, divided by ``tensor_parallel_size``.
        tensor_parallel_size: Ranks that share each layer. What ``configure_model`` leaves without DTensors is spread
            over them by the Hugging Face model's plan, the embeddings and the LM head over the
            vocabulary; otherwise ``configure_model`` parallelizes, on ``self.device_mesh["tensor_parallel"]``.
        expert_parallel_size: Consecutive ranks that split the experts of each layer, and exchange tokens: gradients,
            losses and checkpoints are those of whole experts. Other parameters are sharded over all ranks. It divides
            the number of processes and that of experts, which the kernel ``"moe_experts"`` must have replaced.
        **kwargs: ``on_nonfinite_grad``, ``context_parallel_size``, ``activation_checkpointing``, ``memory_budget``,
            ``fault_tolerance`` and ``compile`` as in :class:`~lightning_liger.LigerFSDPStrategy`; others as in
            Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel, layer class or ``on_nonfinite_grad``; with a ``tensor_parallel_size`` for a
            model without a plan, or sizes that cannot be divided by it; with an ``expert_parallel_size`` for a model
            without experts or that is sharded already, and sizes that cannot be divided by it.
    """

    _initializes_on_meta = True

    @override
    def setup(self, trainer: L.Trainer) -> None:
        assert self.model is not None
        if has_meta_tensors(self.model):  # Lightning's set-up would give the model memory before it is sharded
            self.model = self._convert(self.precision_plugin.convert_module, self.model)
            self._shard_children(self.model)
            self._initialize(self.model)
        module: Any = self.lightning_module
        # Lightning insists on a configure_model that parallelizes; here it need not be there.
        stand_in = {} if is_overridden("configure_model", module) else {"configure_model": lambda: None}
        vars(module).update(stand_in)
        try:
            super().setup(trainer)
        finally:
            for name in stand_in:
                del vars(module)[name]

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super().optimizer_state(optimizer) if optimizer.state else optimizer.state_dict()

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        assert self.model is not None
        self._shard_children(self.model)
        _expose_lazy_logits(self.model)

    def _shard_children(self, model: Module) -> None:
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            self._check_experts(model)
        else:
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


class FabricLigerModelParallelStrategy(_Shards, FabricStrategy, fabric_model_parallel.ModelParallelStrategy):
    """:class:`LigerModelParallelStrategy` for Fabric.

    Takes the same arguments, except for ``on_nonfinite_grad`` and ``context_parallel_size``, and ``parallelize_fn`` as
    Lightning's strategy: by default modules are sharded as there the children of a LightningModule.

    Raises:
        RuntimeError: When an optimizer has parameters from before the model was sharded: set up the model with
            ``fabric.setup_module``, make the optimizer of its parameters, then call ``fabric.setup_optimizers``.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if parallelize_fn is not None and not callable(parallelize_fn):
            raise wrong_type("parallelize_fn", "a function or None", parallelize_fn)
        self._parallelize = parallelize_fn or self._shard_whole
        super().__init__(
            kernels,
            auto_wrap_policy,
            activation_checkpointing_policy,
            data_parallel_size,
            tensor_parallel_size,
            expert_parallel_size,
            parallelize_fn=self._parallelize_and_initialize,
            **kwargs,
        )

    def _shard_whole(self, module: Module, mesh: DeviceMesh) -> Module:
        self._shard(module, [module], mesh)
        return module

    def _parallelize_and_initialize(self, module: Module, mesh: DeviceMesh) -> Module:
        module = self._parallelize(module, mesh)
        if isinstance(module, Module):  # Lightning refuses anything else
            self._check_experts(module)
            self._initialize(module)
            _expose_lazy_logits(module)
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
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            raise RuntimeError(
                f"{type(optimizer).__name__} has no sharded parameter, so its steps would not"
                f" train the model, whose parameters sharding has replaced: {_SETUP_ORDER}"
            )
        return super().setup_optimizer(optimizer)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        empty = {
            name: part.state_dict() for name, part in state.items() if isinstance(part, Optimizer) and not part.state
        }
        super().save_checkpoint(path, state | empty, *args, **kwargs)

    @override
    def module_to_device(self, module: Module) -> None:
        """Does nothing: sharding moves a module to its device."""
