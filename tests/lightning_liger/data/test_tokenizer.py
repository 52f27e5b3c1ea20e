"""The trained tokenizer loses nothing and is reproducible; tokenizers are kept, loaded and refused as documented."""

import json

import numpy as np
import pytest

from lightning_liger.data import tokenizer as tokenizer_module
from lightning_liger.data.sources import python_library_files
from lightning_liger.data.tokenizer import (
    END_OF_TEXT,
    MIN_VOCAB_SIZE,
    atomic_folder,
    load_or_train_tokenizer,
    load_tokenizer,
    tokenizer_files,
    train_bpe_tokenizer,
    write_tokens,
)

DOCUMENTS = ["def add(a, b):\n    return a + b\n" * 3, "class Adder:\n    def add(self, a):\n        return a\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe_tokenizer(DOCUMENTS, vocab_size=300)


def test_vocabulary_has_the_asked_size_and_one_special_token():
    documents = [file.read_text(encoding="utf-8") for file in python_library_files()[:20]]
    tokenizer = train_bpe_tokenizer(documents, vocab_size=2000)
    assert len(tokenizer) == 2000
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.eos_token_id == 0
    assert len(tokenizer("import argparse")["input_ids"]) < len("import argparse") / 2


def test_vocabulary_is_smaller_when_there_is_nothing_left_to_merge():
    assert MIN_VOCAB_SIZE < len(train_bpe_tokenizer(["ab ab"], vocab_size=5000)) < MIN_VOCAB_SIZE + 10


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(" leading,  double and trailing  ", id="spaces"),
        pytest.param("\t\r\n\n \x00\x7f\u00a0\u200b\u2028\ufeff", id="controls"),
        pytest.param("cafe\u0301 ﬁ Å Å ﷺ", id="no normalisation"),
        pytest.param("日本語 עברית हिन्दी 👩‍👩‍👧‍👦🏳️‍🌈", id="scripts and joined emoji"),
        pytest.param("\U0010ffff\ufffe\ue000", id="unassigned"),
        pytest.param(f"a {END_OF_TEXT} b", id="special token"),
        pytest.param("don't  . , ! ?  it 's", id="clean-up"),
    ],
)
@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_decoding_gives_back_any_text(tokenizer, text, split_special_tokens):
    ids = tokenizer(text, split_special_tokens=split_special_tokens)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_training_is_deterministic(tokenizer):
    again = train_bpe_tokenizer(iter(DOCUMENTS), vocab_size=300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_training_reads_a_bounded_part_spread_over_the_documents(monkeypatch):
    documents = [chr(ord("a") + index) * 10 for index in range(16)]
    spread = tokenizer_module._evenly_spaced(iter(documents), max_bytes=45)
    assert spread == documents[::4]
    assert tokenizer_module._evenly_spaced(documents, max_bytes=160) == documents
    assert tokenizer_module._evenly_spaced(["é" * 10], max_bytes=5) == ["éé"]
    monkeypatch.setattr(tokenizer_module, "MAX_TRAINING_BYTES", 45)
    assert (
        train_bpe_tokenizer(documents, 300).backend_tokenizer.to_str()
        == train_bpe_tokenizer(spread, 300).backend_tokenizer.to_str()
    )


def test_too_small_vocabulary_is_an_error():
    with pytest.raises(ValueError, match=r"vocab_size must be an integer of at least 257 .*, got 256"):
        train_bpe_tokenizer(DOCUMENTS, vocab_size=256)


def test_trained_tokenizer_is_kept_and_not_trained_again(tmp_path):
    first = load_or_train_tokenizer(None, lambda: DOCUMENTS, 300, tmp_path / "kept")
    again = load_or_train_tokenizer(None, lambda: pytest.fail("trained again"), 300, tmp_path / "kept")
    assert again.get_vocab() == first.get_vocab()
    assert (again.eos_token_id, again.pad_token_id) == (0, 0)


def test_given_tokenizer_is_loaded_and_nothing_is_trained_or_kept(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "given")
    loaded = load_or_train_tokenizer(tmp_path / "given", lambda: pytest.fail("trained"), 300, tmp_path / "kept")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert not (tmp_path / "kept").exists()


def test_tokenizer_folder_is_checked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer='.*absent': expected a folder.*tokenizer\.json"):
        tokenizer_files(tmp_path / "absent")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer='.*': expected a folder.*tokenizer\.json"):
        tokenizer_files(tmp_path)


@pytest.mark.parametrize("content", ["{}", "not json"])
def test_broken_tokenizer_is_reported_with_its_path(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*' could not be loaded by AutoTokenizer"):
        load_tokenizer(tmp_path)


def test_tokenizer_without_end_of_sequence_token_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*' has no eos_token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("piece_characters", [7, 1000])  # documents below, at and above a piece; each in one piece
def test_written_tokens_are_the_documents_each_with_one_end_token(tokenizer, tmp_path, monkeypatch, piece_characters):
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", piece_characters)
    monkeypatch.setattr(tokenizer_module, "_PIECES_PER_BATCH", 3)
    documents = ["short", "exactly", "twice as long:", "日本語" * 20, f"spells {END_OF_TEXT} out"]
    num_tokens = write_tokens(tmp_path / "tokens.bin", documents, tokenizer, "uint16")
    tokens = np.fromfile(tmp_path / "tokens.bin", dtype="uint16")
    assert len(tokens) == num_tokens
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    assert ends[-1] == num_tokens - 1
    assert [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]] == [
        document + END_OF_TEXT for document in documents
    ]


def test_atomic_folder_appears_only_when_complete(tmp_path):
    with atomic_folder(tmp_path / "sub" / "done") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "sub" / "done").exists()
    assert (tmp_path / "sub" / "done" / "file").read_text() == "content"
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["done"]


def test_atomic_folder_leaves_nothing_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "sub" / "done") as folder:
        (folder / "file").write_text("half")
        raise KeyboardInterrupt
    assert list((tmp_path / "sub").iterdir()) == []


def test_atomic_folder_keeps_what_another_process_finished_first(tmp_path):
    with atomic_folder(tmp_path / "done") as slow:
        (slow / "file").write_text("slow")
        with atomic_folder(tmp_path / "done") as fast:
            (fast / "file").write_text("fast")
    assert (tmp_path / "done" / "file").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["done"]
