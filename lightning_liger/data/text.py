"""Text as rows of tokens: documents, each followed by an end-of-text token, end to end, cut into equal blocks.

Results that depend only on the corpus and the tokenizer are computed once and kept in a cache folder:
``train.bin`` and ``validation.bin`` (token ids, two or four bytes each), ``tokenizer/`` and ``metadata.json``.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from liger_ops.arguments import check_bool, check_integer, check_text
from lightning_liger.data.module import Split, TokenizedDataModule, held_out_places, num_held_out
from lightning_liger.data.sources import fingerprints, read_documents, source_files
from lightning_liger.data.tokenizer import load_or_train_tokenizer, write_tokens

_FORMAT_VERSION = 2  # part of the cache key: raise it when the files change for the same settings


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Rows of ``block_size`` consecutive tokens from a flat file of token ids, without the incomplete last row.

    A row is ``{"input_ids": [block_size], "labels": [block_size]}`` in int64. Labels equal the inputs: causal language
    models shift them in the loss. If ``last_token``, the id that ends each document, is given, a row also has
    ``position_ids`` of the same shape, which restart at 0 in each document.
    """

    def __init__(self, file: Path, dtype: str, block_size: int, last_token: int | None = None) -> None:
        self.file, self.dtype, self.block_size, self.last_token = file, dtype, block_size, last_token
        self.tokens = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memmap would hold the whole file.
        return PackedTokens, (self.file, self.dtype, self.block_size, self.last_token)

    def __len__(self) -> int:
        return len(self.tokens) // self.block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index * self.block_size : (index + 1) * self.block_size]
        input_ids = torch.from_numpy(row.astype(np.int64))
        found = {"input_ids": input_ids, "labels": input_ids}  # collating copies both
        if self.last_token is not None:
            places = np.arange(self.block_size)
            starts = np.append(0, np.where(row[:-1] == self.last_token, places[1:], 0))
            found["position_ids"] = torch.from_numpy(places - np.maximum.accumulate(starts))
        return found


