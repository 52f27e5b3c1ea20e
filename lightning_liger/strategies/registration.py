"""The names of our strategies, for ``Trainer(strategy=...)`` and ``Fabric(strategy=...)``."""

from typing import Any, NamedTuple

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_liger.strategies.ddp import FabricLigerDDPStrategy, LigerDDPStrategy
from lightning_liger.strategies.deepspeed import FabricLigerDeepSpeedStrategy, LigerDeepSpeedStrategy
from lightning_liger.strategies.fsdp import FabricLigerFSDPStrategy, LigerFSDPStrategy
from lightning_liger.strategies.model_parallel import FabricLigerModelParallelStrategy, LigerModelParallelStrategy
from lightning_liger.strategies.single import FabricLigerSingleDeviceStrategy, LigerSingleDeviceStrategy


class Registration(NamedTuple):
    """One name for ``strategy=``."""

    name: str
    trainer: type
    fabric: type
    engine: str
    """Begins the description in Lightning's registry; "with fused kernels ..." follows."""
    options: dict[str, Any] = {}
    """Arguments of both classes."""


_SINGLE = (LigerSingleDeviceStrategy, FabricLigerSingleDeviceStrategy)
_DDP = (LigerDDPStrategy, FabricLigerDDPStrategy)
_FSDP = (LigerFSDPStrategy, FabricLigerFSDPStrategy)
_MODEL_PARALLEL = (LigerModelParallelStrategy, FabricLigerModelParallelStrategy)
_DEEPSPEED = (LigerDeepSpeedStrategy, FabricLigerDeepSpeedStrategy)
_UNUSED = {"find_unused_parameters": True}
_FLOAT8 = {"fp8": "auto"}
_OFFLOAD_2 = {"stage": 2, "offload_optimizer": True}
_OFFLOAD_3 = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}

REGISTRATIONS = (
    Registration("liger", *_SINGLE, "One device"),
    Registration("liger_ddp", *_DDP, "DDP"),
    Registration("liger_ddp_find_unused_parameters_true", *_DDP, "DDP, with unused parameters allowed,", _UNUSED),
    Registration("liger_fsdp", *_FSDP, "FSDP"),
    Registration("liger_fsdp_cpu_offload", *_FSDP, "FSDP, states in CPU memory,", {"cpu_offload": True}),
    Registration("liger_model_parallel", *_MODEL_PARALLEL, "FSDP2 and tensor parallelism on a device mesh"),
    Registration("liger_fp8", *_SINGLE, "One device, linear layers in float8,", _FLOAT8),
    Registration("liger_ddp_fp8", *_DDP, "DDP, linear layers in float8,", _FLOAT8),
    Registration("liger_fsdp_fp8", *_FSDP, "FSDP, linear layers in float8,", _FLOAT8),
    Registration("liger_model_parallel_fp8", *_MODEL_PARALLEL, "FSDP2, linear layers in float8,", _FLOAT8),
    Registration("liger_deepspeed_stage_2", *_DEEPSPEED, "ZeRO 2", {"stage": 2}),
    Registration("liger_deepspeed_stage_2_offload", *_DEEPSPEED, "ZeRO 2 offloaded", _OFFLOAD_2),
    Registration("liger_deepspeed_stage_3", *_DEEPSPEED, "ZeRO 3", {"stage": 3}),
    Registration("liger_deepspeed_stage_3_offload", *_DEEPSPEED, "ZeRO 3 offloaded", _OFFLOAD_3),
)


def register_strategies() -> None:
    """Registers every name that is not taken."""
    for name, trainer, fabric, engine, options in REGISTRATIONS:
        for registry, strategy in ((StrategyRegistry, trainer), (STRATEGY_REGISTRY, fabric)):
            if name not in registry:
                description = f"{engine} with fused kernels and a loss that never materializes the logits"
                registry.register(name, strategy, description=description, **options)
