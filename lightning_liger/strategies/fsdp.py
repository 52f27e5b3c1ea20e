"""``liger_fsdp``: Fully Sharded Data Parallel with fused kernels, for Trainer and Fabric, on GPUs and CPUs."""

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.fabric.strategies.fsdp as fabric_fsdp
import lightning.pytorch.strategies.fsdp as pytorch_fsdp
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from liger_ops.collectives import reduce_scatter_mean
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.parts.activations import FabricActivations, TrainerActivations
from lightning_liger.strategies.parts.adoption import FabricKernels, TrainerKernels
from lightning_liger.strategies.parts.arguments import refuse_unknown
from lightning_liger.strategies.parts.early_release import EarlyRelease
from lightning_liger.strategies.parts.fault_tolerance import FabricFaultTolerance, TrainerFaultTolerance
from lightning_liger.strategies.parts.gradient_norm import clip_gradient_norm
from lightning_liger.strategies.parts.head_units import check_head_units, detach_frozen_heads, tied_pairs
from lightning_liger.strategies.parts.optimizer_states import FabricOptimizerStates, TrainerOptimizerStates
from lightning_liger.strategies.parts.policies import (
    LayerPolicy,
    check_policy,
    decoder_layer_classes,
    resolve_policy,
)
from lightning_liger.strategies.parts.shared_sequences import SharesSequences
from lightning_liger.strategies.precision import ShardedClippedPrecision, ShardedPrecision
from lightning_liger.weights.materialize import Materializer, has_meta_tensors

if TYPE_CHECKING:
    _Strategy = Any  # Lightning's for the Trainer or for Fabric, which have no common base
else:
    _Strategy = object

_ROOT = "_liger_fsdp_root"


class _FusedFSDP(_Strategy):
    """Wraps models in FSDP. A mixin for strategies of Trainer and Fabric."""

    materializes = True

    @property
    def _fsdp_arguments(self) -> dict[str, Any]:
        """The arguments of FSDP that neither this class nor Lightning's knows."""
        raise NotImplementedError

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: LayerPolicy | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        **kwargs: Any,
    ) -> None:
        check_policy("auto_wrap_policy", auto_wrap_policy)
        check_policy("activation_checkpointing_policy", activation_checkpointing_policy)
        self._layers_to_wrap = auto_wrap_policy
        self._layers_to_checkpoint = activation_checkpointing_policy
        sharding_strategy = _check_sharding(sharding_strategy)
        super().__init__(kernels=kernels, **kwargs)
        refuse_unknown(type(self).__name__, self._fsdp_arguments, FullyShardedDataParallel)
        # Not given to Lightning, which refuses hybrid sharding without a policy: ours may come from the model.
        self.sharding_strategy = sharding_strategy

    def setup_environment(self) -> None:
        """Makes the device mesh of the kind of devices in use; Lightning's is always of GPUs."""
        sizes = self._fsdp_arguments.pop("device_mesh", None)
        super().setup_environment()
        if isinstance(sizes, tuple):
            if math.prod(sizes) != dist.get_world_size():
                raise ValueError(
                    f"device_mesh={sizes}: the product of the sizes must be world_size = {dist.get_world_size()}"
                )
            sizes = init_device_mesh(self.root_device.type, sizes)
        if sizes is not None:
            self._fsdp_arguments["device_mesh"] = sizes

    def _wrap(self, model: Module, precision: Any) -> Module:
        """``model`` wrapped in FSDP, unless its user wrapped it. Lightning's set-up accepts a wrapped model as it is.

        Lightning itself would pass FSDP a device index, which a CPU does not have.
        """
        on_cpu = self.root_device.type == "cpu"
        if on_cpu and precision.scaler is not None and not precision.scaler.is_enabled():
            precision.scaler = ShardedGradScaler(device="cpu")  # Lightning's is for GPUs, and off without one
        root, parameters = vars(model).get(_ROOT, (None, []))
        if root is not None and set(parameters) == set(model.parameters()):
            return root
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            check_head_units(model, tied_pairs(model))
            return model
        pairs = tied_pairs(model)
        layers = resolve_policy("auto_wrap_policy", self._layers_to_wrap, model) or decoder_layer_classes(model)
        if not layers:
            rank_zero_warn(
                "auto_wrap_policy was not given and the model names no layers that must not be split: FSDP gathers all"
                " of its parameters at once. Name its layer classes in auto_wrap_policy."
            )
        arguments = fabric_fsdp._auto_wrap_policy_kwargs(layers or None, dict(self._fsdp_arguments))
        if has_meta_tensors(model) and arguments.get("param_init_fn") is None:
            arguments["param_init_fn"] = Materializer(model, self.root_device)
        detach_frozen_heads(model)
        root = FullyShardedDataParallel(
            model,
            device_id=self.root_device,
            cpu_offload=None if on_cpu else self.cpu_offload,  # parameters are in CPU memory already
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **arguments,
        )
        if root.sharding_strategy == ShardingStrategy.NO_SHARD != self.sharding_strategy and dist.get_world_size() > 1:
            raise ValueError(  # FSDP falls back to NO_SHARD, within the one process
                f"sharding_strategy={self.sharding_strategy.name} shards over groups of one process, so replicas would"
                " not average their gradients: use at least two processes in a group, or sharding_strategy='NO_SHARD'"
            )
        check_head_units(root, pairs)
        if on_cpu:
            # Full state dicts move parameters to the CPU and free what they moved, which on a CPU is the same memory.
            for module in FullyShardedDataParallel.fsdp_modules(root):
                if module._handle is not None:
                    setattr(module._handle, _checked("to_cpu", module._handle), nullcontext)
        # Lightning sets up the bare module again for each stage; only this root can gather its parameters.
        vars(model)[_ROOT] = (root, list(model.parameters()))
        return root


