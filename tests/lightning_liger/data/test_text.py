"""Nothing is lost or leaked between splits, ranks and epochs, and the cache is used exactly when it is valid."""

import json
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_liger.data import TextDataModule, text
from lightning_liger.data.module import default_cache_dir
from lightning_liger.data.text import PackedTokens
from lightning_liger.data.tokenizer import END_OF_TEXT, train_bpe_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A file of 100 documents, each with another first word."""
    generator = random.Random(0)
    documents = [f"document{index} " + " ".join(generator.choices(WORDS, k=60)) for index in range(100)]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    return file


@pytest.fixture
def make(tmp_path, corpus):
    def build(**settings) -> TextDataModule:
        defaults = {
            "path": corpus,
            "cache_dir": tmp_path / "cache",
            "vocab_size": 400,
            "block_size": 16,
            "batch_size": 4,
        }
        return TextDataModule(**{**defaults, **settings})

    return build


def ready(data: TextDataModule, num_replicas: int = 1, rank: int = 0) -> TextDataModule:
    """Prepared and set up as by a Trainer on this rank."""
    sampler_kwargs = {"num_replicas": num_replicas, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler_kwargs, predicting=False)
    data.prepare_data()
    data.setup("fit")
    return data


def rows(batches) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


def documents(data: TextDataModule, split: PackedTokens) -> list[str]:
    return data.text_tokenizer.decode(split.tokens).split(END_OF_TEXT)[:-1]


def test_batches_are_full_blocks_of_int64_with_labels_equal_to_inputs(make):
    data = ready(make())
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_data) // 4 == len(data.train_dataloader())
    for batch in batches:
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_packing_is_lossless(make, corpus):
    data = ready(make())
    originals = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    found = documents(data, data.train_data) + documents(data, data.validation_data)
    assert sorted(found) == sorted(originals)
    for split, loader in ((data.train_data, None), (data.validation_data, data.val_dataloader())):
        batches = loader or [{"input_ids": split[index]["input_ids"][None]} for index in range(len(split))]
        stream = [token for row in rows(batches) for token in row]
        assert stream == split.tokens[: len(stream)].tolist()
        assert 0 <= len(split.tokens) - len(stream) < 16


def test_training_rows_are_all_served_once_an_epoch(make):
    data = ready(make(batch_size=1))
    served = rows(data.train_dataloader())
    stored = [tuple(data.train_data[index]["input_ids"].tolist()) for index in range(len(data.train_data))]
    assert sorted(served) == sorted(stored)
    assert served != stored


def test_splits_are_disjoint_seeded_and_of_the_asked_size(make):
    first, again, other = (ready(make(validation_fraction=0.1, seed=seed)) for seed in (1, 1, 2))
    held_out = documents(first, first.validation_data)
    assert len(held_out) == 10
    assert not set(held_out) & set(documents(first, first.train_data))
    assert documents(again, again.validation_data) == held_out
    assert documents(other, other.validation_data) != held_out


def test_at_least_one_document_is_held_out(make):
    data = ready(make(validation_fraction=1e-6))
    assert len(documents(data, data.validation_data)) == 1


def test_lone_document_is_cut_by_position(make, tmp_path):
    document = " ".join(random.Random(0).choices(WORDS, k=2000))
    (tmp_path / "book.txt").write_text(document)
    data = ready(make(path=tmp_path / "book.txt", validation_fraction=0.25))
    (train,), (held_out,) = documents(data, data.train_data), documents(data, data.validation_data)
    assert train + held_out == document
    assert len(held_out) == round(len(document) * 0.25)


def test_no_validation_data_when_the_fraction_is_zero(make):
    data = ready(make(validation_fraction=0.0))
    assert data.val_dataloader() == data.test_dataloader() == []
    assert len(documents(data, data.train_data)) == 100


def test_test_data_is_the_validation_data(make):
    data = ready(make())
    assert rows(data.test_dataloader()) == rows(data.val_dataloader()) != []


def test_ranks_get_different_rows_and_equally_many_batches(make):
    loaders = [ready(make(), num_replicas=2, rank=rank).train_dataloader() for rank in (0, 1)]
    assert len(loaders[0]) == len(loaders[1]) > 0
    first, second = map(rows, loaders)
    assert len(first) == len(second)
    assert not set(first) & set(second)


def test_without_a_trainer_the_process_group_decides_the_rank(make, monkeypatch):
    data = ready(make())
    data.trainer = None
    assert len(data.train_dataloader().sampler) == len(data.train_data)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert rows(data.train_dataloader()) == rows(ready(make(), num_replicas=2, rank=1).train_dataloader())


def test_order_depends_on_seed_and_epoch_alone(make):
    loader, same, other = (ready(make(seed=seed, validation_fraction=0)).train_dataloader() for seed in (3, 3, 4))
    first_epoch = rows(loader)
    torch.manual_seed(99)
    assert rows(same) == first_epoch != rows(other)
    assert loader.dataset.tokens.tolist() == other.dataset.tokens.tolist()
    loader.sampler.set_epoch(1)
    second_epoch = rows(loader)
    assert second_epoch != first_epoch
    same.sampler.set_epoch(1)
    assert rows(same) == second_epoch


def test_worker_processes_load_the_same_batches(make):
    assert rows(ready(make(num_workers=1)).train_dataloader()) == rows(ready(make()).train_dataloader())


def test_pickled_rows_do_not_carry_the_tokens(tmp_path):
    np.arange(100_000, dtype="uint32").tofile(tmp_path / "tokens.bin")
    data = PackedTokens(tmp_path / "tokens.bin", "uint32", block_size=8)
    assert len(pickle.dumps(data)) < 1000
    assert pickle.loads(pickle.dumps(data))[5]["input_ids"].tolist() == list(range(40, 48))


def test_ids_above_two_bytes_are_stored_whole(make, tmp_path):
    vocabulary = Tokenizer(models.WordLevel({"end": 0, "alpha": 70_000}, unk_token="end"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="end").save_pretrained(tmp_path / "large")
    (tmp_path / "text.txt").write_text("alpha " * 100)
    data = ready(make(path=tmp_path / "text.txt", tokenizer=tmp_path / "large", validation_fraction=0))
    assert data.train_data.tokens.tolist() == [70_000] * 100 + [0]


def test_second_run_reads_the_cache(make, monkeypatch):
    first = ready(make())
    monkeypatch.setattr(text, "read_documents", lambda *_, **__: pytest.fail("the corpus was read again"))
    second = ready(make(block_size=8, batch_size=2))
    assert second.cache_folder == first.cache_folder
    assert second.train_data.tokens.tolist() == first.train_data.tokens.tolist()
    assert second.text_tokenizer.get_vocab() == first.text_tokenizer.get_vocab()


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 300}, {"seed": 1}, {"validation_fraction": 0.5}, {"max_documents": 50}, {"text_field": "t"}],
)
def test_cache_is_keyed_by_settings_that_change_the_tokens(make, change):
    assert make(**change).cache_folder != make().cache_folder


def test_cache_is_keyed_by_the_content_of_corpus_and_tokenizer(make, corpus, tmp_path):
    without_tokenizer = make().cache_folder
    train_bpe_tokenizer(WORDS, vocab_size=300).save_pretrained(tmp_path / "tokenizer")
    before = make(tokenizer=tmp_path / "tokenizer").cache_folder
    train_bpe_tokenizer(WORDS, vocab_size=280).save_pretrained(tmp_path / "tokenizer")
    after = make(tokenizer=tmp_path / "tokenizer").cache_folder
    assert len({without_tokenizer, before, after}) == 3
    with corpus.open("a") as lines:
        lines.write(json.dumps({"text": "one more"}) + "\n")
    assert make().cache_folder != without_tokenizer


def test_failed_preparation_leaves_nothing_behind(make, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    data = make()
    monkeypatch.setattr(text, "write_tokens", fail)
    with pytest.raises(OSError, match="disk full"):
        data.prepare_data()
    assert list(data.cache_dir.iterdir()) == []
    monkeypatch.undo()
    assert rows(ready(data).train_dataloader())


def test_max_documents_takes_the_first_ones(make):
    data = ready(make(max_documents=10))
    found = documents(data, data.train_data) + documents(data, data.validation_data)
    assert sorted(document.split()[0] for document in found) == [f"document{index}" for index in range(10)]


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lightning-liger"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "lightning-liger"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("vocab_size", 256, "an integer of at least 257"),
        ("block_size", 1, "an integer of at least 2"),
        ("batch_size", 0, "an integer of at least 1"),
        ("validation_fraction", 1.0, "a finite number of at least 0 and below 1"),
        ("validation_fraction", -0.1, "a finite number of at least 0 and below 1"),
        ("seed", -1, "an integer of at least 0"),
        ("text_field", "", "a string that is not empty"),
        ("num_workers", -1, "an integer of at least 0"),
        ("max_documents", 0, "an integer of at least 1"),
    ],
)
def test_impossible_arguments_are_named(make, name, value, expected):
    with pytest.raises(ValueError, match=rf"data\.{name} must be {expected}.*, got {value!r}"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["path", "tokenizer"])
def test_missing_paths_are_reported_when_the_module_is_built(make, tmp_path, name):
    with pytest.raises(FileNotFoundError, match=rf"data\.{name}='.*absent'"):
        make(**{name: tmp_path / "absent"})


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_too_little_training_text_is_reported_with_tokens_found_and_needed(make, num_replicas):
    data = make(batch_size=2000)
    needed = 2000 * 16 * num_replicas
    message = rf"data\.path='.*' has \d+ train tokens, but {needed} are needed: .* for each of {num_replicas} processes"
    with pytest.raises(ValueError, match=message):
        ready(data, num_replicas)


def test_too_little_validation_text_is_reported(make, tmp_path):
    (tmp_path / "book.txt").write_text("alpha " * 5000)
    with pytest.raises(ValueError, match=r"has \d validation tokens, but 16 are needed: .*validation_fraction=0\.0001"):
        ready(make(path=tmp_path / "book.txt", validation_fraction=0.0001))


def test_setup_without_preparation_says_what_to_do(make):
    with pytest.raises(RuntimeError, match=r"call prepare_data\(\) first"):
        make().setup("fit")


def test_command_line_builds_it_and_documents_every_argument(corpus):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(TextDataModule, "data")
    settings = parser.parse_object({"data": {"path": str(corpus), "max_documents": 3, "block_size": 32}})
    data = parser.instantiate_classes(settings).data
    assert (data.path, data.max_documents, data.block_size) == (str(corpus), 3, 32)
    undocumented = [a.dest for a in parser._actions if a.dest.startswith("data.") and not (a.help or "").strip()]
    assert undocumented == []


class RecordingModel(L.LightningModule):
    """Learns nothing and remembers the rows of each training epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.epochs: list[list[tuple[int, ...]]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch, batch_idx):
        self.epochs[-1] += rows([batch])
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


