"""Rollouts: prompts with sampled completions and their rewards, for policy gradients without generation."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

from liger_ops.arguments import check_choice, shown
from lightning_liger.data.collate import PER_TOKEN_LOG_PROBS, RolloutCollator
from lightning_liger.data.encoding import Encoder
from lightning_liger.data.examples import ExamplesDataModule, first_learned, floats, ids, scored
from lightning_liger.data.records import Record
from lightning_liger.losses.advantages import group_advantages


class RolloutDataModule(ExamplesDataModule):
    """Groups of completions with rewards, as batches of :class:`~lightning_liger.data.RolloutCollator`.

    A record is a group: ``prompt``, a string or a list of messages; ``completions``, a list of the same; and
    ``rewards``, a number for each completion, or ``advantages``, a number for each or a list with one for each of its
    tokens. Instead of texts, ``prompt_ids`` and ``completion_ids`` hold the tokens that were sampled; with them
    ``old_per_token_logps``, ``ref_per_token_logps`` and ``sampling_per_token_logps`` may hold the log-probabilities of
    the tokens of each completion, and ``tool_mask`` a list of 0 for tokens that the policy did not write and 1 for
    others. Groups stay together: ``batch_size`` counts groups. Groups may differ in size.

    Other arguments and errors are those of :class:`~lightning_liger.data.ExamplesDataModule`.

    Args:
        scale_rewards: Advantages of records without them are rewards minus their mean in the group; "group" also
            divides by the standard deviation in the group (GRPO, arXiv:2402.03300), "none" does not (Dr. GRPO,
            arXiv:2503.20783).
    """

    _fields = (
        *("prompt", "completions", "rewards", "advantages", "prompt_ids", "completion_ids", *PER_TOKEN_LOG_PROBS),
        "tool_mask",
    )
    _settings_of_tokens = (*ExamplesDataModule._settings_of_tokens, "scale_rewards")
    _collator_type = RolloutCollator

    def __init__(self, *, scale_rewards: Literal["group", "none"] = "group", **settings: Any) -> None:
        super().__init__(**settings)
        check_choice("data.scale_rewards", scale_rewards, ("group", "none"))
        self.scale_rewards = scale_rewards

    @override
    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        prompt_ids, completions = self._tokens(record, encoder)
        lengths = [len(completion) for completion in completions]
        example = {
            "prompt_ids": ids(prompt_ids),
            "completion_ids": np.concatenate([scored(record, prompt_ids, each) for each in completions]),
            "completion_lengths": ids(lengths),
            **first_learned(len(prompt_ids)),
        }
        if record.has("rewards") or not record.has("advantages"):
            rewards = record.as_numbers("rewards", record.items("rewards"), len(lengths))
            example["rewards"] = floats(rewards)
            scores = torch.tensor(rewards, dtype=torch.float64)
            advantages = group_advantages(scores, len(scores), scale_rewards=self.scale_rewards).tolist()
        if record.has("advantages"):
            advantages = record.items("advantages")
        if any(isinstance(each, list) for each in advantages):
            example["token_advantages"] = _token_values(record, "advantages", lengths)
        else:
            example["advantages"] = floats(record.as_numbers("advantages", advantages, len(lengths)))
        if record.has("tool_mask"):
            mask = _token_values(record, "tool_mask", lengths)
            if not np.isin(mask, (0, 1)).all():
                raise record.error(f"the field 'tool_mask' must have 0 and 1 only, got {shown(mask.tolist())}")
            example["tool_mask"] = mask.astype(np.uint8)
        for key in PER_TOKEN_LOG_PROBS:
            if record.has(key):
                example[key] = _token_values(record, key, lengths)
        yield example

    @staticmethod
    def _tokens(record: Record, encoder: Encoder) -> tuple[list[int], list[list[int]]]:
        if record.has("completion_ids"):
            prompt_ids = record.as_ids("prompt_ids", record.items("prompt_ids"))
            completions = record.items("completion_ids")
            return prompt_ids, [record.as_ids("completion_ids", each) for each in completions]
        texts = [record.text_or_messages("completions", index) for index in range(len(record.items("completions")))]
        return encoder.split(record, record.text_or_messages("prompt"), texts)


def _token_values(record: Record, key: str, lengths: list[int]) -> np.ndarray:
    rows, number = record.items(key), len(lengths)
    if len(rows) != number:
        raise record.error(f"the field {key!r} must have a list for each of {number} completions, got {len(rows)}")
    found = [record.as_numbers(f"{key}[{index}]", row, lengths[index]) for index, row in enumerate(rows)]
    return floats([*chain.from_iterable(found)])
