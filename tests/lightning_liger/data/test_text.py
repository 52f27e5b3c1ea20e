"""Nothing is lost or leaked between splits, ranks and epochs, and the cache is used exactly when it is valid."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pyarrow
import pytest
import torch

from lightning_liger.data import TextDataModule, text
from lightning_liger.data.module import default_cache_dir
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


def stored(data: TextDataModule, split: str) -> list[int]:
    return [token for row in getattr(data, f"{split}_data") for token in row["input_ids"].tolist()]


def documents(data: TextDataModule, split: str) -> list[str]:
    """The documents of a split, of which the last one may be cut."""
    return data.text_tokenizer.decode(stored(data, split)).split(END_OF_TEXT)


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
    assert rows(data.test_dataloader()) == rows(data.val_dataloader()) != []
    assert [token for row in rows(data.val_dataloader()) for token in row] == stored(data, "validation")


def test_documents_are_in_one_split_in_their_order_and_none_is_lost(make, corpus):
    originals = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    splits = []
    for seed in (1, 1, 2):
        data = ready(make(validation_fraction=0.1, seed=seed, block_size=2))
        *train, last = documents(data, "train")
        *held_out, cut = documents(data, "validation")
        train, held_out = [*train, *[last] * bool(last)], [*held_out, *[cut] * bool(cut)]
        assert (len(train), len(held_out)) == (90, 10)
        for found in (train, held_out):
            assert found[:-1] == [each for each in originals if each in found[:-1]]
        assert not set(held_out) & set(train)
        splits.append(held_out)
    assert splits[0] == splits[1] != splits[2]


def test_positions_restart_in_each_document(make):
    data = ready(make(separate_documents=True))
    for batch in data.train_dataloader():
        assert set(batch) == {"input_ids", "labels", "position_ids"}
        for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
            expected = [0]
            for token in ids[:-1]:
                expected.append(0 if token == data.text_tokenizer.eos_token_id else expected[-1] + 1)
            assert positions == expected


def test_at_least_one_document_is_held_out_and_none_if_the_fraction_is_zero(make):
    data = ready(make(validation_fraction=1e-6))
    assert documents(data, "validation")[0].startswith("document")
    data = ready(make(validation_fraction=0.0))
    assert data.val_dataloader() == data.test_dataloader() == []
    assert len(documents(data, "train")) == 100


def test_lone_document_is_cut_by_position(make, tmp_path):
    document = " ".join(random.Random(0).choices(WORDS, k=2000))
    (tmp_path / "book.txt").write_text(document)
    data = ready(make(path=tmp_path / "book.txt", validation_fraction=0.25, block_size=2))
    (train, *_), (held_out, *_) = documents(data, "train"), documents(data, "validation")
    assert document.startswith(train)
    assert document[round(len(document) * 0.75) :].startswith(held_out)


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
    loader.sampler.set_epoch(1)
    second_epoch = rows(loader)
    assert second_epoch != first_epoch
    same.sampler.set_epoch(1)
    assert rows(same) == second_epoch


def test_worker_processes_load_the_same_batches(make):
    assert rows(ready(make(num_workers=1)).train_dataloader()) == rows(ready(make()).train_dataloader())


def test_second_run_reads_the_cache(make, monkeypatch):
    first = ready(make())
    monkeypatch.setattr(text, "read_documents", lambda *_, **__: pytest.fail("the corpus was read again"))
    second = ready(make(batch_size=2, num_workers=1))
    assert second.cache_folder == first.cache_folder
    assert stored(second, "train") == stored(first, "train")
    assert second.text_tokenizer.get_vocab() == first.text_tokenizer.get_vocab()


def test_cache_is_keyed_by_all_that_changes_the_tokens(make, corpus, tmp_path):
    changes = [{}, {"vocab_size": 300}, {"seed": 1}, {"validation_fraction": 0.5}, {"max_documents": 50}]
    changes += [{"text_field": "t"}, {"block_size": 8}]
    folders = [make(**change).cache_folder for change in changes]
    for vocab_size in (300, 280):
        train_bpe_tokenizer(WORDS, vocab_size=vocab_size).save_pretrained(tmp_path / "tokenizer")
        folders.append(make(tokenizer=tmp_path / "tokenizer").cache_folder)
    with corpus.open("a") as lines:
        lines.write(json.dumps({"text": "one more"}) + "\n")
    folders.append(make().cache_folder)
    assert len(set(folders)) == len(folders)


def test_failed_preparation_is_repeated(make, monkeypatch):
    def fail(*_):
        yield {"input_ids": [1] * 16}
        raise OSError("disk full")

    data = make()
    monkeypatch.setattr(text, "token_blocks", fail)
    with pytest.raises(OSError, match="disk full"):
        data.prepare_data()
    with pytest.raises(RuntimeError, match=r"is not complete: call prepare_data\(\) first"):
        make().setup("fit")
    monkeypatch.undo()
    assert rows(ready(data).train_dataloader())


def test_cache_that_is_damaged_is_an_error_that_names_it(make):
    data = ready(make())
    file = next(data.cache_folder.rglob("*-train.arrow"))
    content = file.read_bytes()
    for size in (0, len(content) // 2, len(content) - 100):
        file.write_bytes(content[:size])
        with pytest.raises(RuntimeError, match=rf"{data.cache_folder} cannot be used .*: remove it"):
            ready(make())
    with pyarrow.ipc.open_stream(content) as reader, pyarrow.ipc.new_stream(file, reader.schema) as writer:
        writer.write_table(reader.read_all().slice(0, 3))
    with pytest.raises(RuntimeError, match=rf"\(expected {len(data.train_data)} rows, got 3\): remove it"):
        ready(make())


def test_max_documents_takes_the_first_ones(make):
    data = ready(make(max_documents=10, block_size=2))
    found = [*documents(data, "train"), *documents(data, "validation")]
    names = {document.split()[0] for document in found if document}
    assert names == {f"document{index}" for index in range(10)}


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lightning-liger"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "lightning-liger"


def test_too_little_text_is_reported_with_what_was_found_and_needed(make, tmp_path):
    for num_replicas in (1, 2):
        message = (
            rf"data\.path='.*' has \d+ train rows of data\.block_size=16 tokens, but {2000 * num_replicas} are needed:"
            rf" one batch of data\.batch_size=2000 for each of {num_replicas} processes"
        )
        with pytest.raises(ValueError, match=message):
            ready(make(batch_size=2000), num_replicas)
    (tmp_path / "book.txt").write_text("  \n")
    with pytest.raises(ValueError, match=r"data\.path='.*' holds no text"):
        ready(make(path=tmp_path / "book.txt"))
    (tmp_path / "book.txt").write_text("alpha " * 5000)
    message = (
        r"has no validation rows of data\.block_size=16 tokens, and one is needed: data\.validation_fraction=0\.0001"
    )
    with pytest.raises(ValueError, match=message):
        ready(make(path=tmp_path / "book.txt", validation_fraction=0.0001))


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


def test_checkpoint_state_is_the_tokenizer_and_loads_with_weights_only(make, tmp_path):
    assert make().state_dict() == {}
    data = ready(make())
    torch.save(data.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    ready(make(batch_size=2)).load_state_dict(state)
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
