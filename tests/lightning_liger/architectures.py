"""A tiny model of every architecture that transformers knows as a causal LM, shrunk by the names of its attributes."""

import dataclasses
import inspect
import re
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL_LM_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every model type of ``AutoModelForCausalLM``."""

NOT_TRAINED_BY_ALL_VERSIONS = (
    *("dbrx", "doge", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("musicgen", "musicgen_melody"),
)
"""Types that transformers 5.17 cannot build or train."""

UNBUILDABLE: dict[str, str] = {
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "its configuration asks for key and value sharing in all layers, its layers refuse that"
    if Version(transformers.__version__) < Version("5.24")
    else "its forward needs the keys and values of another model",
}
"""Types that cannot be built here, and why."""

VOCAB_SIZE = 131
"""A prime that divides no other size: a tensor whose number of elements is a multiple of it has a vocabulary."""

BATCH_SIZE, SEQ_LEN = 2, 12

_LAYERS = re.compile(r"(n|num|num_hidden|encoder|decoder|num_encoder|num_decoder)_layers?|depth|num_blocks")

# What attributes are set to, by regular expressions that match their whole names.
_SIZES: dict[str, Any] = {
    r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|(input|output)_embedding_size|word_embed_proj_dim"
    r"|lru_width|attention_hidden_size|backbone_hidden_size|dim_model_base|hidden_size_global|adapter_(in|out)_dim"
    r"|adapter_input_size|(pronunciation|shape)_embed_dim": 32,
    r"((num|encoder|decoder|num_encoder|num_decoder)_)?attention_heads|n_heads?|num_heads|linear_num_value_heads"
    r"|(swa_num_attention|index_n|linear_num)_heads": 4,
    r"mamba_n_heads|mamba_num_heads|n_mamba_heads": 8,
    r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_key_heads": 2,
    r"(swa_|linear_|linear_key_|linear_value_|index_|v_|qk_nope_)?head_dim|dim_head|d_head|d_kv|kv_channels"
    r"|qk_rope_head_dim|attention_head_size|rotary_dim|mamba_d_head|mamba_head_dim": 8,
    r".*intermediate_size(_mlp)?|.*ffn_dim|dim_ff|dff|d_ff|d_inner|.*ffn_hidden_size|feed_forward_size": 48,
    r"(decoder_|pronunciation_|shape_|audio_)?vocab_size(_per_layer_input)?": VOCAB_SIZE,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(source|target)_positions": 64,
    r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num": 4,
    r"num_experts_per_tok(en)?|top_k_experts|moe_k|moe_topk|moe_top_k": 2,
    r"((n|num|moe_num)_shared_experts|first_k_dense_replace|num_dense_layers|n_group|topk_group|num_expert_group)": 1,
    r".*lora_rank|.*state_size|mamba_d_state|time_step_rank|mamba_dt_rank|.*_lowrank|d_rel|rel_extent"
    r"|hidden_size_per_layer_input|laurel_rank|router_hidden_size|gated_norm_rank": 16,
    r"(sliding|attention)_window(_size)?|window_size|local_attention|index_topk": 5,
    r"(mamba_|conf_attention_)?chunk_size|block_size": 8,
    r"attention_chunk_size|keep_window_size": 5,
    r"unpadded_vocab_size": 127,
    r"attn_layer_period|expert_layer_period": 2,
    r"attn_layer_offset|expert_layer_offset": 1,
    r"pad_token_id": 0,
    r"bos_token_id": 1,
    r"eos_token_id": 2,
}
# What models scale or cap by, off their defaults.
_SCALES: dict[str, Any] = {
    r".*soft_?cap(ping)?|clip_qkv": 5.0,
    r"logits_scaling|logits_mup_width_multiplier": 1.7,
    r"logit_scale|(lm_head|embedding|residual|key|attention|.*_(in|out))_multiplier": 0.6,
    r"route_scale|.*(routed|router)_scaling_factor|scale_emb|embedding_scale": 1.3,
    r"scale_depth|.*_(alpha|beta)_factor": 1.2,
    r"query_pre_attn_scalar": 12,
    r"scale_embedding": True,
}
_SWITCHES: dict[str, Any] = {
    r"use_cache": False,
    r"is_decoder|add_cross_attention|output_router_logits": True,
    r"mlp_only_layers": [0],
    r".*(dropout|pdrop|layerdrop|jitter).*": 0.0,
}
_VALUES = {re.compile(name): value for name, value in (_SIZES | _SCALES | _SWITCHES).items()}

_FILLED_IN = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "logit_scale",
    "final_logit_softcapping",
    "clip_qkv",
    "unpadded_vocab_size",
)
"""Attributes that are None in some configurations and have to be set or are worth setting there too."""

_GEMMA4: dict[str, Any] = {"global_head_dim": 16}
_QWEN4: dict[str, Any] = {
    "head_dim": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 64,
    "eos_token_id": 2,
}
_LLAMA4: dict[str, Any] = {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "moe_layers": [1]}
_DOTS3: dict[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 61},
    "cohere2_moe": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "doge": {"is_moe": True},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
    "falcon_h1": {
        "mamba_rms_norm": True,
        "mamba_d_ssm": 64,
        "mlp_multipliers": [0.8, 0.7],
        "mamba_n_heads": 8,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": {
        "text_config": _GEMMA4 | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    },
    "gemma4_text": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_assistant": {
        "text_config": _GEMMA4
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
        }
    },
    "gemma4_unified_text": _GEMMA4,
    "git": {"vision_config": {"image_size": 32}},
    "gpt_bigcode": {"add_cross_attention": False},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "inkling_text": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "kosmos-2.5": {"text_config": {"layers": 2, "embed_dim": 32, "ffn_dim": 48}},
    "laguna": {"num_hidden_layers": 2, "num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"full_attn_idxs": [1], "block_multiple_of": 8},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "mamba2": {"hidden_size": 32, "num_heads": 8, "head_dim": 8},
    "mellum": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "axial_pos_shape": [3, 4],
        "axial_pos_embds_dim": [16, 16],
        "hash_seed": 0,
    },
    "stablelm": {"qk_layernorm": True},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 8, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a type needs beyond its names, for its parts by their attribute."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of ``model_type`` with the fewest layers that show each kind, without dropout or cache."""
    return _shrunk(CONFIG_MAPPING[model_type], _OVERRIDES.get(model_type, {}))


