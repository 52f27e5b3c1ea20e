"""The tokens of a batch: those that the model is run on in a training step, padding included."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from liger_ops import IGNORE_INDEX

_IDS = "input_ids"
_OF_OTHERS = "teacher_"
"""Begins the names of what another model is run on."""
_LABELS = (("labels", IGNORE_INDEX), ("shift_labels", IGNORE_INDEX), ("completion_mask", 0))
"""Names of labels, and of the mask of completions, with the value of tokens that have no loss."""


class Part(NamedTuple):
    """Rows of tokens that the model is run on together."""

    shape: tuple[int, ...]
    """``[..., seq_len]``."""
    masks: tuple[Tensor, ...] = ()
    """Not 0 at tokens that are no padding, ``[..., seq_len]``; the second one continues the rows of the first."""
    positions: Tensor | None = None
    """The place of each token in its document, ``[..., seq_len]``."""
    labels: Tensor | None = None
    num_labels: int = 0
    """With those of prompts, which ``labels`` may leave out."""
    no_loss: int = IGNORE_INDEX
    """The label of tokens that have no loss."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def num_tokens(self) -> int:
        return math.prod(self.shape)


def parts_of(batch: Any) -> list[Part]:
    """The parts of a batch, found by names; only shapes are looked at.

    A part is ``input_ids``, also with a prefix such as ``chosen_``, ``rejected_`` or ``KL_`` (but not ``teacher_``,
    which another model reads), ``prompt_ids`` with ``completion_ids``, or ``inputs_embeds``. A dict or list of batches,
    as ``CombinedLoader`` makes, has the parts of all of them.
    """
    if _is_mapping(batch):
        names = [name for name in batch.keys() if isinstance(name, str) and name.endswith(_IDS)]  # noqa: SIM118
        ids = [name for name in names if not name.startswith(_OF_OTHERS) and isinstance(batch[name], Tensor)]
        if ids:
            return [_part(batch, name.removesuffix(_IDS), tuple(batch[name].shape)) for name in ids]
        embeddings = batch.get("inputs_embeds")
        if isinstance(embeddings, Tensor) and embeddings.ndim > 1:
            return [_part(batch, "", tuple(embeddings.shape[:-1]))]
        prompts, completions = batch.get("prompt_ids"), batch.get("completion_ids")
        if isinstance(prompts, Tensor) and isinstance(completions, Tensor):
            return [_of_prompts(batch, prompts, completions)]
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return []
    return [part for each in batch if isinstance(each, list | tuple) or _is_mapping(each) for part in parts_of(each)]


def contents_of(batch: Any) -> tuple[int, list[Part]]:
    """The number of rows of a batch, 0 if it cannot be told, and its parts with tokens."""
    parts = parts_of(batch)
    if parts:
        return sum(part.num_rows for part in parts), parts
    values = batch.values() if _is_mapping(batch) else batch if isinstance(batch, list | tuple) else [batch]
    first = next((value for value in values if isinstance(value, Tensor) and value.ndim), None)
    return (0 if first is None else len(first)), []


def size_of(batch: Any) -> tuple[int, int]:
    """The numbers of rows and of tokens of a batch, those of padding included; 0 for what cannot be told."""
    num_rows, parts = contents_of(batch)
    return num_rows, sum(part.num_tokens for part in parts)


def count_tokens(batch: Any) -> int:
    """The number of tokens of a batch, those of padding included; 0 if it has none."""
    return size_of(batch)[1]


def _is_mapping(batch: Any) -> bool:
    return isinstance(batch, Mapping) or (hasattr(batch, "get") and hasattr(batch, "keys"))


def _part(batch: Mapping[str, Any], prefix: str, shape: tuple[int, ...]) -> Part:
    def of_tokens(name: str) -> Tensor | None:
        value = batch.get(prefix + name)
        return value if isinstance(value, Tensor) and value.shape == shape else None

    mask = of_tokens("attention_mask")
    masks = () if mask is None else (mask,)
    for name, no_loss in _LABELS:
        labels = batch.get(prefix + name)
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            return Part(shape, masks, of_tokens("position_ids"), labels, labels.numel(), no_loss)
    return Part(shape, masks, of_tokens("position_ids"))


def _of_prompts(batch: Mapping[str, Any], prompts: Tensor, completions: Tensor) -> Part:
    """Prompts, each followed by its completion."""
    shape = (*completions.shape[:-1], prompts.shape[-1] + completions.shape[-1])
    masks = batch.get("prompt_mask"), batch.get("completion_mask")
    whole = tuple(
        mask
        for mask, ids in zip(masks, (prompts, completions), strict=True)
        if isinstance(mask, Tensor) and mask.shape == ids.shape
    )
    return Part(shape, whole, None, whole[1], math.prod(shape), 0) if len(whole) == 2 else Part(shape)
