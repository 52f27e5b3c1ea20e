"""A cache of keys and values that stays empty.

Without any cache, models of transformers look for documents in positions, and the host waits for the device in each
step. With one they take rows for what they are where nothing says anything about positions: of one document each.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from lightning_liger.sequences.context_parallel import CACHE

_OTHERS = {"input_ids", "labels", "num_items_in_batch", "output_router_logits", "use_cache"}
"""Arguments that say nothing about positions."""


class EmptyCache(DynamicCache):
    """Gives keys and values back as they come."""

    keeps_nothing = True  # so that layers with it may be captured in CUDA graphs
    recomputable: Sequence[nn.Module] = ()
    """Modules of the model that can switch on transformers' own activation checkpointing, which warns of caches."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def make_empty_cache(model: PreTrainedModel) -> EmptyCache | None:
    """None unless the model is known to use its cache for nothing but earlier keys and values."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    names = {name for part in parts for name in inspect.signature(part.forward).parameters}
    takes_it = CACHE in inspect.signature(model.forward).parameters and "encoder_hidden_states" not in names
    reads_tokens = model.main_input_name == "input_ids" and not getattr(model.config, "is_encoder_decoder", False)
    config: Any = model.config.get_text_config(decoder=True)
    is_known = type(model).__module__.startswith("transformers.") and hasattr(config, "num_hidden_layers")
    if not (takes_it and reads_tokens and is_known):
        return None
    cache = EmptyCache(config=config)
    cache.recomputable = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    is_plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache if is_plain else None


def uses_cache(model: PreTrainedModel) -> bool:
    """Whether a model makes a cache unless a call says otherwise."""
    configs: Any = model.config, model.config.get_text_config()
    return any(getattr(each, "use_cache", None) for each in configs)


def can_use(cache: EmptyCache, model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    """Whether a call with ``inputs`` neither wants a cache nor says anything about positions, nor recomputes layers."""
    given = {name for name, value in inputs.items() if value is not None}
    wants_cache = inputs.get("use_cache")
    wants_cache = uses_cache(model) if wants_cache is None else wants_cache
    recomputes = any(vars(module).get("gradient_checkpointing") for module in cache.recomputable)
    return CACHE not in inputs and given <= _OTHERS and not wants_cache and not recomputes


def give_empty_cache(model: nn.Module) -> list[Callable[[], None]]:
    """Has calls that :func:`can_use` one get an empty cache; returns what undoes it."""
    pretrained = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    cache = None if pretrained is None or _is_given_one(pretrained) else make_empty_cache(pretrained)
    if pretrained is None or cache is None:
        return []
    return [
        pretrained.register_forward_pre_hook(partial(_before_forward, cache), with_kwargs=True).remove,
        pretrained.register_forward_hook(partial(_after_forward, cache)).remove,
    ]


def _is_given_one(model: nn.Module) -> bool:
    return any(getattr(hook, "func", None) is _before_forward for hook in model._forward_pre_hooks.values())


def _before_forward(cache: EmptyCache, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_plain = not torch.compiler.is_compiling() and len(args) <= 1 and model.config.return_dict
    return (args, kwargs | {CACHE: cache}) if is_plain and can_use(cache, model, kwargs) else None


def _after_forward(cache: EmptyCache, model: Any, args: tuple[Any, ...], output: Any) -> Any:
    if not isinstance(output, ModelOutput) or output.get(CACHE) is not cache:
        return None
    return type(output)(**{name: value for name, value in output.items() if name != CACHE})  # as without one
