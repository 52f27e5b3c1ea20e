"""Adapters of peft from plain settings."""

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.imports import package_available
from transformers import PreTrainedModel

from liger_ops.arguments import wrong_type, wrong_value


def check_lora(lora: Any) -> None:
    """Raises unless ``lora`` is None or has arguments of peft's ``LoraConfig``.

    Raises:
        ModuleNotFoundError: If peft is needed and not installed.
        TypeError: If it is no dict with strings as keys.
        ValueError: For arguments that ``LoraConfig`` does not take.
    """
    if lora is not None:
        _lora_config(lora)


def add_adapters(model: PreTrainedModel, lora: Mapping[str, Any]) -> Any:
    """``model`` with adapters, whose other parameters are frozen."""
    from peft import get_peft_model

    return get_peft_model(model, _lora_config(lora))


def _lora_config(lora: Any) -> Any:
    if not isinstance(lora, Mapping) or not all(isinstance(key, str) for key in lora):
        raise wrong_type("lora", "a dict of arguments of peft's LoraConfig, or None", lora)
    if not package_available("peft"):
        raise ModuleNotFoundError("lora needs peft, which is not installed: pip install lightning-liger[peft]")
    from peft import LoraConfig

    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **lora})
    except (TypeError, ValueError) as error:
        raise wrong_value("lora", f"arguments of peft's LoraConfig ({error})", dict(lora)) from None
