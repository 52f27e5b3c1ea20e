"""Batches of prompts and completions as rows, with the values of their tokens aligned with what predicts them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import check_floating, check_same_device, check_shape, check_tensor, wrong_type, wrong_value
from lightning_liger.losses.policy_batch import PolicyBatch
from lightning_liger.post_training.rows import Rows, read_rows

_COLUMNS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
_PROMPTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def read_completions(batch: Mapping[str, Any]) -> tuple[Rows, PolicyBatch, Tensor | None]:
    """The completions of a batch; raises TypeError and ValueError for one that does not fit.

    Args:
        batch: Either ``prompt_ids`` (padded on the left), ``prompt_mask``, ``completion_ids`` (padded on the right) and
            ``completion_mask``, ``[num_sequences, prompt_len]`` and ``[num_sequences, completion_len]``; or
            ``input_ids``, ``completion_mask`` and, if padded on the right, ``attention_mask``, ``[num_rows, seq_len]``,
            packed rows too, see :func:`~lightning_liger.post_training.rows.read_rows`. ``advantages`` are
            ``[num_sequences]`` or of tokens. ``tool_mask`` (0 for tokens that the policy did not write),
            ``old_per_token_logps``, ``ref_per_token_logps`` and ``sampling_per_token_logps`` are of tokens: of
            ``completion_ids``, or of ``input_ids``, each at its token.

    Returns:
        The rows; their values, those of tokens where the token is predicted, one place before it; and, for batches that
        keep prompts apart, where each token of ``prompt_ids`` and ``completion_ids`` is in its row.
    """
    if not isinstance(batch, Mapping) or ("input_ids" not in batch and "prompt_ids" not in batch):
        found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"batch must have the keys 'prompt_ids' and 'completion_ids', or 'input_ids', got {found}")
    advantages = batch.get("advantages")
    if advantages is None:
        raise ValueError(f"batch must have the key 'advantages', got {sorted(map(str, batch))}")
    check_floating("batch['advantages']", advantages)
    is_joined = "input_ids" in batch
    shape = batch["input_ids" if is_joined else "completion_ids"].shape
    columns = {key: batch[key] for key in ("tool_mask", *_COLUMNS) if batch.get(key) is not None}
    for key, value in columns.items():
        (check_tensor if key == "tool_mask" else check_floating)(f"batch[{key!r}]", value)
        check_shape(f"batch[{key!r}]", value, shape, "one value for each token")
    if advantages.ndim > 1:
        check_shape("batch['advantages']", advantages, shape, "one value for each token, or one for each completion")
        columns["advantages"] = advantages
    joined, places = (dict(batch), None) if is_joined else _join(batch)
    if places is not None:
        prompt_len = batch["prompt_ids"].shape[1]
        columns = {key: F.pad(value, (prompt_len, 0)).gather(1, places) for key, value in columns.items()}
    if "tool_mask" in columns:
        joined["completion_mask"] = joined["completion_mask"].bool() & columns.pop("tool_mask").bool()
    rows = read_rows(joined)
    check_same_device("input_ids", rows.labels, **{"advantages": advantages} | columns)
    if advantages.ndim == 1:
        check_shape("batch['advantages']", advantages, (rows.num_sequences,), "one for each completion")
    # The value of a token belongs to the place before it, whose logits predict it.
    shifted = {key: F.pad(value[:, 1:], (0, 1)) for key, value in columns.items()}
    advantages = shifted.get("advantages", advantages)
    return rows, PolicyBatch(rows.completions, advantages, *map(shifted.get, _COLUMNS)), places


def _join(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Prompts and completions in rows that are padded on the right only, which causal attention needs no mask for."""
    for key in _PROMPTS:
        if batch.get(key) is None:
            raise ValueError(f"batch must have the key {key!r}, got {sorted(map(str, batch))}")
        check_tensor(f"batch[{key!r}]", batch[key])
        if batch[key].ndim != 2:
            raise wrong_value(f"batch[{key!r}]", "a tensor of shape [num_sequences, length]", batch[key])
    for key in ("prompt_ids", "completion_ids"):
        if batch[key].dtype not in (torch.int64, torch.int32):
            raise wrong_type(f"batch[{key!r}]", "a tensor of dtype torch.int64", batch[key])
        mask = "prompt_mask" if key == "prompt_ids" else "completion_mask"
        check_shape(f"batch[{mask!r}]", batch[mask], batch[key].shape, "one value for each token")
    prompts, completions = batch["prompt_ids"], batch["completion_ids"]
    if len(prompts) != len(completions):
        raise wrong_value("batch['completion_ids']", f"one row for each of {len(prompts)} prompts", completions)
    check_same_device("prompt_ids", prompts, **{key: batch[key] for key in _PROMPTS})
    prompt_mask, completion_mask = batch["prompt_mask"].bool(), batch["completion_mask"].bool()
    seq_len = prompts.shape[1] + completions.shape[1]
    start = prompts.shape[1] - prompt_mask.sum(1, keepdim=True)
    places = (torch.arange(seq_len, device=prompts.device) + start) % seq_len
    joined = {
        "input_ids": torch.cat((prompts, completions), 1),
        "attention_mask": torch.cat((prompt_mask, completion_mask), 1).to(prompts.dtype),
        "completion_mask": torch.cat((torch.zeros_like(prompt_mask), completion_mask), 1),
    }
    return {key: value.gather(1, places) for key, value in joined.items()}, places
