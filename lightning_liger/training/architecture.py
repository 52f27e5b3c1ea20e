"""The configuration of a Hugging Face causal LM, from a folder or from the name of an architecture."""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from liger_ops.arguments import check_integer, did_you_mean, shown, wrong_type, wrong_value


def build_config(
    folder: Path | None = None, model_type: str = "llama", settings: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The configuration of a checkpoint's folder, or else of an architecture, with ``settings`` in place of its own."""
    pretrained = None if folder is None else str(folder)
    if pretrained is None and not isinstance(model_type, str):
        raise wrong_type("model_type", "the name of an architecture, such as 'llama'", model_type)
    if pretrained is None and model_type not in CONFIG_MAPPING:
        raise ValueError(
            "model_type must be an architecture that transformers knows (transformers.CONFIG_MAPPING lists them), got"
            f" {model_type!r}{did_you_mean(model_type, CONFIG_MAPPING.keys(), most=5)}"
        )
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise wrong_type("config", "a dict of settings of the architecture by their names, or None", settings)
    if "trust_remote_code" in settings:  # also in a checkpoint's hyperparameters
        raise ValueError("config must not have trust_remote_code: code in the checkpoint's folder is never run")

    default = _build(pretrained, model_type, {})
    if auto_class(default) is None:
        argument, value = ("model_type", model_type) if pretrained is None else ("pretrained", str(pretrained))
        raise wrong_value(argument, "a causal language model of transformers, of text or of images and text", value)
    settings = dict(settings)
    named = settings.pop("model_type", default.model_type)  # a whole config.json has it
    if named not in (default.model_type, model_type if pretrained is None else None):
        raise wrong_value("config['model_type']", f"{default.model_type!r}, as the architecture", named)
    _check_settings("config", default, functools.partial(_build, pretrained, model_type), settings)
    return _build(pretrained, model_type, settings)


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' auto class of a causal language model, of images and text if none is of text alone; or None."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises ValueError if the tokenizer, if there is one, has tokens that the model has no embeddings for."""
    vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if tokenizer is None or not isinstance(vocab_size, int):
        return
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise ValueError(
            f"config['vocab_size'] must be at least {needed}, the number of tokens of the tokenizer, got {vocab_size}."
            " A tokenizer that is trained on the text has at most data.vocab_size tokens."
        )


def _check_settings(
    path: str, default: PreTrainedConfig, build: Callable[..., Any], settings: Mapping[str, Any]
) -> None:
    """Raises for names that ``default``, or a configuration in it, does not have, and for some impossible values."""
    saved = default.to_dict()  # `hasattr` raises for settings that differ between layers
    for name, value in settings.items():
        if name in ("vocab_size", "hidden_size"):
            check_integer(f"{path}[{name!r}]", value, at_least=1)
        elif isinstance(value, float) and math.isnan(value):
            raise wrong_value(f"{path}[{name!r}]", "a number", value)
        elif name == "head_dim" and "num_key_value_heads" in saved:
            continue  # which such attention reads, whether the configuration has it or not
        elif name not in saved and not hasattr(default, name):
            changed = build({name: value}).to_dict()  # of another setting, if it is a former name
            if all(changed[key] == saved.get(key) for key in changed if key != name):
                hint = did_you_mean(name, saved)
                expected = f"settings of {default.model_type!r}"
                raise ValueError(f"{path} must be {expected}, got {name!r}: {shown(value)}{hint}")
        elif isinstance(value, Mapping) and name in default.sub_configs:

            def build_nested(own: Mapping[str, Any], name: str = name) -> Any:
                return getattr(build({name: own}), name)

            architecture = {key: value[key] for key in ("model_type",) if key in value}
            _check_settings(f"{path}[{name!r}]", build_nested(architecture), build_nested, value)


def _build(pretrained: str | None, model_type: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    settings = copy.deepcopy(dict(settings))  # transformers writes into them
    try:
        if pretrained is None:
            return AutoConfig.for_model(model_type, **settings)
        return AutoConfig.from_pretrained(pretrained, local_files_only=True, trust_remote_code=False, **settings)
    except Exception as error:  # of any class, whatever the architecture's own checks do
        if pretrained is not None and not settings:
            raise ValueError(f"pretrained must have a valid config.json, got {str(pretrained)!r}: {error}") from error
        taker = model_type if pretrained is None else pretrained
        raise ValueError(f"config must be settings that {taker!r} takes, got {shown(settings)}: {error}") from error