def _shrunk(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    instance = config_class(**overrides)
    names = [field.name for field in dataclasses.fields(config_class)]
    # Attributes that differ between layers cannot be read as others are.
    default = {name: vars(instance).get(config_class.attribute_map.get(name, name)) for name in names}
    parts = {
        name: _shrunk(type(value), overrides.get(name, {}))
        for name, value in default.items()
        if isinstance(value, PreTrainedConfig)
    }
    overrides = {name: value for name, value in overrides.items() if name not in parts}
    names = [name for name in names if name not in parts]
    values = {name: value for name in names if (value := _shrunk_value(name, default[name])) is not None}
    if "kv_lora_rank" in values:  # multi-head latent attention has as many key heads as query heads
        values["num_key_value_heads"] = 4
    if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()):
        overrides = {"rope_parameters": _with_sections(default, values.get("head_dim", 8))} | overrides
    num_layers = {name: default[name] for name in names if _LAYERS.fullmatch(name)}
    # Lists with an entry for each layer keep one of each kind.
    kinds = {
        name: list(dict.fromkeys(default[name]))
        for name in names
        if isinstance(default[name], list | tuple) and len(default[name]) in num_layers.values()
    }
    count = next((overrides[name] for name in num_layers if name in overrides), max([2, *map(len, kinds.values())]))
    values |= dict.fromkeys(num_layers, count)
    values |= {name: (each * count)[:count] for name, each in kinds.items()}
    return config_class(**values | parts | overrides)


