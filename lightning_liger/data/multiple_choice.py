"""Questions with several answers of which one is right, in the format of MMLU."""

from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from liger_ops.arguments import check_choice
from lightning_liger.data.collate import MultipleChoiceCollator
from lightning_liger.data.encoding import Encoder
from lightning_liger.data.examples import ExamplesDataModule, first_learned, ids, scored
from lightning_liger.data.module import Split
from lightning_liger.data.records import Record


class MultipleChoiceDataModule(ExamplesDataModule):
    """Multiple-choice questions, as batches of :class:`~lightning_liger.data.MultipleChoiceCollator`.

    A record has ``question``, a string; ``choices``, 2 to 26 strings; ``answer``, the place of the right one from 0, or
    its letter; and maybe ``subject``, such as ``high_school_physics``. Training batches have the right answers, and
    validation batches all choices, from whose log-probabilities :class:`~lightning_liger.LigerMultipleChoice` computes
    the accuracy. An end-of-sequence token is neither learned nor scored.

    Questions whose choices do not all fit ``max_length`` are dropped, with a warning that gives their number. Other
    arguments and errors are those of :class:`~lightning_liger.data.ExamplesDataModule`.

    Args:
        answer_as: ``"letter"``: the prompt of MMLU (arXiv:2009.03300), which lists the choices, and a letter as answer.
            ``"text"``: the question alone, and the text of a choice as answer.
    """

    _fields = ("question", "choices", "answer", "subject")
    _settings_of_tokens = (*ExamplesDataModule._settings_of_tokens, "answer_as")

    def __init__(self, *, answer_as: Literal["letter", "text"] = "letter", **settings: Any) -> None:
        super().__init__(**settings)
        check_choice("data.answer_as", answer_as, ("letter", "text"))
        self.answer_as: Literal["letter", "text"] = answer_as

    @override
    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        question, choices = record.text("question"), record.items("choices")
        if not 2 <= len(choices) <= len(ascii_uppercase) or not all(isinstance(each, str) and each for each in choices):
            raise record.error(f"the field 'choices' must be a list of 2 to {len(ascii_uppercase)} strings")
        letters = ascii_uppercase[: len(choices)]
        answer = record.values.get("answer")
        place = letters.find(answer) if isinstance(answer, str) and len(answer) == 1 else answer
        if type(place) is not int or not 0 <= place < len(letters):
            expected = f"a number from 0 to {len(letters) - 1}, or a letter from A to {letters[-1]}"
            raise record.error(f"the field 'answer' must be {expected}, got {answer!r}")
        if self.answer_as == "letter":
            texts = list(letters)
            lines = [f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)]
            prompt = "\n".join([question.strip(), *lines, "Answer:"])
            if record.has("subject"):
                subject = record.text("subject").replace("_", " ")
                prompt = f"The following are multiple choice questions (with answers) about {subject}.\n\n{prompt}"
        else:
            texts, prompt = choices, f"Question: {question.strip()}\nAnswer:"
        prompt_ids, completions = encoder.split(record, prompt, [f" {text}" for text in texts])
        end = encoder.tokenizer.eos_token_id
        completions = [each[:-1] if each[-1:] == [end] else each for each in completions]
        longest = max(map(len, completions))
        yield {
            "prompt_ids": ids(prompt_ids),
            "completion_ids": np.concatenate([scored(record, prompt_ids, each) for each in completions]),
            "completion_lengths": ids([len(each) for each in completions]),
            "num_characters": ids([len(text) for text in texts]),
            "answer": np.int32(place),
            # All of each choice is scored. Prompts may lose their beginning, and one token of them stays.
            **first_learned(len(prompt_ids) + longest - 1, longest),
        }

    @override
    def _lengths(self, split: Split, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        lengths, counts = super()._lengths(split, rows)
        right = lengths[counts.cumsum() - counts + rows["answer"][:]], np.ones_like(counts)
        return right if split == "train" else (lengths, counts)

    @override
    def _collator(self, split: Split) -> MultipleChoiceCollator:
        return MultipleChoiceCollator(self.layout, all_choices=split == "validation")