class TextDataModule(TokenizedDataModule):
    """Text files as batches for a causal language model, tokenized once and then read from a cache.

    Batches are ``{"input_ids": [batch_size, block_size], "labels": [batch_size, block_size]}`` in int64, with labels
    equal to the inputs (the model's loss shifts them) and no padding. Training rows are shuffled in each epoch,
    depending on ``seed`` and the epoch only, and processes get different rows; validation keeps the order of the text.
    After ``setup`` the tokenizer is ``text_tokenizer``. Checkpoints hold it: ``predict`` continues prompts with the
    tokenizer of the checkpoint and reads no corpus, all else that loads a checkpoint must have the same one.

    Args:
        path: A text file (one document), a .jsonl file (one document a line) or a folder with such files (.txt, .md,
            .rst, .py, .jsonl; hidden ones are skipped). By default the sources of Python's standard library.
        tokenizer: A folder with a Hugging Face tokenizer that has an eos_token. By default a byte-level BPE is trained
            on the training documents.
        vocab_size: The maximum number of tokens of a trained tokenizer. Not used with ``tokenizer``.
        block_size: Tokens per row.
        batch_size: Rows per batch of each process.
        validation_fraction: Fraction of the documents that are held out (of the text, if there is only one document),
            at least one. 0 means no validation data.
        seed: Determines which documents are held out, and the order of the training rows.
        text_field: The key of the text in the lines of a .jsonl file.
        num_workers: Worker processes per training process that load batches. 0 loads them in the training process.
        separate_documents: Whether batches also have ``position_ids``, ``[batch_size, block_size]`` in int64, that
            restart in each document: then attention does not cross documents, and last tokens predict nothing.
        cache_dir: Where tokenized text is kept. By default lightning-liger in $XDG_CACHE_HOME or in ~/.cache.
        max_documents: The maximum number of documents to read. By default all.
        prompt: Text for ``predict`` to continue.

    Raises:
        FileNotFoundError: If there is no text at ``path``, or no tokenizer at ``tokenizer``.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        block_size: int = 1024,
        batch_size: int = 8,
        validation_fraction: float = 0.02,
        seed: int = 42,
        text_field: str = "text",
        num_workers: int = 0,
        separate_documents: bool = False,
        cache_dir: str | Path | None = None,
        max_documents: int | None = None,
        prompt: str | None = None,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            batch_size=batch_size,
            validation_fraction=validation_fraction,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
            prompt=prompt,
        )
        check_integer("data.block_size", block_size, at_least=2)  # a token and the next one
        check_text("data.text_field", text_field)
        check_bool("data.separate_documents", separate_documents)
        check_integer("data.max_documents", max_documents, at_least=1, at_most=sys.maxsize, optional=True)
        source_files(path)  # raises if there is nothing to read
        self.path, self.block_size, self.separate_documents = path, block_size, separate_documents
        self.text_field, self.max_documents = text_field, max_documents
        self.train_data: PackedTokens | None = None
        self.validation_data: PackedTokens | None = None

    @override
    def _write_cache(self, folder: Path) -> dict[str, Any]:
        num_documents = sum(1 for _ in self._documents())
        tokenizer = load_or_train_tokenizer(
            self.tokenizer, lambda: self._split("train", num_documents), self.vocab_size, folder / "tokenizer"
        )
        tokenizer.save_pretrained(folder / "tokenizer")
        dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
        num_tokens = {
            split: write_tokens(folder / f"{split}.bin", self._split(split, num_documents), tokenizer, dtype)
            for split in ("train", "validation")
        }
        return {"dtype": dtype, "num_tokens": num_tokens}

    @override
    def _read_cache(self, folder: Path, metadata: dict[str, Any], stage: str | None) -> None:
        dtype = metadata["dtype"]
        last_token = self._after_setup(self.text_tokenizer).eos_token_id if self.separate_documents else None
        self.train_data = PackedTokens(folder / "train.bin", dtype, self.block_size, last_token)
        if stage in (None, "fit"):
            num_shards = self._shard()["num_replicas"]
            needed_for = f"one batch of data.batch_size={self.batch_size} rows for each of {num_shards} processes"
            self._require_rows("train", self.train_data, self.batch_size * num_shards, needed_for)
        if self.validation_fraction and stage != "predict":
            self.validation_data = PackedTokens(folder / "validation.bin", dtype, self.block_size, last_token)
            needed_for = f"one row (data.validation_fraction={self.validation_fraction})"
            self._require_rows("validation", self.validation_data, 1, needed_for)

    def _require_rows(self, split: Split, data: PackedTokens, num_rows: int, needed_for: str) -> None:
        if len(data) < num_rows:
            raise ValueError(
                f"{self._corpus} has {len(data.tokens)} {split} tokens, but {num_rows * self.block_size} are needed: "
                f"{needed_for}, data.block_size={self.block_size} tokens per row."
            )

    @property
    @override
    def _corpus(self) -> str:
        return "the source code of Python's standard library" if self.path is None else f"data.path={str(self.path)!r}"

    @override
    def _content_settings(self) -> dict[str, Any]:
        return {
            "format": _FORMAT_VERSION,
            "tokenizers": tokenizers.__version__,
            "corpus": fingerprints(source_files(self.path)),
            "tokenizer": self._tokenizer_settings(),
            "text_field": self.text_field,
            "max_documents": self.max_documents,
            "validation_fraction": self.validation_fraction,
            "seed": self.seed,
        }

    def _documents(self) -> Iterator[str]:
        return islice(read_documents(self.path, text_field=self.text_field), self.max_documents)

    def _split(self, split: Split, num_documents: int) -> Iterator[str]:
        """The documents of one split; if there is only one document, it is cut in two."""
        if num_documents == 1:
            (document,) = self._documents()
            cut = len(document) - num_held_out(len(document), self.validation_fraction)
            documents, held_out = iter((document[:cut], document[cut:])), {1}
        else:
            documents = self._documents()
            held_out = held_out_places(num_documents, self.validation_fraction, self.seed)
        for index, document in enumerate(documents):
            if document and (index in held_out) == (split == "validation"):
                yield document
