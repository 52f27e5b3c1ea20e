"""All data modules: nothing is lost or leaked between splits, ranks, epochs and runs; caches are used when valid."""

import pickle
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path

import lightning as L
import pyarrow
import pytest
import torch

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
    text,
)
from lightning_liger.data.tokenizer import train_bpe_tokenizer
from tests.lightning_liger.data.kinds import (
    EXAMPLES,
    TEMPLATE,
    TOKENIZER,
    WORDS,
    all_rows,
    build,
    ready,
    rows,
    write_corpus,
    write_lines,
)
from tests.lightning_liger.tiny import quiet_trainer


@pytest.fixture(params=[TextDataModule, PreferenceDataModule, TeacherTopKDataModule])
def make(request, tmp_path):
    """Builds data modules of one kind."""

    def kind(**settings):
        if request.param is TeacherTopKDataModule:
            return TeacherTopKDataModule(**{"path": EXAMPLES / "teacher_topk.safetensors", "batch_size": 4} | settings)
        return build(tmp_path, request.param, **settings)

    return kind


@pytest.fixture(params=[TextDataModule, PreferenceDataModule])
def tokenized(request, tmp_path):
    return lambda **settings: build(tmp_path, request.param, **settings)


def test_rows_are_served_once_an_epoch_in_an_order_of_seed_and_epoch(make):
    data = ready(make(validation_fraction=0, batch_size=1))
    loader, same = data.train_dataloader(), data.train_dataloader()
    first = rows(loader)
    assert sorted(first) == sorted(all_rows(data))
    torch.manual_seed(99)
    other = rows(ready(make(validation_fraction=0, batch_size=1, seed=1)).train_dataloader())
    assert rows(same) == first != other
    assert sorted(other) == sorted(first)
    for each in (loader, same):
        each.sampler.set_epoch(1)
    second = rows(loader)
    assert sorted(second) == sorted(first) != second
    assert rows(same) == second != first


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_ranks_get_different_rows_and_equally_many_batches(make, monkeypatch, num_replicas):
    ranks = [ready(make(batch_size=2), num_replicas, rank) for rank in range(num_replicas)]
    served = [rows(data.train_dataloader()) for data in ranks]
    assert len({len(each) for each in served}) == 1 < len(served[0])
    whole = Counter(all_rows(ranks[0]))
    found = Counter(chain.from_iterable(served))
    assert found <= whole
    per_row = len(all_rows(ranks[0])) // len(ranks[0].train_data)  # a pair has two sequences
    assert len(served[0]) == len(ranks[0].train_data) // num_replicas // 2 * 2 * per_row
    data = ranks[0]
    data.trainer = None  # as with Fabric
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_replicas)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert rows(data.train_dataloader()) == served[1]


def test_validation_is_held_out_in_order(make):
    whole = all_rows(ready(make(validation_fraction=0)))
    splits = [ready(make(validation_fraction=0.2, seed=seed, batch_size=1)) for seed in (1, 1, 2)]
    held_out = [rows(data.val_dataloader()) for data in splits]
    assert held_out[0] == held_out[1] != held_out[2]
    if not isinstance(splits[0], TextDataModule):  # whose rows do not end with documents
        assert held_out[0] == [each for each in whole if each in held_out[0]]
        assert sorted(held_out[0] + all_rows(splits[0])) == sorted(whole)
    assert not set(held_out[0]) & set(all_rows(splits[0]))
    assert rows(splits[0].test_dataloader()) == held_out[0]
    assert abs(len(held_out[0]) / len(whole) - 0.2) < 0.03
    assert ready(make(validation_fraction=1e-6)).val_dataloader()
    assert make().val_dataloader() == ready(make(validation_fraction=0)).val_dataloader() == []


def test_validation_may_have_its_own_files(make):
    path = make().path
    data = ready(make(path=path, validation_path=path, batch_size=1))
    assert rows(data.val_dataloader()) == all_rows(data) == all_rows(ready(make(path=path, validation_fraction=0)))


