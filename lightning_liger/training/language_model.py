"""The model of a LightningModule as the mixin's steps see it: the inputs that it takes, and its own loss."""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils import TransformersKwargs

from liger_ops.arguments import did_you_mean, shown
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.sequences.context_parallel import CACHE
from lightning_liger.sequences.empty_cache import EmptyCache, can_use, make_empty_cache, uses_cache

# Not among the named arguments of all models that take them, but read by attention and by layers of Mamba.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_COUNTED_HERE = {"num_items_in_batch"}  # a model would ignore it, because its loss function is not called


class _NoCrossEntropy:
    """Stands in for a model's ``loss_function``: returns 0, so that its loss is all that it adds to cross entropy."""

    def __init__(self) -> None:
        self.original: Any = None
        self.value: Tensor | None = None
        self._is_traced = False

    def __call__(self, logits: LazyLogits | Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.value is not None:  # that of further heads, such as one that predicts other tokens, stays
            return self.original(logits, *args, **kwargs)
        self._is_traced = torch.compiler.is_compiling()
        with nullcontext() if self._is_traced else torch.inference_mode(False):  # in which it would have no version
            self.value = torch.zeros((), device=logits.device)
        return self.value

    def was_added_to(self, loss: Tensor) -> bool:
        """Whether the model's loss is more than the 0 that it got, without waiting for the device if it can be seen."""
        if loss is not self.value or loss.requires_grad:
            return True
        return bool(loss != 0) if self._is_traced else loss._version > 0


class LanguageModel:
    """What the steps of :class:`~lightning_liger.LigerLMMixin` know about a model. Made once for each model.

    It is one of Hugging Face, a wrapper of one (torch.compile, peft, FSDP), or any whose output has ``logits``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pretrained = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
        self.known_keys = _known_keys(model, self.pretrained)
        arguments = [] if self.pretrained is None else [_named_arguments(each) for each in (model, self.pretrained)]
        self._passes_labels = bool(arguments) and all(takes_any or "labels" in named for named, takes_any in arguments)
        self._no_cross_entropy = _NoCrossEntropy()
        self._finds_documents: bool | None = None  # until the first call with positions
        self._has_warned = False
        config: Any = getattr(self.pretrained, "config", None)
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.labels = _meaning_of_labels(self.pretrained, self._is_encoder_decoder)
        # Else it reads images or sound, or labels are for a decoder.
        self.reads_tokens = (
            getattr(self.pretrained, "main_input_name", None) == "input_ids" and not self._is_encoder_decoder
        )
        # peft's prompt learning adds tokens.
        self.returns_tokens = not getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
        embeddings = None
        if self.pretrained is not None and config.get_text_config() is config:  # else ids may stand for images
            embeddings = self.pretrained.get_input_embeddings()
        self.num_embeddings = embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else None
        self._empty_cache: EmptyCache | None = None
        if self.pretrained is not None and self.returns_tokens and CACHE in self.known_keys:
            self._empty_cache = make_empty_cache(self.pretrained)

    def leave_out_cache(self, inputs: dict[str, Any]) -> None:
        """Makes the call with ``inputs`` keep no keys and values until backward, unless they ask for it."""
        takes_it = not self.known_keys or "use_cache" in self.known_keys
        if self.pretrained is not None and takes_it and uses_cache(self.pretrained):
            inputs.setdefault("use_cache", False)
        cache, model = self._empty_cache, self.pretrained
        if model is not None and cache is not None and can_use(cache, model, inputs):
            inputs[CACHE] = cache

    def __call__(self, inputs: Mapping[str, Any], labels: Tensor) -> tuple[Any, Tensor | None, Tensor | None]:
        """Calls the model with all that it takes besides labels, and labels ``[batch_size, seq_len]``.

        Returns:
            Its output; the sum of the losses that it adds to cross entropy, such as a router's, None if it adds none;
            and its whole loss if cross entropy could not be told apart, else None. The latter is computed once only.
        """
        inputs = dict(inputs)
        self.leave_out_cache(inputs)
        prepare = self._is_encoder_decoder and getattr(self.pretrained, "prepare_decoder_input_ids_from_labels", None)
        if prepare and not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
            inputs["decoder_input_ids"] = prepare(labels)
        if not self._passes_labels:
            output = self._call(inputs)
            losses = output.items() if isinstance(output, Mapping) else ()
            if names := [name for name, value in losses if name.endswith("_loss") and isinstance(value, Tensor)]:
                name = type(self.model).__name__
                self._warn(f"{name} returns {names}, which the default steps do not add to the loss")
            return output, None, None
        model: Any = self.pretrained
        function = self._no_cross_entropy  # one object, for which torch.compile compiles once
        function.original, model.loss_function = model.loss_function, function
        try:
            output = self._call(inputs | {"labels": labels})
            loss = getattr(output, "loss", None)
            if function.value is None:  # a model that calls no loss function
                self._passes_labels = self._is_encoder_decoder and not prepare
                return output, None, loss
            return output, loss if loss is not None and function.was_added_to(loss) else None, None
        finally:
            model.loss_function = function.original
            function.original = function.value = None  # holds no graph

    def _call(self, inputs: dict[str, Any]) -> Any:
        mask, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
        reads_text = self.labels == "next" and self.reads_tokens and self.returns_tokens
        if not (reads_text and isinstance(position_ids, Tensor) and position_ids.ndim == 2):
            return self.model(**inputs)
        if isinstance(mask, Tensor) and mask.ndim == 2 and _is_packed(mask, position_ids):
            mask = inputs["attention_mask"] = None  # transformers looks for documents in position_ids without one only
        if mask is not None or self._finds_documents or not self._should_find_documents(inputs):
            return self.model(**inputs)
        with _Differences() as differences:
            output = self.model(**inputs)
        model: Any = self.pretrained
        mixes = model._is_stateful or model.config.model_type in _MIXING_DOCUMENTS  # layers of Mamba read no positions
        self._finds_documents = differences.were_taken and not mixes
        if not self._finds_documents and bool((position_ids.diff(dim=-1) != 1).any()):
            raise ValueError(
                "batch['position_ids'] must not restart within a row, as not all layers of"
                f" {type(self.pretrained).__name__} derive documents from them, and tokens would attend to other"
                " documents: give each document its own row"
            )
        return output

    def _should_find_documents(self, inputs: Mapping[str, Any]) -> bool:
        """Whether documents are kept apart by nothing but attention's mask, made from ``position_ids``."""
        if torch.compiler.is_compiling():
            return False
        is_compiled = any(
            part._compiled_call_impl or name.endswith("_orig_mod") for name, part in self.model.named_modules()
        )
        model: Any = self.pretrained
        has_borders = model._is_stateful and any(inputs.get(name) is not None for name in _PACKING)
        gets_masks = model.config._attn_implementation in ("eager", "sdpa", "flex_attention")
        return gets_masks and not has_borders and not is_compiled

    def compare(self, own_loss: Tensor, cross_entropy: Tensor) -> None:
        """Warns, once, if a model's own loss is another than the one that the steps use."""
        tolerance = torch.finfo(own_loss.dtype).eps ** 0.5
        if not torch.allclose(own_loss.detach().float(), cross_entropy.detach().float(), tolerance, equal_nan=True):
            self._warn(
                f"the loss of {type(self.pretrained).__name__} is {own_loss:.4g}, but its cross entropy, the loss of"
                f" the default steps, is {cross_entropy:.4g}"
            )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"{message}. If it should train on its own loss, return that from your training_step.")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Raises ValueError for a key of a batch that the model does not know; it would be ignored without a word."""
        known = sorted(self.known_keys)
        for key in keys:
            if not isinstance(key, str) or (known and key not in known):
                name = type(self.pretrained or self.model).__name__
                hint = f"{did_you_mean(key, known)}; known: {', '.join(known)}" if known else ""
                raise ValueError(
                    f"batch must hold arguments of {name} and labels, got the unknown key {shown(key)}{hint}"
                )


def _meaning_of_labels(pretrained: PreTrainedModel | None, is_encoder_decoder: bool) -> str | None:
    """``"next"`` if a token predicts the label after it, ``"own"`` if its own, None if labels are not of tokens."""
    loss_type = getattr(pretrained, "loss_type", None) or "ForCausalLM"
    if loss_type.endswith(("ForMaskedLM", "ForTokenClassification")):
        return "own"
    if not loss_type.endswith(("ForCausalLM", "ForConditionalGeneration")):
        return None
    return "own" if is_encoder_decoder else "next"


_MIXING_DOCUMENTS = {
    *("blt", "doge", "inkling_text", "inkling2_text", "lfm2", "lfm2_moe", "lfm3", "minimax", "minimax_m3_vl_text")
}
"""Model types in which some layers find documents and others, such as convolutions, do not."""


class _Differences(TorchFunctionMode):
    """Notes whether anything takes differences, by which transformers finds documents in positions."""

    were_taken = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.were_taken |= function is torch.diff
        return function(*args, **(kwargs or {}))


@torch.compiler.disable  # depends on values
def _is_packed(mask: Tensor, position_ids: Tensor) -> bool:
    """Whether rows have tokens of several documents, which then needs no mask; raises if they need one, too."""
    is_real, starts = mask.bool(), F.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)
    documents = starts.cumsum(-1)
    is_packed = is_real & (documents != documents.where(is_real, 0).amax(-1, keepdim=True))
    has_hole = is_real & ~F.pad(is_real[:, :-1], (1, 0)) & ~starts
    packed, holes = torch.stack((is_packed.any(), has_hole.any())).tolist()  # the host waits, as transformers does
    if packed and holes:
        raise ValueError(
            "batch['attention_mask'] must be 0 only where no token of the same document follows in rows that are"
            " packed by position_ids, got zeros within or before one: restart position_ids after them"
        )
    return bool(packed)


def _named_arguments(module: nn.Module) -> tuple[set[str], bool]:
    """The names that ``forward`` takes, and whether it takes any other."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return named, any(each.kind is each.VAR_KEYWORD for each in parameters)


def _known_keys(model: nn.Module, pretrained: PreTrainedModel | None) -> frozenset[str]:
    """All keys that the model may be called with; empty if it takes any."""
    known, takes_any = _named_arguments(model)
    if takes_any:
        if pretrained is None:
            return frozenset()
        named, passes_on = _named_arguments(pretrained)
        known |= named
        if passes_on:
            # Models from outside transformers may read more of them in any layer.
            is_inside = type(pretrained).__module__.startswith("transformers.")
            for part in pretrained.modules():
                if isinstance(part, PreTrainedModel) or not is_inside:
                    known |= _named_arguments(part)[0]
            known |= {*TransformersKwargs.__annotations__, *_PACKING}
    return frozenset(known - _COUNTED_HERE)
