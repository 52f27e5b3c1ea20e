"""Multiple choice: the prompts of MMLU, and the accuracy that plain log-probabilities give."""

import json
import math
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_liger import LigerMultipleChoice
from lightning_liger.data import MultipleChoiceDataModule
from lightning_liger.data.tokenizer import load_tokenizer
from tests.lightning_liger.post_training.preference_data import sums
from tests.lightning_liger.tiny import quiet_trainer

TOKENIZER = Path(__file__).parents[3] / "examples" / "data" / "tokenizer"
QUESTIONS = [
    {"question": "How much is 2 plus 3?", "choices": ["4", "5"], "answer": "B", "subject": "school_sums"},
    {"question": " Which?", "choices": ["a lamp", "b", "a river", "stone"], "answer": 2},
    {"question": "Where?", "choices": ["near", "far away", "garden"], "answer": 0},
    {"question": "What?", "choices": ["cloud", "bread", "winter"], "answer": 1},
    {"question": "Who?", "choices": ["copper", "the copper", "window"], "answer": 2},
]


@pytest.fixture
def make(tmp_path):
    def build(rows=QUESTIONS, **settings):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        path, defaults = tmp_path / "rows.jsonl", {"tokenizer": TOKENIZER, "cache_dir": tmp_path, "batch_size": 2}
        data = MultipleChoiceDataModule(path=path, validation_path=path, **(defaults | settings))
        data.prepare_data()
        data.setup("validate")
        return data

    return build


def module() -> LigerMultipleChoice:
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    L.seed_everything(1, verbose=False)
    return LigerMultipleChoice(config={**sizes, **heads, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})


def plain_scores(model, tokenizer, prompt: str, answers: list[str]) -> torch.Tensor:
    """The log-probability of each answer after the prompt, without a batch."""
    start = len(tokenizer(prompt)["input_ids"])
    return sums(model, [(torch.tensor(tokenizer(f"{prompt} {answer}")["input_ids"]), start) for answer in answers])


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_accuracy_is_that_of_the_choices_log_probabilities(make, packing):
    data, lm = make(answer_as="text", padding_free=packing), module()
    (logged,) = quiet_trainer(strategy="liger").validate(lm, data, verbose=False)
    reference, tokenizer = lm.model, load_tokenizer(TOKENIZER)
    correct, correct_norm = 0, 0
    with torch.no_grad():
        for row in QUESTIONS:
            scores = plain_scores(reference, tokenizer, f"Question: {row['question'].strip()}\nAnswer:", row["choices"])
            lengths = torch.tensor([len(choice) for choice in row["choices"]])
            answer = "AB".index(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
            correct += int(scores.argmax() == answer)
            correct_norm += int((scores / lengths).argmax() == answer)
    assert 0 < correct < len(QUESTIONS)
    assert correct != correct_norm  # else the test could not tell them apart
    assert logged["val_choice_accuracy"] == correct / len(QUESTIONS)
    assert logged["val_choice_accuracy_norm"] == pytest.approx(correct_norm / len(QUESTIONS))
    assert math.isfinite(logged["val_loss"])


def test_training_learns_the_right_answers_only_and_validation_scores_all(make):
    data = make(batch_size=5)
    (batch,) = data.train_dataloader()
    decode = data.text_tokenizer.decode
    answers = {decode(row[row >= 0]) for row in batch["labels"]}
    assert answers == {" A", " B", " C"}
    rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    prompts = [decode(ids[(labels < 0) & (mask > 0)]) for ids, labels, mask in rows]
    about = "The following are multiple choice questions (with answers) about school sums.\n\n"
    assert f"{about}How much is 2 plus 3?\nA. 4\nB. 5\nAnswer:" in prompts
    assert "Which?\nA. a lamp\nB. b\nC. a river\nD. stone\nAnswer:" in prompts
    (batch,) = data.val_dataloader()
    assert batch["num_questions"] == 5
    assert batch["question_ids"].tolist() == [0] * 2 + [1] * 4 + [2] * 3 + [3] * 3 + [4] * 3
    assert batch["is_answer"].nonzero().flatten().tolist() == [1, 4, 6, 10, 14]
    assert (batch["completion_mask"].sum(1) == 2).all()  # a space and a letter in this small vocabulary


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_questions_whose_choices_do_not_fit_are_left_out(make, truncation):
    rows = [QUESTIONS[1], QUESTIONS[2] | {"question": "long " * 60}, QUESTIONS[3]]
    if truncation == "keep_start":
        with pytest.warns(UserWarning, match="1 of 3 train examples .* dropped"):
            assert len(make(rows, max_length=64, truncation=truncation).train_data) == 2
        return
    data = make(rows, max_length=64, truncation=truncation)
    assert [batch["num_questions"] for batch in data.val_dataloader()] == [2, 1]
    assert all((batch["completion_mask"].sum(1) == 2).all() for batch in data.val_dataloader())
