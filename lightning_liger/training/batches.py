"""Checks of the batches that the default steps of the mixin get, before the model is called."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops.arguments import check_tensor, wrong_type, wrong_value
from lightning_liger.sequences.context_parallel import attention_implementation
from lightning_liger.training.language_model import LanguageModel

LABELS = ("labels", "shift_labels")
_INTEGERS = (torch.int64, torch.int32)


def check_batch(stage: str, batch: Any, model: LanguageModel) -> None:
    """Raises unless ``batch`` is one that the default step of ``stage`` can train ``model`` on.

    Raises:
        TypeError: For tensors of a wrong dtype, and for other values in place of tensors.
        ValueError: For missing and unknown keys, and for shapes that do not fit.
    """
    keys = [key for key in LABELS if isinstance(batch, Mapping) and batch.get(key) is not None]
    if len(keys) != 1:
        found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            "batch must be a mapping with one of the keys 'shift_labels' and 'labels' for the default"
            f" {stage} step, got {found}; override the step for batches of another form"
        )
    model.check_keys(key for key, value in batch.items() if key not in LABELS and value is not None)
    labels = batch[keys[0]]
    check_tensor(f"batch[{keys[0]!r}]", labels)
    if labels.dtype != torch.int64:
        raise wrong_type(f"batch[{keys[0]!r}]", "class indices of dtype torch.int64", labels)
    _check_inputs(batch, model)
    _check_fit(keys[0], batch, model)
    check_packing(model.model, batch.get("position_ids"))


def check_prompts(batch: Any) -> None:
    """Raises unless ``batch`` has ``input_ids`` of shape ``[batch_size, seq_len]``."""
    if not isinstance(batch, Mapping) or batch.get("input_ids") is None:
        found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"batch must be a mapping with the key 'input_ids' for predict_step, got {found}")
    input_ids = batch["input_ids"]
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in _INTEGERS:
        raise wrong_type("batch['input_ids']", "a tensor of dtype torch.int64", input_ids)
    if input_ids.ndim != 2 or not input_ids.numel():
        raise wrong_value("batch['input_ids']", "a tensor of shape [batch_size, seq_len] with tokens", input_ids)


def _check_inputs(batch: Mapping[str, Any], model: LanguageModel) -> None:
    for key in ("input_ids", "position_ids"):
        value = batch.get(key)
        if value is not None and (not isinstance(value, Tensor) or value.dtype not in _INTEGERS):
            raise wrong_type(f"batch[{key!r}]", "a tensor of dtype torch.int64", value)
    embeddings = batch.get("inputs_embeds")
    if embeddings is not None and not (isinstance(embeddings, Tensor) and embeddings.is_floating_point()):
        raise wrong_type("batch['inputs_embeds']", "a floating-point tensor", embeddings)
    if not model.reads_tokens:
        return
    given = [key for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None]
    if not given:
        raise ValueError(f"batch must have 'input_ids' or 'inputs_embeds', got {sorted(batch)}")
    input_ids = batch.get("input_ids")
    if input_ids is None:
        return
    vocab_size = model.num_embeddings
    if vocab_size is not None and input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = input_ids[(input_ids < 0) | (input_ids >= vocab_size)]
        if wrong.numel():
            raise ValueError(
                f"batch['input_ids'] must be between 0 and vocab_size - 1 = {vocab_size - 1}, got {int(wrong[0])}"
                f" ({wrong.numel()} of {input_ids.numel()})"
            )


def _check_fit(labels_key: str, batch: Mapping[str, Any], model: LanguageModel) -> None:
    """One label, and one entry of a mask of two dimensions, for each token that the model reads."""
    tokens = batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]
    if tokens is None or not model.reads_tokens or not model.returns_tokens:
        return
    if tokens.ndim < 2 or (batch.get("input_ids") is not None and tokens.ndim != 2):
        raise wrong_value("batch['input_ids']", "a tensor of shape [batch_size, seq_len]", tokens)
    shape = tuple(tokens.shape[:2])
    expected = f"a tensor of shape {shape}, one value for each token"
    if tuple(batch[labels_key].shape) != shape:
        raise wrong_value(f"batch[{labels_key!r}]", expected, batch[labels_key])
    positions = batch.get("position_ids")
    if positions is not None and positions.ndim == 2 and positions.shape not in (shape, (1, shape[1])):
        raise wrong_value("batch['position_ids']", expected, positions)
    mask = batch.get("attention_mask")
    if mask is None or batch.get("past_key_values") is not None:
        return
    if isinstance(mask, Mapping) or (isinstance(mask, Tensor) and mask.ndim > 2):  # transformers takes it as it is
        return
    check_tensor("batch['attention_mask']", mask)
    if tuple(mask.shape) != shape:
        raise wrong_value("batch['attention_mask']", expected, mask)


def check_packing(model: nn.Module, position_ids: Tensor | None) -> None:
    """Raises ValueError for packed documents between which attention would not see a border."""
    if position_ids is None or position_ids.ndim != 2 or len(position_ids) == 1:
        return
    implementation = attention_implementation(model)
    if "flash" not in implementation:
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):  # waits for the device, as flash attention's own look at them
        raise ValueError(
            f"attn_implementation={implementation!r} separates packed documents only in a batch of one row, got"
            f" position_ids of shape {tuple(position_ids.shape)} that start again: concatenate the rows into one, or"
            " use 'sdpa'"
        )
