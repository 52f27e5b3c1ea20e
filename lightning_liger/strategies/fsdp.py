"""``liger_fsdp``: Fully Sharded Data Parallel with fused kernels, for Trainer and Fabric, on GPUs and CPUs."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.fabric.plugins.precision.fsdp as fabric_precision
import lightning.fabric.strategies.fsdp as fabric_fsdp
import lightning.pytorch.plugins.precision.fsdp as pytorch_precision
import lightning.pytorch.strategies.fsdp as pytorch_fsdp
import torch
import torch.distributed as dist
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch.core.optimizer import LightningOptimizer
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

from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.parts.clipping import TrainerClipping
from lightning_liger.strategies.parts.fault_tolerance import FabricFaultTolerance, TrainerFaultTolerance
from lightning_liger.strategies.parts.gradient_norm import clip_gradient_norm
from lightning_liger.strategies.parts.head_units import check_head_units, detach_frozen_heads, tied_pairs
from lightning_liger.strategies.parts.policies import check_policy, decoder_layer_classes, resolve_policy
from lightning_liger.strategies.parts.shared_sequences import SharesSequences
from lightning_liger.strategies.precision import FabricLigerPrecisionPlugin, LigerPrecisionPlugin
from lightning_liger.weights.materialize import Materializer, has_meta_tensors

_NAME = "liger_fsdp"
_DESCRIPTION = "Fully Sharded Data Parallel (FSDP) with fused kernels and a loss without logits"
_ROOT = "_liger_fsdp_root"


class _FusedFSDP:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    materializes = True
    """Whether models may be built on the meta device."""

    cpu_offload: Any
    mixed_precision_config: Any
    sharding_strategy: Any
    root_device: torch.device
    _fsdp_arguments: dict[str, Any]

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | Callable[..., bool] | None = None,
        activation_checkpointing_policy: list[str] | set[type[Module]] | Callable[..., bool] | None = None,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        **kwargs: Any,
    ) -> None:
        check_kernels(kernels)
        check_policy("auto_wrap_policy", auto_wrap_policy)
        check_policy("activation_checkpointing_policy", activation_checkpointing_policy)
        self.kernels = kernels
        self._layers_to_wrap = auto_wrap_policy
        self._layers_to_checkpoint = activation_checkpointing_policy
        sharding_strategy = _check_sharding(sharding_strategy)
        super().__init__(**kwargs)
        # Not given to Lightning, which refuses hybrid sharding without a policy: ours may come from the model.
        self.sharding_strategy = sharding_strategy

    def setup_environment(self) -> None:
        """Makes the device mesh of the strategy's devices, where Lightning's is always of GPUs."""
        sizes = self._fsdp_arguments.pop("device_mesh", None)
        super().setup_environment()  # type: ignore[misc]
        if isinstance(sizes, tuple):
            if math.prod(sizes) != dist.get_world_size():
                raise ValueError(
                    f"device_mesh={sizes} must have as many places as there are processes, {dist.get_world_size()}"
                )
            sizes = init_device_mesh(self.root_device.type, sizes)
        if sizes is not None:
            self._fsdp_arguments["device_mesh"] = sizes

    def _wrap(self, model: Module, precision: Any) -> Module:
        """``model`` in FSDP, unless its user wrapped it already; Lightning's set-up then takes it as it is.

        Lightning would pass FSDP a device index, which a CPU does not have.
        """
        on_cpu = self.root_device.type == "cpu"
        if on_cpu and precision.scaler is not None and not precision.scaler.is_enabled():
            precision.scaler = ShardedGradScaler(device="cpu")  # Lightning's is for GPUs, and off without one
        if self._layers_to_checkpoint is not None:
            layers = resolve_policy("activation_checkpointing_policy", self._layers_to_checkpoint, model)
            self._activation_checkpointing_kwargs = fabric_fsdp._activation_checkpointing_kwargs(None, layers)
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
            cpu_offload=None if on_cpu else self.cpu_offload,  # there is nowhere to bring parameters from
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **arguments,
        )
        if root.sharding_strategy == ShardingStrategy.NO_SHARD != self.sharding_strategy and dist.get_world_size() > 1:
            raise ValueError(  # FSDP falls back to NO_SHARD, within the one process
                f"sharding_strategy={self.sharding_strategy.name} over groups of one process leaves every replica with"
                " gradients of its own; expected at least two processes to shard over, or 'NO_SHARD'"
            )
        check_head_units(root, pairs)
        if on_cpu:
            # Full state dicts move parameters to the CPU and free what they moved, which on a CPU is the same memory.
            for module in FullyShardedDataParallel.fsdp_modules(root):
                if module._handle is not None:
                    module._handle.to_cpu = nullcontext
        # Lightning sets the bare module up again for each stage, whose parameters only this root can gather.
        vars(model)[_ROOT] = (root, list(model.parameters()))
        return root

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if not dist.is_available() or _NAME in strategy_registry:
            return
        strategy_registry.register(_NAME, cls, description=_DESCRIPTION)
        strategy_registry.register(
            f"{_NAME}_cpu_offload",
            cls,
            description=f"{_DESCRIPTION}, parameters and optimizer states in the memory of the CPU",
            cpu_offload=True,
        )


class LigerStrategy(_FusedFSDP, SharesSequences, TrainerFaultTolerance, TrainerClipping, pytorch_fsdp.FSDPStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.FSDPStrategy` with fused kernels and a fused loss.

    Also runs on CPUs (over gloo), finds the layers to wrap by itself, and clips gradients by norm, which it logs as
    ``grad_norm``: over all ranks, before clipping.

    Args:
        kernels: ``"auto"``, ``"none"``, a list of names or a dict with options; see
            :func:`~lightning_liger.apply_liger_kernels`.
        auto_wrap_policy: The layers to shard one by one: their classes or names of these (dotted, or bare if the model
            has such a layer), or any FSDP policy. By default the layers that the Hugging Face model in the module says
            must not be split; embeddings and LM head stay in the root unit, where the fused loss needs them.
        activation_checkpointing_policy: The layers to recompute in backward, named in the same way. By default none.
        sharding_strategy: As in Lightning's strategy; hybrid sharding without ``device_mesh`` or ``process_group``
            shards over the GPUs of each node.
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN: ``"raise"`` ends training,
            ``"skip"`` lets the optimizer change nothing, ``"ignore"`` lets it take them as they are. The first two
            take the norm in every step, clipped or not, and wait for it. With precision ``"16-mixed"`` the scaler skips
            such steps in any case.
        context_parallel_size: Ranks that share each sequence; see :class:`~lightning_liger.ContextParallel`.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel, layer class, ``sharding_strategy`` or ``on_nonfinite_grad``, and for a
            ``device_mesh`` of another size than the processes.
    """

    strategy_name = _NAME
    _registered_strategies: list[str] = []

    @property
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
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = _full_optimizer_state(self.model, optimizer)
        if self.global_rank > 0:
            return state
        return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)

    @property
    def patch_report(self) -> PatchReport | None:
        """What was replaced in the model, None before it was set up."""
        return getattr(self._precision_plugin, "patch_report", None)

    @property
    @override
    def precision_plugin(self) -> pytorch_precision.FSDPPrecision:
        return self._precision_plugin or LigerPrecisionPlugin(
            "32-true", kernels=self.kernels, on_nonfinite_grad=self.on_nonfinite_grad
        )

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Any) -> None:
        if type(precision_plugin) is pytorch_precision.FSDPPrecision:
            precision_plugin = LigerPrecisionPlugin.replacing(
                precision_plugin, self.kernels, on_nonfinite_grad=self.on_nonfinite_grad
            )
        TrainerClipping.precision_plugin.fset(self, precision_plugin)

    @override
    def _setup_model(self, model: Module) -> Module:
        model = super()._setup_model(self._wrap(model, self.precision_plugin))
        return _connect_gradients(model, self.precision_plugin)


