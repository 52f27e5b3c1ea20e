"""Fused kernels and a loss without logits for PyTorch Lightning and Fabric.

Importing this registers the strategies ``"liger"``, ``"liger_ddp"``, ``"liger_fsdp"``, ``"liger_model_parallel"``,
``"liger_deepspeed_stage_2"`` and ``"liger_deepspeed_stage_3"`` (and each ``_offload``) for :class:`lightning.Trainer`
and :class:`lightning.Fabric`.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_liger.callbacks import LigerCallback, TrainingSummary
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.patching import PatchReport, apply_liger_kernels
from lightning_liger.patching.auto import AutoLigerModelForCausalLM, AutoLigerModelForImageTextToText
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.sequences.labels import shift_labels, split_sequence
from lightning_liger.strategies import (
    FabricLigerDDPStrategy,
    FabricLigerDeepSpeedStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerSingleDeviceStrategy,
    FabricLigerStrategy,
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
    LigerStrategy,
)
from lightning_liger.strategies.precision import FabricLigerPrecisionPlugin, LigerPrecisionPlugin
from lightning_liger.training.causal_lm import LigerCausalLM
from lightning_liger.training.mixin import LigerLMMixin
from lightning_liger.weights.export import export_pretrained
from lightning_liger.weights.pretrained import load_pretrained

for _strategy in (
    LigerSingleDeviceStrategy,
    LigerDDPStrategy,
    LigerStrategy,
    LigerModelParallelStrategy,
    LigerDeepSpeedStrategy,
):
    _strategy.register_strategies(StrategyRegistry)
for _strategy in (
    FabricLigerSingleDeviceStrategy,
    FabricLigerDDPStrategy,
    FabricLigerStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerDeepSpeedStrategy,
):
    _strategy.register_strategies(STRATEGY_REGISTRY)

__version__ = "0.1.0"

__all__ = [
    "AutoLigerModelForCausalLM",
    "AutoLigerModelForImageTextToText",
    "ContextParallel",
    "FabricLigerDDPStrategy",
    "FabricLigerDeepSpeedStrategy",
    "FabricLigerModelParallelStrategy",
    "FabricLigerPrecisionPlugin",
    "FabricLigerSingleDeviceStrategy",
    "FabricLigerStrategy",
    "LazyLogits",
    "LigerCallback",
    "LigerCausalLM",
    "LigerDDPStrategy",
    "LigerDeepSpeedStrategy",
    "LigerLMMixin",
    "LigerModelParallelStrategy",
    "LigerPrecisionPlugin",
    "LigerSingleDeviceStrategy",
    "LigerStrategy",
    "PatchReport",
    "TrainingSummary",
    "apply_liger_kernels",
    "export_pretrained",
    "load_pretrained",
    "shift_labels",
    "split_sequence",
]
