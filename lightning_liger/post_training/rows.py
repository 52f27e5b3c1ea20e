"""Rows of prompts and completions as models and losses take them."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import (
    check_floating,
    check_integer,
    check_same_device,
    check_shape,
    check_tensor,
    wrong_type,
    wrong_value,
)
from lightning_liger.losses.completions import Completions, sequence_sums
from lightning_liger.losses.policy_batch import PolicyBatch
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.sequences.labels import shift_labels
from lightning_liger.training.batches import LABELS, check_batch, check_integers
from lightning_liger.training.language_model import LanguageModel

_COLUMNS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
PACKING = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Rows(NamedTuple):
    """Rows of tokens with labels: of sequences whose completions are scored, or of any text."""

    inputs: dict[str, Any]
    """Arguments of the model besides labels."""
    labels: Tensor
    """What each token of the inputs predicts, ``[rows, seq_len]``, int64; -100 where none is scored."""
    sequence_ids: Tensor | None = None
    """The sequence of each token, ``[rows, seq_len]``; None if each row is one."""
    num_sequences: int = 0
    extras: Mapping[str, Any] = {}
    """Other values of the batch by name; those of tokens, ``[rows, seq_len, ...]``, are split with them."""

    @property
    def num_tokens(self) -> Tensor:
        """The number of tokens that are no padding, prompts included, a scalar; masks of other shapes tell nothing."""
        mask, ids = self.inputs.get("attention_mask"), self.sequence_ids
        if isinstance(mask, Tensor) and mask.shape == self.labels.shape:
            return mask.count_nonzero()
        return (torch.zeros_like(self.labels) if ids is None else ids.expand_as(self.labels)).ge(0).sum()

    @property
    def num_labels(self) -> Tensor:
        """The number of tokens with a label, a scalar."""
        return torch.count_nonzero(self.labels >= 0)

    @property
    def positions(self) -> Tensor | None:
        """The position of each token in its document, None if no row holds several."""
        position_ids = self.inputs.get("position_ids")
        if not isinstance(position_ids, Tensor) or position_ids.ndim > 2:  # of images and text: no documents
            return None
        return position_ids

    def sums(self, values: Tensor) -> Tensor:
        """The sum of each sequence's values, ``[num_sequences]``."""
        return sequence_sums(values, self.sequence_ids, self.num_sequences)

    @property
    def completions(self) -> Completions:
        """The tokens with a label."""
        return Completions(self.labels != IGNORE_INDEX, self.sequence_ids, self.num_sequences)

    def to_context(self, context: ContextParallel | None) -> "Rows":
        """This rank's part of each row under context parallelism. Right padding needs no attention mask."""
        if context is None:
            return self
        whole = {key: value for key, value in self.inputs.items() if key not in ("attention_mask", "seq_idx")}
        inputs = dict(context.split({**whole, "shift_labels": self.labels}))

        def part(value: Any) -> Any:
            is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == self.labels.shape
            return value.chunk(context.size, dim=1)[context.rank] if is_of_tokens else value

        extras = {name: part(value) for name, value in self.extras.items()}
        return Rows(inputs, inputs.pop("shift_labels"), part(self.sequence_ids), self.num_sequences, extras)


def read_rows(batch: Mapping[str, Any], prefix: str = "") -> Rows:
    """The sequences of a batch; raises TypeError and ValueError for one that does not fit.

    Args:
        batch: ``input_ids`` ``[rows, seq_len]`` int64, ``completion_mask`` of the same shape (True or 1 for tokens of
            the completion), and ``attention_mask`` where rows are padded. For packed rows also ``position_ids``, which
            start again with each sequence, ``sequence_ids`` (the number of each token's sequence, from 0; any negative
            number for padding), and their number: ``num_sequences``, an integer, or ``cu_seq_lens_q``, where they start
            and the last one ends; without both the device is asked for the largest.
        prefix: Of the names of the keys, such as ``"KL_"``.
    """
    for key in ("input_ids", "completion_mask"):
        if batch.get(prefix + key) is None:
            raise ValueError(f"batch must have the key {prefix + key!r}, got {sorted(map(str, batch))}")
    input_ids = batch[prefix + "input_ids"]
    check_integers(batch, prefix + "input_ids")
    if input_ids.ndim != 2:
        raise wrong_value(f"batch[{prefix + 'input_ids'!r}]", "a tensor of shape [rows, seq_len]", input_ids)
    inputs: dict[str, Any] = {"input_ids": input_ids}
    for key in ("completion_mask", "attention_mask", "sequence_ids"):
        value = batch.get(prefix + key)
        if value is not None:
            check_tensor(f"batch[{prefix + key!r}]", value)
            check_shape(f"batch[{prefix + key!r}]", value, input_ids.shape, "one value for each token")
    for key in ("attention_mask", *PACKING):
        if batch.get(prefix + key) is not None:
            inputs[key] = batch[prefix + key]
    position_ids, ids = inputs.get("position_ids"), batch.get(prefix + "sequence_ids")
    labels = completion_labels(input_ids, batch[prefix + "completion_mask"], inputs.get("attention_mask"))
    labels = shift_labels(labels, position_ids)
    if ids is None:
        return Rows(inputs, labels, None, len(input_ids))
    # A border is also where the sequence changes, for position_ids of rows that do not start again.
    changes = F.pad(ids.diff(dim=-1) != 0, (0, 1), value=True)
    labels = labels.masked_fill(changes | (ids < 0), IGNORE_INDEX)
    return Rows(inputs, labels, ids, count_sequences(batch, prefix))


