"""``liger_fsdp``: Fully Sharded Data Parallel with fused kernels, for Trainer and Fabric, on GPUs and CPUs."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import lightning.fabric.strategies.fsdp as fabric_fsdp
import lightning.pytorch.strategies.fsdp as pytorch_fsdp
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from liger_ops.arguments import wrong_value
from lightning_liger.activations.layers import unsplit_classes
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.common import CommonStrategy
from lightning_liger.strategies.fabric import FabricStrategy
from lightning_liger.strategies.parts.gradient_norm import clip_gradient_norm
from lightning_liger.strategies.parts.head_units import check_head_units, detach_frozen_heads, tied_pairs
from lightning_liger.strategies.parts.packed import check_flattened
from lightning_liger.strategies.parts.policies import LayerPolicy, check_policy, resolve_policy
from lightning_liger.strategies.precision import control_gradients, has_buffer_dtypes
from lightning_liger.strategies.trainer import TrainerStrategy
from lightning_liger.weights.meta_device import Initializer, has_meta_tensors

_ROOT = "liger_fsdp_root"


class BackwardRepair:
    """Adds up gradients that FSDP offloads to the CPU, and shows frozen parameters after backward.

    FSDP overwrites gradients that it offloads. And it takes parameters of units that are not sharded for restored ones
    after backward, also where all of them are frozen: state dicts and ``parameters()`` lack them.
    """

    def __init__(self) -> None:
        self._with_gradients: set[Parameter] | None = None  # on the CPU before every forward since the last backward
        self._whole_units: list[FullyShardedDataParallel] = []

    def watch(self, model: Module) -> Module:
        """Repairs what :meth:`context` is around, of a wrapped model, which is returned."""
        units = FullyShardedDataParallel.fsdp_modules(model)
        if any(unit.cpu_offload.offload_params for unit in units):
            model.register_forward_pre_hook(self.note_gradients)
        self._whole_units = [unit for unit in units if unit.sharding_strategy == ShardingStrategy.NO_SHARD]
        if model in self._whole_units and model._handle is not None:
            # Logits are computed after forward too, when FSDP frees what it cast without sharding it, as their weight.
            handle: Any = model._handle
            free = type(handle).post_reshard
            handle.post_reshard = lambda: None if handle._training_state.name == "FORWARD" else free(handle)
        return model

    def note_gradients(self, model: Module, args: Any) -> None:
        """Before forward, in which FSDP shows the gradients of earlier steps again, although they were set to None."""
        found = {p for p in model.parameters() if p.grad is not None and p.grad.device.type == "cpu"}
        self._with_gradients = found if self._with_gradients is None else self._with_gradients & found

    @contextmanager
    def context(self) -> Iterator[None]:
        """Goes around backward."""
        gradients = {p: p.grad for p in self._with_gradients or () if p.grad is not None}
        self._with_gradients = None
        earlier = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient.zero_()  # of units that this backward does not reach
        yield
        for parameter, gradient in earlier.items():
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
        for unit in self._whole_units:
            if unit._handle is not None and not unit._handle.flat_param.requires_grad:
                unit._handle.reshard(False)


class _Shards(CommonStrategy):
    """Wraps models in FSDP when they are set up. A mixin for both strategies."""

    _wrapper = FullyShardedDataParallel
    root_device: Any
    cpu_offload: Any
    mixed_precision: MixedPrecision | None
    mixed_precision_config: Any
    _state_dict_type: Literal["full", "sharded"]

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: LayerPolicy | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        **kwargs: Any,
    ) -> None:
        check_policy("auto_wrap_policy", auto_wrap_policy)
        super().__init__(kernels, activation_checkpointing_policy=activation_checkpointing_policy, **kwargs)
        self._wrapped_layers = auto_wrap_policy
        # Those of FSDP that neither this strategy nor Lightning's knows.
        self._arguments: dict[str, Any] = vars(self)["_fsdp_kwargs" if isinstance(self, FabricStrategy) else "kwargs"]
        named = {name.lower(): each for name, each in ShardingStrategy.__members__.items()}
        found = named.get(str(sharding_strategy).lower(), sharding_strategy)
        if not isinstance(found, ShardingStrategy):
            raise wrong_value("sharding_strategy", f"one of {list(ShardingStrategy.__members__)}", sharding_strategy)
        # Not given to Lightning, which refuses hybrid sharding without a policy: ours may come from the model.
        self.sharding_strategy = found
        self._checkpoints.are_sharded = True
        self._checkpoints.writes_itself = isinstance(self, FabricStrategy) or self._state_dict_type == "sharded"
        self._mesh_sizes = self._arguments.pop("device_mesh", None)
        self._backward_repair = BackwardRepair()

    def setup_environment(self) -> None:
        """Also makes the device mesh of the kind of devices in use; Lightning's is always of GPUs."""
        super().setup_environment()  # type: ignore[misc]  # of the next class
        sizes = self._mesh_sizes
        if isinstance(sizes, tuple):
            if math.prod(sizes) != dist.get_world_size():
                raise ValueError(
                    f"device_mesh={sizes}: the product of the sizes must be world_size = {dist.get_world_size()}"
                )
            sizes = init_device_mesh(self.root_device.type, sizes)
        if sizes is not None:
            self._arguments["device_mesh"] = sizes

    @override
    def _prepare(self, model: Module) -> Module:
        """Also wraps it in FSDP, unless its user did. Lightning's set-up accepts a wrapped model as it is.

        Lightning itself would pass FSDP a device index, which a CPU does not have.
        """
        model, precision = super()._prepare(model), self._plugin
        on_cpu = self.root_device.type == "cpu"
        if on_cpu and precision.scaler is not None and not precision.scaler.is_enabled():
            precision.scaler = ShardedGradScaler(device="cpu")  # Lightning's is for GPUs, and off without one
        root, parameters = vars(model).get(_ROOT, (None, []))
        if root is not None and set(parameters) == set(model.parameters()):
            return self._backward_repair.watch(root)
        pairs = tied_pairs(model)
        if FullyShardedDataParallel.fsdp_modules(model):
            check_head_units(model, pairs)
            return self._backward_repair.watch(model)
        layers = resolve_policy("auto_wrap_policy", self._wrapped_layers, model) or unsplit_classes(model)
        if not layers:
            rank_zero_warn(
                "auto_wrap_policy was not given and the model names no layers that must not be split: FSDP gathers all"
                " of its parameters at once. Name its layer classes in auto_wrap_policy."
            )
        arguments = dict(self._arguments)
        if layers:
            arguments["auto_wrap_policy"] = ModuleWrapPolicy(layers) if isinstance(layers, set) else layers
        if has_meta_tensors(model) and arguments.get("param_init_fn") is None:
            arguments["param_init_fn"] = Initializer(model, self.root_device)
        detach_frozen_heads(model)
        wanted, mixed_precision = self.sharding_strategy, self.mixed_precision_config
        if self.mixed_precision is None and mixed_precision is not None:
            mixed_precision.cast_root_forward_inputs = not getattr(model, "keeps_float_inputs", False)
            if has_buffer_dtypes(precision.precision, model):
                mixed_precision.buffer_dtype = None
        check_flattened(model, mixed_precision)
        root = FullyShardedDataParallel(
            model,
            device_id=self.root_device,
            cpu_offload=None if on_cpu else self.cpu_offload,  # parameters are in CPU memory already
            mixed_precision=mixed_precision,
            sharding_strategy=wanted,
            **arguments,
        )
        if root.sharding_strategy == ShardingStrategy.NO_SHARD != wanted and dist.get_world_size() > 1:
            raise ValueError(  # FSDP falls back to NO_SHARD, within the one process
                f"sharding_strategy={wanted.name} shards over groups of one process, so replicas would not average"
                " their gradients: use at least two processes in a group, or sharding_strategy='NO_SHARD'"
            )
        check_head_units(root, pairs)
        if (
            root.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
            and dist.get_backend(root.process_group) == "nccl"
        ):
            root.register_comm_hook(root.process_group, _average)
        # Lightning sets up the bare module again for each stage; only this root can gather its parameters.
        vars(model)[_ROOT] = (root, list(model.parameters()))
        return self._backward_repair.watch(root)


