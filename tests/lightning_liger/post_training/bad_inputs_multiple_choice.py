"""Wrong records and batches of multiple-choice questions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_liger import LigerMultipleChoice
from lightning_liger.data import MultipleChoiceDataModule
from tests.bad_inputs import BadInput
from tests.lightning_liger.tiny import tiny_llama

GOOD: dict[str, Any] = {"question": "a?", "choices": ["b", "c"], "answer": 1}
PLACES = "a number from 0 to 1, or a letter from A to B"


def prepares(changed: dict[str, Any], **settings: Any) -> Callable[[Path], Any]:
    def call(tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        file.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **changed}), encoding="utf-8")
        MultipleChoiceDataModule(path=file, cache_dir=tmp_path, vocab_size=300, **settings).prepare_data()

    return call


def validates(**changed: Any) -> Callable[[], Any]:
    def call() -> None:
        module = LigerMultipleChoice(config={"num_hidden_layers": 1})
        module.model = tiny_llama()
        ids = torch.ones(2, 4, dtype=torch.int64)
        batch = {"input_ids": ids, "completion_mask": ids, "question_ids": ids[0, :2], "is_answer": ids[0, :2] > 0}
        batch |= {"num_characters": ids[0, :2].float(), "num_questions": 1}
        module.validation_step({**batch, **changed}, 0)

    return call


BAD_INPUTS = [
    *(
        BadInput(f"record-{index}", prepares(changed), ("a.jsonl, line 2", *mentions))
        for index, (changed, mentions) in enumerate(
            (
                ({"question": None}, ("'question' is null",)),
                ({"choices": []}, ("'choices'", "not empty")),
                ({"choices": ["b"]}, ("'choices'", "2 to 26 strings")),
                ({"choices": ["b", 5]}, ("'choices'", "2 to 26 strings")),
                ({"answer": None}, ("'answer'", PLACES, "None")),
                ({"answer": 2}, ("'answer'", PLACES, "2")),
                ({"answer": True}, ("'answer'", PLACES, "True")),
                ({"answer": "C"}, ("'answer'", PLACES, "'C'")),
            )
        )
    ),
    BadInput("data-answer_as", prepares({}, answer_as="words"), ("data.answer_as", "'letter', 'text'", "'words'")),
    BadInput("batch-question_ids", validates(question_ids=None), ("'question_ids'", "got")),
    BadInput("batch-num_questions", validates(num_questions=0), ("num_questions", "at least 1", "0")),
    BadInput("batch-is_answer", validates(is_answer=torch.ones(3)), ("is_answer", "each choice", "3")),
]
