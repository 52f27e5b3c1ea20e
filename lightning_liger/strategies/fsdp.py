"""``liger_fsdp``: Fully Sharded Data Parallel with fused kernels, for Trainer and Fabric, on GPUs and CPUs."""

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
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_liger.clipping import clip_gradient_norm
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.precision import (
    FabricLigerPrecisionPlugin,
    LigerPrecisionPlugin,
    OnNonfiniteGrad,
    check_on_nonfinite_grad,
)
from lightning_liger.strategies.head_units import check_head_units, tied_pairs
from lightning_liger.strategies.policies import check_policy, decoder_layer_classes, resolve_policy

_NAME = "liger_fsdp"
_DESCRIPTION = "Fully Sharded Data Parallel (FSDP) with fused kernels and a loss without logits"


class _FusedFSDP:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    cpu_offload: Any
    mixed_precision_config: Any
    sharding_strategy: Any
    root_device: torch.device

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        auto_wrap_policy: list[str] | set[type[Module]] | Callable[..., bool] | None = None,
        activation_checkpointing_policy: list[str] | set[type[Module]] | Callable[..., bool] | None = None,
        **kwargs: Any,
    ) -> None:
        check_kernels(kernels)
        check_policy("auto_wrap_policy", auto_wrap_policy)
        check_policy("activation_checkpointing_policy", activation_checkpointing_policy)
        self.kernels = kernels
        self._layers_to_wrap = auto_wrap_policy
        self._layers_to_checkpoint = activation_checkpointing_policy
        super().__init__(**kwargs)

    def _wrap(self, model: Module, fsdp_kwargs: dict[str, Any]) -> Module:
        """``model`` in FSDP, unless its user wrapped it already; Lightning's set-up then takes it as it is.

        Lightning would pass FSDP a device index, which a CPU does not have.
        """
        if self._layers_to_checkpoint is not None:
            layers = resolve_policy("activation_checkpointing_policy", self._layers_to_checkpoint, model)
            self._activation_checkpointing_kwargs = fabric_fsdp._activation_checkpointing_kwargs(None, layers)
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
        model = FullyShardedDataParallel(
            model,
            device_id=self.root_device,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **fabric_fsdp._auto_wrap_policy_kwargs(layers or None, dict(fsdp_kwargs)),
        )
        check_head_units(model, pairs)
        if self.root_device.type == "cpu":
            # Full state dicts move parameters to the CPU and free what they moved, which on a CPU is the same memory.
            for module in FullyShardedDataParallel.fsdp_modules(model):
                if module._handle is not None:
                    module._handle.to_cpu = nullcontext
        return model

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if dist.is_available() and _NAME not in strategy_registry:
            strategy_registry.register(_NAME, cls, description=_DESCRIPTION)


class LigerStrategy(_FusedFSDP, pytorch_fsdp.FSDPStrategy):
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
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN: ``"raise"`` ends training,
            ``"skip"`` lets the optimizer change nothing, ``"ignore"`` lets it take them as they are. The first two
            take the norm in every step, clipped or not, and wait for it. With precision ``"16-mixed"`` the scaler skips
            such steps in any case.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel, layer class or ``on_nonfinite_grad``.
    """

    strategy_name = _NAME
    _registered_strategies: list[str] = []

    def __init__(self, *args: Any, on_nonfinite_grad: OnNonfiniteGrad = "ignore", **kwargs: Any) -> None:
        check_on_nonfinite_grad(on_nonfinite_grad)
        self.on_nonfinite_grad = on_nonfinite_grad
        super().__init__(*args, **kwargs)

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
        pytorch_fsdp.FSDPStrategy.precision_plugin.fset(self, precision_plugin)

    @override
    def _setup_model(self, model: Module) -> Module:
        return _average_while_reducing(super()._setup_model(self._wrap(model, self.kwargs)))


class FabricLigerStrategy(_FusedFSDP, fabric_fsdp.FSDPStrategy):
    """:class:`LigerStrategy` for Fabric; takes the same arguments, except for ``on_nonfinite_grad``.

    ``fabric.clip_gradients`` returns the norm, and raises if it is not finite unless ``error_if_nonfinite=False``.
    """

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
        return _average_while_reducing(super().setup_module(self._wrap(module, self._fsdp_kwargs)))

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


def _average_while_reducing(model: Module) -> Module:
    """Lets NCCL average gradients as it sums them, where FSDP would divide each in passes of its own."""
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
