"""A teacher's most likely tokens, stored for distillation: one safetensors file or several, mapped into memory.

Rows stand end to end, row i from ``offsets[i]`` to ``offsets[i + 1]``; docs/data.md has the tensors and the metadata.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.utils.data import ConcatDataset, Dataset
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_choice, check_integer, check_number, check_path, shown, wrong_type, wrong_value
from lightning_liger.data.collate import Layout, TeacherTopKCollator
from lightning_liger.data.module import SequencesDataModule, Split
from lightning_liger.data.tokenizer import load_tokenizer, tokenizer_files

FORMAT = "lightning_liger.teacher_topk"
FORMAT_VERSION = 1
SUFFIX = ".safetensors"
_IDS, _LOG_PROBS = "teacher_topk_ids", "teacher_topk_log_probs"
_OF_TOKENS = ("input_ids", "labels", _IDS, _LOG_PROBS)
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
    with TemporaryDirectory(dir=file.parent) as folder:
        top_k, offsets = None, [0]
        for index, row in enumerate(rows):
            checked = _checked(f"rows[{index}]", row, top_k)
            top_k = checked[_IDS].shape[1]
            checked[_LOG_PROBS] = checked[_LOG_PROBS].astype(dtype)
            offsets.append(offsets[-1] + len(checked["input_ids"]))
            for name, values in checked.items():  # to a file for each tensor; these are mapped into memory to be joined
                with Path(folder, name).open("ab") as part:
                    values.tofile(part)
        if top_k is None:
            raise wrong_value("rows", "at least one row", rows)
        tensors = {
            name: np.memmap(Path(folder, name), values.dtype, "r", shape=(offsets[-1], *values.shape[1:]))
            for name, values in checked.items()
        }
        metadata = {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "temperature": repr(float(temperature)),
            "tokenizer_hash": "" if tokenizer is None else tokenizer_hash(tokenizer),
            "num_rows": str(len(offsets) - 1),
            "top_k": str(top_k),
        }
        save_file({"offsets": np.array(offsets, dtype=np.int64), **tensors}, Path(folder, "whole"), metadata)
        os.replace(Path(folder, "whole"), file)


def _checked(name: str, row: Any, top_k: int | None) -> dict[str, np.ndarray]:
    if not isinstance(row, Mapping):
        raise wrong_type(name, "a mapping of arrays", row)
    row = {"labels": row.get("input_ids"), **{key: value for key, value in row.items() if value is not None}}
    if missing := [key for key in _OF_TOKENS if row.get(key) is None]:
        raise ValueError(f"{name} must have {missing[0]!r}, got the keys {shown(sorted(map(str, row)))}")
    found = {key: _array(f"{name}[{key!r}]", row[key], key) for key in _OF_TOKENS}
    ids, log_probs = found[_IDS], found[_LOG_PROBS]
    shape = found["input_ids"].size, top_k or (ids.shape[1] if ids.ndim > 1 else 1)
    for key, array in found.items():
        wanted = shape if key in (_IDS, _LOG_PROBS) else shape[:1]
        if array.shape != wanted or not array.size:
            raise ValueError(
                f"{name}[{key!r}] must have the shape [L] or [L, K], with the L of input_ids and the K of other rows:"
                f" expected {list(wanted)}, got {list(array.shape)}"
            )
    with np.errstate(over="ignore"):
        mass = np.exp(log_probs).sum(axis=1)
    if not (is_right := mass <= 1 + _TOLERANCE).all():  # NaN is not either
        place = int(np.argmin(is_right))
        raise ValueError(
            f"{name}[{_LOG_PROBS!r}] must be logarithms of probabilities that add up to at most 1, got a sum of"
            f" {mass[place]:.4g} at token {place}"
        )
    # Entries of probability 0 fill up the K places, with any id.
    named = np.sort(np.where(np.isneginf(log_probs), -1 - np.arange(ids.shape[1]), ids), axis=1)
    if (twice := (np.diff(named, axis=1) == 0).any(axis=1)).any():
        place = int(np.argmax(twice))
        raise ValueError(f"{name}[{_IDS!r}] must have different ids at a token, got {shown(ids[place].tolist())}")
    return found


def _array(name: str, value: Any, key: str) -> np.ndarray:
    """``value``, which the row has under ``key``, as an array of int32 or float32."""
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths
        raise wrong_type(name, "an array", value) from error
    is_of_numbers = key == _LOG_PROBS
    if tensor.is_floating_point() != is_of_numbers or tensor.dtype in (torch.bool, torch.complex64):
        raise wrong_type(name, f"an array of {'floating-point numbers' if is_of_numbers else 'integers'}", value)
    if is_of_numbers:
        return tensor.float().numpy()
    tensor = tensor.long()
    if ((tensor < 0) & ((key != "labels") | (tensor != IGNORE_INDEX)) | (tensor >= 2**31)).any():
        expected = f"ids of at least 0{', or -100' if key == 'labels' else ''}"
        raise ValueError(f"{name} must be {expected}, got {int(tensor.min())} to {int(tensor.max())}")
    return tensor.int().numpy()


class TeacherTopKFile(Dataset[dict[str, Any]]):
    """Rows of a file of :func:`write_teacher_topk`, mapped into memory."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            opened = safe_open(file, "np")
            self.metadata: dict[str, str] = opened.metadata() or {}
            self._tensors = {name: opened.get_slice(name) for name in sorted(opened.keys())}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
        for key, expected in (("format", FORMAT), ("format_version", str(FORMAT_VERSION))):
            if (found := self.metadata.get(key)) != expected:
                raise ValueError(f"{file}: the metadata {key!r} must be {expected!r}, got {found!r}")
        self.temperature = self._number("temperature")
        self.tokenizer_hash = self.metadata.get("tokenizer_hash", "")
        self.top_k, num_rows = round(self._number("top_k")), round(self._number("num_rows"))
        layout = {name: (part.get_dtype(), list(part.get_shape())) for name, part in self._tensors.items()}
        num_tokens = layout["input_ids"][1][0] if "input_ids" in layout else 0
        for name, dtypes, shape in (
            ("input_ids", ("I32",), [num_tokens]),
            ("labels", ("I32",), [num_tokens]),
            (_IDS, ("I32",), [num_tokens, self.top_k]),
            (_LOG_PROBS, ("F32", "F16"), [num_tokens, self.top_k]),
            ("offsets", ("I64",), [num_rows + 1]),
        ):
            if layout.get(name) not in [(dtype, shape) for dtype in dtypes]:
                expected = f"{' or '.join(dtypes)} of shape {shape}"
                raise ValueError(f"{file}: the tensor {name!r} must be {expected}, got {layout.get(name)}")
        self.offsets: np.ndarray = self._tensors["offsets"][:]
        if self.offsets[0] != 0 or self.offsets[-1] != num_tokens or (np.diff(self.offsets) < 1).any():
            raise ValueError(f"{file}: the tensor 'offsets' must rise from 0 to {num_tokens}, got {self.offsets}")

    def _number(self, key: str) -> float:
        text = self.metadata.get(key, "")
        with suppress(ValueError):
            if 0 < float(text) < float("inf"):
                return float(text)
        raise ValueError(f"{self.file}: the metadata {key!r} must be a number above 0, got {text!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return TeacherTopKFile, (self.file,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return {name: self._tensors[name][row] for name in _OF_TOKENS}


class TeacherTopKDataModule(SequencesDataModule):
    """A teacher's stored top-k as batches of :class:`~lightning_liger.data.TeacherTopKCollator`.

    Files are those of :func:`write_teacher_topk`. After ``setup``, ``temperature`` and ``top_k`` are theirs, which must
    be the same in all. Other arguments and errors are those of
    :class:`~lightning_liger.data.module.SequencesDataModule` and
    :class:`~lightning_liger.data.module.BatchesDataModule`.

    Args:
        tokenizer: The Hugging Face tokenizer of the ids, a folder or a name on the Hub; that of the files must be the
            same.
        pad_token_id: The token of padding. By default that of the tokenizer, or 0.
        max_length: The maximum number of tokens of a row; the rest is cut off. None keeps all.
    """

    _suffixes = (SUFFIX,)
    _collator_type = TeacherTopKCollator

    def __init__(
        self,
        *,
        tokenizer: str | Path | None = None,
        pad_token_id: int | None = None,
        max_length: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(max_length=max_length, **settings)
        check_integer("data.pad_token_id", pad_token_id, at_least=0, optional=True)
        if tokenizer is not None:
            tokenizer_files(tokenizer)  # raises if it is not a tokenizer's folder
            self.text_tokenizer = load_tokenizer(tokenizer)
        self.tokenizer, self.pad_token_id = tokenizer, pad_token_id
        self.temperature: float | None = None
        self.top_k: int | None = None

    @override
    def _read(self, split: Split) -> ConcatDataset[dict[str, Any]]:
        data = [TeacherTopKFile(file) for file in self._files(split)]
        known = "" if self.text_tokenizer is None else tokenizer_hash(self.text_tokenizer)
        for file in data:
            place, own = f"{self._place(split)[0]}: {file.file}", file.tokenizer_hash
            self.temperature, self.top_k = self.temperature or file.temperature, self.top_k or file.top_k
            if (file.temperature, file.top_k) != (self.temperature, self.top_k):
                raise ValueError(
                    f"{place} has top_k={file.top_k} and temperature={file.temperature}, others top_k={self.top_k} and"
                    f" temperature={self.temperature}; expected the same in all files"
                )
            known = known or own
            if own not in ("", known):
                others = "other files" if self.tokenizer is None else f"data.tokenizer={str(self.tokenizer)!r}"
                wrong = f"was made with a different tokenizer (hash {own[:12]}) than {others} ({known[:12]})"
                raise ValueError(f"{place} {wrong}")
        return ConcatDataset(data)

    @override
    def _lengths(self, split: Split, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        whole, places = (rows.dataset, rows.indices) if hasattr(rows, "indices") else (rows, slice(None))
        lengths = np.concatenate([np.diff(file.offsets) for file in whole.datasets])[places]
        return lengths, np.ones_like(lengths)

    @property
    @override
    def layout(self) -> Layout:
        if self.pad_token_id is None and self.text_tokenizer is not None:
            return super().layout
        return replace(self._layout, pad_token_id=self.pad_token_id or 0)
