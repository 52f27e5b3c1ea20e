"""Adapters of peft from plain settings."""

import warnings
from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.imports import package_available
from transformers import PreTrainedModel

from liger_ops.arguments import check_integer, wrong_type, wrong_value

_SHORT = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
_WITHOUT_WEIGHTS = {
    *("task_type", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "bias"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "init_lora_weights"),
    "target_parameters",
}
"""Settings with which the adapters' first values do not depend on the model's weights."""


def check_lora(lora: Any) -> Any:
    """peft's ``LoraConfig`` with these arguments, None for None; raises for what it does not take."""
    if lora is None:
        return None
    if not isinstance(lora, Mapping) or not all(isinstance(key, str) for key in lora):
        raise wrong_type("lora", "a dict of arguments of peft's LoraConfig, or None", lora)
    if not package_available("peft"):
        raise ModuleNotFoundError("lora needs peft, which is not installed: pip install 'lightning-liger[peft]'")
    from peft import LoraConfig

    if twice := [name for name, full in _SHORT.items() if name in lora and full in lora]:
        raise wrong_value("lora", f"settings without both {twice[0]!r} and {_SHORT[twice[0]]!r}", dict(lora))
    if "r" in lora:
        check_integer("lora['r']", lora["r"], at_least=1)
    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **_full_names(lora)})
    except (TypeError, ValueError) as error:
        raise wrong_value("lora", f"arguments of peft's LoraConfig ({error})", dict(lora)) from None


def add_adapters(model: PreTrainedModel, lora: Mapping[str, Any]) -> Any:
    """``model`` with adapters, whose other parameters are frozen."""
    from peft import get_peft_model

    config = check_lora(lora)
    try:
        with warnings.catch_warnings():  # peft reads an attribute that transformers renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return get_peft_model(model, config)
    except ValueError as error:
        raise wrong_value("lora", f"settings that fit {type(model).__name__} ({error})", dict(lora)) from None


def needs_weights(lora: Mapping[str, Any]) -> bool:
    """Whether the adapters' first values depend on the model's weights, which are not known on the meta device."""
    settings = _full_names(lora)
    if settings.get("init_lora_weights", True) not in (True, False, "gaussian"):
        return True
    return any(settings[name] for name in settings.keys() - _WITHOUT_WEIGHTS)


def _full_names(lora: Mapping[str, Any]) -> dict[str, Any]:
    return {_SHORT.get(name, name): value for name, value in lora.items()}
