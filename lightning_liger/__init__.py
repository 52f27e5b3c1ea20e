"""Fused kernels and a loss without logits for PyTorch Lightning and Fabric.

Importing this registers the strategies ``"liger"``, ``"liger_ddp"``, ``"liger_fsdp"`` and ``"liger_model_parallel"``
for :class:`lightning.Trainer` and :class:`lightning.Fabric`.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_liger.auto import AutoLigerModelForCausalLM, AutoLigerModelForImageTextToText
from lightning_liger.callbacks import LigerCallback, TrainingSummary
from lightning_liger.causal_lm import LigerCausalLM
from lightning_liger.lazy_logits import LazyLogits
from lightning_liger.module import LigerLMMixin
from lightning_liger.patching import PatchReport, apply_liger_kernels
from lightning_liger.precision import FabricLigerPrecisionPlugin, LigerPrecisionPlugin
from lightning_liger.strategies import (
    FabricLigerDDPStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerSingleDeviceStrategy,
    FabricLigerStrategy,
    LigerDDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
    LigerStrategy,
)

for _strategy in (LigerSingleDeviceStrategy, LigerDDPStrategy, LigerStrategy, LigerModelParallelStrategy):
    _strategy.register_strategies(StrategyRegistry)
for _strategy in (
    FabricLigerSingleDeviceStrategy,
    FabricLigerDDPStrategy,
    FabricLigerStrategy,
    FabricLigerModelParallelStrategy,
):
    _strategy.register_strategies(STRATEGY_REGISTRY)

__version__ = "0.1.0"

__all__ = [
    "AutoLigerModelForCausalLM",
    "AutoLigerModelForImageTextToText",
    "FabricLigerDDPStrategy",
    "FabricLigerModelParallelStrategy",
    "FabricLigerPrecisionPlugin",
    "FabricLigerSingleDeviceStrategy",
    "FabricLigerStrategy",
    "LazyLogits",
    "LigerCallback",
    "LigerCausalLM",
    "LigerDDPStrategy",
    "LigerLMMixin",
    "LigerModelParallelStrategy",
    "LigerPrecisionPlugin",
    "LigerSingleDeviceStrategy",
    "LigerStrategy",
    "PatchReport",
    "TrainingSummary",
    "apply_liger_kernels",
]
