"""The base of data modules whose files hold records: read, tokenized once, kept in a cache, truncated and collated."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import transformers
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import Dataset
from typing_extensions import override

from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_integer,
    check_path,
    shown,
    wrong_type,
    wrong_value,
)
from lightning_liger.data.collate import TRUNCATIONS, Layout
from lightning_liger.data.encoding import Encoder
from lightning_liger.data.module import Split, TokenizedDataModule, held_out_places
from lightning_liger.data.ragged import RaggedTable, RaggedWriter
from lightning_liger.data.records import Record, read_records, record_files
from lightning_liger.data.sources import fingerprints
from lightning_liger.data.tokenizer import load_or_train_tokenizer

_FORMAT_VERSION = 2  # part of the cache key: raise it when the files change for the same settings


class Examples(Dataset[dict[str, Any]]):
    """Rows of a table of examples.

    Args:
        table: All examples.
        places: The places in the table of those that are used, ``[num_examples]``.
    """

    def __init__(self, table: RaggedTable, places: np.ndarray) -> None:
        self.table, self.places = table, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.table[int(self.places[index])]


class ExamplesDataModule(TokenizedDataModule):
    """Records of JSON lines, JSON or Parquet files as batches, tokenized once and then read from a cache.

    Training examples are shuffled in each epoch, depending on ``seed`` and the epoch only, and processes get different
    ones; validation keeps the order of the file. After ``setup`` the tokenizer is ``text_tokenizer``, and checkpoints
    hold it. Examples of which ``max_length`` leaves nothing to learn are left out, with a warning that counts them.

    Args:
        path: A .jsonl file (one object a line), a .json file (a list of objects), a .parquet file (with pyarrow), or a
            folder with such files.
        validation_path: The same for validation. By default ``validation_fraction`` of the records of ``path``.
        validation_fraction: Fraction of the records that are held out, at least one. 0 means no validation data.
        tokenizer: A folder with a Hugging Face tokenizer that has an eos_token. By default a byte-level BPE is trained
            on the training records.
        vocab_size: The maximum number of tokens of a trained tokenizer. Not used with ``tokenizer``.
        chat_template: A file with a chat template (jinja), in place of the tokenizer's.
        chat_template_kwargs: Further variables of the chat template. Those of a record win over them.
        columns: The names of fields in the files, where they differ: ``{"prompt": "question"}``.
        max_length: The maximum number of tokens of a sequence. None keeps all.
        truncation: Which tokens of longer sequences stay: "keep_start" or "keep_end".
        packing: Whether the sequences of a batch are concatenated into one row without padding. Attention separates
            them by position_ids or cu_seq_lens.
        pad_to_multiple_of: The number of tokens of a row is a multiple of this.
        batch_size: Examples per batch of each process.
        max_records: The maximum number of records to read from ``path``. By default all.
        seed: Determines which records are held out, and the order of the training examples.
        num_workers: Worker processes per training process that load batches. 0 loads them in the training process.
        cache_dir: Where tokens are kept. By default lightning-liger in $XDG_CACHE_HOME or in ~/.cache.
        prompt: Text for ``predict`` to continue.

    Raises:
        FileNotFoundError: If there are no records at ``path``, or no tokenizer at ``tokenizer``.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range; in ``prepare_data`` for a record that is wrong, with the file and
            the line.
    """

    _fields: tuple[str, ...] = ()
    """The names that ``columns`` may rename."""

    def __init__(
        self,
        *,
        path: str | Path,
        validation_path: str | Path | None = None,
        validation_fraction: float = 0.02,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        chat_template: str | Path | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        columns: dict[str, str] | None = None,
        max_length: int | None = 1024,
        truncation: Literal["keep_start", "keep_end"] = "keep_start",
        packing: bool = False,
        pad_to_multiple_of: int = 1,
        batch_size: int = 8,
        max_records: int | None = None,
        seed: int = 42,
        num_workers: int = 0,
        cache_dir: str | Path | None = None,
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
        check_integer("data.max_length", max_length, at_least=2, optional=True)
        check_choice("data.truncation", truncation, TRUNCATIONS)
        check_bool("data.packing", packing)
        check_integer("data.pad_to_multiple_of", pad_to_multiple_of, at_least=1)
        check_integer("data.max_records", max_records, at_least=1, at_most=sys.maxsize, optional=True)
        record_files("data.path", path)  # raises if there is nothing to read
        if validation_path is not None:
            record_files("data.validation_path", validation_path)
        _check_columns(columns, self._fields)
        _check_template_kwargs(chat_template_kwargs)
        _read_template(chat_template)
        self.path, self.validation_path = path, validation_path
        self.chat_template, self.chat_template_kwargs = chat_template, dict(chat_template_kwargs or {})
        self.columns, self.max_records = dict(columns or {}), max_records
        self.max_length, self.truncation = max_length, truncation
        self.packing, self.pad_to_multiple_of = packing, pad_to_multiple_of
        self.train_data: Examples | None = None
        self.validation_data: Examples | None = None
        self._warned_of: set[str] = set()

    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        """The examples of a record, not truncated.

        Raises:
            ValueError: If the record is wrong.
        """
        raise NotImplementedError

    def _usable(self, table: RaggedTable, max_length: int) -> np.ndarray:
        """Whether there is something to learn of each example after truncation, ``[len(table)]``."""
        raise NotImplementedError

    def _data_set(self, table: RaggedTable, places: np.ndarray) -> Examples:
        """The data set of these examples of the table."""
        return Examples(table, places)

    def _encoding_settings(self) -> dict[str, Any]:
        """Settings of a subclass that determine what :meth:`_encode` returns."""
        return {}

    @property
    def layout(self) -> Layout:
        """How collators truncate, pad and pack; after ``setup``, when the tokenizer is known."""
        tokenizer = self._after_setup(self.text_tokenizer)
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return Layout(pad, self.max_length, self.truncation, self.pad_to_multiple_of, self.packing)

    @property
    @override
    def _corpus(self) -> str:
        return f"data.path={str(self.path)!r}"

    @override
    def _content_settings(self) -> dict[str, Any]:
        return {
            "format": _FORMAT_VERSION,
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,  # renders chat templates
            "corpus": fingerprints(record_files("data.path", self.path)),
            "validation": self.validation_path
            and fingerprints(record_files("data.validation_path", self.validation_path)),
            "tokenizer": self._tokenizer_settings(),
            "chat_template": _read_template(self.chat_template),
            "chat_template_kwargs": self.chat_template_kwargs,
            "columns": self.columns,
            "max_records": self.max_records,
            "validation_fraction": self.validation_fraction,
            "seed": self.seed,
            **self._encoding_settings(),
        }

    @override
    def _write_cache(self, folder: Path) -> dict[str, Any]:
        num_records = sum(1 for _ in self._records())
        if not num_records:
            raise ValueError(f"{self._corpus} holds no records.")
        tokenizer = load_or_train_tokenizer(
            self.tokenizer,
            lambda: (text for record in self._split("train", num_records) for text in record.strings()),
            self.vocab_size,
            folder / "tokenizer",
        )
        if self.chat_template is not None:
            tokenizer.chat_template = _read_template(self.chat_template)
        tokenizer.save_pretrained(folder / "tokenizer")
        encoder = Encoder(tokenizer, self.chat_template_kwargs)
        num_examples = {}
        for split in ("train", "validation"):
            with RaggedWriter(folder / f"{split}.safetensors") as writer:
                self._write_split(writer, self._split(split, num_records), encoder)
            num_examples[split] = writer.num_rows
        return {"num_examples": num_examples}

    def _write_split(self, writer: RaggedWriter, records: Iterator[Record], encoder: Encoder) -> None:
        names: set[str] | None = None
        for record in records:
            for example in self._encode(record.renamed(self.columns), encoder):
                names = names or set(example)
                if differing := sorted(names ^ set(example)):
                    which = "lacks" if differing[0] in names else "has"
                    raise record.error(
                        f"all records must have the same optional fields, and this one {which} the"
                        f" values of {differing[0]!r}, unlike those before it"
                    )
                writer.append(example)

    @override
    def _read_cache(self, folder: Path, metadata: dict[str, Any], stage: str | None) -> None:
        num_needed, needed_for = 0, ""
        if stage in (None, "fit"):
            num_needed = self.batch_size * (num_shards := self._shard()["num_replicas"])
            needed_for = f"one batch of data.batch_size={self.batch_size} for each of {num_shards} processes"
        self.train_data = self._examples(folder, "train", num_needed, needed_for)
        if (self.validation_fraction or self.validation_path is not None) and stage != "predict":
            setting = "validation_fraction" if self.validation_path is None else "validation_path"
            needed_for = f"data.{setting}={shown(getattr(self, setting))}"
            self.validation_data = self._examples(folder, "validation", 1, needed_for)

    def _examples(self, folder: Path, split: Split, num_needed: int, needed_for: str) -> Examples:
        is_own_file = split == "validation" and self.validation_path is not None
        source = f"data.validation_path={str(self.validation_path)!r}" if is_own_file else self._corpus
        table = RaggedTable(folder / f"{split}.safetensors")
        usable = np.ones(len(table), dtype=bool)
        if self.max_length is not None and len(table):
            usable = self._usable(table, self.max_length)
        places = np.flatnonzero(usable)
        if num_dropped := len(table) - len(places):
            kept = "first" if self.truncation == "keep_start" else "last"
            message = (
                f"{num_dropped} of {len(table)} {split} examples of {source} are left out: their {kept}"
                f" {self.max_length} tokens (data.max_length) have nothing to learn"
            )
            if not len(places):
                raise ValueError(f"{message}. Give a larger data.max_length.")
            if split not in self._warned_of:
                self._warned_of.add(split)
                rank_zero_warn(f"{message}.")
        if len(places) < num_needed:
            raise ValueError(f"{source} has {len(places)} {split} examples, but {num_needed} are needed: {needed_for}.")
        return self._data_set(table, places)

    def _records(self) -> Iterator[Record]:
        records = read_records("data.path", record_files("data.path", self.path))
        return islice(records, self.max_records)

    def _split(self, split: Split, num_records: int) -> Iterator[Record]:
        if self.validation_path is not None:
            if split == "train":
                yield from self._records()
            else:
                files = record_files("data.validation_path", self.validation_path)
                yield from read_records("data.validation_path", files)
            return
        held_out = held_out_places(num_records, self.validation_fraction, self.seed)
        for index, record in enumerate(self._records()):
            if (index in held_out) == (split == "validation"):
                yield record

    @override
    def _collator(self) -> Callable[..., Any]:
        raise NotImplementedError


def ids(values: Any) -> np.ndarray:
    """Token ids as tables hold them."""
    return np.asarray(values, dtype=np.int32)


def floats(values: Any) -> np.ndarray:
    """Numbers as tables hold them."""
    return np.asarray(values, dtype=np.float32)


def scored(record: Record, prompt_ids: list[int], completion_ids: list[int]) -> np.ndarray:
    """The ids of a completion as tables hold them.

    Raises:
        ValueError: If no token of it follows another token, so that there is nothing to learn.
    """
    if not completion_ids or len(prompt_ids) + len(completion_ids) < 2:
        raise record.error("a completion has no token to learn after the first token of the sequence")
    return ids(completion_ids)


def prompts_fit(data: ExamplesDataModule, table: RaggedTable, max_length: int) -> np.ndarray:
    """Whether each prompt leaves a place for its completion; the end of a sequence always has one."""
    if data.truncation == "keep_end":
        return np.ones(len(table), dtype=bool)
    return table.lengths("prompt_ids") < max_length


def _check_columns(columns: Any, fields: tuple[str, ...]) -> None:
    if columns is None:
        return
    expected = f"a dict of strings whose keys are of {', '.join(fields)}, or None"
    if not isinstance(columns, dict) or not all(isinstance(name, str) and name for name in columns.values()):
        raise wrong_type("data.columns", expected, columns)
    if unknown := [key for key in columns if key not in fields]:
        raise wrong_value("data.columns", expected, {key: columns[key] for key in unknown})


def _check_template_kwargs(kwargs: Any) -> None:
    expected = "a dict with string keys and values of JSON, or None"
    if kwargs is not None:
        if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
            raise wrong_type("data.chat_template_kwargs", expected, kwargs)
        try:
            json.dumps(kwargs)
        except (TypeError, ValueError, RecursionError) as error:
            raise wrong_type("data.chat_template_kwargs", expected, kwargs) from error


def _read_template(file: Any) -> str | None:
    check_path("data.chat_template", file, optional=True)
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        expected = "a file with a chat template"
        raise ValueError(f"data.chat_template must be {expected}, got {shown(str(file))}: {error}") from error
