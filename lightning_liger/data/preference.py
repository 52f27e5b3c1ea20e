"""Preference pairs: a prompt with a chosen and a rejected completion."""

from collections.abc import Iterator

import numpy as np
from typing_extensions import override

from lightning_liger.data.collate import PreferenceCollator
from lightning_liger.data.encoding import Encoder, implicit_prompt
from lightning_liger.data.examples import ExamplesDataModule, first_learned, floats, ids, scored
from lightning_liger.data.records import Record, Text

_REFERENCE_LOG_PROBS = ("ref_chosen_logps", "ref_rejected_logps")


def preference_pair(record: Record) -> tuple[Text, Text, Text]:
    """Prompt, chosen and rejected of a record; the prompt may be the common beginning of the two.

    Raises:
        ValueError: If a field is missing or of a wrong type, or if the two completions are equal conversations.
    """
    chosen, rejected = record.text_or_messages("chosen"), record.text_or_messages("rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise record.error("the fields 'chosen' and 'rejected' must be either both strings, or both lists of messages")
    prompt = record.text_or_messages("prompt") if record.has("prompt") else None
    if isinstance(prompt, str) and not isinstance(chosen, str):
        # Some data sets give the whole conversations, and their first question as the prompt.
        if not any(message.get("content") == prompt for message in chosen):
            raise record.error("the field 'prompt' is a string, and no message of 'chosen' has this content")
        prompt = None
    if prompt is None:
        length = implicit_prompt(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        if not isinstance(prompt, str) and not (prompt and chosen and rejected):
            problem = "begin with the same messages, their prompt, and end with others"
            raise record.error(f"without a field 'prompt', 'chosen' and 'rejected' must {problem}")
    return prompt, chosen, rejected


class PreferenceDataModule(ExamplesDataModule):
    """Preference pairs for DPO and related losses, as batches of :class:`~lightning_liger.data.PreferenceCollator`.

    A record has ``chosen``, ``rejected`` and ``prompt``: strings, or lists of messages. Without ``prompt`` it is what
    ``chosen`` and ``rejected`` begin with. Messages are rendered by the chat template, with ``tools`` and
    ``chat_template_kwargs`` of the record if it has them; strings get an end-of-sequence token. All records, or none,
    may have ``ref_chosen_logps`` and ``ref_rejected_logps`` (summed log-probabilities of a reference model), and
    ``reference``, a third completion (triples of TPO, arXiv:2405.16681), which needs ``prompt``.

    Arguments and errors are those of :class:`~lightning_liger.data.ExamplesDataModule`.
    """

    _fields = ("prompt", "chosen", "rejected", "reference", *_REFERENCE_LOG_PROBS, "tools", "chat_template_kwargs")

    @override
    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        prompt, *completions = preference_pair(record)
        names = ["chosen_ids", "rejected_ids"]
        if record.has("reference"):
            record.text_or_messages("prompt")  # raises if it is implicit: the reference does not begin with it
            names.append("reference_ids")
            completions.append(record.text_or_messages("reference"))
        prompt_ids, completion_ids = encoder.split(record, prompt, completions)
        example = {"prompt_ids": ids(prompt_ids), **first_learned(len(prompt_ids))}
        for name, values in zip(names, completion_ids, strict=True):
            example[name] = scored(record, prompt_ids, values)
        if any(map(record.has, _REFERENCE_LOG_PROBS)):
            example |= {key: floats(record.number(key)) for key in _REFERENCE_LOG_PROBS}
        yield example

    @override
    def _collator(self) -> PreferenceCollator:
        return PreferenceCollator(self.layout)
