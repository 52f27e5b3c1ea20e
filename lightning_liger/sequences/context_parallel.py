"""Context parallelism: each rank of a group computes one shard of every sequence, and attention sees whole sequences.

In a causal language model only attention mixes tokens. Around it an all-to-all exchanges tokens for heads: before it
each rank has all heads of its shard, during it some heads of the whole sequence, after it its shard again
(DeepSpeed-Ulysses, arXiv:2309.14509). Every attention function of transformers then works unchanged: causal, over
documents packed into a row, with sliding windows.
"""

import copy
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_ops.arguments import check_integer, wrong_type
from liger_ops.collectives import all_gather
from lightning_liger.sequences.labels import split_sequence

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""The argument of models for earlier keys and values, which transformers 5.24 renamed."""
_NAME = "liger_context_parallel"
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


class ContextParallel:
    """Groups of consecutive ranks, each of which computes a shard of its group's sequences.

    Strategies create one for ``context_parallel_size``. With Fabric or your own training loop, on all ranks::

        context = ContextParallel(size=2)
        context.apply(model)  # before it is wrapped
        for batch in loader:  # the same rows on all ranks of a group
            shard = context.split(batch)
            loss = model(**shard, labels=shard["shift_labels"]).loss

    This loss is the mean over the tokens of a shard, and ranks may have different numbers of tokens; the steps of
    :class:`~lightning_liger.LigerLMMixin` take the mean over all of them.

    Args:
        size: The number of ranks in a group, at least 1; must divide the number of processes.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialized.
        TypeError: If ``size`` is not an integer.
        ValueError: If ``size`` is less than 1 or does not divide the number of processes.
    """

    def __init__(self, size: int) -> None:
        check_size(size, size)
        if not dist.is_initialized():
            raise RuntimeError("ContextParallel needs torch.distributed to be initialized, as fabric.launch() does")
        check_size(size, dist.get_world_size())
        self.size = size
        self.group, _ = dist.new_subgroups(size)
        self.rank = dist.get_rank(self.group)
        self._layouts: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._has_seen_rows = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContextParallel":
        return self  # attention modules refer to it, and a process group cannot be copied

    def apply(self, model: nn.Module) -> None:
        """Lets the attention of each Hugging Face model in ``model`` see whole sequences; parameters do not change.

        Raises:
            TypeError: If ``model`` is no module.
            ValueError: If there is none, or if context parallelism would change the results of one: because layers mix
                tokens without transformers' attention interface, or ``size`` does not divide the number of heads.
        """
        _check_module(model)
        models = list(outermost_models(model))
        if not models:
            raise ValueError(f"context parallelism needs a Hugging Face model, {type(model).__name__} holds none")
        self.undo(model)  # the process groups of an earlier context may be destroyed
        for found in models:
            _check(found, self.size)
            _set_attention(found, self)

    @staticmethod
    def undo(model: nn.Module) -> None:
        """Restores attention as before :meth:`apply`, for rows that were not split, as in generation."""
        _check_module(model)
        for found in outermost_models(model):
            for module in _attention_modules(found):
                if (whole := vars(module).pop("context_parallel", None)) is not None:
                    found.set_attn_implementation(whole.config._attn_implementation)

    def split(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's shard of a batch of whole rows, as :func:`~lightning_liger.split_sequence` returns it.

        Raises:
            ValueError: Also if the first batch differs between the ranks of the group.
        """
        shard = split_sequence(batch, self.rank, self.size)
        if not self._has_seen_rows:
            self._check_same_rows(batch)
            self._has_seen_rows = True
        return shard

    def _check_same_rows(self, batch: Mapping[str, Any]) -> None:
        """Raises ValueError unless all ranks got the same batch; waits for the device, so called for the first only."""
        tokens = batch["inputs_embeds"] if batch.get("input_ids") is None else batch["input_ids"]
        bits = (tokens.float().view(torch.int32) if tokens.is_floating_point() else tokens).flatten().long()
        weights = torch.arange(1, bits.numel() + 1, device=bits.device)
        own = torch.stack(((bits * weights).sum(), weights[-1]))
        if not bool((all_gather(own, self.group) == own).all()):
            raise ValueError(
                f"the {self.size} ranks that share a sequence got different batches (rank {self.rank} of them has"
                f" {tuple(tokens.shape)} tokens): the loader must give all of them the same rows, as Lightning's"
                " sampler does, or one with trainer.distributed_sampler_kwargs"
            )

    def all_to_all(self, states: Tensor) -> Tensor:
        """Exchanges heads for tokens or back: splits dimension 1 over the ranks, joins dimension 2; differentiable.

        ``[batch_size, heads, seq_len / size, head_dim]`` becomes ``[batch_size, heads / size, seq_len, head_dim]``, and
        ``[batch_size, seq_len, heads / size, head_dim]`` becomes ``[batch_size, seq_len / size, heads, head_dim]``.
        """
        sent = states.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        received: Tensor = all_to_all_single(torch.empty_like(sent), sent, group=self.group)
        return received.movedim(0, 2).flatten(2, 3)

    def layout(self, position_ids: Tensor) -> "_Layout":
        """The layout of the whole sequences, gathered once for all layers of a forward pass."""
        if position_ids not in self._layouts:
            self._layouts[position_ids] = _Layout(all_gather(position_ids, self.group).movedim(0, 1).flatten(1, 2))
        return self._layouts[position_ids]


