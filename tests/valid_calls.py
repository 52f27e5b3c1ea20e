"""A right call of every public function and class, for ``bad_inputs``, and what their annotations do not say."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from lightning_liger import MedusaHeads
from lightning_liger.data import Layout, SupervisedCollator
from tests.bad_inputs import Hints
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch, tiny_llama

EXAMPLES = Path(__file__).parents[1] / "examples" / "data"
PAIRS, TEACHER, IMAGES = EXAMPLES / "preference.jsonl", EXAMPLES / "teacher_topk.safetensors", EXAMPLES / "images"
X, W, W4, HEADS, TABLE = (torch.ones(shape) for shape in ((2, 4, 8), (8,), (4,), (2, 3, 5, 8), (2, 5, 8)))
INPUT, WEIGHT, LOGITS = torch.ones(4, 3), torch.ones(11, 3), torch.ones(4, 11)
ONE, OF_SAMPLES = torch.ones(1), torch.ones(2, 8)
TARGET, IDS = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64)
MASK, TOKEN_WEIGHT, BIAS = torch.ones(4, dtype=torch.bool), torch.ones(4), torch.ones(11)
LOG_PROBS = torch.full((2, 3), -2.0)
PAIR = {"student_log_probs": LOG_PROBS, "teacher_log_probs": LOG_PROBS}
REWARDS = {"rewards": torch.zeros(6), "num_generations": 3}
LINEAR = {"input": INPUT, "linear_weight": WEIGHT, "linear_bias": BIAS}
OF_TOKENS = {"mask": MASK, "token_weight": TOKEN_WEIGHT}
PLAIN_IMAGES = {"tokenizer": str(EXAMPLES / "tokenizer"), "image_size": 8, "tokens_per_image": 3}
TEACHER_ROW = {"input_ids": [1, 2], "teacher_topk_ids": [[1, 2], [3, 4]], "teacher_topk_log_probs": [[-1.0, -2.0]] * 2}
NO_FOLDER = "no/such/folder"
SIZES = {"hidden_size": 4, "intermediate_size": 6}

model = functools.cache(tiny_llama)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()


def negative_log_probs(scores: Any, index: Any) -> Any:
    return -scores.log_probs


VALID: dict[str, dict[str, Any]] = {
    "liger_ops.AdamW": {"params": [nn.Parameter(torch.ones(2))]},
    "liger_ops.CrossEntropyLoss": {"weight": torch.ones(7)},
    "liger_ops.GeGLU": SIZES,
    "liger_ops.GroupNorm": {"num_groups": 2, "num_channels": 4},
    "liger_ops.HyperConnection": {"layer": nn.Identity(), "num_streams": 2, "num_channels": 4},
    "liger_ops.LayerNorm": {"normalized_shape": 8},
    "liger_ops.LinearCrossEntropyLoss": {"in_features": 4, "num_classes": 7, "weight": torch.ones(7)},
    "liger_ops.MultiTokenAttention": {"in_channels": 2, "out_channels": 4, "kernel_size": 3},
    "liger_ops.RMSNorm": {"normalized_shape": 8},
    "liger_ops.RotaryEmbedding": {"head_dim": 8},
    "liger_ops.SparseMoE": {**SIZES, "num_experts": 3, "top_k": 2},
    "liger_ops.SwiGLU": SIZES,
    "liger_ops.VocabShard": {"group": dist.ProcessGroup(0, 1), "start": 0, "vocab_size": 11},
    "liger_ops.add_rms_norm": {"input": X, "residual": X, "normalized_shape": (8,), "weight": W},
    "liger_ops.apply_rotary": {"q": HEADS, "k": HEADS, "cos": TABLE, "sin": TABLE},
    "liger_ops.cross_entropy": {"input": LOGITS, "target": TARGET, "weight": BIAS, "token_weight": TOKEN_WEIGHT},
    "liger_ops.divergence": {"student_logits": LOGITS, "teacher_logits": LOGITS, **OF_TOKENS},
    "liger_ops.dyt": {"input": X, "alpha": ONE, "gamma": W, "beta": W},
    "liger_ops.gated_rms_norm": {"input": X, "gate": X, "weight": W},
    "liger_ops.gelu_mul": {"gate": X, "up": X},
    "liger_ops.group_norm": {"input": X, "num_groups": 2, "weight": W4, "bias": W4},
    "liger_ops.layer_norm": {"input": X, "normalized_shape": (8,), "weight": W, "bias": W},
    "liger_ops.linear_cross_entropy": {**LINEAR, "target": TARGET, "weight": BIAS, "token_weight": TOKEN_WEIGHT},
    "liger_ops.linear_divergence": {
        **LINEAR, "teacher_input": torch.ones(4, 5), "teacher_weight": torch.ones(11, 5), "teacher_bias": BIAS,
        **OF_TOKENS,
    },
    "liger_ops.linear_log_probs": {**LINEAR, "target": TARGET},
    "liger_ops.linear_token_loss": {**LINEAR, "target": TARGET, "token_loss": negative_log_probs},
    "liger_ops.linear_topk_log_probs": {**LINEAR, "ids": IDS, "mask": MASK},
    "liger_ops.mhc_coeffs": {
        "x": X, "phi": torch.ones(32, 24), "b": torch.ones(24), "alpha_pre": ONE, "alpha_post": ONE, "alpha_res": ONE,
    },
    "liger_ops.mhc_post_res": {"x": X, "f_out": OF_SAMPLES, "h_post": torch.ones(2, 4), "h_res": torch.ones(2, 4, 4)},
    "liger_ops.mhc_pre": {"x": X, "h_pre": torch.ones(2, 4)},
    "liger_ops.moe_experts": {
        "x": torch.ones(4, 8), "gate_up": torch.ones(3, 12, 8), "down": torch.ones(3, 8, 6),
        "top_k_index": torch.zeros(4, 2, dtype=torch.int64), "top_k_weights": torch.ones(4, 2),
        "gate_up_bias": torch.ones(3, 12), "down_bias": torch.ones(3, 8),
    },
    "liger_ops.moe_router": {"logits": X, "top_k": 2, "bias": W, "num_groups": 2},
    "liger_ops.modulated_rms_norm": {"input": X, "weight": W, "scale": OF_SAMPLES, "shift": OF_SAMPLES},
    "liger_ops.multi_token_attention": {
        "scores": torch.ones(2, 4, 5, 5), "weight": torch.ones(6, 4, 3, 3), "bias": torch.ones(6), "padding": 1,
    },
    "liger_ops.poly_norm": {"input": X, "weight": torch.ones(3), "bias": ONE},
    "liger_ops.relu_squared": {"input": X},
    "liger_ops.relu_squared_mul": {"gate": X, "up": X},
    "liger_ops.rms_norm": {"input": X, "normalized_shape": (8,), "weight": W},
    "liger_ops.silu_mul": {"gate": X, "up": X},
    "liger_ops.softmax": {"input": X},
    "liger_ops.sparsemax": {"input": X},
    "liger_ops.token_log_probs": {"logits": LOGITS, "target": TARGET},
    "lightning_liger.DistillationOptions": {"divergence": "jsd"},
    "lightning_liger.ContextParallel": {"size": 1},
    "lightning_liger.ExamplesDataModule": {"path": PAIRS},
    "lightning_liger.ImageTextDataModule": {"path": IMAGES, "processor": PLAIN_IMAGES},
    **{
        f"lightning_liger.Liger{name}": {"config": TINY_CONFIG}
        for name in ("CPO", "CausalLM", "DPO", "Distillation", "GRPO", "KTO", "Medusa", "MultipleChoice", "ORPO", "TPO")
    },
    "lightning_liger.PackedStream": {
        "examples": [{"input_ids": [1, 2], "loss_mask": [1, 1]}],
        "collator": SupervisedCollator(Layout(max_length=8, padding_free=True)),
    },
    "lightning_liger.MedusaHeads": {"hidden_size": 8, "vocab_size": 5},
    "lightning_liger.TeacherTopKDataModule": {"path": TEACHER},
    "lightning_liger.apply_liger_kernels": {"model": model()},
    "lightning_liger.check_kernels": {"kernels": "auto"},
    "lightning_liger.deepseek_mtp_weights": {"num_depths": 1},
    "lightning_liger.divergence": {"student_logits": LOGITS, "teacher_logits": LOGITS, **OF_TOKENS},
    "lightning_liger.export_pretrained": {"module": Module(), "ckpt_path": NO_FOLDER, "output": NO_FOLDER},
    "lightning_liger.find_gpu": {"device_name": "NVIDIA H100", "total_memory": 2**36},
    "lightning_liger.get_gpu": {"name": "h100-80gb"},
    "lightning_liger.group_advantages": REWARDS,
    "lightning_liger.inspect_model": {"model": "llama"},
    "lightning_liger.leave_one_out_advantages": {**REWARDS, "kl": torch.zeros(6)},
    "lightning_liger.load_medusa_heads": {"heads": MedusaHeads(8, 5, 1), "folder": NO_FOLDER},
    "lightning_liger.load_pretrained": {"model": model(), "folder": NO_FOLDER},
    "lightning_liger.materialize": {"logits": LOGITS},
    "lightning_liger.measure_matmul_flops": {"device": torch.device("cpu"), "dtype": torch.float32},
    "lightning_liger.medusa_weights": {"num_heads": 2},
    "lightning_liger.multi_token_loss": {
        "logits": torch.zeros(2, 3, 4), "targets": torch.zeros(2, 3).long(), "weights": [1.0, 1.0]
    },
    "lightning_liger.multi_token_weights": {"num_heads": 2},
    "lightning_liger.run_tiled": {"module": nn.Linear(3, 2), "input": INPUT},
    "lightning_liger.sampled_divergence": {**PAIR, "old_log_probs": LOG_PROBS},
    "lightning_liger.save_medusa_heads": {"heads": MedusaHeads(8, 5, 1), "folder": NO_FOLDER},
    "lightning_liger.shift_labels": {"labels": IDS, "position_ids": IDS},
    "lightning_liger.sparse_divergence": {**PAIR, "support_mask": torch.ones(2, 3, dtype=torch.bool)},
    "lightning_liger.split_sequence": {"batch": {"input_ids": IDS}, "rank": 0, "size": 1},
    "lightning_liger.store_teacher_topk": {"model": model(), "data": [tiny_batch()], "path": "a.safetensors"},
    "lightning_liger.targets_ahead": {"targets": IDS, "num_ahead": 1, "position_ids": IDS},
    "lightning_liger.teacher_topk_rows": {"model": model(), "batches": []},
    "lightning_liger.token_loss": {"logits": LOGITS, "labels": TARGET, "loss": negative_log_probs},
    "lightning_liger.token_scores": {"logits": LOGITS, "labels": TARGET},
    "lightning_liger.topk_log_probs": {"logits": LOGITS, "ids": IDS, "mask": MASK},
    "lightning_liger.universal_logit_divergence": {
        "student_logits": torch.zeros(2, 5), "teacher_logits": torch.zeros(2, 7)
    },
    "lightning_liger.write_teacher_topk": {"path": "a.safetensors", "rows": [TEACHER_ROW]},
    **{
        f"lightning_liger.{name}": {"path": PAIRS}
        for name in (
            "ConversationDataModule", "MultipleChoiceDataModule", "PreferenceDataModule", "PromptCompletionDataModule",
            "RolloutDataModule", "TextDataModule", "UnpairedFeedbackDataModule",
        )
    },
}  # fmt: skip
"""Arguments of each that needs some, and tensors of which wrong ones are made."""

RESULTS = (
    "Fit", "Gpu", "Inspection", "LazyLogits", "PatchEntry", "PatchReport", "Row", "Settings", "TokenScores",
    "TokenStats", "AutoLigerModelForCausalLM", "AutoLigerModelForImageTextToText", "FeedbackCollator",
    "ImageTextCollator", "MultipleChoiceCollator", "PreferenceCollator", "RolloutCollator", "SupervisedCollator",
    "TeacherTopKCollator",
)  # fmt: skip
"""Classes that users do not make; data modules make collators, and check."""

AT_LEAST_0 = """
activation_checkpointing cpo_alpha crossentropy_weight desirable_weight distillation_weight entropy_coef eps
label_smoothing ld_alpha learning_rate lr max_valid_tokens medusa_heads_coefficient medusa_lr_multiplier
medusa_num_layers medusa_warmup_steps min_lr_ratio num_ahead num_layers num_workers pad_token_id padding pre_eps rank
ref_model_mixup_alpha rms_eps saved_logits_bytes seed sinkhorn_eps skip_steps tpo_alpha undesirable_weight
validation_fraction vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min warmup_steps weight weight_decay z_loss_weight divergence.beta linear_divergence.beta
LigerGRPO.beta PolicyOptions.beta SparseDistillationOptions.beta DistillationOptions.beta LigerDistillation.beta
leave_one_out_advantages.beta LigerCPO.temperature LigerCausalLM.temperature LigerDPO.temperature
LigerDistillation.temperature LigerKTO.temperature LigerMedusa.temperature LigerMultipleChoice.temperature
LigerORPO.temperature LigerTPO.temperature stage
"""
ANY_NUMBER = """
alpha f_alpha_divergence_coef gate_multiplier ignore_index logit_scale off_policy_mask_threshold offset post_mult
simpo_gamma start teacher_logit_scale tpo_l_gamma up_offset
"""
AT_MOST_1 = """
divergence.beta linear_divergence.beta SparseDistillationOptions.beta DistillationOptions.beta LigerDistillation.beta
label_smoothing ld_alpha min_lr_ratio ref_model_mixup_alpha top_entropy_quantile
"""
UNTRIED = """
leave_one_out_advantages.kl leave_one_out_advantages.reward_clip_range multi_token_loss.targets normalized_shape
mrope_sections sampled_divergence.options save_medusa_heads.base_model store_teacher_topk.data write_teacher_topk.rows
sparse_divergence.options targets_ahead.position_ids targets_ahead.targets token_loss.labels token_loss.loss
PackedStream.examples token_scores.labels topk_log_probs.ids universal_logit_divergence.options
"""
HINTS = Hints(
    least=dict.fromkeys(AT_LEAST_0.split(), 0)
    | dict.fromkeys(ANY_NUMBER.split(), -math.inf)
    | {"block_size": 2, "max_length": 2, "delta": 1.2, "dim": -1}
    | dict.fromkeys(("TextDataModule.vocab_size", "PreferenceDataModule.vocab_size"), 257),
    most=dict.fromkeys(AT_MOST_1.split(), 1),
    below={"validation_fraction": 1, "CPOOptions.label_smoothing": 0.5, "TPOOptions.label_smoothing": 0.5},
    text=frozenset(
        ("attn_implementation", "device_name", "page", "prompt", "teacher", "text_field", "export_pretrained.data")
    ),
    also={
        "LigerDeepSpeedStrategy.context_parallel_size": (bool,),
        "eps": (torch.Tensor,),
        "offset": (torch.Tensor,),
        "normalized_shape": (bytes, dict),
        "out_features": (bytes, dict),
        **dict.fromkeys(("activation_checkpointing", "data_parallel_size", "device"), (int,)),  # of any size
        **dict.fromkeys(  # of another device PyTorch speaks
            ("teacher_log_probs", "old_log_probs", "support_mask", "universal_logit_divergence.teacher_logits"),
            ("meta",),
        ),
        "token_weight": (torch.int64, torch.bool, torch.float8_e4m3fn),
    },
    untried={
        "AdamW.params": "PyTorch checks them",
        "GroupNorm.bias": "None is the value of affine",
        **dict.fromkeys(UNTRIED.split(), "some types meet errors of Python or PyTorch; others are in tables"),
        "medusa_pretrained": "a folder, of which messages speak",
        "FabricLigerSingleDeviceStrategy.device": "Lightning checks it",
        "LigerSingleDeviceStrategy.device": "Lightning checks it",
        "processor": "needs pillow",
        "batches": "an iterator that is not begun",
        "generator": "of an iterator that is not begun",
        "enabled": "is only a truth value",
        "materialize.logits": "all that is not lazy passes",
        "measure_matmul_flops.dtype": "None measures nothing",
        "tokenizer_hash.tokenizer": "takes all that has a vocabulary",
    },
)
ALIASES = {"get_gpu.name": "gpu", "distillation_temperature": "temperature"}
"""What messages call arguments, if not by their names."""
