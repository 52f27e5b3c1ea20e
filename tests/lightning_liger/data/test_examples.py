"""Data modules of records: nothing is lost or mixed between splits, ranks, epochs, batches and layouts."""

import json
import pickle
import shutil
import warnings
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser

from examples.data import make as example_files
from lightning_liger import LigerCausalLM
from lightning_liger.data import (
    ConversationDataModule,
    MultipleChoiceDataModule,
    PreferenceDataModule,
    PromptCompletionDataModule,
    RolloutDataModule,
    TeacherTopKDataModule,
    TextDataModule,
    UnpairedFeedbackDataModule,
    examples,
)
from lightning_liger.data.feedback import mismatched
from tests.lightning_liger.tiny import tiny_llama

EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
TOKENIZER = EXAMPLES / "tokenizer"
FORMATS = [
    (PreferenceDataModule, "preference.jsonl", {}),
    (PreferenceDataModule, "preference_conversations.jsonl", {"chat_template": EXAMPLES / "chat_template.jinja"}),
    (UnpairedFeedbackDataModule, "feedback.jsonl", {}),
    (PromptCompletionDataModule, "completions.jsonl", {}),
    (PromptCompletionDataModule, "alpaca.json", {}),
    (ConversationDataModule, "conversations.jsonl", {"chat_template": EXAMPLES / "chat_template.jinja"}),
    (RolloutDataModule, "rollouts.jsonl", {}),
]


@pytest.fixture
def make(tmp_path):
    def build(cls=PreferenceDataModule, path="preference.jsonl", **settings):
        if isinstance(path, list):
            lines, path = path, tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        defaults = {"path": EXAMPLES / path, "tokenizer": TOKENIZER, "cache_dir": tmp_path / "cache", "batch_size": 4}
        return cls(**{**defaults, **settings})

    return build


def ready(data, num_replicas: int = 1, rank: int = 0, stage: str = "fit"):
    """Prepared and set up as by a Trainer on this rank."""
    sampler_kwargs = {"num_replicas": num_replicas, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler_kwargs, predicting=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.prepare_data()
        data.setup(stage)
    return data


def sequences(data, batch, prefix="") -> list[tuple[str, str]]:
    """Prompt and completion of each sequence of a batch, as text."""
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}completion_mask"]
    if f"{prefix}cu_seq_lens_q" in batch:
        parts = [(batch[f"{prefix}sequence_ids"] == index) for index in range(batch[f"{prefix}num_sequences"])]
    else:
        parts = list(range(len(ids)))
    decode = data.text_tokenizer.decode
    found = []
    for part in parts:
        row, scored = ids[part], mask[part]
        real = batch[f"{prefix}attention_mask"][part] if f"{prefix}attention_mask" in batch else torch.ones_like(row)
        found.append((decode(row[(scored == 0) & (real == 1)]), decode(row[scored == 1])))
    return found


def pairs(data, batches) -> list[tuple[str, str, str]]:
    found = []
    for batch in batches:
        rows = sequences(data, batch)
        half = len(rows) // 2
        for (prompt, chosen), (same, rejected) in zip(rows[:half], rows[half:], strict=True):
            assert prompt == same
            found.append((prompt, chosen, rejected))
    return found


def records(path="preference.jsonl") -> list[dict]:
    return [json.loads(line) for line in (EXAMPLES / path).read_text().splitlines()]


END = "<|endoftext|>"
ALL_PAIRS = [(each["prompt"], each["chosen"] + END, each["rejected"] + END) for each in records()]


def test_pairs_are_served_once_an_epoch_whole_and_in_a_seeded_order(make):
    data = ready(make(validation_fraction=0))
    loader, same = data.train_dataloader(), data.train_dataloader()
    other = ready(make(validation_fraction=0, seed=1)).train_dataloader()
    first = pairs(data, loader)
    assert sorted(first) == sorted(ALL_PAIRS) != first
    assert pairs(data, same) == first != pairs(data, other)
    loader.sampler.set_epoch(1)
    assert sorted(pairs(data, loader)) == sorted(first) != pairs(data, loader)