def test_loaders_resume_in_the_middle(make):
    data = ready(make())
    loader, other = data.train_dataloader(), data.train_dataloader()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    left = list(other)
    assert len(left) == len(loader) - 3 > 0
    for batch, expected in zip(left, iterator, strict=True):
        torch.testing.assert_close(batch, expected)


def test_workers_load_the_same_batches_of_rows_that_are_mapped(tokenized):
    data = ready(tokenized())
    assert rows(ready(tokenized(num_workers=1)).train_dataloader()) == rows(data.train_dataloader())
    limit = "max_documents" if isinstance(data, TextDataModule) else "max_records"
    few = ready(tokenized(path=data.path, **{limit: 8}))
    assert abs(len(pickle.dumps(data.train_data)) - len(pickle.dumps(few.train_data))) < 50


def test_second_run_reads_the_cache(tokenized, monkeypatch):
    first = ready(tokenized())
    monkeypatch.setattr(text, "read_documents", lambda *_: pytest.fail("the corpus was read again"))
    monkeypatch.setattr(examples, "read_records", lambda *_: pytest.fail("the corpus was read again"))
    settings = {"batch_size": 2, "num_workers": 1, "prompt": "a"}
    if isinstance(first, PreferenceDataModule):
        settings |= {"max_length": 500, "truncation": "keep_end", "pad_to_multiple_of": 8}
        settings |= {"packing": True, "packing_strategy": "bfd"}
    second = ready(tokenized(**settings, path=first.path))
    assert second.cache_folder == first.cache_folder
    key = "prompt_ids" if "packing" in settings else "input_ids"
    found, expected = ([row[key].tolist() for row in data.train_data] for data in (second, first))
    assert found == expected
    assert second.text_tokenizer.get_vocab() == first.text_tokenizer.get_vocab()


def test_cache_is_keyed_by_all_that_changes_the_tokens(tmp_path):
    pairs, template = tmp_path / "pairs.jsonl", tmp_path / "template.jinja"
    shutil.copy(EXAMPLES / "preference.jsonl", pairs)
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    template.write_text("{{ messages }}")
    corpus = write_corpus(tmp_path)
    shared = [{"seed": 1}, {"validation_fraction": 0.5}, {"validation_path": corpus}, {"tokenizer": None}]
    shared += [{"tokenizer": None, "vocab_size": 300}]
    record_changes = [{"chat_template": template}, {"chat_template_kwargs": {"a": 1}}, {"max_records": 40}]
    packed = {"packing_strategy": "bfd_split"}
    own = {
        TextDataModule: [{"max_documents": 50}, {"text_field": "t"}, {"block_size": 8}, packed],
        PreferenceDataModule: [*record_changes, {"columns": {"chosen": "rejected", "rejected": "chosen"}}],
        UnpairedFeedbackDataModule: [],
        PromptCompletionDataModule: [{"completion_only": False}, {"teacher_tokenizer": TOKENIZER}],
        ConversationDataModule: [{"train_on": "all"}],
        RolloutDataModule: [{"scale_rewards": "none"}],
        MultipleChoiceDataModule: [{"answer_as": "text"}],
    }

    def folders() -> list[Path]:
        base = {"tokenizer": tmp_path / "tokenizer"}
        return [
            build(tmp_path, cls, corpus if cls is TextDataModule else pairs, **base | change).cache_folder
            for cls, changes in own.items()
            for change in [{}, *shared, *changes]
        ]

    first, again = folders(), folders()
    assert first == again
    assert len(set(first)) == len(first)
    with corpus.open("a") as lines, pairs.open("a") as more:
        lines.write('{"text": "one more"}\n')
        more.write("\n")
    template.write_text("{{ messages }}!")
    train_bpe_tokenizer(WORDS, vocab_size=280).save_pretrained(tmp_path / "tokenizer")
    assert not set(folders()) & set(first)


