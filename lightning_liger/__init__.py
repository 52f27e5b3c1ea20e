"""Fused kernels and a loss that never materializes the logits, for PyTorch Lightning and Fabric.

Importing this registers the strategies ``"liger"``, ``"liger_ddp"``, ``"liger_fsdp"``, ``"liger_model_parallel"``,
``"liger_deepspeed_stage_2"`` and ``"liger_deepspeed_stage_3"`` (and their variants, such as ``_offload``) for
:class:`lightning.Trainer` and :class:`lightning.Fabric`.
"""

# ruff: noqa: E402
from lightning_liger.early import run_early

__version__ = "0.1.0"

run_early()

from lightning_liger.activations.tiles import run_tiled
from lightning_liger.callbacks import LigerCallback
from lightning_liger.lazy.logits import LazyLogits, lazy_logits, materialize
from lightning_liger.lazy.scores import divergence, token_loss, token_scores, topk_log_probs
from lightning_liger.losses.advantages import group_advantages, leave_one_out_advantages
from lightning_liger.losses.cpo import CPOOptions
from lightning_liger.losses.distillation import (
    SampledDistillationOptions,
    SparseDistillationOptions,
    ULDOptions,
    sampled_divergence,
    sparse_divergence,
    universal_logit_divergence,
)
from lightning_liger.losses.distillation_options import DistillationOptions
from lightning_liger.losses.dpo import DPOOptions
from lightning_liger.losses.kto import KTOOptions
from lightning_liger.losses.multi_head import deepseek_mtp_weights, medusa_weights, multi_token_weights, targets_ahead
from lightning_liger.losses.orpo import ORPOOptions
from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.losses.tpo import TPOOptions
from lightning_liger.monitor import LigerMonitor
from lightning_liger.patching import PatchReport, apply_liger_kernels
from lightning_liger.patching.auto import AutoLigerModelForCausalLM, AutoLigerModelForImageTextToText
from lightning_liger.patching.float8 import Float8Recipe
from lightning_liger.post_training.distillation import LigerDistillation, LigerDistillationMixin
from lightning_liger.post_training.medusa import LigerMedusa, LigerMedusaMixin, multi_token_loss
from lightning_liger.post_training.medusa_heads import MedusaHeads, load_medusa_heads, save_medusa_heads
from lightning_liger.post_training.modules import LigerCPO, LigerDPO, LigerGRPO, LigerKTO, LigerORPO, LigerTPO
from lightning_liger.post_training.multiple_choice import LigerMultipleChoice
from lightning_liger.post_training.policy import LigerPolicyMixin
from lightning_liger.post_training.preference import LigerPreferenceMixin
from lightning_liger.post_training.teacher import store_teacher_topk, teacher_topk_rows
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

__all__ = [
    "AutoLigerModelForCausalLM",
    "AutoLigerModelForImageTextToText",
    "CPOOptions",
    "ContextParallel",
    "DPOOptions",
    "DistillationOptions",
    "FabricLigerDDPStrategy",
    "FabricLigerDeepSpeedStrategy",
    "FabricLigerFSDPStrategy",
    "FabricLigerModelParallelStrategy",
    "FabricLigerPrecisionPlugin",
    "FabricLigerSingleDeviceStrategy",
    "FabricLigerStrategy",
    "Float8Recipe",
    "KTOOptions",
    "LazyLogits",
    "LigerCPO",
    "LigerCallback",
    "LigerCausalLM",
    "LigerDDPStrategy",
    "LigerDPO",
    "LigerDeepSpeedStrategy",
    "LigerDistillation",
    "LigerDistillationMixin",
    "LigerFSDPStrategy",
    "LigerGRPO",
    "LigerKTO",
    "LigerLMMixin",
    "LigerMedusa",
    "LigerMedusaMixin",
    "LigerModelParallelStrategy",
    "LigerMonitor",
    "LigerMultipleChoice",
    "LigerORPO",
    "LigerPolicyMixin",
    "LigerPrecisionPlugin",
    "LigerPreferenceMixin",
    "LigerSingleDeviceStrategy",
    "LigerStrategy",
    "LigerTPO",
    "MedusaHeads",
    "ORPOOptions",
    "PatchReport",
    "PolicyOptions",
    "SampledDistillationOptions",
    "SparseDistillationOptions",
    "TPOOptions",
    "ULDOptions",
    "apply_liger_kernels",
    "deepseek_mtp_weights",
    "divergence",
    "export_pretrained",
    "group_advantages",
    "lazy_logits",
    "leave_one_out_advantages",
    "load_medusa_heads",
    "load_pretrained",
    "materialize",
    "medusa_weights",
    "multi_token_loss",
    "multi_token_weights",
    "run_tiled",
    "sampled_divergence",
    "save_medusa_heads",
    "shift_labels",
    "sparse_divergence",
    "split_sequence",
    "store_teacher_topk",
    "targets_ahead",
    "teacher_topk_rows",
    "token_loss",
    "token_scores",
    "topk_log_probs",
    "universal_logit_divergence",
]