class LigerFSDPStrategy(
    _FusedFSDP,
    SharesSequences,
    TrainerFaultTolerance,
    TrainerActivations,
    EarlyRelease,
    TrainerKernels,
    TrainerOptimizerStates,
    pytorch_fsdp.FSDPStrategy,
):
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
        **kwargs: As in Lightning's strategy.

    Raises:
        TypeError: For an argument that neither Lightning's strategy nor ``FullyShardedDataParallel`` has.
        ValueError: For an unknown kernel, layer class, ``sharding_strategy`` or ``on_nonfinite_grad``, and for a
            ``device_mesh`` whose sizes do not multiply to the number of processes.
    """

    strategy_name = "liger_fsdp"
    _reads_by_itself = True
    # Lightning refuses to run the names that are registered here without a GPU.
    _registered_strategies: list[str] = []
    _precision_mixin = ShardedClippedPrecision
    _overridden = ("_setup_model",)

    @property
    @override
    def _fsdp_arguments(self) -> dict[str, Any]:
        return self.kwargs

    @property
    @override
    def saves_folders(self) -> bool:
        return self._state_dict_type == "sharded"

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.saves_folders or self.root_device.type != "cpu":
            return super().optimizer_state(optimizer)
        assert self.model is not None
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = _full_optimizer_state(self.model, optimizer)
        if self.global_rank > 0:
            return state
        return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)

    @override
    def _setup_model(self, model: Module) -> Module:
        self._check_optimization(model)
        model = super()._setup_model(self._wrap(model, self.precision_plugin))
        return _connect_gradients(model, self.precision_plugin)

    def _check_optimization(self, model: Module) -> None:
        """Raises before a module of manual optimization is wrapped: its backward would run inside FSDP's forward."""
        module = self.lightning_module
        if module is None or module.automatic_optimization or module.trainer.state.fn != TrainerFn.FITTING:
            return
        by_user = _ROOT not in vars(model) and any(
            isinstance(unit, FullyShardedDataParallel) for unit in model.modules()
        )
        if not by_user:
            raise ValueError(
                "automatic_optimization=False is not supported by 'liger_fsdp' around a whole LightningModule, because"
                " manual_backward would run inside FSDP's forward: use strategy='liger_model_parallel' (FSDP2) or"
                " 'liger_ddp', or wrap the model inside the LightningModule in FullyShardedDataParallel in"
                " configure_model"
            )