def attention_implementation(model: nn.Module) -> str:
    """The attention implementation of ``model``, such as ``"sdpa"``, also inside context parallelism; empty if none."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    if name != _NAME:
        return name
    found = filter(None, map(_whole_attention, _attention_modules(model)))
    return next((whole.config._attn_implementation for whole in found), "")


def check_size(size: int, num_processes: int) -> None:
    """Raises unless ``size`` is an integer of at least 1 by which ``num_processes`` can be divided."""
    check_integer("context_parallel_size", size, at_least=1)
    if num_processes % size:
        raise ValueError(f"context_parallel_size={size} must divide the number of processes, which is {num_processes}")


@dataclass
class _Layout:
    """Which tokens of the whole rows attend to each other."""

    position_ids: Tensor
    """``[batch_size or 1, seq_len]``."""
    _masks: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def mask(self, config: PreTrainedConfig, sliding: bool, query: Tensor) -> Any:
        """The model's mask for whole rows, in the format of ``config``'s attention implementation."""
        # Two models may see the same rows, such as a student and its teacher.
        key = (config._attn_implementation, sliding and config.sliding_window, query.dtype)
        if key not in self._masks:
            make: Any = create_sliding_window_causal_mask if sliding else create_causal_mask
            self._masks[key] = make(
                config=config,
                inputs_embeds=query.new_empty(1, 1, 1).expand(query.shape[0], query.shape[2], 1),
                attention_mask=None,
                position_ids=self.position_ids,
                **{CACHE: None},
            )
        return self._masks[key]


class _WholeAttention(NamedTuple):
    """Attribute ``context_parallel`` of an attention module that sees whole sequences."""

    context: ContextParallel
    config: PreTrainedConfig
    """A copy of the module's configuration, with its former attention implementation."""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: all heads of a shard in, all heads of a shard out."""
    whole = _whole_attention(module)
    if whole is None:
        raise RuntimeError(
            f"attn_implementation={_NAME!r} is set by context_parallel_size of a strategy, or ContextParallel.apply(),"
            " and cannot be set directly"
        )
    context, position_ids = whole.context, kwargs.pop("position_ids", None)
    if attention_mask is not None or position_ids is None or position_ids.ndim != 2:
        raise ValueError(
            f"{type(module).__name__} must be called with position_ids [batch_size, seq_len] and no attention_mask for"
            f" context parallelism, got position_ids of shape {getattr(position_ids, 'shape', None)} and attention_mask"
            f" of shape {getattr(attention_mask, 'shape', None)}"
        )
    num_kv_heads = key.shape[1]
    copies = context.size // math.gcd(num_kv_heads, context.size)
    if copies > 1:  # each rank needs at least one head
        key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        module = copy.copy(module)
        vars(module)["num_key_value_groups"] = query.shape[1] // (num_kv_heads * copies)
    query, key, value = (context.all_to_all(states) for states in (query, key, value))
    layout = context.layout(position_ids)
    mask = layout.mask(whole.config, kwargs.get("sliding_window") is not None, query)
    # What transformers would call; eager attention is defined in the model's file.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(whole.config._attn_implementation or "", eager)
    output, _ = function(module, query, key, value, mask, position_ids=layout.position_ids, **kwargs)
    return context.all_to_all(output), None


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a torch.nn.Module", model)


def outermost_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """The Hugging Face models in ``module``, without those inside others."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from outermost_models(child)


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "config")]


def _whole_attention(module: nn.Module) -> _WholeAttention | None:
    return vars(module).get("context_parallel")


def _set_attention(model: PreTrainedModel, context: ContextParallel) -> None:
    implementation = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    for module in _attention_modules(model):
        config: Any = copy.deepcopy(module.config)  # with nested ones, which are set too
        config._attn_implementation = implementation
        vars(module)["context_parallel"] = _WholeAttention(context, config)


def _check(model: PreTrainedModel, size: int) -> None:
    """Raises ValueError for models whose results context parallelism would change."""
    name, config = type(model).__name__, model.config.get_text_config()
    refused = "context parallelism cannot be used"
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not use transformers' AttentionInterface: {refused}")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    attentions = set(_attention_modules(model))
    layers = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules or ())]
    without = [layer for layer in layers if not attentions.intersection(layer.modules())]
    convolutions = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Conv1d)]
    if others or without or convolutions or not attentions:
        found = others or sorted({type(module).__name__ for module in without + convolutions}) or ["no attention"]
        raise ValueError(f"{name} mixes tokens by means other than full or sliding attention, {found}: {refused}")
    if not all(module.is_causal for module in attentions):
        raise ValueError(f"{name} has attention that is not causal; expected a causal language model")
    if (num_heads := config.num_attention_heads) % size:
        raise ValueError(f"context_parallel_size={size} must divide the {num_heads} attention heads of {name}")


AttentionInterface.register(_NAME, _attention)
