"""Adapters of peft, and quantized weights under them, from plain settings."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning_utilities.core.imports import package_available
from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from liger_ops.arguments import check_integer, did_you_mean, wrong_type, wrong_value

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


def check_quantization(settings: Any, lora: Any, pretrained: Any) -> Any:
    """transformers' configuration of the quantization, None for None; raises for what it does not take."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise wrong_type("quantization", "a dict of arguments of BitsAndBytesConfig or of a class of torchao", settings)
    if lora is None or pretrained is None:
        raise wrong_value("quantization", "None without lora and pretrained: quantized weights are frozen", settings)
    own: dict[str, Any] = dict(settings)
    kind: Any = BitsAndBytesConfig
    method = own.pop("quant_method", "bitsandbytes")
    if method not in ("bitsandbytes", "torchao"):
        raise wrong_value("quantization['quant_method']", "'bitsandbytes' or 'torchao'", method)
    if not package_available(method):
        raise ModuleNotFoundError(f"quantization={dict(settings)!r} needs {method}: pip install {method}")
    if method == "torchao":
        import torchao.quantization

        name = str(own.pop("quant_type", None))
        kind = getattr(torchao.quantization, name, None) if name.endswith("WeightOnlyConfig") else None
        # peft refuses 4-bit weights in the plain format, and products with those in tinygemm's have no derivative.
        if kind is None or name == "Int4WeightOnlyConfig":
            expected = "a name such as 'Int8WeightOnlyConfig' of torchao; 4 bits can be trained over with load_in_4bit"
            raise wrong_value("quantization['quant_type']", expected, name)
    elif bool(own.get("load_in_4bit")) == bool(own.get("load_in_8bit")):
        raise wrong_value("quantization", "either load_in_4bit=True or load_in_8bit=True", own)
    known = inspect.signature(kind).parameters
    if unknown := sorted(own.keys() - known):  # transformers ignores them
        expected = f"arguments of {kind.__name__}{did_you_mean(unknown[0], known)}"
        raise wrong_value("quantization", expected, dict(settings))
    try:
        made = kind(**own)
    except (TypeError, ValueError, AttributeError) as error:
        raise wrong_value("quantization", f"arguments of {kind.__name__} ({error})", dict(settings)) from None
    return made if kind is BitsAndBytesConfig else TorchAoConfig(made)


@contextmanager
def float32_tables() -> Iterator[None]:
    """For quantization: bitsandbytes makes its tables in PyTorch's default dtype, and its kernels read float32."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def fit_to_strategy(settings: Mapping[str, Any], strategy: Strategy | None, shards_packed: bool) -> dict[str, Any]:
    """``settings`` of a quantization whose weights a strategy can hold; raises for those it cannot.

    ``shards_packed`` says that it shards parameters bit by bit, whatever they stand for.
    """
    in_4bit, of_torchao = bool(settings.get("load_in_4bit")), settings.get("quant_method") == "torchao"
    shards = isinstance(strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy))
    # Layers of bitsandbytes in 8 bits, and types of torchao, compute with tensors besides the parameter, which engines
    # do not shard; FSDP2 can leave parameters whole.
    stays_whole = of_torchao and isinstance(strategy, ModelParallelStrategy)
    if shards and not (shards_packed and (in_4bit or stays_whole)):
        expected = (
            f"None under {type(strategy).__name__}, or: 4 bits of bitsandbytes ({{'load_in_4bit': True}}) with"
            " 'liger_model_parallel' or 'liger_fsdp', torchao with 'liger_model_parallel', all with 'liger_ddp' or"
            " 'liger'"
        )
        raise wrong_value("quantization", expected, dict(settings))
    if not in_4bit:
        return dict(settings)
    if isinstance(strategy, FSDPStrategy) and strategy._state_dict_type == "sharded":  # which needs all parameters
        raise wrong_value("state_dict_type", "'full' with quantization, or use 'liger_model_parallel'", "sharded")
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    # FSDP joins parameters of one dtype to a flat one; FSDP2 took integers for trained until torch 2.13.
    takes_integers = not isinstance(strategy, FSDPStrategy) and (not shards or torch.__version__ >= "2.13")
    stored = {"bnb_4bit_quant_storage": dtype if shards else "uint8", **settings}
    storage = str(stored["bnb_4bit_quant_storage"]).removeprefix("torch.")
    if storage not in ((dtype, "uint8", "int8") if takes_integers else (dtype,)):
        expected = f"{dtype!r}, the dtype of other parameters{', or an integer one' if takes_integers else ''}"
        raise wrong_value("quantization['bnb_4bit_quant_storage']", expected, storage)
    return stored
