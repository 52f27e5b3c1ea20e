"""The trained tokenizer loses nothing and is reproducible; tokenizers are kept, loaded and refused as documented."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_liger.data import tokenizer as tokenizer_module
from lightning_liger.data.sources import python_library_files
from lightning_liger.data.tokenizer import (
    END_OF_TEXT,
    MIN_VOCAB_SIZE,
    keep_tokenizer,
    load_tokenizer,
    token_blocks,
    tokenizer_files,
    train_bpe_tokenizer,
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
    assert MIN_VOCAB_SIZE < len(train_bpe_tokenizer(["ab ab"], vocab_size=5000)) < MIN_VOCAB_SIZE + 10


@settings(derandomize=True, deadline=None)
@given(text=st.text(), split_special_tokens=st.booleans())
@example(text=f"a {END_OF_TEXT} b  don't , ! it 's ", split_special_tokens=False)
@example(text="\u00a0\u200b\u2028\ufeff cafe\u0301 ﬁ Å 👩‍👩‍👧‍👦 \U0010ffff\ufffe\ue000", split_special_tokens=True)
def test_decoding_gives_back_any_text(tokenizer, text, split_special_tokens):
    ids = tokenizer(text, split_special_tokens=split_special_tokens)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_training_is_deterministic_and_reads_a_bounded_part_spread_over_the_documents(tokenizer, monkeypatch):
    again = train_bpe_tokenizer(iter(DOCUMENTS), vocab_size=300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    documents = [chr(ord("a") + index) * 10 for index in range(16)]
    spread = tokenizer_module._evenly_spaced(iter(documents), max_bytes=45)
    assert spread == documents[::4]
    assert tokenizer_module._evenly_spaced(documents, max_bytes=160) == documents
    assert tokenizer_module._evenly_spaced(["é" * 10], max_bytes=5) == ["éé"]
    monkeypatch.setattr(tokenizer_module, "MAX_TRAINING_BYTES", 45)
    found, expected = (train_bpe_tokenizer(each, 300).backend_tokenizer.to_str() for each in (documents, spread))
    assert found == expected


def test_tokenizer_is_kept_whole_or_not_at_all(tokenizer, tmp_path):
    def fails():
        raise KeyboardInterrupt

    def is_slow():
        keep_tokenizer(tmp_path / "sub" / "kept", lambda: tokenizer)  # another process finishes first
        return train_bpe_tokenizer(["other"], 260)

    with pytest.raises(KeyboardInterrupt):
        keep_tokenizer(tmp_path / "sub" / "kept", fails)
    assert not list((tmp_path / "sub").iterdir())
    for make in (is_slow, lambda: pytest.fail("made again")):
        keep_tokenizer(tmp_path / "sub" / "kept", make)
        assert load_tokenizer(tmp_path / "sub" / "kept").get_vocab() == tokenizer.get_vocab()
        assert [path.name for path in (tmp_path / "sub").iterdir()] == ["kept"]


def test_folders_that_hold_no_usable_tokenizer_are_named(tokenizer, tmp_path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer='.*': expected a folder.*tokenizer\.json"):
        tokenizer_files(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*' has no eos_token"):
        load_tokenizer(tmp_path)


@settings(derandomize=True, deadline=None)
@given(
    documents=st.lists(st.text(min_size=1, max_size=30) | st.just(f"spells {END_OF_TEXT} out"), max_size=9),
    block_size=st.integers(1, 7),
    piece=st.integers(1, 8),
    pieces=st.integers(1, 4),
)
def test_blocks_are_the_documents_end_to_end_each_with_one_end_token(tokenizer, documents, block_size, piece, pieces):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_CHARACTERS", piece)
        patch.setattr(tokenizer_module, "_PIECES_PER_BATCH", pieces)
        blocks = [row["input_ids"].tolist() for row in token_blocks(documents, tokenizer, block_size)]
        whole = [int(row["input_ids"][0]) for row in token_blocks(documents, tokenizer, 1)]
    assert {len(block) for block in blocks} <= {block_size}
    assert [token for block in blocks for token in block] == whole[: len(whole) // block_size * block_size]
    assert tokenizer.decode(whole) == "".join(document + END_OF_TEXT for document in documents)
    assert whole.count(0) == len(documents)