def completion_labels(input_ids: Tensor, completion_mask: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The ids of completion tokens in int64, -100 for others: padding is no label, and none is predicted from it."""
    mask = completion_mask.bool()
    if attention_mask is not None:
        is_real = attention_mask.bool()
        mask = mask & is_real & F.pad(is_real[:, :-1], (1, 0), value=True)
    return input_ids.long().masked_fill(~mask, IGNORE_INDEX)


def read_tokens(
    stage: str, batch: Any, model: LanguageModel, columns: Collection[str] = (), prefixes: Collection[str] = ()
) -> Rows:
    """The rows of a batch with ``labels`` (unshifted) or ``shift_labels``, as ``LigerLMMixin`` takes it.

    ``completion_mask`` (1 at tokens that have a label) may stand in their place. Raises TypeError and ValueError for a
    batch that does not fit. Keys are those of the model; of ``columns``, and with one of the ``prefixes``, which become
    ``extras``.
    """
    extras: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        names = {*columns, "sequence_ids", "num_sequences"}  # of packed sequences, which losses of tokens do not need
        others = [key for key in batch if key in names or str(key).startswith(tuple(prefixes))]
        extras = {key: batch[key] for key in others if batch[key] is not None}
        batch = _with_labels({key: value for key, value in batch.items() if key not in others})
    check_batch(stage, batch, model)
    inputs = {key: value for key, value in batch.items() if key not in LABELS and value is not None}
    rows = Rows(inputs, batch.get("shift_labels"), extras.pop("sequence_ids", None), extras=extras)
    return rows if rows.labels is not None else rows._replace(labels=shift_labels(batch["labels"], rows.positions))


def _with_labels(batch: dict[Any, Any]) -> dict[Any, Any]:
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


def count_sequences(batch: Mapping[str, Any], prefix: str = "") -> int:
    """The number of sequences in packed rows, for which the host waits for the device if nothing else tells it."""
    number, ends = batch.get(prefix + "num_sequences"), batch.get(prefix + "cu_seq_lens_q")
    if number is None:
        number = int(batch[prefix + "sequence_ids"].max()) + 1 if ends is None else len(ends) - 1
    check_integer(f"batch[{prefix + 'num_sequences'!r}]", number, at_least=1)
    return int(number)


def check_log_probs(name: str, value: Any) -> None:
    """Raises TypeError unless these are of at least float32: others would be rounded to multiples of 2 at -300."""
    check_floating(name, value)
    if value.dtype.itemsize < 4:
        expected = (
            "log-probabilities in float32 (under other strategies than those of this package, precision='bf16-true'"
            " rounds them)"
        )
        raise wrong_type(name, expected, value)


def read_completions(batch: Mapping[str, Any]) -> tuple[Rows, PolicyBatch, Tensor | None]:
    """The completions of a batch; raises TypeError and ValueError for one that does not fit.

    Args:
        batch: Either ``prompt_ids`` (padded on the left), ``prompt_mask``, ``completion_ids`` (padded on the right) and
            ``completion_mask``, ``[num_sequences, prompt_len]`` and ``[num_sequences, completion_len]``; or
            ``input_ids``, ``completion_mask`` and, if padded on the right, ``attention_mask``, ``[num_rows, seq_len]``,
            packed rows too, see :func:`read_rows`. ``advantages`` are
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
        (check_tensor if key == "tool_mask" else check_log_probs)(f"batch[{key!r}]", value)
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
    for ids, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        for key in (ids, mask):
            if batch.get(key) is None:
                raise ValueError(f"batch must have the key {key!r}, got {sorted(map(str, batch))}")
            check_tensor(f"batch[{key!r}]", batch[key])
        if batch[ids].ndim != 2:
            raise wrong_value(f"batch[{ids!r}]", "a tensor of shape [num_sequences, length]", batch[ids])
        if batch[ids].dtype not in (torch.int64, torch.int32):
            raise wrong_type(f"batch[{ids!r}]", "a tensor of dtype torch.int64", batch[ids])
        check_shape(f"batch[{mask!r}]", batch[mask], batch[ids].shape, "one value for each token")
        check_same_device("prompt_ids", batch["prompt_ids"], **{key: batch[key] for key in (ids, mask)})
    prompts, completions = batch["prompt_ids"], batch["completion_ids"]
    if len(prompts) != len(completions):
        raise wrong_value("batch['completion_ids']", f"one row for each of {len(prompts)} prompts", completions)
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
