"""The base of data modules whose files hold records: read, tokenized once, kept in a cache, truncated and collated."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import transformers
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops.arguments import (
    check_integer,
    check_path,
    shown,
    wrong_type,
    wrong_value,
)
from lightning_liger.data.collate import Layout, check_layout
from lightning_liger.data.encoding import Encoder
from lightning_liger.data.module import Split, TokenizedDataModule
from lightning_liger.data.records import Record, read_records
from lightning_liger.data.sources import fingerprints, record_files

if TYPE_CHECKING:
    import datasets

_FORMAT_VERSION = 3  # part of the cache key: raise it when the files change for the same settings


class ExamplesDataModule(TokenizedDataModule):
    """Records of JSON lines, JSON or Parquet files as batches, tokenized once and then read from a cache.

    Examples of which ``max_length`` leaves nothing to learn are left out, with a warning that counts them. Other
    arguments are those of :class:`~lightning_liger.data.module.TokenizedDataModule` and
    :class:`~lightning_liger.data.module.BatchesDataModule`.

    Args:
        path: A .jsonl file (one object a line), a .json file (a list of objects), a .parquet file, or a folder with
            such files.
        validation_path: The same for validation. By default ``validation_fraction`` of the records of ``path``.
        chat_template: A file with a chat template (jinja), in place of the tokenizer's.
        chat_template_kwargs: Further variables of the chat template. Those of a record win over them.
        columns: The names of fields in the files, where they differ: ``{"prompt": "question"}``.
        max_length: The maximum number of tokens of a sequence. None keeps all.
        truncation: Which tokens of longer sequences stay: "keep_start" or "keep_end".
        packing: Whether the sequences of a batch are concatenated into one row without padding. Attention separates
            them by position_ids or cu_seq_lens.
        pad_to_multiple_of: The number of tokens of a row is a multiple of this.
        max_records: The maximum number of records to read from ``path``. By default all.

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
        chat_template: str | Path | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        columns: dict[str, str] | None = None,
        max_length: int | None = 1024,
        truncation: Literal["keep_start", "keep_end"] = "keep_start",
        packing: bool = False,
        pad_to_multiple_of: int = 1,
        max_records: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_layout("data.", max_length, truncation, pad_to_multiple_of, packing)
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
        self._has_warned: set[str] = set()

    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        """The examples of a record, not truncated; :func:`first_learned` gives two of their values.

        Raises:
            ValueError: If the record is wrong.
        """
        raise NotImplementedError

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
    def _rows_name(self) -> str:
        return "examples"

    @property
    @override
    def _corpus(self) -> str:
        return f"data.path={str(self.path)!r}"

    @override
    def _content_settings(self) -> dict[str, Any]:
        validation = self.validation_path and record_files("data.validation_path", self.validation_path)
        return super()._content_settings() | {
            "format": _FORMAT_VERSION,
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "transformers": transformers.__version__,  # renders chat templates
            "corpus": fingerprints(record_files("data.path", self.path)),
            "validation": fingerprints(validation or ()),
            "chat_template": _read_template(self.chat_template),
            "chat_template_kwargs": self.chat_template_kwargs,
            "columns": self.columns,
            "max_records": self.max_records,
            **self._encoding_settings(),
        }

    @property
    @override
    def _validation_setting(self) -> str | None:
        return super()._validation_setting if self.validation_path is None else "validation_path"

    @override
    def _all_items(self) -> Iterator[Record]:
        records = read_records("data.path", record_files("data.path", self.path))
        return islice(records, self.max_records)

    @override
    def _items(self, split: Split) -> Iterator[Record]:
        if self.validation_path is None:
            return super()._items(split)
        if split == "train":
            return self._all_items()
        return read_records("data.validation_path", record_files("data.validation_path", self.validation_path))

    @override
    def _texts(self, items: Iterator[Record]) -> Iterator[str]:
        return (text for record in items for text in record.strings())

    @override
    def _make_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = super()._make_tokenizer()
        if self.chat_template is not None:
            tokenizer.chat_template = _read_template(self.chat_template)
        return tokenizer

    @override
    def _rows(self, items: Iterator[Record], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, np.ndarray]]:
        encoder, names = Encoder(tokenizer, self.chat_template_kwargs), None
        for record in items:
            for example in self._encode(record.renamed(self.columns), encoder):
                names = names or set(example)
                if differing := sorted(names ^ set(example)):
                    which = "lacks" if differing[0] in names else "has"
                    raise record.error(
                        f"all records must have the same optional fields, and this one {which} the"
                        f" values of {differing[0]!r}, unlike those before it"
                    )
                yield example

    @override
    def _usable(self, split: Split, rows: "datasets.Dataset") -> Any:
        """The rows of which truncation leaves something to learn."""
        if self.max_length is None:
            return rows
        places = np.flatnonzero(rows[self.truncation][:] < self.max_length)
        if num_dropped := len(rows) - len(places):
            is_own_file = split == "validation" and self.validation_path is not None
            source = f"data.validation_path={str(self.validation_path)!r}" if is_own_file else self._corpus
            kept = "first" if self.truncation == "keep_start" else "last"
            message = (
                f"{num_dropped} of {len(rows)} {split} examples of {source} are left out: their {kept}"
                f" {self.max_length} tokens (data.max_length) have nothing to learn"
            )
            if not len(places):
                raise ValueError(f"{message}. Give a larger data.max_length.")
            if split not in self._has_warned:
                self._has_warned.add(split)
                rank_zero_warn(f"{message}.")
            rows = rows.select(places)
        return rows


def ids(values: Any) -> np.ndarray:
    """Token ids as tables hold them."""
    return np.asarray(values, dtype=np.int32)


def floats(values: Any) -> np.ndarray:
    """Numbers as tables hold them."""
    return np.asarray(values, dtype=np.float32)[()]  # a scalar of a number


def scored(record: Record, prompt_ids: list[int], completion_ids: list[int]) -> np.ndarray:
    """The ids of a completion as tables hold them.

    Raises:
        ValueError: If no token of it follows another token, so that there is nothing to learn.
    """
    if not completion_ids or len(prompt_ids) + len(completion_ids) < 2:
        raise record.error("a completion has no token to learn after the first token of the sequence")
    return ids(completion_ids)


def first_learned(from_start: int, from_end: int = 0) -> dict[str, np.ndarray]:
    """The largest ``max_length`` that leaves nothing to learn of an example, for each value of ``truncation``.

    Args:
        from_start: The number of tokens before the first one to learn; of a prompt, its length.
        from_end: The number of tokens from the last one to learn on; 0 if the sequence always ends with one.
    """
    return {"keep_start": np.int32(from_start), "keep_end": np.int32(from_end)}


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