class LigerFSDPStrategy(_Shards, TrainerStrategy, pytorch_fsdp.FSDPStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.FSDPStrategy` with fused kernels and a fused loss.

    Also runs on CPUs (over gloo), finds the layers to wrap by itself, and clips gradients by norm: the norm over all
    ranks, before clipping, is logged as ``grad_norm``. ``LigerStrategy`` is another name of this class.

    Args:
        kernels: ``"auto"``, ``"none"``, a name, a list of names or a dict of changes to ``"auto"``; see
            :func:`~lightning_liger.apply_liger_kernels`.
        auto_wrap_policy: The layers to shard one by one: their classes or names of these (dotted, or bare if the model
            has such a layer), or any FSDP policy. By default the layers that the Hugging Face model in the module says
            must not be split; embeddings and LM head stay in the root unit, where the fused loss needs them.
        activation_checkpointing_policy: The layers to recompute in backward, chosen in the same way. Only one of this
            and the next two arguments may be given.
        activation_checkpointing: The layers to recompute in backward: ``"none"`` (the default), ``"full"``, the number
            of the first ones, or a list or set of layer classes or their names; see docs/training.md.
        memory_budget: A share of the GPU's memory up to 1, GiB above 1, or ``"auto"``: as many layers are recomputed as
            needed to stay within it.
        sharding_strategy: As in Lightning's strategy; hybrid sharding without ``device_mesh`` or ``process_group``
            shards over the GPUs of each node.
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN: ``"raise"`` ends training,
            ``"skip"`` skips the optimizer step, ``"ignore"`` lets the optimizer use them. The first two compute the
            norm in every step, clipped or not, and wait for it. With precision ``"16-mixed"`` the scaler skips such
            steps in any case.
        context_parallel_size: Ranks that share each sequence; see :class:`~lightning_liger.ContextParallel`.
        fault_tolerance: Whether checkpoints are atomic and hold what every rank needs to resume in the middle of an
            epoch, and SIGTERM ends all ranks at the same batch. False leaves all of it to Lightning.
        fp8: Has linear layers multiply in float8, as in :func:`~lightning_liger.apply_liger_kernels`; see docs/fp8.md.
        compile: ``"layers"``, or True, compiles the decoder layers by :func:`torch.compile`, inside of what the engine
            and recomputation do around them. Under ``liger`` and ``liger_ddp`` also ``"model"``, the whole model. A
            dict has this as ``scope`` beside other arguments of ``torch.compile``.
        **kwargs: As in Lightning's strategy.

    Raises:
        TypeError: For an argument that neither Lightning's strategy nor ``FullyShardedDataParallel`` has.
        ValueError: For an unknown kernel, layer class, ``sharding_strategy`` or ``on_nonfinite_grad``, and for a
            ``device_mesh`` whose sizes do not multiply to the number of processes.
    """

    strategy_name = "liger_fsdp"
    _initializes_on_meta = True

    @override
    def _control_plugin(self, plugin: Any) -> None:
        control_gradients(plugin, self.on_nonfinite_grad, self._backward_repair.context)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._checkpoints.writes_itself or self.root_device.type != "cpu":
            return super().lightning_module_state_dict()
        assert self.model is not None
        with _whole_on_cpu(self.model):
            return self.model.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._checkpoints.writes_itself or self.root_device.type != "cpu":
            return super().optimizer_state(optimizer)
        assert self.model is not None
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with _whole_on_cpu(self.model):
            state = FullyShardedDataParallel.optim_state_dict(self.model, optimizer)
        if self.global_rank > 0:
            return state
        return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)

    @override
    def _prepare(self, model: Module) -> Module:
        module = self.lightning_module
        is_manual = module is not None and not module.automatic_optimization and module.trainer.training
        is_wrapped = _ROOT not in vars(model) and FullyShardedDataParallel.fsdp_modules(model)
        if is_manual and not is_wrapped:  # backward would run inside FSDP's forward
            raise ValueError(
                "automatic_optimization=False is not supported by 'liger_fsdp' around a whole LightningModule, because"
                " manual_backward would run inside FSDP's forward: use strategy='liger_model_parallel' (FSDP2) or"
                " 'liger_ddp', or wrap the model inside the LightningModule in FullyShardedDataParallel in"
                " configure_model"
            )
        return super()._prepare(model)


LigerStrategy = LigerFSDPStrategy


class FabricLigerFSDPStrategy(_Shards, FabricStrategy, fabric_fsdp.FSDPStrategy):
    """:class:`LigerFSDPStrategy` for Fabric.

    Takes the same arguments, except for ``on_nonfinite_grad`` and ``context_parallel_size``: ``fabric.clip_gradients``
    returns the norm, and raises if it is not finite unless ``error_if_nonfinite=False``.
    """

    @override
    def module_to_device(self, module: Module) -> None:
        """Does nothing: FSDP moves a module to its device."""

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        with self._backward_repair.context():
            super().backward(tensor, module, *args, **kwargs)

    @override
    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        if self._state_dict_type != "sharded" and self.root_device.type == "cpu":
            raise ValueError(
                "state_dict_type='full' is not supported on CPUs with Fabric, where FSDP would free what it saves;"
                " expected state_dict_type='sharded'"
            )
        super().save_checkpoint(path, *args, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Also clips a module with several FSDP roots, and follows ``error_if_nonfinite`` as Fabric documents it."""
        self.precision.unscale_gradients(optimizer)
        norm = clip_gradient_norm(module, self.precision.main_params(optimizer), max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"error_if_nonfinite=True: the norm of the gradients is {norm.item()}, not finite")
        return norm


FabricLigerStrategy = FabricLigerFSDPStrategy


def _average(group: dist.ProcessGroup, gradient: Tensor, shard: Tensor) -> None:
    """Writes this rank's part of the mean over a group to ``shard``. FSDP itself divides before and after the sum."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name since torch 2.13
    scatter(shard, gradient, op=dist.ReduceOp.AVG, group=group)


def _whole_on_cpu(model: Module) -> AbstractContextManager[Any]:
    """A context in which state dicts of a model on CPUs are whole, on the first rank.

    Lightning's has FSDP move tensors to the CPU and free what it moved, which on a CPU is the same memory. States of an
    optimizer are gathered into one buffer: both moments of Adam would be the one that was gathered last.
    """
    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
    )
