"""Data modules of records: what the batches of each format hold, padded and packed, with optional and wrong fields."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from examples.data import make as example_files
from lightning_liger.data import (
    ConversationDataModule,
    PromptCompletionDataModule,
    RolloutDataModule,
    UnpairedFeedbackDataModule,
)
from lightning_liger.data.preference import mismatched
from lightning_liger.data.tokenizer import train_bpe_tokenizer
from tests.lightning_liger.data.kinds import END, EXAMPLES, TEMPLATE, build, only_batch, read_lines, ready
from tests.lightning_liger.tiny import tiny_llama

ALONE = {"batch_size": 1, "validation_fraction": 0}
CHAT = {"chat_template": TEMPLATE, **ALONE}
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def make(tmp_path):
    return lambda *arguments, **settings: build(tmp_path, *arguments, **settings)


def sequences(data, batch, prefix="") -> list[tuple[str, str]]:
    """Prompt and completion of each sequence of a batch, as text."""
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}completion_mask"]
    if f"{prefix}num_sequences" in batch:
        parts = [batch[f"{prefix}sequence_ids"] == index for index in range(batch[f"{prefix}num_sequences"])]
    else:
        parts = [(index, batch[f"{prefix}attention_mask"][index] == 1) for index in range(len(ids))]
    decode = data.text_tokenizer.decode
    return [(decode(ids[part][mask[part] == 0]), decode(ids[part][mask[part] == 1])) for part in parts]


def pairs(data) -> list[tuple[str, str, str]]:
    """Prompt, chosen and rejected of all training examples, sorted."""
    found = []
    for batch in data.train_dataloader():
        rows = sequences(data, batch)
        for (prompt, chosen), (same, rejected) in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True):
            assert prompt == same
            found.append((prompt, chosen, rejected))
    return sorted(found)


def test_pairs_are_those_of_the_file(make):
    records = read_lines(EXAMPLES / "preference.jsonl")
    expected = sorted((each["prompt"], each["chosen"] + END, each["rejected"] + END) for each in records)
    assert pairs(ready(make(validation_fraction=0))) == expected
    trained = ready(make(validation_fraction=0, tokenizer=None, vocab_size=400))
    assert pairs(trained) == expected
    assert len(trained.text_tokenizer) == 400
    assert len(pairs(ready(make(path="preference_conversations.jsonl", **CHAT)))) == len(records)


def test_model_computes_the_same_for_padded_and_packed_pairs(make):
    model = tiny_llama(vocab_size=320, max_position_embeddings=128).eval()
    padded, packed = ready(make(batch_size=2)), ready(make(batch_size=2, padding_free=True, pad_to_multiple_of=32))
    one, two = next(iter(padded.train_dataloader())), next(iter(packed.train_dataloader()))
    assert sequences(padded, one) == sequences(packed, two)
    keys = ("input_ids", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    with torch.no_grad():
        expected = model(input_ids=one["input_ids"], attention_mask=one["attention_mask"]).logits
        found = model(**{key: two[key] for key in keys}, use_cache=False).logits
    assert two["completion_mask"].sum() == one["completion_mask"].sum() > 0
    is_pair = two["sequence_ids"] >= 0
    torch.testing.assert_close(found[is_pair], expected[one["attention_mask"] == 1], rtol=1e-4, atol=1e-4)


def test_shipped_files_are_those_that_the_script_writes(tmp_path):
    example_files.main(tmp_path)
    files = [file for file in sorted(tmp_path.iterdir()) if file.suffix in (".json", ".jsonl")]
    assert len(files) == 9
    for file in files:
        assert file.read_bytes() == (EXAMPLES / file.name).read_bytes(), file.name


def test_prompts_that_fill_max_length_are_left_out_with_a_warning(make):
    lines = [{"prompt": "z" * length, "chosen": "yes", "rejected": "no"} for length in (3, 30, 8, 9)]
    data = make(path=lines, max_length=9, **ALONE)
    data.prepare_data()
    with pytest.warns(UserWarning, match=r"2 of 4 train examples of data\.path=.* are dropped: their first 9 tokens"):
        data.setup("fit")
    assert pairs(data) == sorted([("z" * 3, "yes" + END, "no" + END), ("z" * 8, "y", "n")])
    with pytest.raises(ValueError, match=r"4 of 4 train examples .*no target tokens.*Give a larger data\.max_length"):
        ready(make(path=lines, max_length=3, **ALONE))
    at_end = make(path=lines, max_length=3, truncation="keep_end", **ALONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_end.prepare_data()
        at_end.setup("fit")
    assert pairs(at_end)[0][0] == ""


def test_supervised_examples_without_labels_after_truncation_are_left_out(make):
    lines = [{"prompt": "aaaa", "completion": "b"}, {"prompt": "a", "completion": "bbbbb"}]
    batch = only_batch(ready(make(PromptCompletionDataModule, lines, max_length=4, **ALONE)))
    assert batch["labels"].tolist() == [[-100, *batch["input_ids"][0, 1:].tolist()]]
    late = [{"messages": [*TALK, {"role": "user", "content": "c" * 20}]}, {"messages": TALK}]
    at_end = {**CHAT, "truncation": "keep_end"}
    batch = only_batch(ready(make(ConversationDataModule, late, max_length=12, **at_end)))
    assert (batch["labels"][:, 1:] != -100).any()
    row = ready(make(ConversationDataModule, late[:1], **CHAT)).train_data[0]
    num_left = len(row["input_ids"]) - int(np.flatnonzero(row["loss_mask"])[-1])  # the last one becomes the first
    ready(make(ConversationDataModule, late[:1], max_length=num_left + 1, **at_end))
    with pytest.raises(ValueError, match=r"1 of 1 train examples .* their last"):
        ready(make(ConversationDataModule, late[:1], max_length=num_left, **at_end))


def test_examples_that_a_teachers_tokens_fill_are_left_out(make, tmp_path):
    train_bpe_tokenizer(["other"], 257).save_pretrained(tmp_path / "teacher")  # each byte is a token
    lines = [{"prompt": prompt, "completion": "b"} for prompt in ("a", "Question: What is the answer")]
    settings = {"teacher_tokenizer": tmp_path / "teacher", **ALONE}
    lengths = [len(row["input_ids"]) for row in ready(make(PromptCompletionDataModule, lines, **settings)).train_data]
    data = ready(make(PromptCompletionDataModule, lines, max_length=max(lengths), **settings))
    assert max(lengths) < len(lines[1]["prompt"])
    batch = only_batch(data)
    assert batch["teacher_labels"].shape[1] == 3
    assert (batch["teacher_labels"][:, 1:] >= 0).any()


def test_records_must_agree_in_optional_fields(make):
    line = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with_reference = {**line, "ref_chosen_logps": -1.5, "ref_rejected_logps": -2}
    batch = only_batch(ready(make(path=[with_reference] * 4, validation_fraction=0)))
    assert batch["ref_chosen_logps"].tolist() == [-1.5] * 4
    for lines, problem in (
        ([line, line, with_reference], "line 3: .* this one has the values of 'ref_chosen_logps'"),
        ([with_reference, line, line], "line 2: .* this one lacks the values of 'ref_chosen_logps'"),
    ):
        with pytest.raises(ValueError, match=problem):
            make(path=lines, validation_fraction=0).prepare_data()


ASK, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "Y"), ("assistant", "N"))
)
RENDERED = ("<user>\nQ\n<assistant>\n", f"Y{END}\n", f"N{END}\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, RENDERED),
        ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, RENDERED),
        ({"prompt": "Q", "chosen": [ASK, YES], "rejected": [ASK, NO]}, RENDERED),
        ({"prompt": None, "chosen": [ASK, YES], "rejected": [ASK, NO]}, RENDERED),
        ({"chosen": "1? A: yes", "rejected": "1? A: no"}, ("1? A:", f" yes{END}", f" no{END}")),
        ({"chosen": "1? A: two", "rejected": "1? A: three"}, ("1? A:", f" two{END}", f" three{END}")),
        ({"chosen": "a b", "rejected": "a b c"}, ("a b", END, f" c{END}")),
        ({"chosen": "x é", "rejected": "x ß"}, ("x", f" é{END}", f" ß{END}")),
        ({"chosen": "xy", "rejected": "zy"}, ("", f"xy{END}", f"zy{END}")),
        ({"chosen": "Q", "prompt": "Y", "rejected": "N"}, ("Q", f"Y{END}", f"N{END}")),
    ],
)
def test_prompts_in_all_their_forms(make, line, expected):
    columns = {"prompt": "chosen", "chosen": "prompt"} if line["chosen"] == "Q" else None
    assert pairs(ready(make(path=[line], columns=columns, **CHAT))) == [expected]


def test_triples_have_a_reference(make):
    data = ready(make(path=[{"prompt": "a", "chosen": " b", "rejected": " c", "reference": " d"}], **ALONE))
    assert sequences(data, only_batch(data)) == [("a", f" {text}{END}") for text in "bcd"]


def test_feedback_and_its_mismatched_pairs(make):
    data = ready(make(UnpairedFeedbackDataModule, "feedback.jsonl", validation_fraction=0))
    records = read_lines(EXAMPLES / "feedback.jsonl")
    expected = {(each["prompt"], each["completion"] + END, each["label"]) for each in records}
    loader = data.train_dataloader()
    epochs: list[Any] = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        served, mismatches = set(), {}
        for batch in loader:
            rows = sequences(data, batch)
            served |= {(*row, label) for row, label in zip(rows, batch["label"].tolist(), strict=True)}
            mismatches |= dict(zip(rows, sequences(data, batch, "KL_"), strict=True))
        assert served == expected
        epochs.append(mismatches)
    assert epochs[0] == epochs[1]  # whatever the order
    assert all(own[0] == other[0] for own, other in epochs[0].items())
    assert sum(own != other for own, other in epochs[0].items()) > 40  # some prompts have equal answers


def test_mismatched_pairs_use_each_completion_once_and_no_prompt_has_its_own():
    random = np.random.default_rng(0)
    for _ in range(300):
        size = int(random.integers(1, 30))
        prompts = random.integers(0, random.integers(1, 12), size)
        others = mismatched(prompts, int(random.integers(100)))
        assert sorted(others) == list(range(size))
        most = np.bincount(prompts).max()
        assert (prompts == prompts[others]).sum() == max(0, 2 * most - size)


def test_feedback_of_one_prompt_has_no_mismatched_pairs_and_of_pairs_two_examples_each(make):
    line = {"prompt": "a", "completion": "b", "label": True, "ref_logps": -2.5}
    settings = {"batch_size": 2, "validation_fraction": 0}
    batch = only_batch(ready(make(UnpairedFeedbackDataModule, [line] * 2, **settings)))
    assert batch["ref_logps"].tolist() == [-2.5, -2.5]
    assert batch["KL_completion_mask"].sum() == 0
    lines = [
        {**each, "ref_chosen_logps": -index, "ref_rejected_logps": -100}
        for index, each in enumerate(read_lines(EXAMPLES / "preference.jsonl")[:12])
    ]
    data = ready(make(UnpairedFeedbackDataModule, lines, validation_fraction=0.5, batch_size=6))
    assert (len(data.train_data), len(data.validation_data)) == (12, 12)
    for batch in data.val_dataloader():
        assert batch["label"].tolist() == [True, False] * 3
        assert batch["ref_logps"][1::2].tolist() == [-100] * 3
        assert set(batch["ref_logps"][::2].tolist()) <= {-float(index) for index in range(12)}


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        (
            {"instruction": "Add {input}.", "input": "1, 2"},
            "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
            " response that appropriately completes the request.\n\n### Instruction:\nAdd {input}.\n\n### Input:\n"
            "1, 2\n\n### Response:",
        ),
        (
            {"instruction": "Greet {input}.", "input": ""},
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nGreet {input}.\n\n### Response:",
        ),
    ],
)
def test_alpaca_prompts_are_the_published_ones(make, line, prompt):
    line["output"] = "Hi {input}"
    data = ready(make(PromptCompletionDataModule, [line], **ALONE))
    batch = only_batch(data)
    is_learned, decode = batch["labels"] >= 0, data.text_tokenizer.decode
    assert decode(batch["input_ids"][~is_learned]) == prompt
    assert decode(batch["labels"][is_learned]) == f"Hi {{input}}{END}"
    whole = only_batch(ready(make(PromptCompletionDataModule, [line], completion_only=False, **ALONE)))
    assert torch.equal(whole["labels"], batch["input_ids"])


def test_sharegpt_conversations_are_those_of_messages(make):
    shared = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    batches = [only_batch(ready(make(ConversationDataModule, each, **CHAT))) for each in ([{"messages": TALK}], shared)]
    torch.testing.assert_close(*batches)


def test_advantages_are_those_of_the_group_unless_they_are_given(make):
    for scale in ("group", "none"):
        data = ready(make(RolloutDataModule, "rollouts.jsonl", batch_size=2, scale_rewards=scale))
        batch = next(iter(data.train_dataloader()))
        rewards = batch["rewards"].view(2, 4)
        expected = rewards - rewards.mean(1, keepdim=True)
        expected /= rewards.std(1, keepdim=True) + 1e-4 if scale == "group" else 1
        torch.testing.assert_close(batch["advantages"], expected.flatten())
    line = {"prompt": "a", "completions": ["b", "c"], "advantages": [0.25, -4]}
    batch = only_batch(ready(make(RolloutDataModule, [line], **ALONE)))
    assert batch["advantages"].tolist() == [0.25, -4]
    assert "rewards" not in batch
    alone = {"prompt": "a", "completions": ["b"], "rewards": [3]}
    assert only_batch(ready(make(RolloutDataModule, [alone], **ALONE)))["advantages"].tolist() == [0.0]


def test_sampled_tokens_keep_their_log_probabilities(make):
    line = {"completion_ids": [[7, 8], [9]], "advantages": [[1, 2], [3]], "tool_mask": [[1, 0], [1]]}
    line |= {"sampling_per_token_logps": [[-0.5, -0.25], [-1]]}
    batch = only_batch(ready(make(RolloutDataModule, [line | {"prompt_ids": [5, 6], "rewards": [1, 0]}], **ALONE)))
    for key, rows in line.items():
        assert batch[key].tolist() == [rows[0], [*rows[1], 0]]
    assert batch["prompt_ids"].tolist() == [[5, 6]] * 2
    assert batch["rewards"].tolist() == [1, 0]
    assert batch["tool_mask"].dtype == torch.int64
