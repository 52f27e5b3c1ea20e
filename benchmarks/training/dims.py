"""The dimensions of published models; weights are random."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_GQA = {"num_attention_heads": 32, "num_key_value_heads": 8}
_MHA = {"num_attention_heads": 32, "num_key_value_heads": 32}


@dataclass(frozen=True)
class Dims:
    """An architecture of transformers with its sizes.

    Attributes:
        title: As in tables and figures.
        model_type: As in a ``config.json``.
        num_layers: The published depth.
        sizes: The settings in which it differs from the architecture's defaults.
        lora: Arguments of peft's ``LoraConfig`` besides the rank; by default peft's choice of layers.
        needs_meta: Whether it is built on the meta device for strategies that shard it, as it is large for one GPU.
    """

    title: str
    model_type: str
    num_layers: int
    sizes: dict[str, Any] = field(repr=False)
    lora: dict[str, Any] = field(default_factory=dict, repr=False)
    needs_meta: bool = False

    def config(self, num_layers: int | None = None, tiny: bool = False, **changes: Any) -> PreTrainedConfig:
        """Its configuration with ``num_layers`` layers (default: the published depth), or with tiny sizes."""
        sizes = self.sizes | changes
        if tiny:
            sizes = {name: _TINY.get(name, value) for name, value in sizes.items()} | _TINY_HEADS
            if self.model_type == "bamba":
                sizes |= {"mamba_n_heads": 8, "mamba_d_head": 16}
        return AutoConfig.for_model(
            self.model_type,
            num_hidden_layers=num_layers or (2 if tiny else self.num_layers),
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **sizes,
        )


DIMS: dict[str, Dims] = {
    "llama3_8b": Dims(
        "Llama 3 8B", "llama", 32,
        {**_GQA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama3_1b": Dims(
        "Llama 3.2 1B", "llama", 16,
        {**_GQA, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 8192, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama_120m": Dims(
        "Llama of 120M", "llama", 12,
        {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 768, "intermediate_size": 3072,
         "vocab_size": 16384, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    ),
    "qwen2_7b": Dims(
        "Qwen2 7B", "qwen2", 28,
        {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "intermediate_size": 18944,
         "vocab_size": 152064, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    ),
    "qwen3_8b": Dims(
        "Qwen3 8B", "qwen3", 36,
        {**_GQA, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128, "vocab_size": 151936},
    ),
    "gemma_7b": Dims(
        "Gemma 7B", "gemma", 28,
        {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_size": 3072,
         "intermediate_size": 24576, "vocab_size": 256000},
    ),
    "gemma3_4b": Dims(
        "Gemma 3 4B", "gemma3_text", 34,
        {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "vocab_size": 262208},
    ),
    "mistral_7b": Dims(
        "Mistral 7B", "mistral", 32,
        {**_GQA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32768, "sliding_window": None},
    ),
    "phi3_mini": Dims(
        "Phi-3 mini", "phi3", 32,
        {**_MHA, "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064},
    ),
    "glm4_9b": Dims(
        "GLM-4 9B", "glm4", 40,
        {"hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32, "num_key_value_heads": 2,
         "head_dim": 128, "vocab_size": 151552},
    ),
    "olmo2_7b": Dims(
        "OLMo 2 7B", "olmo2", 32,
        {**_MHA, "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 100352},
    ),
    "granite3_8b": Dims(
        "Granite 3 8B", "granite", 40,
        {**_GQA, "hidden_size": 4096, "intermediate_size": 12800, "vocab_size": 49155, "logits_scaling": 16.0,
         "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125},
    ),
    "mixtral_narrow": Dims(
        "Mixtral, narrow experts", "mixtral", 32,
        {**_GQA, "hidden_size": 4096, "intermediate_size": 3584, "vocab_size": 32000, "num_local_experts": 8},
    ),
    "qwen3_30b_a3b": Dims(
        "Qwen3 30B-A3B", "qwen3_moe", 48,
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
         "num_experts_per_tok": 8, "norm_topk_prob": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
         "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        needs_meta=True,
    ),
    "bamba_9b": Dims(
        "Bamba 9B", "bamba", 32,
        {**_GQA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "attn_layer_indices": [1]},
    ),
}  # fmt: skip
"""Every model by its name on the command line."""

_TINY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "head_dim": 16, "moe_intermediate_size": 32,
         "num_experts": 8, "num_experts_per_tok": 3}  # fmt: skip
_TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def make_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model in training mode, made on ``device``, with the same weights from the same seed."""
    torch.manual_seed(seed)
    with device:  # also the random numbers are drawn there, which on a GPU takes a second for 8B parameters
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