def test_ranks_get_different_pairs_and_all_of_them(make):
    served = []
    for rank in range(3):
        data = ready(make(batch_size=2, validation_fraction=0), num_replicas=3, rank=rank)
        served.append(pairs(data, data.train_dataloader()))
    assert [len(each) for each in served] == [16, 16, 16]
    assert sorted(chain.from_iterable(served)) == sorted(ALL_PAIRS)
    for rank in range(5):  # 48 pairs leave a rest, which is left out for this epoch
        data = ready(make(batch_size=2, validation_fraction=0), num_replicas=5, rank=rank)
        served.append(pairs(data, data.train_dataloader()))
    assert [len(each) for each in served[3:]] == [8] * 5
    assert len(set(chain.from_iterable(served[3:]))) == 40


def test_validation_is_held_out_in_order_or_a_file(make):
    data = ready(make(validation_fraction=0.2, batch_size=3))
    held_out = pairs(data, data.val_dataloader())
    assert len(held_out) == 10
    assert held_out == [each for each in ALL_PAIRS if each in held_out]
    training = pairs(data, data.train_dataloader())
    assert len(training) == 36  # of 38, in whole batches
    assert not set(training) & set(held_out)
    own = ready(make(validation_path=EXAMPLES / "preference.jsonl", max_records=8))
    assert pairs(own, own.val_dataloader()) == ALL_PAIRS
    assert sorted(pairs(own, own.train_dataloader())) == sorted(ALL_PAIRS[:8])
    assert make().val_dataloader() == ready(make(validation_fraction=0)).val_dataloader() == []


def test_packed_batches_hold_the_pairs_of_padded_ones(make):
    padded, packed = ready(make()), ready(make(packing=True, pad_to_multiple_of=16))
    for one, two in zip(padded.train_dataloader(), packed.train_dataloader(), strict=True):
        assert sequences(padded, one) == sequences(packed, two)
        assert two["input_ids"].shape[1] % 16 == 0
        assert two["input_ids"].shape[1] - one["attention_mask"].sum() < 16


