"""Tokenizers, trained on the corpus, from a folder or from a checkpoint; no code that comes with one is run."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from liger_ops.arguments import check_integer, check_path, wrong_value
from lightning_liger.data.packing import best_fit_decreasing, rows_of
from lightning_liger.hub import TOKENIZER, check_for_repository, is_hub_name, snapshot

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # every byte, so that any text can be encoded, and END_OF_TEXT
MAX_VOCAB_SIZE = 2**24  # for far more, the library that trains them ends the process
MAX_TRAINING_BYTES = 12_000_000  # half a minute of text like Chinese: without spaces, whole clauses count as words
# At most 8 million characters are tokenized at a time: the encodings take about a hundred times the space of the ids.
_PIECE_CHARACTERS = 65_536
_PIECES_PER_BATCH = 128


def train_bpe_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE, deterministically; decoding returns exactly any text that was encoded.

    ``<|endoftext|>`` is its end-of-sequence and padding token and has the id 0.
    """
    check_integer("vocab_size", vocab_size, at_least=MIN_VOCAB_SIZE, at_most=MAX_VOCAB_SIZE)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_evenly_spaced(documents, MAX_TRAINING_BYTES), trainer)
    special = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def pretrained_folder(setting: str, path: str | Path, revision: str | None = None) -> str:
    """The folder of a tokenizer or processor, whose files are downloaded if ``path`` is a name on the Hub."""
    check_path(setting, path)
    check_for_repository(f"{setting}_revision", revision, path)
    if is_hub_name(path):
        return str(snapshot(setting, str(path), *TOKENIZER, revision=revision))
    return os.path.expanduser(path)


def tokenizer_files(path: str | Path, setting: str = "data.tokenizer") -> list[Path]:
    """The files in the folder of a tokenizer, sorted; raises if it is none."""
    folder = pretrained_folder(setting, path)
    files = sorted(file for file in Path(folder).iterdir() if file.is_file()) if os.path.isdir(folder) else []
    if not {"tokenizer.json", "tokenizer_config.json"} & {file.name for file in files}:
        raise FileNotFoundError(
            f"{setting}={str(path)!r}: expected a folder with a Hugging Face tokenizer (tokenizer.json or "
            "tokenizer_config.json), or owner/name of one on the Hub. Without data.tokenizer one is trained on the"
            " text."
        )
    return files


def load_tokenizer(path: str | Path, described: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a Hugging Face tokenizer; in errors it is ``described``, or data.tokenizer with the path."""
    described = described or f"data.tokenizer={str(path)!r}"
    folder = pretrained_folder("data.tokenizer", path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # which types a broken tokenizer.json raises is not documented: KeyError is one
        raise ValueError(f"{described} could not be loaded by AutoTokenizer: {error!r}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{described} has no eos_token, which is needed between documents.")
    return tokenizer


def tokenizer_from_content(content: Any, described: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from the content of its files by their names, as checkpoints hold it."""
    # A name with folders could overwrite files elsewhere.
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and Path(name).name == name not in ("", "..") and isinstance(value, bytes)
        for name, value in content.items()
    ):
        raise wrong_value(described, "file names with the content of each file", content)
    with TemporaryDirectory() as folder:
        for name, value in content.items():
            Path(folder, name).write_bytes(value)
        return load_tokenizer(folder, described)


def same_tokenizer(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether both give the same tokens for every text, and end documents with the same one."""
    return _identity(first) == _identity(second)


def _identity(tokenizer: PreTrainedTokenizerBase) -> Any:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return type(tokenizer), tokenizer.eos_token_id, tokenizer.get_vocab()
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    return tokenizer.eos_token_id, {**definition, "truncation": None, "padding": None}  # settings of the last call


def keep_tokenizer(folder: Path, make: Callable[[], PreTrainedTokenizerBase]) -> None:
    """Saves the tokenizer that ``make`` returns as ``folder``, all of it or nothing, unless the folder exists."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        saved = Path(temporary, "tokenizer")
        make().save_pretrained(saved)
        try:
            os.replace(saved, folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise


def token_blocks(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Full rows of ``block_size`` tokens in int32: the documents, each with an end-of-sequence token, end to end."""
    ids: list[int] = []
    for batch in _encoded(documents, tokenizer):
        for part, _ in batch:
            ids += part
        blocks = np.array(ids[: len(ids) // block_size * block_size], dtype=np.int32).reshape(-1, block_size)
        yield from ({"input_ids": block} for block in blocks)
        ids = ids[blocks.size :]


def packed_documents(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Rows as those of :func:`token_blocks`, of which only longer documents are cut; end-of-sequence tokens fill up."""
    ids: list[int] = []
    pieces: list[np.ndarray] = []
    for batch in chain(_encoded(documents, tokenizer), [[]]):
        for part, ends in batch:
            ids += part
            while len(ids) > block_size or (ends and ids):
                pieces.append(np.array(ids[:block_size], dtype=np.int32))
                ids = ids[block_size:]
        if pieces and (len(pieces) >= 10_000 or not batch):
            for row in rows_of(best_fit_decreasing(np.array([*map(len, pieces)]), block_size)):
                packed = np.concatenate([pieces[place] for place in row])
                yield {
                    "input_ids": np.pad(packed, (0, block_size - len(packed)), constant_values=tokenizer.eos_token_id)
                }
            pieces = []


def _evenly_spaced(documents: Iterable[str], max_bytes: int) -> list[str]:
    """Every n-th document for the smallest power of two n that keeps the total within the limit."""
    kept: list[bytes] = []
    num_bytes, spacing = 0, 1
    for index, document in enumerate(documents):
        if index % spacing == 0:
            kept.append(document.encode()[:max_bytes])
            num_bytes += len(kept[-1])
        while num_bytes > max_bytes:
            kept, spacing = kept[::2], spacing * 2
            num_bytes = sum(map(len, kept))
    return [text.decode(errors="ignore") for text in kept]  # a limit may cut the last character


def _encoded(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[tuple[list[int], bool]]]:
    """Batches of the tokens of pieces of documents, each with whether it ends its document, with the token for that."""
    pieces = _pieces(documents)
    while batch := list(islice(pieces, _PIECES_PER_BATCH)):
        texts, ends = zip(*batch, strict=True)
        # A document that contains the text of a special token is encoded as ordinary characters.
        encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)
        parts = zip(encoded["input_ids"], ends, strict=True)
        yield [(part + [tokenizer.eos_token_id] * is_last, is_last) for part, is_last in parts]


def _pieces(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of bounded length of the documents, each with whether it is the last of its document."""
    for document in documents:
        for start in range(0, len(document), _PIECE_CHARACTERS):
            end = start + _PIECE_CHARACTERS
            yield document[start:end], end >= len(document)
