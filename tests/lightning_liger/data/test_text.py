"""Text: blocks of documents in their order, each in one split, and what a corpus may be."""

import random
from pathlib import Path

import pytest
import torch

from lightning_liger.data import TextDataModule
from lightning_liger.data.tokenizer import END_OF_TEXT
from tests.lightning_liger.data.kinds import WORDS, build, read_lines, ready


@pytest.fixture
def make(tmp_path):
    return lambda **settings: build(tmp_path, TextDataModule, **settings)


def documents(data: TextDataModule, split: str) -> list[str]:
    """The documents of a split, of which the last one may be cut."""
    ids = [token for row in getattr(data, f"{split}_data") for token in row["input_ids"].tolist()]
    return data.text_tokenizer.decode(ids).split(END_OF_TEXT)


def test_batches_are_full_blocks_of_int64_with_labels_equal_to_inputs(make):
    batches = list(ready(make()).train_dataloader())
    for batch in batches:
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_documents_are_in_one_split_in_their_order_and_none_is_lost(make):
    data = ready(make(validation_fraction=0.1, seed=1, block_size=2))
    originals = [line["text"] for line in read_lines(Path(data.path))]
    *train, last = documents(data, "train")
    *held_out, cut = documents(data, "validation")
    train, held_out = [*train, *[last] * bool(last)], [*held_out, *[cut] * bool(cut)]
    assert (len(train), len(held_out)) == (90, 10)
    for found in (train, held_out):
        assert found[:-1] == [each for each in originals if each in found[:-1]]
    assert not set(held_out) & set(train)
    assert len(documents(ready(make(validation_fraction=0.0)), "train")) == 100
    few = ready(make(max_documents=10, validation_fraction=0, validation_path=data.path))
    assert [document.split()[0] for document in documents(few, "train")][:10] == [f"document{i}" for i in range(10)]
    assert len(documents(few, "validation")) == 100


def test_positions_restart_in_each_document(make):
    data = ready(make(separate_documents=True))
    for batch in data.train_dataloader():
        assert set(batch) == {"input_ids", "labels", "position_ids"}
        for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
            expected = [0]
            for token in ids[:-1]:
                expected.append(0 if token == data.text_tokenizer.eos_token_id else expected[-1] + 1)
            assert positions == expected


def test_lone_document_is_cut_by_position(make, tmp_path):
    document = " ".join(random.Random(0).choices(WORDS, k=2000))
    (tmp_path / "book.txt").write_text(document)
    data = ready(make(path=tmp_path / "book.txt", validation_fraction=0.25, block_size=2))
    (train, *_), (held_out, *_) = documents(data, "train"), documents(data, "validation")
    assert document.startswith(train)
    assert document[round(len(document) * 0.75) :].startswith(held_out)
