"""Unpaired feedback: a prompt with a completion, and whether it is good."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from liger_ops.arguments import check_bool, wrong_value
from lightning_liger.data.collate import FeedbackCollator
from lightning_liger.data.encoding import Encoder
from lightning_liger.data.examples import ExamplesDataModule, floats, ids, prompts_fit, scored
from lightning_liger.data.preference import pair_of
from lightning_liger.data.ragged import RaggedTable
from lightning_liger.data.records import Record


class UnpairedFeedbackDataModule(ExamplesDataModule):
    """Unpaired feedback for KTO and related losses, as batches of :class:`~lightning_liger.data.FeedbackCollator`.

    A record has ``prompt`` and ``completion``, strings or lists of messages, and ``label``, true if the completion is
    good. Records of :class:`~lightning_liger.data.PreferenceDataModule` are accepted too: each becomes two examples,
    the chosen completion with true and the rejected one with false. All records, or none, may have ``ref_logps`` (for
    pairs ``ref_chosen_logps`` and ``ref_rejected_logps``), summed log-probabilities of a reference model.

    Other arguments and errors are those of :class:`~lightning_liger.data.ExamplesDataModule`.

    Args:
        with_kl: Whether batches have the mismatched pairs from which KTO (arXiv:2402.01306) estimates a divergence.
            Needs a batch_size of at least 2.
    """

    _fields = (
        *("prompt", "completion", "label", "ref_logps", "chosen", "rejected", "ref_chosen_logps"),
        *("ref_rejected_logps", "tools", "chat_template_kwargs"),
    )

    def __init__(self, *, with_kl: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        check_bool("data.with_kl", with_kl)
        if with_kl and self.batch_size < 2:
            raise wrong_value("data.batch_size", "at least 2 for data.with_kl, which mismatches pairs", self.batch_size)
        self.with_kl = with_kl

    @override
    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        if record.has("chosen") or record.has("rejected"):
            prompt, *completions = pair_of(record)
            labels, log_probs = [True, False], ["ref_chosen_logps", "ref_rejected_logps"]
        else:
            prompt, completions = record.text_or_messages("prompt"), [record.text_or_messages("completion")]
            labels, log_probs = [record.flag("label")], ["ref_logps"]
        for index, (completion, label, key) in enumerate(zip(completions, labels, log_probs, strict=True)):
            prompt_ids, (completion_ids,) = encoder.split(record, prompt, [completion])
            example = {
                "prompt_ids": ids(prompt_ids),
                "completion_ids": scored(record, prompt_ids, completion_ids),
                "label": np.uint8(label),
                "of_pair": np.uint8(index),
            }
            yield example | ({"ref_logps": floats(record.number(key))} if record.has(key) else {})

    @override
    def _usable(self, table: RaggedTable, max_length: int) -> np.ndarray:
        return prompts_fit(self, table, max_length)

    @override
    def _ordered(self, table: RaggedTable, places: np.ndarray) -> np.ndarray:
        # Next to each other, the two of a pair would be taken as mismatched, though they have the same prompt.
        return places[np.argsort(table.column("of_pair")[places], kind="stable")] if len(places) else places

    @override
    def _collator(self) -> FeedbackCollator:
        return FeedbackCollator(self.layout, self.with_kl)
