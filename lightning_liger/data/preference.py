"""Preference pairs, a prompt with a chosen and a rejected completion; unpaired feedback: completions with labels."""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from liger_ops.arguments import check_bool
from lightning_liger.data.collate import FeedbackCollator, PreferenceCollator
from lightning_liger.data.encoding import Encoder, common_prefix
from lightning_liger.data.examples import ExamplesDataModule, first_learned, floats, ids, scored
from lightning_liger.data.module import Split
from lightning_liger.data.records import Record, Text

if TYPE_CHECKING:
    import datasets

_REFERENCE_LOG_PROBS = ("ref_chosen_logps", "ref_rejected_logps")


def _preference_pair(record: Record) -> tuple[Text, Text, Text]:
    """Prompt, chosen and rejected of a record; the prompt may be what the two begin with."""
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
        length = common_prefix(chosen, rejected)
        if isinstance(chosen, str) and chosen[:length].endswith(" "):
            length -= 1  # tokens begin with spaces
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

    _fields = ("prompt", "chosen", "rejected", "reference", *_REFERENCE_LOG_PROBS)
    _collator_type = PreferenceCollator

    @override
    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        prompt, *completions = _preference_pair(record)
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


class UnpairedFeedbackDataModule(ExamplesDataModule):
    """Unpaired feedback for KTO and related losses, as batches of :class:`~lightning_liger.data.FeedbackCollator`.

    A record has ``prompt`` and ``completion``, strings or lists of messages, and ``label``, true if the completion is
    good. Records of :class:`~lightning_liger.data.PreferenceDataModule` are accepted too: each becomes two examples,
    the chosen completion with true and the rejected one with false. All records, or none, may have ``ref_logps`` (for
    pairs ``ref_chosen_logps`` and ``ref_rejected_logps``), summed log-probabilities of a reference model.

    Other arguments and errors are those of :class:`~lightning_liger.data.ExamplesDataModule`.

    Args:
        with_kl: Whether batches have the mismatched pairs from which KTO (arXiv:2402.01306) estimates a divergence:
            each prompt with the completion of another one, the same in every epoch.
    """

    _fields = ("prompt", "completion", "label", "ref_logps", "chosen", "rejected", *_REFERENCE_LOG_PROBS)
    _collator_type = FeedbackCollator

    def __init__(self, *, with_kl: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        check_bool("data.with_kl", with_kl)
        self.with_kl = with_kl

    @override
    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        if record.has("chosen") or record.has("rejected"):
            prompt, *completions = _preference_pair(record)
            labels, log_probs = [True, False], [*_REFERENCE_LOG_PROBS]
        else:
            prompt, completions = record.text_or_messages("prompt"), [record.text_or_messages("completion")]
            labels, log_probs = [record.flag("label")], ["ref_logps"]
        for completion, label, key in zip(completions, labels, log_probs, strict=True):
            prompt_ids, (completion_ids,) = encoder.split(record, prompt, [completion])
            digest = hashlib.blake2b(ids(prompt_ids).tobytes(), digest_size=8).digest()
            example = {
                "prompt_ids": ids(prompt_ids),
                "completion_ids": scored(record, prompt_ids, completion_ids),
                "label": np.uint8(label),
                "prompt_hash": np.frombuffer(digest, np.int64)[0],
                **first_learned(len(prompt_ids)),
            }
            yield example | ({"ref_logps": floats(record.number(key))} if record.has(key) else {})

    @override
    def _usable(self, split: Split, rows: "datasets.Dataset") -> Any:
        rows = super()._usable(split, rows)
        return _MismatchedExamples(rows, self.seed) if self.with_kl else rows


class _MismatchedExamples(Dataset[dict[str, Any]]):
    """Examples with ``KL_completion_ids``, the completion of another prompt; none where most have one prompt."""

    def __init__(self, rows: "datasets.Dataset", seed: int) -> None:
        self.rows, self.others = rows, mismatched(rows["prompt_hash"][:], seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example, other = self.rows[index], self.rows[int(self.others[index])]
        is_mismatched = other["prompt_hash"] != example["prompt_hash"]
        return {**example, "KL_completion_ids": other["completion_ids"][: None if is_mismatched else 0]}


def mismatched(prompts: np.ndarray, seed: int) -> np.ndarray:
    """A permutation of examples in which none keeps its prompt, if no prompt is that of more than half of them."""
    _, groups, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
    order = np.argsort(np.random.default_rng(seed).permutation(len(sizes))[groups], kind="stable")
    others = np.empty_like(order)
    others[order] = np.roll(order, -sizes.max())  # past the longest run of one prompt
    return others
