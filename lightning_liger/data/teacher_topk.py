"""A teacher's most likely tokens, stored for distillation: one safetensors file or several, mapped into memory.

The tensors of a file, of R rows with N tokens in all:

- ``offsets`` ``[R + 1]``, int64: row i has the tokens from ``offsets[i]`` to ``offsets[i + 1]``
- ``input_ids`` ``[N]``, int32
- ``labels`` ``[N]``, int32, not shifted, -100 where nothing is learned
- ``teacher_topk_ids`` ``[N, K]``, int32
- ``teacher_topk_log_probs`` ``[N, K]``, float32 or float16: natural logarithms, -inf where there are fewer than K

As logits, the entries at a token are about the next token. The metadata of the file, strings, are ``format``
(``lightning_liger.teacher_topk``), ``format_version``, ``num_rows``, ``top_k``, ``temperature`` (by which the teacher's
logits were divided) and ``tokenizer_hash`` (:func:`tokenizer_hash`, or nothing).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_integer,
    check_number,
    check_path,
    shown,
    wrong_type,
    wrong_value,
)
from lightning_liger.data.collate import TRUNCATIONS, Layout, TeacherTopKCollator
from lightning_liger.data.module import BatchesDataModule, held_out_places
from lightning_liger.data.ragged import SHARED_OFFSETS, RaggedTable, RaggedWriter
from lightning_liger.data.sources import files_at
from lightning_liger.data.tokenizer import load_tokenizer, tokenizer_files

FORMAT = "lightning_liger.teacher_topk"
FORMAT_VERSION = 1
SUFFIX = ".safetensors"
_IDS, _LOG_PROBS = "teacher_topk_ids", "teacher_topk_log_probs"
_TOLERANCE = 1e-2  # of the sum of probabilities, in float16 or bfloat16


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary and the end-of-sequence token: of what ids mean."""
    meaning = sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


