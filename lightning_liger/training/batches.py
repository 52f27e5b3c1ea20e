"""Checks of the batches that the default steps of the mixin get, before the model is called."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops.arguments import check_tensor, wrong_type, wrong_value
from lightning_liger.sequences.context_parallel import CACHE, attention_implementation
from lightning_liger.training.language_model import LanguageModel

LABELS = ("labels", "shift_labels")


def check_batch(stage: str, batch: Any, model: LanguageModel) -> None:
    """Raises unless ``batch`` is one that the default step of ``stage`` can train ``model`` on."""
    keys = [key for key in LABELS if isinstance(batch, Mapping) and batch.get(key) is not None]
    if len(keys) != 1:
        raise ValueError(
            "batch must be a mapping with one of the keys 'shift_labels' and 'labels' for the default"
            f" {stage} step, got {_form(batch)}; override the step for batches of another form"
        )
    model.check_keys(key for key, value in batch.items() if key not in LABELS and value is not None)
    labels = batch[keys[0]]
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        raise wrong_type(f"batch[{keys[0]!r}]", "a tensor of class indices, of dtype torch.int64", labels)
    _check_inputs(batch, model)
    _check_fit(keys[0], batch, model)
    _check_packing(model.model, batch.get("position_ids"))


def check_prompts(batch: Any) -> None:
    """Raises unless ``batch`` has ``input_ids`` of shape ``[batch_size, seq_len]``."""
    if not isinstance(batch, Mapping) or batch.get("input_ids") is None:
        raise ValueError(f"batch must be a mapping with the key 'input_ids' for predict_step, got {_form(batch)}")
    check_integers(batch, "input_ids")
    if batch["input_ids"].ndim != 2 or not batch["input_ids"].numel():
        expected = "a tensor of shape [batch_size, seq_len] with tokens"
        raise wrong_value("batch['input_ids']", expected, batch["input_ids"])


def _form(batch: Any) -> Any:
    return sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__


def check_integers(batch: Mapping[str, Any], *keys: str) -> None:
    """Raises TypeError unless the values of these keys, where there are any, are tensors of integers."""
    for key in keys:
        value = batch.get(key)
        if value is not None and (not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32)):
            raise wrong_type(f"batch[{key!r}]", "a tensor of dtype torch.int64", value)


def _check_inputs(batch: Mapping[str, Any], model: LanguageModel) -> None:
    check_integers(batch, "input_ids", "position_ids")
    input_ids, embeddings = batch.get("input_ids"), batch.get("inputs_embeds")
    if embeddings is not None and not (isinstance(embeddings, Tensor) and embeddings.is_floating_point()):
        raise wrong_type("batch['inputs_embeds']", "a floating-point tensor", embeddings)
    if model.reads_tokens and input_ids is None and embeddings is None:
        raise ValueError(f"batch must have 'input_ids' or 'inputs_embeds', got {sorted(batch)}")
    size = model.num_embeddings
    if size is None or not model.reads_tokens or input_ids is None or torch.compiler.is_compiling():
        return
    if input_ids.device.type == "cpu":  # else the host would wait
        wrong = input_ids[(input_ids < 0) | (input_ids >= size)]
        if wrong.numel():
            raise ValueError(
                f"batch['input_ids'] must be between 0 and vocab_size - 1 = {size - 1}, got {int(wrong[0])}"
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
    if mask is None or isinstance(mask, Mapping) or batch.get(CACHE) is not None:
        return
    check_tensor("batch['attention_mask']", mask)
    if mask.ndim <= 2 and tuple(mask.shape) != shape:  # transformers takes others as they are
        raise wrong_value("batch['attention_mask']", expected, mask)


def _check_packing(model: nn.Module, position_ids: Tensor | None) -> None:
    """Raises ValueError for packed documents between which attention would not see a border."""
    if position_ids is None or position_ids.ndim != 2 or len(position_ids) == 1:
        return
    implementation = attention_implementation(model)
    # Waits for the device, as flash attention's own look at them.
    if "flash" in implementation and bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            f"attn_implementation={implementation!r} separates packed documents only in a batch of one row, got"
            f" position_ids of shape {tuple(position_ids.shape)} that start again: concatenate the rows into one, or"
            " use 'sdpa'"
        )