class FabricLigerStrategy(_FusedFSDP, FabricFaultTolerance, fabric_fsdp.FSDPStrategy):
    """:class:`LigerStrategy` for Fabric; takes the same arguments, except for ``on_nonfinite_grad``.

    ``fabric.clip_gradients`` returns the norm, and raises if it is not finite unless ``error_if_nonfinite=False``.
    """

    _writes_by_itself = True

    @property
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

    @property
    def patch_report(self) -> PatchReport | None:
        """What was replaced in the model, None before it was set up."""
        return getattr(self._precision, "patch_report", None)

    @property
    @override
    def precision(self) -> fabric_precision.FSDPPrecision:
        return self._precision or FabricLigerPrecisionPlugin("32-true", kernels=self.kernels)

    @precision.setter
    @override
    def precision(self, precision: Any) -> None:
        if type(precision) is fabric_precision.FSDPPrecision:
            precision = FabricLigerPrecisionPlugin.replacing(precision, self.kernels)
        fabric_fsdp.FSDPStrategy.precision.fset(self, precision)

    @override
    def setup_module(self, module: Module) -> Module:
        return _connect_gradients(super().setup_module(self._wrap(module, self.precision)), self.precision)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Also for a module with several FSDP roots, and as Fabric documents ``error_if_nonfinite``."""
        self.precision.unscale_gradients(optimizer)
        norm = clip_gradient_norm(module, self.precision.main_params(optimizer), max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"error_if_nonfinite=True: the norm of the gradients is {norm.item()}, not finite")
        return norm


def _check_sharding(sharding_strategy: str | ShardingStrategy) -> ShardingStrategy:
    known = ShardingStrategy.__members__
    if isinstance(sharding_strategy, str) and sharding_strategy.upper() in known:
        return known[sharding_strategy.upper()]
    if not isinstance(sharding_strategy, ShardingStrategy):
        raise ValueError(f"sharding_strategy must be one of {list(known)}, got {sharding_strategy!r}")
    return sharding_strategy


def _full_optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """The whole state of an optimizer, on the first rank, for a model on CPUs.

    FSDP gathers all states of a unit into one buffer and offloads each from there to the CPU, which on a CPU copies
    nothing: both moments of Adam would be the last one gathered.
    """
    copied = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=copied):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def _connect_gradients(model: Module, precision: Any) -> Module:
    """Lets NCCL average gradients as it sums them, where FSDP would divide each in passes of its own; and tells the
    precision plugin of those that FSDP brings to the CPU."""
    if any(unit.cpu_offload.offload_params for unit in FullyShardedDataParallel.fsdp_modules(model)):
        precision.add_up_offloaded(model)
    sharded = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    if (
        isinstance(model, FullyShardedDataParallel)
        and model.sharding_strategy in sharded
        and model._comm_hook is None
        and dist.get_backend(model.process_group) == "nccl"
    ):
        model.register_comm_hook(model.process_group, _reduce_scatter_mean)
    return model


def _reduce_scatter_mean(process_group: dist.ProcessGroup, gradient: Tensor, shard: Tensor) -> None:
    dist.reduce_scatter_tensor(shard, gradient, op=dist.ReduceOp.AVG, group=process_group)