LigerStrategy = LigerFSDPStrategy


class FabricLigerFSDPStrategy(
    _FusedFSDP,
    FabricFaultTolerance,
    FabricActivations,
    FabricKernels,
    FabricOptimizerStates,
    fabric_fsdp.FSDPStrategy,
):
    """:class:`LigerFSDPStrategy` for Fabric.

    Takes the same arguments, except for ``on_nonfinite_grad`` and ``context_parallel_size``: ``fabric.clip_gradients``
    returns the norm, and raises if it is not finite unless ``error_if_nonfinite=False``.
    """

    _writes_by_itself = True
    _precision_mixin = ShardedPrecision

    @property
    @override
    def _fsdp_arguments(self) -> dict[str, Any]:
        return self._fsdp_kwargs

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._state_dict_type == "full" and self.root_device.type == "cpu":
            models = [part for part in state.values() if isinstance(part, FullyShardedDataParallel)]
            optimizers = {
                name: part for name, part in state.items() if isinstance(part, Optimizer) and len(models) == 1
            }
            state = state | {name: _full_optimizer_state(models[0], part) for name, part in optimizers.items()}
        super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def setup_module(self, module: Module) -> Module:
        root = _connect_gradients(super().setup_module(self._wrap(module, self.precision)), self.precision)
        if isinstance(root, FullyShardedDataParallel) and root.sharding_strategy != ShardingStrategy.NO_SHARD:
            root.module.register_forward_pre_hook(partial(_check_gathered, root))
        return root

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


def _checked(name: str, owner: object) -> str:
    """``name``, if it is a method of ``owner``; assigning to another name would change nothing, silently."""
    if not callable(getattr(owner, name, None)):
        raise RuntimeError(
            f"torch {torch.__version__}: {type(owner).__name__} has no method {name!r}, which liger_fsdp replaces on"
            " CPUs. Use a version of torch that lightning-liger supports, or train on GPUs"
        )
    return name


def _check_sharding(sharding_strategy: str | ShardingStrategy) -> ShardingStrategy:
    known = ShardingStrategy.__members__
    if isinstance(sharding_strategy, str) and sharding_strategy.upper() in known:
        return known[sharding_strategy.upper()]
    if not isinstance(sharding_strategy, ShardingStrategy):
        raise ValueError(f"sharding_strategy must be one of {list(known)}, got {sharding_strategy!r}")
    return sharding_strategy


def _full_optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """The whole state of an optimizer of a model on CPUs, on the first rank.

    FSDP gathers all states of a unit into one buffer and offloads each from there to the CPU. On a CPU that copies
    nothing: both moments of Adam would be the one that was gathered last.
    """
    copied = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=copied):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def _connect_gradients(model: Module, precision: Any) -> Module:
    """Lets NCCL average gradients while it sums them, where FSDP would divide them in separate passes, and lets the
    precision plugin mend what FSDP leaves undone after backward."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    if any(unit.cpu_offload.offload_params for unit in units):
        precision.accumulate_offloaded(model)
    precision.show_frozen(unit for unit in units if unit.sharding_strategy == ShardingStrategy.NO_SHARD)
    sharded = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    if (
        isinstance(model, FullyShardedDataParallel)
        and model.sharding_strategy in sharded
        and model._comm_hook is None
        and dist.get_backend(model.process_group) == "nccl"
    ):
        model.register_comm_hook(model.process_group, reduce_scatter_mean)
    return model


def _check_gathered(root: FullyShardedDataParallel, module: Module, args: Any) -> None:
    """Raises if ``module`` is called from outside ``root``, as by a method that Fabric does not know."""
    if root.training_state.name == "IDLE":
        name = type(module).__name__
        raise RuntimeError(
            f"{name} is called outside FSDP's forward, where its parameters are sharded: call the model that"
            " fabric.setup returned, and mark its other methods that call the model, as with"
            ' model.mark_forward_method("generate")'
        )
