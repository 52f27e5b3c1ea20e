"""Fused kernels and a loss that never materializes the logits, for PyTorch Lightning and Fabric.

Importing this registers the strategies ``"liger"``, ``"liger_ddp"``, ``"liger_fsdp"``, ``"liger_model_parallel"``,
``"liger_deepspeed_stage_2"`` and ``"liger_deepspeed_stage_3"`` (and their variants, such as ``_offload``) for
:class:`lightning.Trainer` and :class:`lightning.Fabric`.
"""

from lightning_liger.callbacks import LigerCallback, TrainingSummary
from lightning_liger.lazy.logits import LazyLogits, lazy_logits, materialize
from lightning_liger.lazy.scores import divergence, token_loss, token_scores, topk_log_probs
from lightning_liger.losses.advantages import group_advantages, leave_one_out_advantages
from lightning_liger.losses.cpo import CPOOptions
from lightning_liger.losses.dpo import DPOOptions
from lightning_liger.losses.kto import KTOOptions
from lightning_liger.losses.orpo import ORPOOptions
from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.losses.tpo import TPOOptions
from lightning_liger.patching import PatchReport, apply_liger_kernels
from lightning_liger.patching.auto import AutoLigerModelForCausalLM, AutoLigerModelForImageTextToText
from lightning_liger.post_training.grpo import LigerGRPO
from lightning_liger.post_training.modules import LigerCPO, LigerDPO, LigerKTO, LigerORPO, LigerTPO
from lightning_liger.post_training.policy import LigerPolicyMixin
from lightning_liger.post_training.preference import LigerPreferenceMixin
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.sequences.labels import shift_labels, split_sequence
from lightning_liger.strategies import (
    FabricLigerDDPStrategy,
    FabricLigerDeepSpeedStrategy,
    FabricLigerFSDPStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerSingleDeviceStrategy,
    FabricLigerStrategy,
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
    LigerStrategy,
    register_strategies,
)
from lightning_liger.strategies.precision import FabricLigerPrecisionPlugin, LigerPrecisionPlugin
from lightning_liger.training.causal_lm import LigerCausalLM
from lightning_liger.training.mixin import LigerLMMixin
from lightning_liger.weights.export import export_pretrained
from lightning_liger.weights.pretrained import load_pretrained

register_strategies()

__version__ = "0.1.0"

__all__ = [
    "AutoLigerModelForCausalLM",
    "AutoLigerModelForImageTextToText",
    "CPOOptions",
    "ContextParallel",
    "DPOOptions",
    "FabricLigerDDPStrategy",
    "FabricLigerDeepSpeedStrategy",
    "FabricLigerFSDPStrategy",
    "FabricLigerModelParallelStrategy",
    "FabricLigerPrecisionPlugin",
    "FabricLigerSingleDeviceStrategy",
    "FabricLigerStrategy",
    "KTOOptions",
    "LazyLogits",
    "LigerCPO",
    "LigerCallback",
    "LigerCausalLM",
    "LigerDDPStrategy",
    "LigerDPO",
    "LigerDeepSpeedStrategy",
    "LigerFSDPStrategy",
    "LigerGRPO",
    "LigerKTO",
    "LigerLMMixin",
    "LigerModelParallelStrategy",
    "LigerORPO",
    "LigerPolicyMixin",
    "LigerPrecisionPlugin",
    "LigerPreferenceMixin",
    "LigerSingleDeviceStrategy",
    "LigerStrategy",
    "LigerTPO",
    "ORPOOptions",
    "PatchReport",
    "PolicyOptions",
    "TPOOptions",
    "TrainingSummary",
    "apply_liger_kernels",
    "divergence",
    "export_pretrained",
    "group_advantages",
    "lazy_logits",
    "leave_one_out_advantages",
    "load_pretrained",
    "materialize",
    "shift_labels",
    "split_sequence",
    "token_loss",
    "token_scores",
    "topk_log_probs",
]
