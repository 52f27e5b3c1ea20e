"""The names of our strategies, for ``Trainer(strategy=...)`` and ``Fabric(strategy=...)``."""

from typing import Any, NamedTuple

import torch.distributed as dist
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


_DEEPSPEED = (LigerDeepSpeedStrategy, FabricLigerDeepSpeedStrategy)
_OFFLOADED = {"offload_optimizer": True, "offload_parameters": True}

REGISTRATIONS = (
    Registration("liger", LigerSingleDeviceStrategy, FabricLigerSingleDeviceStrategy, "One device"),
    Registration("liger_ddp", LigerDDPStrategy, FabricLigerDDPStrategy, "Distributed Data Parallel (DDP)"),
    Registration(
        "liger_ddp_find_unused_parameters_true",
        LigerDDPStrategy,
        FabricLigerDDPStrategy,
        "Distributed Data Parallel (DDP) of models with parameters that a loss may not need",
        {"find_unused_parameters": True},
    ),
    Registration("liger_fsdp", LigerFSDPStrategy, FabricLigerFSDPStrategy, "Fully Sharded Data Parallel (FSDP)"),
    Registration(
        "liger_fsdp_cpu_offload",
        LigerFSDPStrategy,
        FabricLigerFSDPStrategy,
        "Fully Sharded Data Parallel (FSDP), parameters and optimizer states in the memory of the CPU,",
        {"cpu_offload": True},
    ),
    Registration(
        "liger_model_parallel",
        LigerModelParallelStrategy,
        FabricLigerModelParallelStrategy,
        "FSDP2 and tensor parallelism on a device mesh",
    ),
    Registration("liger_deepspeed_stage_2", *_DEEPSPEED, "DeepSpeed ZeRO stage 2", {"stage": 2}),
    Registration(
        "liger_deepspeed_stage_2_offload",
        *_DEEPSPEED,
        "DeepSpeed ZeRO stage 2, optimizer states in the memory of the CPU,",
        {"stage": 2, "offload_optimizer": True},
    ),
    Registration("liger_deepspeed_stage_3", *_DEEPSPEED, "DeepSpeed ZeRO stage 3", {"stage": 3}),
    Registration(
        "liger_deepspeed_stage_3_offload",
        *_DEEPSPEED,
        "DeepSpeed ZeRO stage 3, parameters and optimizer states in the memory of the CPU,",
        {"stage": 3, **_OFFLOADED},
    ),
)


def register_strategies() -> None:
    """Registers every name that is not taken; without ``torch.distributed`` only ``liger``."""
    for name, trainer, fabric, engine, options in REGISTRATIONS:
        if name != "liger" and not dist.is_available():
            continue
        for registry, strategy in ((StrategyRegistry, trainer), (STRATEGY_REGISTRY, fabric)):
            if name not in registry:
                description = f"{engine} with fused kernels and a loss that never materializes the logits"
                registry.register(name, strategy, description=description, **options)