@pytest.mark.parametrize("validation_fraction", [0.0, 0.1])
def test_trainer_shuffles_anew_each_epoch(make, tmp_path, validation_fraction):
    data, model = make(validation_fraction=validation_fraction, batch_size=1), RecordingModel()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **quiet).fit(model, data)
    first, second = model.epochs
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer/tokenizer.json", "metadata.json"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_damaged_cache_is_made_again_with_a_warning_that_names_the_file(make, name, damage):
    data = ready(make())
    expected, file = data.train_data.tokens.tolist(), data.cache_folder / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        file.unlink()
    with pytest.raises(RuntimeError, match=rf"{name}.*: call prepare_data\(\) first"):
        make().setup("fit")
    with pytest.warns(UserWarning, match=rf"is damaged and made again: .*{name}"):
        again = ready(make())
    assert again.train_data.tokens.tolist() == expected


def test_file_in_place_of_the_cache_folder_is_replaced(make):
    data = make()
    data.cache_folder.parent.mkdir()
    data.cache_folder.touch()
    with pytest.warns(UserWarning, match="is not a folder"):
        assert rows(ready(data).train_dataloader())


def test_checkpoint_state_is_the_tokenizer_and_loads_with_weights_only(make, tmp_path):
    assert make().state_dict() == {}
    data = ready(make())
    torch.save(data.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    ready(make(block_size=8)).load_state_dict(state)
    fresh = make()
    fresh.load_state_dict(state)
    assert fresh.text_tokenizer.backend_tokenizer.to_str() == data.text_tokenizer.backend_tokenizer.to_str()
    assert fresh.state_dict() == state


@pytest.mark.parametrize("is_loaded_first", [False, True])
def test_checkpoint_of_another_tokenizer_is_refused_with_both_named(make, is_loaded_first):
    state, other = ready(make()).state_dict(), make(vocab_size=300)
    message = r"trained on data\.path='.*' \(300 tokens\) is not the checkpoint's tokenizer, .* \(\d+ tokens\): give"
    if is_loaded_first:
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            ready(other)
        other.teardown("fit")  # as the Trainer calls it: the next run has another checkpoint
        ready(other)
    else:
        with pytest.raises(ValueError, match=message):
            ready(other).load_state_dict(state)
