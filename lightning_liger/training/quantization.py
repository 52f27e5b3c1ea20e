"""Frozen base models with quantized weights, under adapters: the settings, and what their checkpoints hold."""

import inspect
from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.imports import package_available
from torch import nn
from transformers.quantizers.auto import AutoQuantizationConfig

from liger_ops.arguments import did_you_mean, wrong_type, wrong_value

_EXPECTED = "arguments of transformers' BitsAndBytesConfig or, with quant_method='torchao', of TorchAoConfig"


def check_quantization(settings: Any, lora: Any, pretrained: Any) -> Any:
    """transformers' configuration of the quantization, None for None; raises for what it does not take."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise wrong_type("quantization", f"a dict of {_EXPECTED}, or None", settings)
    if lora is None or pretrained is None:
        raise wrong_value("quantization", "None without lora and pretrained: quantized weights are frozen", settings)
    given = dict(settings)
    method = given.setdefault("quant_method", "bitsandbytes")
    if method not in ("bitsandbytes", "torchao"):
        raise wrong_value("quantization['quant_method']", "'bitsandbytes' or 'torchao'", method)
    if not package_available(method):
        raise ModuleNotFoundError(f"quantization={dict(settings)!r} needs {method}: pip install {method}")
    if method == "torchao":
        return _torchao(given)
    if bool(given.get("load_in_4bit")) == bool(given.get("load_in_8bit")):
        raise wrong_value("quantization", "either load_in_4bit=True or load_in_8bit=True", dict(settings))
    try:
        config = AutoQuantizationConfig.from_dict(given)
    except (TypeError, ValueError, AttributeError) as error:
        raise wrong_value("quantization", f"{_EXPECTED} ({error})", dict(settings)) from None
    known = inspect.signature(type(config).__init__).parameters.keys() | {"quant_method"}
    if unknown := sorted(given.keys() - known):  # transformers ignores them
        raise wrong_value("quantization", f"{_EXPECTED}{did_you_mean(unknown[0], known)}", dict(settings))
    return config


def _torchao(given: dict[str, Any]) -> Any:
    """With the name of a class of torchao and its arguments, such as Int4WeightOnlyConfig with a group_size."""
    import torchao.quantization
    from transformers import TorchAoConfig

    name = str(given.get("quant_type"))
    kind: Any = getattr(torchao.quantization, name, None) if name.endswith("WeightOnlyConfig") else None
    if not isinstance(kind, type):
        raise wrong_value("quantization['quant_type']", "a name such as 'Int8WeightOnlyConfig' of torchao", name)
    own = {key: value for key, value in given.items() if key not in ("quant_method", "quant_type")}
    try:
        return TorchAoConfig(kind(**own))
    except TypeError as error:
        raise wrong_value("quantization", f"arguments of torchao's {name} ({error})", given) from None


def trained_names(module: nn.Module) -> set[str]:
    """The parameters that checkpoints hold: all others are the quantized ones of ``pretrained``."""
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}
