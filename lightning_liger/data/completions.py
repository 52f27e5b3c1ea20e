"""Supervised examples: prompts with completions, instructions, and conversations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
from typing_extensions import override

from liger_ops.arguments import check_bool, check_choice
from lightning_liger.data.collate import SupervisedCollator
from lightning_liger.data.encoding import Encoder, TrainOn
from lightning_liger.data.examples import ExamplesDataModule, first_learned, ids, scored
from lightning_liger.data.records import Message, Record, Text
from lightning_liger.data.sources import fingerprints
from lightning_liger.data.tokenizer import load_tokenizer, tokenizer_files

# Published with the data: https://github.com/tatsu-lab/stanford_alpaca#data-release
_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}{input}\n\n### Response:"
)
_ALPACA_WITH_INPUT = ", paired with an input that provides further context"
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


class _SupervisedDataModule(ExamplesDataModule):
    """Examples of ``input_ids`` and ``loss_mask``, and of the same in the teacher's tokens.

    Args:
        teacher_tokenizer: The tokenizer, a folder or a name on the Hub, of a teacher that has another one, for
            distillation_mode "uld". Its own chat template renders its messages.
    """

    _settings_of_tokens = (*ExamplesDataModule._settings_of_tokens, "_teacher_files")
    _collator_type = SupervisedCollator

    def __init__(self, *, teacher_tokenizer: str | Path | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.teacher_tokenizer = teacher_tokenizer
        self._teacher_files: list[Any] = []
        self._encoders: dict[str, Encoder] = {}  # of the teacher
        if teacher_tokenizer is not None:
            setting = "data.teacher_tokenizer"
            self._teacher_files = fingerprints(tokenizer_files(teacher_tokenizer, setting))
            tokenizer = load_tokenizer(teacher_tokenizer, f"{setting}={str(teacher_tokenizer)!r}")
            self._encoders["teacher_"] = Encoder(tokenizer, self.chat_template_kwargs)

    def _tokens(self, record: Record, encoder: Encoder) -> tuple[list[int], list[int]]:
        """The ids of a record, and a mask of the same length: 1 at tokens to learn."""
        raise NotImplementedError

    @override
    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        example, places = {}, []
        for prefix, each in {"": encoder, **self._encoders}.items():
            input_ids, loss_mask = self._tokens(record, each)
            learned = np.flatnonzero(loss_mask[1:]) + 1  # nothing predicts the first token
            if not len(learned):
                raise record.error("there is no token to train on after the first token of the sequence")
            places.append((learned[0], len(input_ids) - learned[-1]))
            example[f"{prefix}input_ids"] = ids(input_ids)
            example[f"{prefix}loss_mask"] = np.asarray(loss_mask, dtype=np.uint8)
        yield example | first_learned(*np.max(places, axis=0))


class PromptCompletionDataModule(_SupervisedDataModule):
    """Prompts with completions, as batches of :class:`~lightning_liger.data.SupervisedCollator`.

    A record has ``prompt`` and ``completion``, strings or lists of messages; or, in the format of Alpaca,
    ``instruction``, ``input`` (may be empty or missing) and ``output``, from which the published template of Alpaca
    makes the prompt. Messages are rendered by the chat template; strings get an end-of-sequence token.

    Other arguments and errors are those of :class:`~lightning_liger.data.ExamplesDataModule`.

    Args:
        completion_only: Whether the loss is over completion tokens only; otherwise over prompts too.
    """

    _fields = ("prompt", "completion", "instruction", "input", "output")
    _settings_of_tokens = (*_SupervisedDataModule._settings_of_tokens, "completion_only")

    def __init__(self, *, completion_only: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        check_bool("data.completion_only", completion_only)
        self.completion_only = completion_only

    @override
    def _tokens(self, record: Record, encoder: Encoder) -> tuple[list[int], list[int]]:
        if record.has("instruction") and not record.has("prompt"):
            text = record.text("input") if record.has("input") else ""
            more, text = (_ALPACA_WITH_INPUT, f"\n\n### Input:\n{text}") if text else ("", "")
            prompt: Text = _ALPACA.format(more=more, instruction=record.text("instruction"), input=text)
            completion: Text = record.text("output")
        else:
            prompt, completion = record.text_or_messages("prompt"), record.text_or_messages("completion")
        prompt_ids, (completion_ids,) = encoder.split(record, prompt, [completion])
        scored(record, prompt_ids, completion_ids)
        mask = [0 if self.completion_only else 1] * len(prompt_ids) + [1] * len(completion_ids)
        return prompt_ids + completion_ids, mask


class ConversationDataModule(_SupervisedDataModule):
    """Conversations, as batches of :class:`~lightning_liger.data.SupervisedCollator`.

    A record has ``messages``, each with ``role`` and ``content``, or ``conversations`` in the format of ShareGPT
    (``from`` and ``value``), and optionally ``tools`` and ``chat_template_kwargs``. The chat template renders them.

    Other arguments and errors are those of :class:`~lightning_liger.data.ExamplesDataModule`.

    Args:
        train_on: "assistant" trains on the assistant's messages, with the tokens that end them; "last" only on the
            last of them; "all" on every token. Chat templates with {% generation %} mark these messages themselves.
    """

    _fields = ("messages", "conversations")
    _settings_of_tokens = (*_SupervisedDataModule._settings_of_tokens, "train_on")

    def __init__(self, *, train_on: TrainOn = "assistant", **settings: Any) -> None:
        super().__init__(**settings)
        check_choice("data.train_on", train_on, get_args(TrainOn))
        self.train_on: TrainOn = train_on

    @override
    def _tokens(self, record: Record, encoder: Encoder) -> tuple[list[int], list[int]]:
        is_shared = record.has("conversations") and not record.has("messages")
        messages = record.items("conversations" if is_shared else "messages")
        if is_shared:
            messages = [_sharegpt(record, turn) for turn in messages]
        return encoder.conversation(record, record.as_messages("messages", messages), self.train_on)


def _sharegpt(record: Record, turn: Any) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise record.error(f"the field 'conversations' must be a list of objects with 'from' and 'value', got {turn!r}")
    return {"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
