"""Text as rows of tokens: documents, each followed by an end-of-text token, end to end, cut into equal blocks.

Results that depend only on the corpus and the tokenizer are computed once and kept in a cache folder:
``train.bin`` and ``validation.bin`` (token ids, two or four bytes each), ``tokenizer/`` and ``metadata.json``.
"""

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning as L
import numpy as np
import tokenizers
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops.arguments import (
    check_bool,
    check_integer,
    check_number,
    check_path,
    check_text,
    shown,
    wrong_type,
    wrong_value,
)
from lightning_liger.data.sources import fingerprints, read_documents, source_files
from lightning_liger.data.tokenizer import (
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    atomic_folder,
    load_or_train_tokenizer,
    load_tokenizer,
    same_tokenizer,
    tokenizer_files,
    tokenizer_from_content,
    write_tokens,
)
from lightning_liger.resuming.dataloader import resumable

Split = Literal["train", "validation"]
_T = TypeVar("_T")

_MAX_SEED = 2**63 - 1  # the epoch is added, and the sum must fit torch's 64 bits
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


class TextDataModule(L.LightningDataModule):
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
        super().__init__()
        check_integer("data.vocab_size", vocab_size, at_least=MIN_VOCAB_SIZE, at_most=MAX_VOCAB_SIZE)
        check_integer("data.block_size", block_size, at_least=2)  # a token and the next one
        check_integer("data.batch_size", batch_size, at_least=1)
        check_number("data.validation_fraction", validation_fraction, at_least=0, below=1)
        check_integer("data.seed", seed, at_least=0, at_most=_MAX_SEED)
        check_text("data.text_field", text_field)
        check_integer("data.num_workers", num_workers, at_least=0)
        check_bool("data.separate_documents", separate_documents)
        check_integer("data.max_documents", max_documents, at_least=1, at_most=sys.maxsize, optional=True)
        _check_cache_dir(cache_dir)
        _check_prompt(prompt)
        source_files(path)  # raises if there is nothing to read
        if tokenizer is not None:
            tokenizer_files(tokenizer)  # raises if it is not a tokenizer's folder
        self.path, self.tokenizer, self.vocab_size = path, tokenizer, int(vocab_size)
        self.block_size, self.batch_size, self.num_workers = block_size, batch_size, num_workers
        self.separate_documents = separate_documents
        self.validation_fraction, self.seed = float(validation_fraction), int(seed)
        self.text_field, self.max_documents, self.prompt = text_field, max_documents, prompt
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.text_tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizer_state: dict[str, Any] = {}
        self._loaded_state: dict[str, Any] = {}
        self.train_data: PackedTokens | None = None
        self.validation_data: PackedTokens | None = None

    @property
    def cache_folder(self) -> Path:
        """The folder for this corpus and these settings; its name is a hash of all that determines its content."""
        return self.cache_dir / hashlib.sha256(json.dumps(self._content_settings()).encode()).hexdigest()[:20]

    @override
    def prepare_data(self) -> None:
        if not self._predicts:
            self._prepare_cache()

    @override
    def setup(self, stage: str | None = None) -> None:
        if self._predicts:  # the checkpoint, which is loaded later, may have the tokenizer
            self._require_prompt()
            return
        folder, dtype = self._take_tokenizer()
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

    @override
    def teardown(self, stage: str) -> None:
        self._loaded_state = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        """The tokenizer: the content of its files by name, and where it comes from. Empty before ``setup``."""
        return dict(self._tokenizer_state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the tokenizer of a checkpoint, to predict or before ``setup``; else compares it with this one.

        Raises:
            ValueError: If it is not the tokenizer of this data module.
        """
        if not isinstance(state_dict, dict):
            raise wrong_type("state_dict", "a dict, as state_dict() returns", state_dict)
        if not state_dict:
            return
        self._loaded_state = state_dict
        if self.text_tokenizer is None or self._predicts:
            loaded = tokenizer_from_content(state_dict.get("tokenizer"), "the checkpoint's tokenizer")
            if self.tokenizer is not None:
                self._compare_tokenizers(load_tokenizer(self.tokenizer), loaded)
            self.text_tokenizer, self._tokenizer_state = loaded, state_dict
        else:
            self._compare_with_loaded(self.text_tokenizer)

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        # Lightning keeps a DistributedSampler and sets its epoch. The sampler that it would add itself takes its seed
        # from the environment.
        train_data = self._after_setup(self.train_data)
        sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(
            train_data, **self._shard(), shuffle=True, seed=self.seed, drop_last=True
        )
        return resumable(self._dataloader(train_data, sampler=sampler, drop_last=True))

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """All validation rows in order; the last batch may be smaller. An empty list without validation data.

        Lightning divides the rows over several processes, and repeats a few of them if they do not divide evenly.
        """
        return [] if self.validation_data is None else self._dataloader(self.validation_data)

    @override
    def test_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """The validation data."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """``prompt`` as one row, encoded by the checkpoint's tokenizer.

        Without a checkpoint, and with one that holds no tokenizer, by that of ``tokenizer`` or the corpus.

        Raises:
            ValueError: If there is no prompt, or it has no tokens.
        """
        prompt = self._require_prompt()
        if self._predicts and self.text_tokenizer is None:
            self._prepare_cache()
            self._take_tokenizer()
        if self.trainer is not None and self.trainer.ckpt_path and not self._loaded_state:
            rank_zero_warn(
                f"{self.trainer.ckpt_path} holds no tokenizer: the prompt is encoded with {self._tokenizer_source}."
            )
        tokenizer = self._after_setup(self.text_tokenizer)
        input_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not input_ids:
            raise wrong_value("data.prompt", "a text that has tokens", prompt)
        prompts: Any = [{"input_ids": torch.tensor(input_ids)}]  # a list is a map-style dataset
        return DataLoader(prompts, batch_size=1)

    def _require_prompt(self) -> str:
        if not self.prompt:
            raise wrong_value("data.prompt", "the text that predict continues", self.prompt)
        return self.prompt

    @property
    def _predicts(self) -> bool:
        """Whether a Trainer runs ``predict``, which needs a tokenizer but no corpus."""
        return self.trainer is not None and self.trainer.predicting

    def _prepare_cache(self) -> None:
        destination = self.cache_folder
        if (problem := _problem_of_cache(destination)) is None:
            return
        if os.path.lexists(destination):
            rank_zero_warn(f"{destination} is damaged and made again: {problem}")
            shutil.rmtree(destination) if destination.is_dir() else destination.unlink()
        rank_zero_info(f"Tokenizing {self._corpus} into {destination}")
        num_documents = sum(1 for _ in self._documents())
        with atomic_folder(destination) as folder:
            tokenizer = load_or_train_tokenizer(
                self.tokenizer, lambda: self._split("train", num_documents), self.vocab_size, folder / "tokenizer"
            )
            tokenizer.save_pretrained(folder / "tokenizer")
            dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
            num_tokens = {
                split: write_tokens(folder / f"{split}.bin", self._split(split, num_documents), tokenizer, dtype)
                for split in ("train", "validation")
            }
            metadata = {
                "dtype": dtype,
                "num_tokens": num_tokens,
                "file_sizes": _file_sizes(folder),
                "settings": self._content_settings(),
            }
            (folder / "metadata.json").write_text(json.dumps(metadata, indent=1), encoding="utf-8")

    def _take_tokenizer(self) -> tuple[Path, str]:
        """Loads the tokenizer of the cache; returns the cache folder and the dtype of its tokens."""
        folder = self.cache_folder
        if (problem := _problem_of_cache(folder)) is not None:
            raise RuntimeError(f"{problem}: call prepare_data() first, and do not change the corpus.")
        dtype = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["dtype"]
        tokenizer = load_tokenizer(folder / "tokenizer", self._tokenizer_source)
        if self._loaded_state:
            self._compare_with_loaded(tokenizer)
        self.text_tokenizer = tokenizer
        content = {file.name: file.read_bytes() for file in tokenizer_files(folder / "tokenizer")}
        self._tokenizer_state = {"tokenizer": content, "source": self._tokenizer_source}
        return folder, dtype

    @property
    def _tokenizer_source(self) -> str:
        if self.tokenizer is not None:
            return f"data.tokenizer={str(self.tokenizer)!r}"
        return f"a tokenizer trained on {self._corpus}"

    def _compare_with_loaded(self, own: PreTrainedTokenizerBase) -> None:
        loaded = tokenizer_from_content(self._loaded_state.get("tokenizer"), "the checkpoint's tokenizer")
        self._compare_tokenizers(own, loaded)

    def _compare_tokenizers(self, own: PreTrainedTokenizerBase, loaded: PreTrainedTokenizerBase) -> None:
        if not same_tokenizer(own, loaded):
            raise ValueError(
                f"{self._tokenizer_source} ({len(own)} tokens) is not the checkpoint's tokenizer, "
                f"{self._loaded_state.get('source')} ({len(loaded)} tokens): give the data settings that the model was "
                "trained with, or as data.tokenizer the folder to which the checkpoint was exported."
            )

    def _dataloader(self, rows: PackedTokens, **options: Any) -> DataLoader[dict[str, Tensor]]:
        options |= {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": torch.cuda.is_available(),  # copies from pageable memory would wait for the device
        }
        return DataLoader(rows, batch_size=self.batch_size, **options)

    def _shard(self) -> dict[str, int]:
        """Arguments of DistributedSampler: the number of shards (tensor-parallel ranks share one), and this rank's."""
        from_strategy = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        if from_strategy is not None:
            return from_strategy
        if dist.is_available() and dist.is_initialized():  # Fabric, which has no trainer
            return {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}
        return {"num_replicas": 1, "rank": 0}

    def _require_rows(self, split: Split, data: PackedTokens, num_rows: int, needed_for: str) -> None:
        if len(data) < num_rows:
            raise ValueError(
                f"{self._corpus} has {len(data.tokens)} {split} tokens, but {num_rows * self.block_size} are needed: "
                f"{needed_for}, data.block_size={self.block_size} tokens per row."
            )

    @staticmethod
    def _after_setup(value: _T | None) -> _T:
        if value is None:
            raise RuntimeError("TextDataModule has no data before setup(): call prepare_data() and setup() first.")
        return value

    @property
    def _corpus(self) -> str:
        return "the source code of Python's standard library" if self.path is None else f"data.path={str(self.path)!r}"

    def _content_settings(self) -> dict[str, Any]:
        """Everything that determines the content of the cache folder."""
        return {
            "format": _FORMAT_VERSION,
            "tokenizers": tokenizers.__version__,
            "corpus": fingerprints(source_files(self.path)),
            "tokenizer": self.vocab_size if self.tokenizer is None else fingerprints(tokenizer_files(self.tokenizer)),
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
            cut = len(document) - _num_held_out(len(document), self.validation_fraction)
            documents, held_out = iter((document[:cut], document[cut:])), {1}
        else:
            num_held_out = _num_held_out(num_documents, self.validation_fraction)
            documents = self._documents()
            held_out = set(random.Random(self.seed).sample(range(num_documents), num_held_out))
        for index, document in enumerate(documents):
            if document and (index in held_out) == (split == "validation"):
                yield document


def default_cache_dir() -> Path:
    """The folder ``lightning-liger`` in ``$XDG_CACHE_HOME``, or in ``~/.cache`` if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning-liger")


def _check_cache_dir(cache_dir: Any) -> None:
    check_path("data.cache_dir", cache_dir, optional=True)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    try:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    except OSError as error:
        raise ValueError(f"data.cache_dir must be a folder, got {shown(str(cache_dir))}: {error}") from error
    if file is not None:
        raise wrong_value("data.cache_dir", f"a folder, and {str(file)!r} is a file", str(folder))


def _check_prompt(prompt: Any) -> None:
    if prompt == "":
        return  # predict says what it needs
    check_text("data.prompt", prompt, optional=True)
    try:
        (prompt or "").encode()
    except UnicodeEncodeError as error:  # such as bytes on the command line that are not UTF-8
        raise wrong_value("data.prompt", "valid Unicode", prompt) from error


def _file_sizes(folder: Path) -> dict[str, int]:
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def _problem_of_cache(folder: Path) -> str | None:
    """Why the folder cannot be read; None if it is complete."""
    if not folder.is_dir():
        return f"{folder} does not exist" if not os.path.lexists(folder) else f"{folder} is not a folder"
    try:
        expected = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["file_sizes"]
        found = _file_sizes(folder)
        wrong = [name for name, size in expected.items() if found.get(name) != size]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return f"{folder / 'metadata.json'} cannot be read"
    return f"{folder / wrong[0]} is missing or has another size than it was written with" if wrong else None


def _num_held_out(total: int, fraction: float) -> int:
    """How many of ``total`` are held out: at least one unless ``fraction`` is 0, and never all."""
    return min(max(1, round(total * fraction)), total - 1) if fraction else 0