def _with_sections(default: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary parameters whose sections for time, height and width fit ``head_dim``."""
    rope = default.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
    factor = rope.get("partial_rotary_factor", default.get("partial_rotary_factor")) or 1.0
    num_pairs = int(head_dim * factor) // 2
    return {**rope, "mrope_section": [num_pairs - 2 * (num_pairs // 4), num_pairs // 4, num_pairs // 4]}


def _shrunk_value(name: str, default: Any) -> Any:
    if default is None and name not in _FILLED_IN:
        return None
    value = next((value for pattern, value in _VALUES.items() if pattern.fullmatch(name)), None)
    return type(default)(value) if value == 0 and default is not None else value  # configurations check types


def tiny_causal_lm(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A causal LM of ``model_type`` on the CPU in float32, its parameters random and the same at every call."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(model_type)
        if hasattr(config, "decoder"):  # MusicGen's: the class takes a part, and the auto class hands it the whole
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config.decoder, **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
            else:  # norms start as ones, biases and offsets from one as zeros, which would hide mistakes
                parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


IMAGE_TEXT_TYPES: tuple[str, ...] = (
    "aria", "aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid",
    "dots3_note", "exaone4_5", "fuyu", "gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe",
    "glm_ocr", "glmga", "got_ocr2", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl",
    "janus", "kimi_k25", "kosmos-2.5", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next",
    "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl",
    "mistral3", "mistral4", "mistral_large4", "mllama", "muse_glimmer", "ovis2", "paligemma", "pp_chart2table",
    "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "shieldgemma2", "smolvlm", "t5gemma2",
    "video_llama_3", "video_llava", "vipllava"
)  # fmt: skip
"""Types of ``AutoModelForImageTextToText`` that can be built here and run on text alone."""


def tiny_image_text_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A model of images and text on the CPU in float32, its matrices random and the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(model_type)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
    return model


def tiny_inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Any]:
    """Inputs of two rows: ``labels`` of which some are ignored, a mask that leaves out the end of the second row.

    Models that attend to an encoder, an image or another model's keys get those as well. A model whose forward takes no
    ``labels`` gets none.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = inspect.signature(model.forward).parameters
    config = model.config.get_text_config()
    num_codebooks = getattr(config, "num_codebooks", 1) if "lm_heads" in dict(model.named_children()) else 1

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    input_ids = torch.randint(3, 120, (BATCH_SIZE, num_codebooks, SEQ_LEN), generator=generator)
    attention_mask = torch.ones(BATCH_SIZE, SEQ_LEN, dtype=torch.int64)
    attention_mask[1, -2:] = 0
    labels = input_ids.masked_fill(attention_mask[:, None] == 0, -100)
    labels[0, :, :3] = -100
    batch: dict[str, Any] = {"input_ids": input_ids.flatten(0, 1), "attention_mask": attention_mask}
    batch["labels"] = labels[:, 0] if num_codebooks == 1 else labels.transpose(1, 2)
    if getattr(config, "add_cross_attention", False) or any(
        "encoder_attn" in name for name, _ in model.named_modules()
    ):
        batch["encoder_hidden_states"] = batch["encoder_outputs"] = noise(BATCH_SIZE, SEQ_LEN, config.hidden_size)
    if config.model_type == "mllama_text_model":
        batch["cross_attention_states"] = noise(BATCH_SIZE, SEQ_LEN, config.hidden_size)
    if config.model_type == "git":  # leaves out the image's logits, also where there is no image
        batch["pixel_values"] = noise(BATCH_SIZE, 3, config.vision_config.image_size, config.vision_config.image_size)
    if "shared_kv_states" in parameters:  # an assistant, which reads the states of a larger model
        batch["inputs_embeds"] = noise(BATCH_SIZE, SEQ_LEN, 2 * model.config.backbone_hidden_size)
        head_dims = {name: config.per_layer_config[name].head_dim for name in sorted(set(config.layer_types))}
        batch["shared_kv_states"] = {
            name: (noise(BATCH_SIZE, 2, SEQ_LEN, head_dim), noise(BATCH_SIZE, 2, SEQ_LEN, head_dim))
            for name, head_dim in head_dims.items()
        }
    return {name: value for name, value in batch.items() if name in parameters}
