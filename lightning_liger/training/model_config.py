"""The Hugging Face config of a causal LM from the settings of a yaml file; misspelled ones are refused."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from liger_ops.arguments import check_integer, shown, wrong_type, wrong_value

_IsKnown = Callable[[PreTrainedConfig, str], bool]
_NAME = "config"
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def model_config(
    pretrained: str | None = None, model_type: str = "llama", config: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The config of a checkpoint folder or of an architecture, with changes.

    Args:
        pretrained: A Hugging Face checkpoint folder, or None.
        model_type: The architecture, if ``pretrained`` is None.
        config: Settings by name, those of nested configs as dicts. transformers would keep names that it does not
            know, without any effect.

    Raises:
        TypeError: If ``config`` is no mapping of names to values.
        ValueError: For an architecture without a causal LM, and settings that it does not have or take; the message has
            the similar names that it has.
    """
    if not isinstance(config, Mapping | None) or not all(isinstance(key, str) for key in config or {}):
        raise wrong_type(_NAME, "a mapping of the architecture's settings to values", config)
    settings = dict(config or {})
    if pretrained is None:
        if model_type not in CONFIG_MAPPING:
            expected = f"an architecture of transformers, such as 'llama'{_similar(str(model_type), CONFIG_MAPPING)}"
            raise wrong_value("model_type", expected, model_type)
        named = settings.pop("model_type", model_type)
        built = _build(model_type, settings)
        if named not in (model_type, built.model_type):
            raise wrong_value(f"{_NAME}.model_type", f"model_type, which is {model_type!r}", named)
        _check_names(_NAME, built, settings, _takes)
    else:
        of_folder = {"local_files_only": True, "trust_remote_code": False}
        original = AutoConfig.from_pretrained(pretrained, **of_folder)
        _check_names(_NAME, original, settings, hasattr)  # before options of from_pretrained could be among them
        built = AutoConfig.from_pretrained(pretrained, **of_folder, **settings)
    if type(built) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise wrong_value("model_type", "an architecture that has a causal language model", built.model_type)
    text_config = built.get_text_config(decoder=True)
    for name in _SIZES:
        if isinstance(size := vars(text_config).get(text_config.attribute_map.get(name, name)), int):
            check_integer(f"{_NAME}.{name}", size, at_least=1)
    return built


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises ValueError if the tokenizer, if there is one, has tokens that the model has no embeddings for."""
    vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if tokenizer is None or not isinstance(vocab_size, int):
        return
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise ValueError(
            f"{_NAME}.vocab_size must be at least {needed}, the number of tokens of the tokenizer, got {vocab_size}. A"
            " tokenizer that is trained on the text has at most data.vocab_size tokens."
        )


def _build(model_type: str, settings: dict[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # whatever the code of an architecture runs into: ZeroDivisionError is one
        raise ValueError(f"{_NAME} must fit the architecture {model_type!r}, got {shown(settings)}: {error}") from error


def _check_names(path: str, built: PreTrainedConfig, settings: Mapping[str, Any], is_known: _IsKnown) -> None:
    """Raises if ``built``, or a config in it, does not know a name in ``settings``."""
    if unknown := [name for name in settings if not is_known(built, name)]:
        names = [name for name in _names(built) if not name.startswith("_") and not callable(getattr(built, name, None))]
        found = ", ".join(f"{name!r}{_similar(name, names)}" for name in unknown)
        raise ValueError(f"{path} must have settings of the architecture {built.model_type!r} only, got {found}")
    for name, value in settings.items():
        if isinstance(value, Mapping) and isinstance(nested := getattr(built, name, None), PreTrainedConfig):
            _check_names(f"{path}.{name}", nested, value, is_known)


def _takes(built: PreTrainedConfig, name: str) -> bool:
    """Whether the architecture's code uses the setting ``name``, which ``built`` was made with."""
    if name in _names(built) or name.startswith("_"):
        return True
    if not hasattr(built, name):  # it became something else, except for settings of `generate`, which are dropped
        return not hasattr(GenerationConfig(), name)
    pattern = re.compile(rf"""\bconfig\.{re.escape(name)}\b|["']{re.escape(name)}["']""")
    files = Path(inspect.getfile(type(built))).parent.glob("*.py")
    return any(pattern.search(file.read_text(encoding="utf-8")) for file in files)


def _names(built: PreTrainedConfig) -> set[str]:
    parameters = inspect.signature(type(built).__init__).parameters.values()
    arguments = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    return arguments | set(dir(type(built))) | set(built.attribute_map) | _computed(type(built))


@functools.cache
def _computed(config_class: type[PreTrainedConfig]) -> set[str]:
    """The attributes that a config computes and also saves, if it can be made without arguments."""
    try:
        return set(vars(config_class()))
    except Exception:  # whatever the code of an architecture runs into
        return set()


def _similar(name: str, names: Collection[str]) -> str:
    matches = difflib.get_close_matches(name, sorted(names))
    return f" (similar: {', '.join(map(repr, matches))})" if matches else ""
