"""Tokens, padding, labels and lengths of sequences in batches, counted on their device without waiting for it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import IGNORE_INDEX
from lightning_liger.monitor.flops import num_pairs

LENGTH_EDGES = (1, 2, *(edge for power in range(1, 24) for edge in (3 * 2 ** (power - 1), 2 ** (power + 1))))
"""The largest length of each class of the histogram: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
COUNTED = ("rows", "tokens", "padding", "labels", "ignored")
"""The numbers that a :class:`BatchCounter` begins with; ``ignored`` are labels."""
_MAX_PENDING = 2**20
"""Tokens whose labels and masks are kept before they are counted: 24 MB at most."""
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
    """The label of tokens without a loss."""


def contents_of(batch: Any) -> tuple[int, list[Part]]:
    """The number of rows of a batch, 0 if it cannot be told, and its parts with tokens; only shapes are looked at.

    A part is ``input_ids``, also with a prefix such as ``chosen_`` (but not ``teacher_``, which another model reads),
    ``prompt_ids`` with ``completion_ids``, or ``inputs_embeds``. Nested batches have the parts of all of them.
    """
    if parts := _parts_of(batch):
        return sum(part.shape[0] if len(part.shape) > 1 else 1 for part in parts), parts
    values = batch.values() if _is_mapping(batch) else batch if isinstance(batch, list | tuple) else [batch]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.ndim), 0), []


def _parts_of(batch: Any) -> list[Part]:
    if _is_mapping(batch):
        tensors = {str(name): value for name, value in batch.items() if isinstance(value, Tensor)}
        names = [name for name in tensors if name.endswith("input_ids") and not name.startswith("teacher_")]
        if names:
            return [_part(tensors, name.removesuffix("input_ids"), tensors[name].shape) for name in names]
        if "inputs_embeds" in tensors and tensors["inputs_embeds"].ndim > 1:
            return [_part(tensors, "", tensors["inputs_embeds"].shape[:-1])]
        if {"prompt_ids", "completion_ids"} <= tensors.keys():
            return [_prompts_with_completions(tensors)]
        batch = list(batch.values())
    return [part for each in batch for part in _parts_of(each)] if isinstance(batch, list | tuple) else []


def _is_mapping(batch: Any) -> bool:
    return isinstance(batch, Mapping) or (hasattr(batch, "get") and hasattr(batch, "keys"))


def _part(tensors: dict[str, Tensor], prefix: str, shape: tuple[int, ...]) -> Part:
    token_tensors = {name: value for name, value in tensors.items() if value.shape == shape}
    masks = (token_tensors[f"{prefix}attention_mask"],) if f"{prefix}attention_mask" in token_tensors else ()
    part = Part(shape, masks, token_tensors.get(f"{prefix}position_ids"))
    for name, no_loss in _LABELS:
        labels = tensors.get(prefix + name)
        if labels is not None and not labels.is_floating_point():
            return part._replace(labels=labels, num_labels=labels.numel(), no_loss=no_loss)
    return part


def _prompts_with_completions(tensors: Any) -> Part:
    """Prompts, each followed by its completion."""
    ids, masks = ([tensors.get(f"{of}_{name}") for of in ("prompt", "completion")] for name in ("ids", "mask"))
    shape = (*ids[1].shape[:-1], ids[0].shape[-1] + ids[1].shape[-1])
    if [mask.shape for mask in masks if mask is not None] != [each.shape for each in ids]:
        return Part(shape)
    return Part(shape, tuple(masks), None, masks[1], math.prod(shape), no_loss=0)


class BatchCounter:
    """Counts what is in the batches of this process, on a device.

    Its numbers are those of :data:`COUNTED`; the pairs of a token and one that it attends to, for each window (None is
    any width); and how many sequences have a length in each class of :data:`LENGTH_EDGES`.
    """

    def __init__(self, device: torch.device, windows: Sequence[int | None] = ()) -> None:
        self._windows = list(windows)
        # Without the last one: longer rows are in its class too.
        self._edges = torch.tensor([0, *LENGTH_EDGES[:-1]], device=device)
        self._sums: Tensor | int = 0
        self._num_rows = self._num_pending = 0
        self._pending: list[Part] = []

    def add(self, num_rows: int, parts: Sequence[Part]) -> None:
        """Adds the rows and the parts of a training batch, of which only shapes are looked at for now."""
        self._num_rows += num_rows
        self._pending += (part for part in parts if math.prod(part.shape))
        self._num_pending += sum(math.prod(part.shape) for part in parts)
        if self._num_pending >= _MAX_PENDING:
            self._count_pending()

    def take(self) -> Any:
        """The numbers since the last call, a tensor in int64 on the device."""
        self._count_pending()
        sums, self._sums = self._sums, 0
        return sums

    @torch.no_grad()
    def _count_pending(self) -> None:
        zero, device = self._edges[:1], self._edges.device
        num_tokens = num_labels = 0
        learned, pairs, lengths = zero, [zero] * len(self._windows), [zero]
        seen_whole, unpadded = list[int](), list[int]()
        """The lengths of rows in which attention sees everything, and of rows without padding and documents."""
        for part in self._pending:
            num_tokens += math.prod(part.shape)
            num_labels += part.num_labels
            rows = [part.shape[-1]] * math.prod(part.shape[:-1])
            if part.labels is not None:
                learned = learned + part.labels.ne(part.no_loss).sum().to(device, non_blocking=True)
            masks = [mask.to(device, non_blocking=True).ne(0) for mask in part.masks]  # a step may do so on its own
            mask = torch.cat(masks, -1) if masks else None
            if part.positions is not None:
                documents = _document_lengths(part.positions.to(device, non_blocking=True).flatten(), mask)
                if mask is None:
                    # Padding at the end of a packed row starts again at 0 with each token.
                    documents = documents.masked_fill(documents == 1, 0)
                    for place, window in enumerate(self._windows):
                        pairs[place] = pairs[place] + (documents * documents.clamp(max=window or 2**62)).sum()
                    rows = []
                lengths.append(documents)
            elif mask is not None:
                lengths.append(mask.sum(-1).flatten())
            else:
                unpadded += rows
            seen_whole += rows  # also packed ones that have a mask
        lengths.append(torch.tensor(unpadded, dtype=torch.int64).to(device, non_blocking=True))
        joined = torch.cat(lengths)
        at_most = torch.searchsorted(joined.sort().values, self._edges, right=True)
        classes = F.pad(at_most, (0, 1), value=len(joined)).diff()
        known = [self._num_rows, num_tokens, num_tokens, num_labels, num_labels]
        known += [sum(num_pairs(length, window) for length in seen_whole) for window in self._windows]
        known += [0] * len(classes)
        counted = torch.cat([zero, zero, -joined.sum(0, keepdim=True), zero, -learned, *pairs, classes])
        self._sums = self._sums + counted + torch.tensor(known).to(device, non_blocking=True)
        self._pending, self._num_rows, self._num_pending = [], 0, 0


def _document_lengths(positions: Tensor, mask: Tensor | None) -> Tensor:
    """The lengths of documents, and zeros: a document starts where the position does not increase by one."""
    number = F.pad(positions.diff() != 1, (1, 0)).cumsum(0)
    counts = torch.ones_like(number) if mask is None else mask.flatten().long()
    return torch.zeros_like(number).scatter_add_(0, number, counts)