def write_teacher_topk(
    path: str | Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    temperature: float = 1.0,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Writes a teacher's top-k for :class:`TeacherTopKDataModule`. One row is in memory at a time.

    Args:
        path: The file to write; its name ends in .safetensors. It appears when all rows are written.
        rows: Tensors, arrays or lists: ``input_ids`` ``[L]``; ``teacher_topk_ids`` and ``teacher_topk_log_probs``
            ``[L, K]``, at each token those of the next one; and maybe ``labels`` ``[L]`` (not shifted; by default the
            inputs).
        tokenizer: The tokenizer of the ids. Its hash lets the reader compare it with another.
        temperature: By which the teacher's logits were divided.
        dtype: Of the log-probabilities in the file.

    Raises:
        FileNotFoundError: If the folder of ``path`` does not exist.
        TypeError: For an argument or a value of a wrong type.
        ValueError: For an argument out of its range; for a row of other shapes, with negative ids, with an id twice at
            a token, or with log-probabilities that are NaN or whose probabilities add up to more than 1.
    """
    check_path("path", path)
    file = Path(path).expanduser()
    if file.suffix != SUFFIX:
        raise wrong_value("path", f"a name that ends in {SUFFIX}", str(path))
    if not file.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: the folder {str(file.parent)!r} does not exist.")
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise wrong_type("tokenizer", "a Hugging Face tokenizer or None", tokenizer)
    check_number("temperature", temperature, above=0)
    check_choice("dtype", dtype, ("float32", "float16"))
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "temperature": repr(float(temperature)),
        "tokenizer_hash": "" if tokenizer is None else tokenizer_hash(tokenizer),
    }
    with RaggedWriter(file, metadata, shares_offsets=True) as writer:
        top_k = None
        for index, row in enumerate(rows):
            checked = _checked(f"rows[{index}]", row, top_k)
            if top_k is None:
                top_k = checked[_IDS].shape[1]
                writer.metadata["top_k"] = str(top_k)
            checked[_LOG_PROBS] = checked[_LOG_PROBS].astype(dtype)
            writer.append(checked)
        if top_k is None:
            raise wrong_value("rows", "at least one row", rows)


def _checked(name: str, row: Any, top_k: int | None) -> dict[str, np.ndarray]:
    """The row as arrays of the layout."""
    if not isinstance(row, Mapping):
        raise wrong_type(name, "a mapping of arrays", row)
    if missing := [key for key in ("input_ids", _IDS, _LOG_PROBS) if row.get(key) is None]:
        raise ValueError(f"{name} must have {missing[0]!r}, got the keys {shown(sorted(map(str, row)))}")
    input_ids = _integers(f"{name}['input_ids']", row["input_ids"], 1)
    length = len(input_ids)
    labels = input_ids if row.get("labels") is None else _integers(f"{name}['labels']", row["labels"], 1, IGNORE_INDEX)
    if len(labels) != length:
        raise ValueError(f"{name}['labels'] must have {length} values as input_ids, got {len(labels)}")
    ids = _integers(f"{name}[{_IDS!r}]", row[_IDS], 2)
    log_probs = _array(f"{name}[{_LOG_PROBS!r}]", row[_LOG_PROBS])
    if not np.issubdtype(log_probs.dtype, np.floating):
        raise wrong_type(f"{name}[{_LOG_PROBS!r}]", "an array of floating-point numbers", row[_LOG_PROBS])
    expected = (length, ids.shape[1] if top_k is None else top_k)
    for key, array in ((_IDS, ids), (_LOG_PROBS, log_probs)):
        if array.shape != expected or not expected[1]:
            raise ValueError(
                f"{name}[{key!r}] must have the shape [L, K] with L={length} tokens and the same K of at least 1 in all"
                f" rows ({expected[1]}), got {array.shape}"
            )
    log_probs = log_probs.astype(np.float32)
    with np.errstate(over="ignore"):
        mass = np.exp(log_probs).sum(axis=1)
    if not (mass <= 1 + _TOLERANCE).all():  # NaN is not either
        place = int(np.argmin(mass <= 1 + _TOLERANCE))
        raise ValueError(
            f"{name}[{_LOG_PROBS!r}] must be logarithms of probabilities that add up to at most 1, got a sum of"
            f" {mass[place]:.4g} at token {place}"
        )
    # Entries of probability 0 fill up the K places, with any id.
    named = np.where(np.isneginf(log_probs), -1 - np.arange(ids.shape[1]), ids)
    named.sort(axis=1)
    if (twice := (np.diff(named, axis=1) == 0).any(axis=1)).any():
        place = int(np.argmax(twice))
        raise ValueError(f"{name}[{_IDS!r}] must have different ids at a token, got {shown(ids[place].tolist())}")
    return {"input_ids": input_ids, "labels": labels, _IDS: ids, _LOG_PROBS: log_probs}


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy has no bfloat16
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:  # lists of different lengths
        raise wrong_type(name, "an array", value) from error


def _integers(name: str, value: Any, num_dims: int, least: int = 0) -> np.ndarray:
    array = _array(name, value)
    if array.ndim != num_dims or not array.size:
        raise ValueError(f"{name} must have {num_dims} dimensions and values, got the shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise wrong_type(name, "an array of integers", value)
    if array.max() >= 2**31 or ((array < 0) & (array != least)).any():
        expected = f"ids of at least 0{f', or {least}' if least else ''}"
        raise ValueError(f"{name} must be {expected}, got {array.min()} to {array.max()}")
    return array.astype(np.int32)


class TeacherTopKFile(Dataset[dict[str, Any]]):
    """Rows of a file of :func:`write_teacher_topk`, mapped into memory.

    Args:
        file: The file.

    Raises:
        ValueError: If it is truncated, or not of the layout.
    """

    def __init__(self, file: Path) -> None:
        self.table = table = RaggedTable(file)
        found = table.metadata
        if found.get("format") != FORMAT:
            raise ValueError(f"{file}: the metadata 'format' must be {FORMAT!r}, got {found.get('format')!r}")
        if found.get("format_version") != str(FORMAT_VERSION):
            version = found.get("format_version")
            raise ValueError(f"{file}: the metadata 'format_version' must be {FORMAT_VERSION}, got {version!r}")
        self.top_k, self.temperature = round(self._number("top_k")), self._number("temperature")
        self.tokenizer_hash = found.get("tokenizer_hash", "")
        if SHARED_OFFSETS not in table.shapes:
            raise ValueError(f"{file} must have the tensor {SHARED_OFFSETS!r}, got {sorted(table.shapes)}")
        for name, dtypes, shape in (
            ("input_ids", ("I32",), ()),
            ("labels", ("I32",), ()),
            (_IDS, ("I32",), (self.top_k,)),
            (_LOG_PROBS, ("F32", "F16"), (self.top_k,)),
        ):
            if name not in table.columns:
                raise ValueError(f"{file} must have the tensor {name!r}, got {sorted(table.columns)}")
            if table.dtypes[name] not in dtypes or table.shapes[name][1:] != shape:
                raise ValueError(
                    f"{file}: the tensor {name!r} must be {' or '.join(dtypes)} of shape {['N', *shape]}, got"
                    f" {table.dtypes[name]} of shape {list(table.shapes[name])}"
                )
        if found.get("num_rows") != str(len(table)):
            raise ValueError(f"{file}: the metadata 'num_rows' must be {len(table)}, got {found.get('num_rows')!r}")

    def _number(self, key: str) -> float:
        text = self.table.metadata.get(key)
        try:
            value = float(text or "")
        except ValueError:
            value = float("nan")
        if not 0 < value < float("inf"):
            raise ValueError(f"{self.table.file}: the metadata {key!r} must be a number above 0, got {text!r}")
        return value

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.table[index]


class TeacherTopKDataModule(BatchesDataModule):
    """A teacher's stored top-k as batches of :class:`~lightning_liger.data.TeacherTopKCollator`.

    Training rows are shuffled in each epoch, depending on ``seed`` and the epoch only, and processes get different
    rows; validation keeps the order of the file. After ``setup``, ``temperature`` and ``top_k`` are those of the files,
    and ``text_tokenizer`` is the tokenizer, if there is one.

    Args:
        path: A file of :func:`write_teacher_topk`, or a folder with such files.
        validation_path: The same for validation. By default ``validation_fraction`` of the rows of ``path``.
        validation_fraction: Fraction of the rows that are held out, at least one. 0 means no validation data.
        tokenizer: A folder with the Hugging Face tokenizer of the ids; that of the files must be the same.
        max_length: The maximum number of tokens of a row; the rest is cut off. None keeps all.
        truncation: Which tokens of longer rows stay: "keep_start" or "keep_end".
        packing: Whether the rows of a batch are concatenated into one without padding.
        pad_to_multiple_of: The number of tokens of a row is a multiple of this.
        pad_token_id: The token of padding. By default that of the tokenizer, or 0.
        batch_size: Rows per batch of each process.
        seed: Determines which rows are held out, and the order of the training rows.
        num_workers: Worker processes per training process that load batches. 0 loads them in the training process.

    Raises:
        FileNotFoundError: If there is no file at ``path``, or no tokenizer at ``tokenizer``.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range; in ``setup`` for files that are truncated, of another layout, or
            whose K, temperature or tokenizer differ.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        validation_path: str | Path | None = None,
        validation_fraction: float = 0.02,
        tokenizer: str | Path | None = None,
        max_length: int | None = None,
        truncation: Literal["keep_start", "keep_end"] = "keep_start",
        packing: bool = False,
        pad_to_multiple_of: int = 1,
        pad_token_id: int | None = None,
        batch_size: int = 8,
        seed: int = 42,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        check_number("data.validation_fraction", validation_fraction, at_least=0, below=1)
        check_integer("data.max_length", max_length, at_least=2, optional=True)
        check_choice("data.truncation", truncation, TRUNCATIONS)
        check_bool("data.packing", packing)
        check_integer("data.pad_to_multiple_of", pad_to_multiple_of, at_least=1)
        check_integer("data.pad_token_id", pad_token_id, at_least=0, optional=True)
        _topk_files("data.path", path)
        if validation_path is not None:
            _topk_files("data.validation_path", validation_path)
        if tokenizer is not None:
            tokenizer_files(tokenizer)
        self.path, self.validation_path, self.validation_fraction = path, validation_path, float(validation_fraction)
        self.tokenizer, self.pad_token_id = tokenizer, pad_token_id
        self.max_length, self.truncation = max_length, truncation
        self.packing, self.pad_to_multiple_of = packing, pad_to_multiple_of
        self.text_tokenizer: PreTrainedTokenizerBase | None = None
        self.temperature: float | None = None
        self.top_k: int | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        if self.tokenizer is not None:
            self.text_tokenizer = load_tokenizer(self.tokenizer)
        data = self._open("data.path", self.path)
        held_out: set[int] = set()
        if self.validation_path is not None:
            self.validation_data = self._open("data.validation_path", self.validation_path)
        elif self.validation_fraction:
            held_out = held_out_places(len(data), self.validation_fraction, self.seed)
            self.validation_data = Subset(data, sorted(held_out))
        train_data = Subset(data, [place for place in range(len(data)) if place not in held_out])
        self.train_data = train_data
        num_needed = self.batch_size * self._shard()["num_replicas"] if stage in (None, "fit") else 0
        if len(train_data) < num_needed:
            raise ValueError(
                f"data.path={str(self.path)!r} has {len(train_data)} train rows, but {num_needed} are needed: one batch"
                f" of data.batch_size={self.batch_size} for each process."
            )

    def _open(self, setting: str, path: Any) -> ConcatDataset[dict[str, Any]]:
        files = [TeacherTopKFile(file) for file in _topk_files(setting, path)]
        known = "" if self.text_tokenizer is None else tokenizer_hash(self.text_tokenizer)
        for file in files:
            self.temperature, self.top_k = self.temperature or file.temperature, self.top_k or file.top_k
            if (file.temperature, file.top_k) != (self.temperature, self.top_k):
                raise ValueError(
                    f"{setting}: {file.table.file} has top_k={file.top_k} and temperature={file.temperature}, others"
                    f" top_k={self.top_k} and temperature={self.temperature}; expected the same in all files"
                )
            known = known or file.tokenizer_hash
            if file.tokenizer_hash and file.tokenizer_hash != known:
                others = "other files" if self.tokenizer is None else f"data.tokenizer={str(self.tokenizer)!r}"
                raise ValueError(
                    f"{setting}: {file.table.file} has the tokens of another tokenizer (hash"
                    f" {file.tokenizer_hash[:12]}) than {others} ({known[:12]})"
                )
        return ConcatDataset(files)

    @override
    def _collator(self) -> TeacherTopKCollator:
        pad = self.pad_token_id
        if pad is None and self.text_tokenizer is not None:
            pad = self.text_tokenizer.pad_token_id
            pad = self.text_tokenizer.eos_token_id if pad is None else pad
        return TeacherTopKCollator(
            Layout(pad or 0, self.max_length, self.truncation, self.pad_to_multiple_of, self.packing)
        )


def _topk_files(setting: str, path: Any) -> list[Path]:
    accepted = f"a file that ends in {SUFFIX}, or a folder with such files"
    return files_at(setting, path, "stored teachers", (SUFFIX,), accepted)
