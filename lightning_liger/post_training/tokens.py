"""Batches of labelled tokens, as models and losses of tokens take them."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops.arguments import check_shape, check_tensor
from lightning_liger.post_training.rows import completion_labels, split_rows
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.sequences.labels import shift_labels
from lightning_liger.training.batches import LABELS, check_batch
from lightning_liger.training.language_model import LanguageModel

_OF_SEQUENCES = ("sequence_ids", "num_sequences")
"""Keys of packed batches that losses of tokens do not need."""


class TokenRows(NamedTuple):
    """Rows whose tokens have targets."""

    inputs: dict[str, Any]
    """Arguments of the model besides labels."""
    targets: Tensor
    """What each token predicts, ``[batch_size, seq_len]``, int64; -100 where nothing is learned."""
    columns: dict[str, Any]
    """Further values of the batch by name, those of tokens ``[batch_size, seq_len, ...]``."""

    def with_columns(self, **columns: Tensor) -> "TokenRows":
        """The rows with further values of each token."""
        return self._replace(columns={**self.columns, **columns})

    def to_context(self, context: ContextParallel | None) -> "TokenRows":
        """This rank's part of each row under context parallelism. Right padding needs no attention mask."""
        return self if context is None else TokenRows(*split_rows(context, self.inputs, self.targets, self.columns))


def read_tokens(
    stage: str, batch: Any, model: LanguageModel, columns: Collection[str] = (), prefixes: Collection[str] = ()
) -> TokenRows:
    """The rows of a batch with ``labels`` (unshifted) or ``shift_labels``, as ``LigerLMMixin`` takes it.

    ``completion_mask`` (1 at tokens that have a label) may stand in their place.

    Args:
        stage: ``"train"``, ``"val"`` or ``"test"``.
        batch: The batch of the data loader.
        model: Its keys, and those of ``columns``, are the ones that a batch may have.
        columns: Names of values that are not for the model.
        prefixes: Of further such names.

    Raises:
        TypeError: For values that are no tensors of integers.
        ValueError: For missing and unknown keys, and shapes that do not fit.
    """
    own: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        names = {*columns, *_OF_SEQUENCES}
        others = [key for key in batch if key in names or str(key).startswith(tuple(prefixes))]
        own = {key: batch[key] for key in others if batch[key] is not None}
        batch = _labelled({key: value for key, value in batch.items() if key not in others})
    check_batch(stage, batch, model)
    inputs = {key: value for key, value in batch.items() if key not in LABELS and value is not None}
    if batch.get("shift_labels") is not None:
        return TokenRows(inputs, batch["shift_labels"], own)
    return TokenRows(inputs, shift_labels(batch["labels"], document_positions(inputs)), own)


def _labelled(batch: dict[Any, Any]) -> dict[Any, Any]:
    """The batch with labels in the place of ``completion_mask``."""
    mask, input_ids = batch.get("completion_mask"), batch.get("input_ids")
    if mask is None or not isinstance(input_ids, Tensor):
        return batch
    check_tensor("batch['completion_mask']", mask)
    check_shape("batch['completion_mask']", mask, input_ids.shape, "one value for each token")
    attention = batch.get("attention_mask")
    is_of_tokens = isinstance(attention, Tensor) and attention.shape == input_ids.shape
    labels = completion_labels(input_ids, mask, attention if is_of_tokens else None)
    return {"labels": labels, **{key: value for key, value in batch.items() if key != "completion_mask"}}


def document_positions(inputs: Mapping[str, Any]) -> Tensor | None:
    """The position of each token in its document, None if no row holds several."""
    position_ids = inputs.get("position_ids")
    if not isinstance(position_ids, Tensor) or position_ids.ndim > 2:  # of images and text: no documents
        return None
    return position_ids


def num_kept(targets: Tensor) -> Tensor:
    """The number of tokens with a target, a scalar."""
    return torch.count_nonzero(targets >= 0)
