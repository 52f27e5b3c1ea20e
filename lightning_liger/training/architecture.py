"""The configuration of a Hugging Face causal LM, from a folder or from the name of an architecture."""

import copy
import inspect
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from liger_ops.arguments import check_integer, shown, wrong_type, wrong_value


def build_config(
    pretrained: str | None = None, model_type: str = "llama", settings: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The configuration of a checkpoint folder, or else of an architecture, with ``settings`` in place of its own.

    Args:
        pretrained: Folder of a Hugging Face checkpoint, or None.
        model_type: As in a ``config.json``; unused with ``pretrained``.
        settings: By name, as in a ``config.json``.

    Raises:
        FileNotFoundError: If ``pretrained`` is no folder with a ``config.json``.
        TypeError: For an argument of a wrong type.
        ValueError: For an architecture that is no causal LM, a setting that it does not have, or a value that it
            refuses.
    """
    if pretrained is not None:
        if not isinstance(pretrained, str | Path):
            raise wrong_type("pretrained", "the path of a Hugging Face checkpoint folder, or None", pretrained)
        if not str(pretrained) or not (Path(pretrained) / "config.json").is_file():
            raise FileNotFoundError(
                f"pretrained must be a Hugging Face checkpoint folder (config.json and weights), got {pretrained!r}"
            )
    elif not isinstance(model_type, str):
        raise wrong_type("model_type", "the name of an architecture, such as 'llama'", model_type)
    elif model_type not in CONFIG_MAPPING:
        close = get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"model_type must be an architecture that transformers knows, got {model_type!r}{hint}")
    if settings is not None and not isinstance(settings, Mapping):
        raise wrong_type("config", "a dict of settings of the architecture, or None", settings)
    for name in settings or ():
        if not isinstance(name, str):
            raise wrong_type("config", "a dict whose keys are names of settings", settings)

    default = _build(pretrained, model_type, {})
    if type(default) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        argument, value = ("model_type", model_type) if pretrained is None else ("pretrained", str(pretrained))
        raise wrong_value(argument, "a causal language model of transformers", value)
    for name, value in (settings or {}).items():
        if name in ("vocab_size", "hidden_size"):
            check_integer(f"config[{name!r}]", value, at_least=1)
        elif isinstance(value, float) and math.isnan(value):
            raise wrong_value(f"config[{name!r}]", "a number", value)
        elif not hasattr(default, name):
            _check_old_name(default, _build(pretrained, model_type, {name: value}), name, value)
    return _build(pretrained, model_type, settings or {})


def _build(pretrained: str | None, model_type: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    settings = copy.deepcopy(dict(settings))  # transformers writes into them
    try:
        if pretrained is None:
            config = AutoConfig.for_model(model_type, **settings)
        else:
            config = AutoConfig.from_pretrained(pretrained, local_files_only=True, **settings)
    except Exception as error:  # of any class, whatever the architecture's own checks do
        what = f"settings that {model_type!r} takes" if pretrained is None else f"settings that {pretrained!r} takes"
        if pretrained is not None and not settings:
            raise ValueError(f"pretrained must have a valid config.json, got {str(pretrained)!r}: {error}") from error
        raise ValueError(f"config must be {what}, got {shown(settings)}: {error}") from error
    return config


def _is_read(config: PreTrainedConfig, name: str) -> bool:
    """Whether the model's code reads a setting that its configuration does not have by default."""
    module = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    source = "" if module is None else inspect.getsource(module)
    return re.search(rf'config\.{re.escape(name)}\b|getattr\((self\.)?config, "{re.escape(name)}"', source) is not None


def _check_old_name(default: PreTrainedConfig, config: PreTrainedConfig, name: str, value: Any) -> None:
    """Raises ValueError unless the setting changes another one, as former names of settings do."""
    before, after = default.to_dict(), config.to_dict()
    if _is_read(default, name) or any(after[key] != before.get(key) for key in after if key != name):
        return
    close = get_close_matches(name, list(before), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"config must be settings of {default.model_type!r}, got {name!r}: {shown(value)}{hint}")
