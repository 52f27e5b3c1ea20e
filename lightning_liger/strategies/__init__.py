"""Lightning's strategies with fused kernels, registered by name for Trainer and Fabric."""

from lightning_liger.strategies.ddp import FabricLigerDDPStrategy, LigerDDPStrategy
from lightning_liger.strategies.deepspeed import FabricLigerDeepSpeedStrategy, LigerDeepSpeedStrategy
from lightning_liger.strategies.fsdp import (
    FabricLigerFSDPStrategy,
    FabricLigerStrategy,
    LigerFSDPStrategy,
    LigerStrategy,
)
from lightning_liger.strategies.model_parallel import FabricLigerModelParallelStrategy, LigerModelParallelStrategy
from lightning_liger.strategies.registration import register_strategies
from lightning_liger.strategies.single import FabricLigerSingleDeviceStrategy, LigerSingleDeviceStrategy

__all__ = [
    "FabricLigerDDPStrategy",
    "FabricLigerDeepSpeedStrategy",
    "FabricLigerFSDPStrategy",
    "FabricLigerModelParallelStrategy",
    "FabricLigerSingleDeviceStrategy",
    "FabricLigerStrategy",
    "LigerDDPStrategy",
    "LigerDeepSpeedStrategy",
    "LigerFSDPStrategy",
    "LigerModelParallelStrategy",
    "LigerSingleDeviceStrategy",
    "LigerStrategy",
    "register_strategies",
]
