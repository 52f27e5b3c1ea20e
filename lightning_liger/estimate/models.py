"""Models on the meta device, from a folder, a name on the Hub or the name of an architecture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from liger_ops.arguments import check_text, did_you_mean
from lightning_liger.hub import check_for_repository, checkpoint_folder, is_hub_name
from lightning_liger.training.architecture import build_config
from lightning_liger.training.lora import add_adapters, check_lora


def find_config(model: str, settings: Mapping[str, Any] | None = None, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a causal language model. Of one on the Hub, ``config.json`` alone is downloaded.

    Args:
        model: A folder with a ``config.json``, a name on the Hub of Hugging Face, such as
            ``"meta-llama/Meta-Llama-3-8B"``, or an architecture of transformers, such as ``"llama"``.
        settings: In place of the configuration's own, by name.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ConnectionError: If it is on the Hub and not in the local cache, and the Hub cannot be reached.
        FileNotFoundError: If it is a folder or a repository without ``config.json``, or none of the three.
        PermissionError: If it is on the Hub and gated.
        ValueError: If it is no causal language model, or has no such setting.
    """
    check_text("model", model)
    check_for_repository("revision", revision, model)
    path = Path(model).expanduser()
    path = path if path.name == "config.json" else path / "config.json"
    if path.is_file():
        return build_config(path.parent, settings=settings)
    if is_hub_name(model):
        return build_config(checkpoint_folder("model", model, revision), settings=settings)
    if model in CONFIG_MAPPING:
        return build_config(None, model, settings)
    if path.parent.is_dir():
        raise FileNotFoundError(f"model must be a folder with a config.json, got {model!r} without")
    hint = "" if "/" in model else did_you_mean(model, CONFIG_MAPPING.keys(), most=5)
    raise FileNotFoundError(
        "model must be a folder with a config.json, owner/name of a model on the Hub, or"
        f" an architecture such as 'llama' (transformers.CONFIG_MAPPING lists them), got {model!r}{hint}"
    )


def make_model(config: PreTrainedConfig, dtype: torch.dtype, lora: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """A causal language model in training mode on the meta device, with adapters if ``lora`` describes them.

    Raises ModuleNotFoundError if peft is not installed, TypeError or ValueError for a ``lora`` that does not fit.
    """
    check_lora(lora)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if lora is not None:
            model = add_adapters(model, lora).to(dtype)
    model.train()
    return model


def make_batch(batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Rows of text without padding, on the meta device."""
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}