def test_failed_preparation_is_repeated(tmp_path, monkeypatch):
    def fail(*_):
        yield {"input_ids": [1] * 16}
        raise OSError("disk full")

    data = build(tmp_path, TextDataModule)
    monkeypatch.setattr(text, "token_blocks", fail)
    with pytest.raises(OSError, match="disk full"):
        data.prepare_data()
    monkeypatch.undo()
    assert rows(ready(data).train_dataloader())


def test_cache_that_is_damaged_is_an_error_that_names_it(tmp_path):
    data = ready(build(tmp_path, TextDataModule))
    file = next(data.cache_folder.rglob("*-train.arrow"))
    content = file.read_bytes()
    for size in (0, len(content) // 2, len(content) - 100):
        file.write_bytes(content[:size])
        with pytest.raises(RuntimeError, match=rf"{data.cache_folder} is corrupt .*: remove it"):
            ready(build(tmp_path, TextDataModule, data.path))
    with pyarrow.ipc.open_stream(content) as reader, pyarrow.ipc.new_stream(file, reader.schema) as writer:
        writer.write_table(reader.read_all().slice(0, 3))
    with pytest.raises(RuntimeError, match=rf"\(expected {len(data.train_data)} rows, got 3\): remove it"):
        ready(build(tmp_path, TextDataModule, data.path))


def test_too_little_data_and_missing_setup_are_named(tokenized, tmp_path):
    with pytest.raises(RuntimeError, match="DataModule has no data before setup"):
        tokenized().train_dataloader()
    needed = r"has \d+ train .*, but 4000 are needed: one batch of data\.batch_size=2000 for each of 2 processes"
    with pytest.raises(ValueError, match=needed):
        ready(tokenized(batch_size=2000), 2).train_dataloader()
    few = write_lines(tmp_path / "few.jsonl", [{"text": "alpha " * 5000, "chosen": "b", "rejected": "c"}])
    with pytest.raises(ValueError, match=r"has no validation .* with data\.validation_fraction=0\.0001: one is needed"):
        ready(tokenized(path=few, validation_fraction=0.0001))
    with pytest.raises(ValueError, match=r"data\.path='.*' (holds no text|has no train examples: one is needed)"):
        ready(tokenized(path=write_lines(tmp_path / "none.jsonl", [])))


def test_trainer_shuffles_anew_each_epoch(tokenized):
    epochs = [[], []]

    class Recording(L.LightningModule):
        def training_step(self, batch, batch_idx):
            epochs[self.current_epoch].extend(rows([batch]))

        def configure_optimizers(self):
            return None

    quiet_trainer(max_epochs=2).fit(Recording(), tokenized(batch_size=1))
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_checkpoint_state_is_the_tokenizer_and_loads_with_weights_only(tokenized, tmp_path):
    assert tokenized().state_dict() == {}
    data = ready(tokenized(**{"chat_template": TEMPLATE} if tokenized().tokenizer else {}))
    torch.save(data.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    data.load_state_dict(state)
    fresh = tokenized(tokenizer=None)
    fresh.load_state_dict(state)
    assert fresh.text_tokenizer.backend_tokenizer.to_str() == data.text_tokenizer.backend_tokenizer.to_str()
    assert fresh.text_tokenizer.chat_template == data.text_tokenizer.chat_template
    assert fresh.state_dict() == state


def test_checkpoint_of_another_tokenizer_is_refused_with_both_named(tmp_path):
    state, other = ready(build(tmp_path, TextDataModule)).state_dict(), build(tmp_path, TextDataModule, vocab_size=300)
    message = r"trained on data\.path='.*' \(300 tokens\) is not the checkpoint's tokenizer, .* \(\d+ tokens\): give"
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        ready(other)
    other.teardown("fit")  # as the Trainer calls it: the next run has another checkpoint
    ready(other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
