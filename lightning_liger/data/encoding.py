"""Token ids of prompts, completions and conversations.

Strings are tokenized with the tokenizer's special tokens, such as one at the beginning of a sequence, and the
end-of-sequence token follows each completion. Messages are rendered by the chat template, to which nothing is added.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lightning_liger.data.records import Message, Record, Text

TrainOn = Literal["assistant", "last", "all"]
_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoder:
    tokenizer: PreTrainedTokenizerBase
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template; those of a record win over them."""

    def _ids(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        # In one call: tokenizers share several texts among the cores.
        encoded = self.tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)
        return encoded["input_ids"]

    def split(self, record: Record, prompt: Text, completions: Sequence[Text]) -> tuple[list[int], list[list[int]]]:
        """The ids of a prompt, the longest common prefix of it alone and with each completion, and of completions."""
        if len({isinstance(each, str) for each in (prompt, *completions)}) != 1:
            raise record.error("prompt and completions must be either all strings, or all lists of messages")
        if isinstance(prompt, str):
            texts = [prompt, *(f"{prompt}{completion}" for completion in completions)]
            bos, end = self.tokenizer.bos_token, self.tokenizer.eos_token_id
            has_bos = isinstance(bos, str) and texts[-1].startswith(bos)
            alone, *whole = self._ids(texts, add_special_tokens=not has_bos)
            whole = [ids if ids[-1:] == [end] else [*ids, end] for ids in whole]
        else:
            is_open = prompt[-1]["role"] == "assistant"  # the completion goes on with the last message
            mode = {"continue_final_message": True} if is_open else {"add_generation_prompt": True}
            rendered = [self.render(record, prompt, **mode)]
            rendered += [self.render(record, [*prompt, *completion]) for completion in completions]
            alone, *whole = self._ids(rendered)
        length = min(common_prefix(alone, each) for each in whole)
        return whole[0][:length], [each[length:] for each in whole]

    def render(self, record: Record, messages: list[Message], **options: Any) -> Any:
        """The text of messages by the chat template, with the tools and ``chat_template_kwargs`` of the record."""
        if self.tokenizer.chat_template is None:
            raise record.error(
                "messages need a chat template, and the tokenizer has none: give data.chat_template, a file with one"
            )
        own = record.decoded("chat_template_kwargs", dict, "an object")
        tools = record.decoded("tools", list, "a list of JSON schemas") or None
        try:
            options = {**self.chat_template_kwargs, **own, "tokenize": False, **options}
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # a template is a program, and may raise anything
            raise record.error(f"the chat template failed: {error!r}") from error

    def conversation(self, record: Record, messages: list[Message], train_on: TrainOn) -> tuple[list[int], list[int]]:
        """The ids of a conversation, and a mask of the same length: 1 at tokens to learn.

        Without ``{% generation %}`` in the template they are what follows other messages and the generation prompt.
        """
        if train_on == "all":
            (ids,) = self._ids([self.render(record, messages)])
            return ids, [1] * len(ids)
        if not any(message["role"] == "assistant" for message in messages):
            raise record.error("the conversation has no message with the role 'assistant'")
        template = self.tokenizer.chat_template
        if isinstance(template, str) and _MARKS_ASSISTANT.search(template) and self.tokenizer.is_fast:
            options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            encoded = self.render(record, messages, **options)
            ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        else:
            ids, mask = self._masked_by_prefixes(record, messages, train_on == "last")
        if not any(mask):
            raise record.error("the chat template marks no token of an assistant's message")
        if train_on == "last":
            end = len(mask) - mask[::-1].index(1)
            start = end - [*mask[:end][::-1], 0].index(0)
            mask = [int(start <= place < end) for place in range(len(mask))]
        return ids, mask

    def _masked_by_prefixes(
        self, record: Record, messages: list[Message], only_last: bool
    ) -> tuple[list[int], list[int]]:
        whole = self.render(record, messages)
        bounds = []
        assistant_turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index in assistant_turns[-1:] if only_last else assistant_turns:
            before = self.render(record, messages[:index], add_generation_prompt=True) if index else ""
            after = self.render(record, messages[: index + 1])
            if not whole.startswith(before) or not whole.startswith(after):
                raise record.error(
                    f"the chat template renders message {index} differently when other messages follow, so that its"
                    " tokens cannot be found: use a template that marks them with {% generation %}, or"
                    " data.train_on='last' with conversations that end there"
                )
            bounds += [before, after]
        ids, *prefixes = self._ids([whole, *bounds])
        places = [common_prefix(prefix, ids) for prefix in prefixes]
        mask = [0] * len(ids)
        for start, end in zip(places[::2], places[1::2], strict=True):
            mask[start:end] = [1] * (end - start)
        return ids, mask


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of items at the beginning that are equal."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
