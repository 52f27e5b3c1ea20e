"""The base of data modules whose files hold records: read, tokenized once, kept in a cache, truncated and collated."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops.arguments import check_integer, check_path, shown, wrong_type, wrong_value
from lightning_liger.data.encoding import Encoder
from lightning_liger.data.module import SequencesDataModule, Split, TokenizedDataModule
from lightning_liger.data.records import Record, read_records
from lightning_liger.data.tables import DataPath

if TYPE_CHECKING:
    import datasets


class ExamplesDataModule(SequencesDataModule, TokenizedDataModule):
    """Records of files or of a data set as batches, tokenized once and then read from a cache.

    Examples without target tokens within ``max_length`` are dropped, with a warning that gives their number. Other
    arguments and errors are those of :class:`~lightning_liger.data.module.SequencesDataModule`,
    :class:`~lightning_liger.data.module.TokenizedDataModule` and
    :class:`~lightning_liger.data.module.BatchesDataModule`.

    Args:
        path: A .jsonl file (one object per line), a .json file (a list of objects), a .parquet or .csv file, or a
            folder with such files; ``owner/name`` of a data set on the Hub; a ``datasets.Dataset`` or a list of
            records.
        chat_template: A file with a chat template (jinja), instead of the tokenizer's.
        chat_template_kwargs: Additional variables of the chat template. Those of a record override them.
        columns: The names of fields in the files, where they differ: ``{"prompt": "question"}``.
        max_records: The maximum number of records to read from ``path``. By default all.
    """

    _fields: tuple[str, ...] = ()
    """The names of fields that records have, but for those of all records with messages."""
    _settings_of_tokens = (
        *TokenizedDataModule._settings_of_tokens, "_template", "chat_template_kwargs", "columns", "max_records"
    )  # fmt: skip
    _rows_name = "examples"

    def __init__(
        self,
        *,
        path: DataPath,
        chat_template: str | Path | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        columns: dict[str, str] | None = None,
        max_records: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(path=path, **settings)
        check_integer("data.max_records", max_records, at_least=1, at_most=sys.maxsize, optional=True)
        _check_columns(columns, (*self._fields, "tools", "chat_template_kwargs"))
        _check_template_kwargs(chat_template_kwargs)
        self.chat_template, self.chat_template_kwargs = chat_template, dict(chat_template_kwargs or {})
        self.columns, self.max_records = dict(columns or {}), max_records
        self._template = None if chat_template is None else _read_template(chat_template)

    def _encode(self, record: Record, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
        """The examples of a record, not truncated; :func:`first_learned` gives two of their values."""
        raise NotImplementedError

    @override
    def _read(self, split: Split) -> Iterator[Record]:
        table = self._table(split)
        records = read_records(self._place(split)[0], self._files(split)) if table is None else table.records()
        unseen = set(self.columns.values()) if split == "train" else set()
        for record in islice(records, self.max_records if split == "train" else None):
            unseen -= record.values.keys()
            yield record
        if unseen:
            expected = f"names of fields of {self._corpus(split)}, in which no record has {shown(sorted(unseen))}"
            raise wrong_value("data.columns", expected, self.columns)

    @override
    def _make_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = super()._make_tokenizer()
        if self._template is not None:
            tokenizer.chat_template = self._template
        return tokenizer

    @override
    def _rows(self, items: Iterable[Record], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, np.ndarray]]:
        encoder, names = Encoder(tokenizer, self.chat_template_kwargs), None
        collator: Any = self._collator("validation")  # of a question all choices
        for record in items:
            for example in self._encode(record.renamed(self.columns), encoder):
                names = names or example.keys()
                if differing := sorted(names ^ example.keys()):
                    which = f"{'lacks' if differing[0] in names else 'has'} the values of {differing[0]!r}"
                    problem = "all records must have the same optional fields, and this one"
                    raise record.error(f"{problem} {which}, unlike those before it")
                yield {**example, "sequence_lengths": ids(collator.sequence_lengths(example))}

    @override
    def _lengths(self, split: Split, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = getattr(rows, "rows", rows)  # without those that mismatched pairs add
        lists = rows.select_columns("sequence_lengths").with_format("arrow")[:].column(0).combine_chunks()
        return lists.flatten().to_numpy(), lists.value_lengths().to_numpy()

    @override
    def _usable(self, split: Split, rows: "datasets.Dataset") -> Any:
        """The rows of which truncation leaves something to learn."""
        limit, truncation = self._layout.max_length, self._layout.truncation
        places = np.flatnonzero(rows[truncation][:] < (sys.maxsize if limit is None else limit))
        if len(places) == len(rows):
            return rows
        kept = "first" if truncation == "keep_start" else "last"
        message = (
            f"{len(rows) - len(places)} of {len(rows)} {split} examples of {self._corpus(split)} are dropped: their"
            f" {kept} {limit} tokens (data.max_length) contain no target tokens"
        )
        if not len(places):
            raise ValueError(f"{message}. Give a larger data.max_length.")
        rank_zero_warn(f"{message}.")
        return rows.select(places)


def ids(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def floats(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)[()]  # a scalar of a number


def scored(record: Record, prompt_ids: list[int], completion_ids: list[int]) -> np.ndarray:
    """The ids of a completion as tables hold them; raises if there is nothing to learn."""
    if not completion_ids or len(prompt_ids) + len(completion_ids) < 2:
        raise record.error("a completion has no token to train on after the first token of the sequence")
    return ids(completion_ids)


def first_learned(from_start: int, from_end: int = 0) -> dict[str, np.ndarray]:
    """The largest ``max_length`` that leaves nothing to learn of an example, for each value of ``truncation``.

    ``from_start`` tokens are before the first one to learn, and ``from_end`` from the last one to learn on.
    """
    return {"keep_start": np.int32(from_start), "keep_end": np.int32(from_end)}


def _check_columns(columns: Any, fields: tuple[str, ...]) -> None:
    if not isinstance(columns, dict | None) or any(
        key not in fields or not isinstance(name, str) or not name for key, name in (columns or {}).items()
    ):
        raise wrong_value("data.columns", f"a dict of strings whose keys are of {', '.join(fields)}, or None", columns)


def _check_template_kwargs(kwargs: Any) -> None:
    with suppress(TypeError, ValueError, RecursionError):
        json.dumps(kwargs)
        if kwargs is None or (isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs)):
            return
    raise wrong_type("data.chat_template_kwargs", "a dict with string keys and values of JSON, or None", kwargs)


def _read_template(file: Any) -> str:
    check_path("data.chat_template", file)
    try:
        return Path(os.path.expanduser(file)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"data.chat_template={str(file)!r} must be a file with a chat template: {error}") from error
