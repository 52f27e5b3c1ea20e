"""Tables of rows of different lengths in safetensors files, which are mapped into memory and read row by row."""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

OFFSETS = ".offsets"
"""Ends the name of the tensor that says where the rows of a column begin; a column without one has a number per row."""
SHARED_OFFSETS = "offsets"
"""The tensor of offsets of all columns, in tables whose columns have rows of equal lengths."""
_DTYPES = {"int32": "I32", "int64": "I64", "uint8": "U8", "float16": "F16", "float32": "F32"}
_NUMPY = {name: dtype for dtype, name in _DTYPES.items()}


class RaggedWriter:
    """Writes a table row by row; the file appears when the ``with`` block ends without an error.

    Columns of different names are concatenated in temporary files, so that no more than a row is in memory. All rows
    must have the columns of the first one.

    Args:
        file: The safetensors file to write.
        metadata: Strings that the file holds too.
        shares_offsets: Whether all columns have rows of equal lengths, and one tensor of offsets. By default each
            column has its own, or none if its rows are numbers.
    """

    def __init__(self, file: Path, metadata: Mapping[str, str] | None = None, shares_offsets: bool = False) -> None:
        self.file, self.metadata, self.shares_offsets = file, dict(metadata or {}), shares_offsets
        self.num_rows = 0
        self._folder = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        self._stack = ExitStack()
        self._parts: dict[str, IO[bytes]] = {}
        self._kinds: dict[str, tuple[str, tuple[int, ...] | None]] = {}
        self._offsets: dict[str, list[int]] = {}

    def __enter__(self) -> "RaggedWriter":
        self._folder.mkdir(parents=True)
        return self

    def _offsets_of(self, name: str) -> str:
        return SHARED_OFFSETS if self.shares_offsets else name + OFFSETS

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row: arrays of ``[length, ...]``, and numbers.

        Raises:
            ValueError: If its columns, or their dtypes and shapes, are not those of the first row.
        """
        arrays = {name: np.asarray(value) for name, value in row.items()}
        kinds = {name: (str(array.dtype), array.shape[1:] if array.ndim else None) for name, array in arrays.items()}
        if not self.num_rows:
            self._kinds = kinds
            for index, (name, array) in enumerate(arrays.items()):
                self._parts[name] = self._stack.enter_context((self._folder / str(index)).open("wb"))
                if array.ndim:
                    self._offsets.setdefault(self._offsets_of(name), [0])
        if kinds != self._kinds:
            raise ValueError(f"rows must have the columns {self._kinds}, got {kinds}")
        lengths = {(self._offsets_of(name), len(array)) for name, array in arrays.items() if array.ndim}
        if self.shares_offsets and len(lengths) != 1:
            raise ValueError(f"all columns of a row must have one length, got {sorted(lengths)}")
        for name, length in lengths:
            self._offsets[name].append(self._offsets[name][-1] + length)
        for name, array in arrays.items():
            array.tofile(self._parts[name])
        self.num_rows += 1

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        self._stack.close()
        try:
            if error is None:
                self._assemble()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _assemble(self) -> None:
        """Header and tensors, as https://github.com/huggingface/safetensors describes them."""
        header: dict[str, Any] = {"__metadata__": {**self.metadata, "num_rows": str(self.num_rows)}}
        offsets = {name: np.array(values, dtype=np.int64) for name, values in self._offsets.items()}
        end = 0
        for name, values in offsets.items():
            header[name] = _entry("int64", values.shape, end)
            end = header[name]["data_offsets"][1]
        # Wide values first: each tensor begins at a multiple of the size of its values.
        names = sorted(self._kinds, key=lambda name: -np.dtype(self._kinds[name][0]).itemsize)
        for name in names:
            dtype, shape = self._kinds[name]
            size = Path(self._parts[name].name).stat().st_size
            length = size // (np.dtype(dtype).itemsize * int(np.prod(shape or ())))
            header[name] = _entry(dtype, (length, *(shape or ())), end)
            end = header[name]["data_offsets"][1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        whole = self._folder / "whole"
        with whole.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for values in offsets.values():
                values.tofile(out)
            for name in names:
                with Path(self._parts[name].name).open("rb") as part:
                    shutil.copyfileobj(part, out, 2**20)
        os.replace(whole, self.file)


class RaggedTable:
    """Reads a file of :class:`RaggedWriter`: rows are dicts of arrays and numbers, which are copied when asked for.

    Args:
        file: A safetensors file.

    Raises:
        ValueError: If it is damaged, or its offsets do not fit its columns.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._open = safe_open(file, "np")
            self.metadata: dict[str, str] = self._open.metadata() or {}
            names = set(self._open.keys())
            self._slices = {name: self._open.get_slice(name) for name in sorted(names)}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a safetensors file, or a part of one: {error}") from error
        self.shapes = {name: tuple(part.get_shape()) for name, part in self._slices.items()}
        self.dtypes = {name: str(part.get_dtype()) for name, part in self._slices.items()}
        if unknown := {name: dtype for name, dtype in self.dtypes.items() if dtype not in _NUMPY}:
            raise ValueError(f"{file}: tensors must have one of the dtypes {', '.join(_NUMPY)}, got {unknown}")
        shared = SHARED_OFFSETS if SHARED_OFFSETS in names else None
        self._offsets: dict[str, np.ndarray] = {}
        for name in sorted(names):
            if name == shared or name.endswith(OFFSETS):
                continue
            place = shared or (name + OFFSETS if name + OFFSETS in names else None)
            self._offsets[name] = self._read_offsets(name, place)
        counts = {name: len(offsets) - 1 for name, offsets in self._offsets.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"{file}: all columns must have the same number of rows, got {counts}")
        self._num_rows = max(counts.values(), default=0)
        self._numbers = {name for name in counts if not shared and name + OFFSETS not in names}

    def _read_offsets(self, name: str, place: str | None) -> np.ndarray:
        if not self.shapes[name]:
            raise ValueError(f"{self.file}: the tensor {name!r} must have a dimension, got the shape ()")
        num_values = self.shapes[name][0]
        if place is None:  # a number for each row
            return np.arange(num_values + 1)
        if self.dtypes[place] != "I64" or len(self.shapes[place]) != 1 or self.shapes[place] == (0,):
            found = f"{self.dtypes[place]} of shape {self.shapes[place]}"
            raise ValueError(f"{self.file}: the tensor {place!r} must be int64 of shape [rows + 1], got {found}")
        offsets: np.ndarray = self._slices[place][:]
        if offsets[0] != 0 or offsets[-1] != num_values or bool((np.diff(offsets) < 0).any()):
            raise ValueError(
                f"{self.file}: the tensor {place!r} must rise from 0 to {num_values}, the length of {name!r}, got"
                f" {offsets[0]} to {offsets[-1]}"
            )
        return offsets

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedTable, (self.file,)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def columns(self) -> set[str]:
        """Their names."""
        return set(self._offsets)

    def lengths(self, name: str) -> np.ndarray:
        """The length of each row in a column, ``[num_rows]``."""
        lengths: np.ndarray = np.diff(self._offsets[name])
        return lengths

    def column(self, name: str) -> np.ndarray:
        """All values of a column."""
        return self._part(name, 0, self.shapes[name][0])

    def _part(self, name: str, start: int, end: int) -> np.ndarray:
        if start == end:  # an error of safetensors at the end of a tensor
            return np.empty((0, *self.shapes[name][1:]), dtype=_NUMPY[self.dtypes[name]])
        part: np.ndarray = self._slices[name][start:end]
        return part

    def __getitem__(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, offsets in self._offsets.items():
            values = self._part(name, int(offsets[index]), int(offsets[index + 1]))
            found[name] = values[0] if name in self._numbers else values
        return found


def _entry(dtype: str, shape: tuple[int, ...], begin: int) -> dict[str, Any]:
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    return {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, begin + size]}