def test_model_computes_the_same_for_padded_and_packed_pairs(make):
    model = tiny_llama(vocab_size=320, max_position_embeddings=128).eval()
    padded, packed = ready(make(batch_size=2)), ready(make(batch_size=2, packing=True, pad_to_multiple_of=32))
    one, two = next(iter(padded.train_dataloader())), next(iter(packed.train_dataloader()))
    keys = ("input_ids", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    with torch.no_grad():
        expected = model(input_ids=one["input_ids"], attention_mask=one["attention_mask"]).logits
        found = model(**{key: two[key] for key in keys}, use_cache=False).logits
    assert two["completion_mask"].sum() == one["completion_mask"].sum() > 0
    of_pairs = two["sequence_ids"] >= 0
    torch.testing.assert_close(found[of_pairs], expected[one["attention_mask"] == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cls", "path", "settings"), FORMATS)
def test_shipped_files_make_batches_and_resume_in_the_middle(make, cls, path, settings):
    data = ready(make(cls, path, batch_size=6, **settings))
    assert len(data.train_data) + len(data.validation_data) == 48
    loader, other = data.train_dataloader(), data.train_dataloader()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    left = list(other)
    assert len(left) == 4
    for batch, expected in zip(left, iterator, strict=True):
        torch.testing.assert_close(batch, expected)


def test_shipped_files_are_those_that_the_script_writes(tmp_path):
    example_files.main(tmp_path)
    files = [file for file in sorted(tmp_path.iterdir()) if file.suffix in (".json", ".jsonl")]
    assert len(files) == 9
    for file in files:
        assert file.read_bytes() == (EXAMPLES / file.name).read_bytes(), file.name


def test_cached_tokens_are_read_again_unless_content_or_settings_change(make, monkeypatch, tmp_path):
    file = tmp_path / "pairs.jsonl"
    shutil.copy(EXAMPLES / "preference.jsonl", file)
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    base = {"path": file, "tokenizer": tmp_path / "tokenizer"}
    first = ready(make(**base))
    folder = first.cache_folder
    changes = [
        {"chat_template": template},
        {"chat_template_kwargs": {"a": 1}},
        {"columns": {"chosen": "rejected", "rejected": "chosen"}},
        {"max_records": 40},
        {"seed": 1},
        {"validation_fraction": 0.5},
        {"validation_path": file},
        {"tokenizer": None},
        {"tokenizer": None, "vocab_size": 300},
        {"cls": UnpairedFeedbackDataModule},
    ]
    folders = {make(**(base | change)).cache_folder for change in changes}
    template.write_text("{{ messages }}!")
    folders.add(make(**base, chat_template=template).cache_folder)
    assert len(folders - {folder}) == len(changes) + 1
    for cls, setting, value in (
        (PromptCompletionDataModule, "completion_only", False),
        (ConversationDataModule, "train_on", "all"),
        (RolloutDataModule, "scale_rewards", "none"),
    ):
        assert make(cls, **base).cache_folder != make(cls, **base, **{setting: value}).cache_folder
    monkeypatch.setattr(examples, "Encoder", lambda *_: pytest.fail("the records were tokenized again"))
    same = {"max_length": 12, "truncation": "keep_end", "packing": True, "pad_to_multiple_of": 8, "batch_size": 2}
    again = ready(make(**base, **same, prompt="a", num_workers=1))
    assert again.cache_folder == folder
    monkeypatch.undo()
    with file.open("a") as lines:
        lines.write(json.dumps({"prompt": "one", "chosen": "more", "rejected": "less"}) + "\n")
    assert make(**base).cache_folder != folder


def test_trained_tokenizer_sees_all_texts_but_the_held_out(make):
    data = ready(make(tokenizer=None, vocab_size=400))
    assert sorted(pairs(data, data.train_dataloader()))[0] in ALL_PAIRS
    assert len(data.text_tokenizer) == 400


def test_prompts_that_fill_max_length_are_left_out_with_one_warning(make):
    lengths = (3, 30, 8, 9)
    lines = [{"prompt": "z" * length, "chosen": "yes", "rejected": "no"} for length in lengths]
    settings = {"batch_size": 1, "validation_fraction": 0}
    data = make(path=lines, max_length=9, **settings)
    data.prepare_data()
    with pytest.warns(UserWarning, match=r"2 of 4 train examples of data\.path=.* are left out: their first 9 tokens"):
        data.setup("fit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("validate")
    served = pairs(data, data.train_dataloader())
    assert sorted(served) == sorted([("z" * 3, "yes" + END, "no" + END), ("z" * 8, "y", "n")])
    with pytest.raises(ValueError, match=r"4 of 4 train examples .*nothing to learn.*Give a larger data\.max_length"):
        ready(make(path=lines, max_length=3, **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_end = make(path=lines, max_length=3, truncation="keep_end", **settings)
        at_end.prepare_data()
        at_end.setup("fit")
    assert sorted(pairs(at_end, at_end.train_dataloader()))[0][0] == ""


def test_supervised_examples_without_labels_after_truncation_are_left_out(make):
    lines = [{"prompt": "aaaa", "completion": "b"}, {"prompt": "a", "completion": "bbbbb"}]
    data = ready(make(PromptCompletionDataModule, lines, max_length=4, batch_size=1, validation_fraction=0))
    (batch,) = data.train_dataloader()
    assert batch["labels"].tolist() == [[-100, *batch["input_ids"][0, 1:].tolist()]]
    template = EXAMPLES / "chat_template.jinja"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    late = [{"messages": [*talk, {"role": "user", "content": "c" * 20}]}, {"messages": talk}]
    settings = {"chat_template": template, "max_length": 12, "batch_size": 1, "validation_fraction": 0}
    at_end = ready(make(ConversationDataModule, late, truncation="keep_end", **settings))
    assert len(at_end.train_data) == 1
    for batch in at_end.train_dataloader():
        assert (batch["labels"][:, 1:] != -100).any()
    row = ready(make(ConversationDataModule, late[:1], **{**settings, "max_length": None})).train_data[0]
    num_left = len(row["input_ids"]) - int(np.flatnonzero(row["loss_mask"])[-1])  # the last one becomes the first
    settings = {**settings, "truncation": "keep_end"}
    ready(make(ConversationDataModule, late[:1], **{**settings, "max_length": num_left + 1}))
    with pytest.raises(ValueError, match=r"1 of 1 train examples .* their last"):
        ready(make(ConversationDataModule, late[:1], **{**settings, "max_length": num_left}))


def test_records_must_agree_in_optional_fields(make):
    line = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with_reference = {**line, "ref_chosen_logps": -1.5, "ref_rejected_logps": -2}
    data = ready(make(path=[with_reference] * 4, validation_fraction=0))
    batch = next(iter(data.train_dataloader()))
    assert batch["ref_chosen_logps"].tolist() == [-1.5] * 4
    for lines, problem in (
        ([line, line, with_reference], "line 3: .* this one has the values of 'ref_chosen_logps'"),
        ([with_reference, line, line], "line 2: .* this one lacks the values of 'ref_chosen_logps'"),
        ([{**line, "ref_chosen_logps": -1}] * 3, "line 1: the field 'ref_rejected_logps' is missing"),
        ([{**line, "ref_chosen_logps": "x", "ref_rejected_logps": 1}] * 3, "line 1: .* must be a finite number"),
    ):
        with pytest.raises(ValueError, match=problem):
            make(path=lines, validation_fraction=0).prepare_data()


def test_triples_have_a_reference(make):
    lines = [{"prompt": "a", "chosen": " b", "rejected": " c", "reference": " d"}] * 4
    data = ready(make(path=lines, validation_fraction=0, batch_size=2))
    batch = next(iter(data.train_dataloader()))
    assert [text for _, text in sequences(data, batch)] == [f" b{END}"] * 2 + [f" c{END}"] * 2 + [f" d{END}"] * 2


def test_prompts_in_all_their_forms(make):
    ask, yes, no = (
        {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "Y"), ("assistant", "N"))
    )
    template = {"chat_template": EXAMPLES / "chat_template.jinja", "validation_fraction": 0, "batch_size": 1}
    expected = ("<user>\nQ\n<assistant>\n", f"Y{END}\n", f"N{END}\n")
    for line in (
        {"prompt": [ask], "chosen": [yes], "rejected": [no]},
        {"chosen": [ask, yes], "rejected": [ask, no]},
        {"prompt": "Q", "chosen": [ask, yes], "rejected": [ask, no]},
        {"prompt": None, "chosen": [ask, yes], "rejected": [ask, no]},
    ):
        data = ready(make(path=[line], **template))
        assert pairs(data, data.train_dataloader()) == [expected]
    for line, found in (
        ({"chosen": "Q: 1? A: yes", "rejected": "Q: 1? A: no"}, ("Q: 1? A:", f" yes{END}", f" no{END}")),
        ({"question": "Q", "good": "Y", "bad": "N"}, ("Q", f"Y{END}", f"N{END}")),
    ):
        columns = {"prompt": "question", "chosen": "good", "rejected": "bad"} if "good" in line else None
        data = ready(make(path=[line], validation_fraction=0, batch_size=1, columns=columns))
        assert pairs(data, data.train_dataloader()) == [found]


def test_feedback_and_its_mismatched_pairs(make):
    data = ready(make(UnpairedFeedbackDataModule, "feedback.jsonl", validation_fraction=0))
    expected = {(each["prompt"], each["completion"] + END, each["label"]) for each in records("feedback.jsonl")}
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


def test_feedback_of_one_prompt_has_no_mismatched_pairs(make):
    with_log_probs = [{"prompt": "a", "completion": "b", "label": True, "ref_logps": -2.5}] * 2
    batch = next(
        iter(
            ready(
                make(UnpairedFeedbackDataModule, with_log_probs, batch_size=2, validation_fraction=0)
            ).train_dataloader()
        )
    )
    assert batch["ref_logps"].tolist() == [-2.5, -2.5]
    assert batch["KL_completion_mask"].sum() == 0


def test_pairs_become_feedback(make):
    lines = [{**each, "ref_chosen_logps": -index, "ref_rejected_logps": -100} for index, each in enumerate(records())]
    data = ready(make(UnpairedFeedbackDataModule, lines[:12], validation_fraction=0.5, batch_size=6))
    assert (len(data.train_data), len(data.validation_data)) == (12, 12)
    for batch in data.val_dataloader():
        assert batch["label"].tolist() == [True, False] * 3
        assert batch["ref_logps"][1::2].tolist() == [-100] * 3
        assert set(batch["ref_logps"][::2].tolist()) <= {-float(index) for index in range(12)}


def test_alpaca_prompts_are_the_published_ones(make):
    lines = [
        {"instruction": "Add {input}.", "input": "1, 2", "output": "3"},
        {"instruction": "Greet {input}.", "input": "", "output": "Hi {input}"},
    ]
    data = ready(make(PromptCompletionDataModule, lines, batch_size=2, validation_fraction=0))
    (batch,) = data.train_dataloader()
    texts = {}
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        prompt, _, rest = data.text_tokenizer.decode(ids).partition("### Response:")
        texts[data.text_tokenizer.decode(labels[labels >= 0])] = (
            prompt,
            rest.removesuffix(END * (rest.count(END) - 1)),
        )
    assert texts == {
        f"3{END}": (
            "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
            " response that appropriately completes the request.\n\n### Instruction:\nAdd {input}.\n\n### Input:\n"
            "1, 2\n\n",
            f"3{END}",
        ),
        f"Hi {{input}}{END}": (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nGreet {input}.\n\n",
            f"Hi {{input}}{END}",
        ),
    }


def test_prompts_are_learned_if_asked(make):
    lines = [{"prompt": "abc", "completion": "d"}]
    data = ready(make(PromptCompletionDataModule, lines, completion_only=False, batch_size=1, validation_fraction=0))
    (batch,) = data.train_dataloader()
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_sharegpt_conversations_are_those_of_messages(make):
    talk = [("user", "a"), ("assistant", "b")]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]}]
    shared = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    settings = {"chat_template": EXAMPLES / "chat_template.jinja", "batch_size": 1, "validation_fraction": 0}
    batches = [
        next(iter(ready(make(ConversationDataModule, each, **settings)).train_dataloader())) for each in (lines, shared)
    ]
    torch.testing.assert_close(*batches)


def test_advantages_are_those_of_the_group_unless_they_are_given(make):
    data = ready(make(RolloutDataModule, "rollouts.jsonl", batch_size=2))
    batch = next(iter(data.train_dataloader()))
    rewards = batch["rewards"].view(2, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"], expected.flatten())
    unscaled = ready(make(RolloutDataModule, "rollouts.jsonl", batch_size=2, scale_rewards="none"))
    batch = next(iter(unscaled.train_dataloader()))
    torch.testing.assert_close(batch["advantages"].view(2, 4), rewards - rewards.mean(1, keepdim=True))
    line = {"prompt": "a", "completions": ["b", "c"], "advantages": [0.25, -4]}
    given = ready(make(RolloutDataModule, [line], batch_size=1, validation_fraction=0))
    batch = next(iter(given.train_dataloader()))
    assert batch["advantages"].tolist() == [0.25, -4]
    assert "rewards" not in batch
    alone = {"prompt": "a", "completions": ["b"], "rewards": [3]}
    batch = next(iter(ready(make(RolloutDataModule, [alone], batch_size=1, validation_fraction=0)).train_dataloader()))
    assert batch["advantages"].tolist() == [0.0]


def test_sampled_tokens_keep_their_log_probabilities(make):
    line = {
        "prompt_ids": [5, 6],
        "completion_ids": [[7, 8], [9]],
        "advantages": [[1, 2], [3]],
        "sampling_per_token_logps": [[-0.5, -0.25], [-1]],
        "tool_mask": [[1, 0], [1]],
    }
    data = ready(make(RolloutDataModule, [line], batch_size=1, validation_fraction=0))
    (batch,) = data.train_dataloader()
    assert batch["completion_ids"].tolist() == [[7, 8], [9, 0]]
    assert batch["advantages"].tolist() == [[1, 2], [3, 0]]
    assert batch["sampling_per_token_logps"].tolist() == [[-0.5, -0.25], [-1, 0]]
    assert batch["tool_mask"].tolist() == [[1, 0], [1, 0]]
    assert batch["tool_mask"].dtype == torch.int64


def test_checkpoints_hold_the_tokenizer_with_its_chat_template(make):
    data = ready(make(chat_template=EXAMPLES / "chat_template.jinja"))
    state = pickle.loads(pickle.dumps(data.state_dict()))
    other = make(tokenizer=None)
    other.load_state_dict(state)
    assert other.text_tokenizer.chat_template == (EXAMPLES / "chat_template.jinja").read_text()


def test_too_few_examples_and_missing_preparation_are_named(make, tmp_path):
    with pytest.raises(RuntimeError, match="call prepare_data"):
        make(cache_dir=tmp_path / "other").setup("fit")
    with pytest.raises(RuntimeError, match="PreferenceDataModule has no data before setup"):
        make().train_dataloader()
    with pytest.raises(ValueError, match=r"has 47 train examples, but 48 are needed: one batch of data.batch_size=16"):
        ready(make(batch_size=16), num_replicas=3)
    line = records()[0]
    with pytest.raises(ValueError, match=r"no validation examples, and one is needed: data\.validation_fraction=0\.02"):
        ready(make(path=[line], batch_size=1))
    with pytest.raises(ValueError, match="has no train examples, and one is needed"):
        make(path=[]).prepare_data()


@pytest.mark.parametrize("packing", [False, True])
def test_finished_module_trains_on_supervised_batches(make, packing, tmp_path):
    data = make(
        ConversationDataModule, "conversations.jsonl", chat_template=EXAMPLES / "chat_template.jinja", packing=packing
    )
    config = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LigerCausalLM(model_type="llama", config=config)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        limit_val_batches=1,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(model, data)
    assert trainer.callback_metrics["train_loss"] > 0
    assert trainer.global_step == 2


def test_yaml_takes_the_arguments_of_all_modules_and_documents_them():
    classes = [*{cls for cls, _, _ in FORMATS}, TeacherTopKDataModule, TextDataModule, MultipleChoiceDataModule]
    for cls in sorted(classes, key=lambda each: each.__name__):
        parser = LightningArgumentParser()
        parser.add_lightning_class_args(cls, "data")
        given = parser.parse_args(["--data.path=a.jsonl", "--data.batch_size=2", "--data.validation_fraction=0.5"]).data
        assert (given.path, given.batch_size, given.validation_fraction) == ("a.jsonl", 2, 0.5)
        assert given.tokenizer is None
        for action in parser._actions:
            assert not action.dest.startswith("data.") or (action.help or "").strip(), (cls, action.dest)


def test_pickled_examples_do_not_carry_the_tokens(make):
    sizes = []
    for max_records in (8, 48):
        data = ready(make(max_records=max_records)).train_data
        copy = pickle.loads(pickle.dumps(data))
        assert all(np.array_equal(copy[5][key], value) for key, value in data[5].items())
        sizes.append(len(pickle.dumps(data)))
    assert abs(sizes[1] - sizes[0]) < 50
