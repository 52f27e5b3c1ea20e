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
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import (
    check_choice,
    check_integer,
    check_number,
    check_path,
    shown,
    wrong_type,
    wrong_value,
)
from lightning_liger.data.collate import Layout, TeacherTopKCollator, check_layout
from lightning_liger.data.module import FilesDataModule
from lightning_liger.data.sources import files_at
from lightning_liger.data.tokenizer import load_tokenizer, tokenizer_files

FORMAT = "lightning_liger.teacher_topk"
FORMAT_VERSION = 1
SUFFIX = ".safetensors"
_IDS, _LOG_PROBS = "teacher_topk_ids", "teacher_topk_log_probs"
_DTYPES = {"input_ids": ("I32",), "labels": ("I32",), _IDS: ("I32",), _LOG_PROBS: ("F32", "F16")}
"""Of the tensors that hold values of tokens."""
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
    with TemporaryDirectory(dir=file.parent) as folder:
        top_k, offsets = None, [0]
        with ExitStack() as stack:
            # Each tensor is written to a file of its own, and these are mapped into memory to be joined.
            parts = {name: stack.enter_context(Path(folder, name).open("wb")) for name in _DTYPES}
            for index, row in enumerate(rows):
                checked = _checked(f"rows[{index}]", row, top_k)
                top_k = checked[_IDS].shape[1]
                checked[_LOG_PROBS] = checked[_LOG_PROBS].astype(dtype)
                offsets.append(offsets[-1] + len(checked["input_ids"]))
                for name, part in parts.items():
                    checked[name].tofile(part)
        if top_k is None:
            raise wrong_value("rows", "at least one row", rows)
        tensors = {
            name: np.memmap(Path(folder, name), values.dtype, "r", shape=(offsets[-1], *values.shape[1:]))
            for name, values in checked.items()
        }
        metadata |= {"num_rows": str(len(offsets) - 1), "top_k": str(top_k)}
        save_file({"offsets": np.array(offsets, dtype=np.int64), **tensors}, Path(folder, "whole"), metadata)
        os.replace(Path(folder, "whole"), file)


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
        self.file = file
        try:
            opened = safe_open(file, "np")
            self.metadata: dict[str, str] = opened.metadata() or {}
            self._tensors = {name: opened.get_slice(name) for name in sorted(opened.keys())}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a safetensors file, or a part of one: {error}") from error
        for key, expected in (("format", FORMAT), ("format_version", str(FORMAT_VERSION))):
            if (found := self.metadata.get(key)) != expected:
                raise ValueError(f"{file}: the metadata {key!r} must be {expected!r}, got {found!r}")
        self.top_k, self.temperature = round(self._number("top_k")), self._number("temperature")
        self.tokenizer_hash = self.metadata.get("tokenizer_hash", "")
        if missing := {"offsets", *_DTYPES} - self._tensors.keys():
            raise ValueError(f"{file} must have the tensor {min(missing)!r}, got {list(self._tensors)}")
        num_tokens = self._tensors["input_ids"].get_shape()[0]
        self._check("offsets", ("I64",), [round(self._number("num_rows")) + 1])
        for name, dtypes in _DTYPES.items():
            self._check(name, dtypes, [num_tokens, *([self.top_k] if name in (_IDS, _LOG_PROBS) else [])])
        self._offsets: np.ndarray = self._tensors["offsets"][:]
        if self._offsets[0] != 0 or self._offsets[-1] != num_tokens or bool((np.diff(self._offsets) < 1).any()):
            raise ValueError(f"{file}: the tensor 'offsets' must rise from 0 to {num_tokens}, got {self._offsets}")

    def _number(self, key: str) -> float:
        text = self.metadata.get(key)
        try:
            value = float(text or "")
        except ValueError:
            value = float("nan")
        if not 0 < value < float("inf"):
            raise ValueError(f"{self.file}: the metadata {key!r} must be a number above 0, got {text!r}")
        return value

    def _check(self, name: str, dtypes: tuple[str, ...], shape: list[int]) -> None:
        found = self._tensors[name]
        if found.get_dtype() not in dtypes or list(found.get_shape()) != shape:
            raise ValueError(
                f"{self.file}: the tensor {name!r} must be {' or '.join(dtypes)} of shape {shape}, got"
                f" {found.get_dtype()} of shape {list(found.get_shape())}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TeacherTopKFile, (self.file,)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return {name: self._tensors[name][row] for name in _DTYPES}


class TeacherTopKDataModule(FilesDataModule):
    """A teacher's stored top-k as batches of :class:`~lightning_liger.data.TeacherTopKCollator`.

    Files are those of :func:`write_teacher_topk`. After ``setup``, ``temperature`` and ``top_k`` are theirs, and
    ``text_tokenizer`` is the tokenizer, if there is one. Other arguments are those of
    :class:`~lightning_liger.data.module.FilesDataModule` and :class:`~lightning_liger.data.module.BatchesDataModule`.

    Args:
        tokenizer: A folder with the Hugging Face tokenizer of the ids; that of the files must be the same.
        max_length: The maximum number of tokens of a row; the rest is cut off. None keeps all.
        truncation: Which tokens of longer rows stay: "keep_start" or "keep_end".
        packing: Whether the rows of a batch are concatenated into one without padding.
        pad_to_multiple_of: The number of tokens of a row is a multiple of this.
        pad_token_id: The token of padding. By default that of the tokenizer, or 0.

    Raises:
        FileNotFoundError: If there is no file at ``path``, or no tokenizer at ``tokenizer``.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range; in ``setup`` for files that are truncated, of another layout, or
            whose K, temperature or tokenizer differ.
    """

    def __init__(
        self,
        *,
        tokenizer: str | Path | None = None,
        max_length: int | None = None,
        truncation: Literal["keep_start", "keep_end"] = "keep_start",
        packing: bool = False,
        pad_to_multiple_of: int = 1,
        pad_token_id: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_layout("data.", max_length, truncation, pad_to_multiple_of, packing)
        check_integer("data.pad_token_id", pad_token_id, at_least=0, optional=True)
        if tokenizer is not None:
            tokenizer_files(tokenizer)
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
        super().setup(stage)

    @override
    def _files(self, setting: str, path: Any) -> list[Path]:
        accepted = f"a file that ends in {SUFFIX}, or a folder with such files"
        return files_at(setting, path, "stored teachers", (SUFFIX,), accepted)

    @override
    def _read(self, setting: str, files: list[Path]) -> ConcatDataset[dict[str, Any]]:
        data = [TeacherTopKFile(file) for file in files]
        known = "" if self.text_tokenizer is None else tokenizer_hash(self.text_tokenizer)
        for file in data:
            self.temperature, self.top_k = self.temperature or file.temperature, self.top_k or file.top_k
            if (file.temperature, file.top_k) != (self.temperature, self.top_k):
                raise ValueError(
                    f"{setting}: {file.file} has top_k={file.top_k} and temperature={file.temperature}, others"
                    f" top_k={self.top_k} and temperature={self.temperature}; expected the same in all files"
                )
            known = known or file.tokenizer_hash
            if file.tokenizer_hash and file.tokenizer_hash != known:
                others = "other files" if self.tokenizer is None else f"data.tokenizer={str(self.tokenizer)!r}"
                raise ValueError(
                    f"{setting}: {file.file} has the tokens of another tokenizer (hash"
                    f" {file.tokenizer_hash[:12]}) than {others} ({known[:12]})"
                )
        return ConcatDataset(data)

    @override
    def _collator(self) -> TeacherTopKCollator:
        pad = self.pad_token_id
        if pad is None and self.text_tokenizer is not None:
            pad = self.text_tokenizer.pad_token_id
            pad = self.text_tokenizer.eos_token_id if pad is None else pad
        return TeacherTopKCollator(
            Layout(pad or 0, self.max_length, self.truncation, self.pad_to_multiple_of, self.packing)
        )
