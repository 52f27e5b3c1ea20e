"""Records: the objects of JSON lines, JSON, Parquet and CSV files, whose errors name the file and the line or row.

``datasets`` would take the type of a field from its first values, and its errors do not say which record is wrong.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from liger_ops.arguments import shown

Message = dict[str, Any]
Text = str | list[Message]
"""A text, or the messages of a conversation."""
_T = TypeVar("_T")
_BLANK = b"\xef\xbb\xbf \t\r\n"  # white space, and the mark that a file may begin with


@dataclass(frozen=True)
class Record:
    """One object of a file."""

    values: Mapping[str, Any]
    place: str
    """The setting, the file and the line, as errors name them."""

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.place}: {problem}")

    def check(
        self, key: str, value: Any, kind: type[_T], expected: str, is_right: Callable[[_T], bool] = lambda _: True
    ) -> _T:
        """``value``, the field ``key`` or a part of it; raises ValueError unless it is of ``kind`` and right."""
        if not isinstance(value, kind) or not is_right(value):
            raise self.error(f"the field {key!r} must be {expected}, got {shown(value)}")
        return value

    def renamed(self, columns: Mapping[str, str]) -> "Record":
        """The record with other keys: those of ``columns``, each for the key in the file."""
        taken = {*columns, *columns.values()}
        values = {key: value for key, value in self.values.items() if key not in taken}
        return Record(values | {own: self._get(key) for own, key in columns.items() if key in self.values}, self.place)

    def has(self, key: str) -> bool:
        """Whether there is a value; tables have null where there is none."""
        return self.values.get(key) is not None

    def _get(self, key: str) -> Any:
        if self.has(key):
            return self.values[key]
        problem = "is null" if key in self.values else "is missing"
        raise self.error(f"the field {key!r} {problem}; keys found: {shown(sorted(map(str, self.values)))}")

    def text(self, key: str) -> str:
        return self.check(key, self._get(key), str, "a string")

    def flag(self, key: str) -> bool:
        return self.check(key, self._get(key), bool, "true or false")

    def number(self, key: str) -> float:
        return float(self.check(key, self._get(key), object, "a finite number", _is_number))  # type: ignore[arg-type]

    def items(self, key: str) -> list[Any]:
        return self.check(key, self._get(key), list, "a list that is not empty", bool)

    def decoded(self, key: str, kind: type[_T], expected: str) -> _T:
        """A list or an object, or the JSON text of one, as tables cannot hold objects of different keys; or empty."""
        value = self.values[key] if self.has(key) else kind()
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise self.error(f"the field {key!r} is text that is not JSON: {error}") from error
        return self.check(key, value, kind, expected)

    def as_numbers(self, key: str, value: Any, length: int) -> list[float]:
        expected = f"a list of {length} finite numbers"
        return self.check(key, value, list, expected, lambda found: [*map(_is_number, found)] == [True] * length)

    def as_ids(self, key: str, value: Any) -> list[int]:
        return self.check(key, value, list, "a list of token ids", lambda ids: all(map(_is_id, ids)))

    def text_or_messages(self, key: str, index: int | None = None) -> Text:
        """A field, or the item of a list that is one."""
        value = self._get(key) if index is None else self.items(key)[index]
        key = key if index is None else f"{key}[{index}]"
        return value if isinstance(value, str) else self.as_messages(key, value)

    def as_messages(self, key: str, value: Any) -> list[Message]:
        """``value`` as messages: each has a ``role`` and a ``content`` (or calls of tools), all of them strings."""
        value = self.check(key, value, list, "a string, or a list of messages that is not empty", bool)
        return [self._message(f"{key}[{index}]", message) for index, message in enumerate(value)]

    def _message(self, key: str, message: Any) -> Message:
        message = self.check(key, message, dict, "a message, an object with 'role' and 'content'")
        message = {name: value for name, value in message.items() if value is not None}
        self.check(f"{key}.role", message.get("role"), str, "a string")
        content = message.get("content")
        if content is None and ("tool_calls" in message or "function_call" in message):
            return message
        if isinstance(content, list):  # parts, as models that read images take them
            parts = [self.check(f"{key}.content", part, dict, "text, or a list of texts") for part in content]
            content = "".join(self.check(f"{key}.content", part.get("text"), str, "text") for part in parts)
        return message | {"content": self.check(f"{key}.content", content, str, "a string")}


def strings(item: Any) -> Iterator[str]:
    """All strings in a record or a value of JSON, for the training of a tokenizer."""
    left: list[Any] = [item]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Record):
            left.append(value.values)
        elif isinstance(value, Mapping | list):
            left.extend(value.values() if isinstance(value, Mapping) else value)


def read_records(setting: str, files: Iterable[Path]) -> Iterator[Record]:
    """Iterates over the records of files, in order; ``setting`` names their path in errors.

    A .parquet or .csv file has one record per row; a .json file a list of objects, or lines; all others have one
    object per line.
    """
    for file in files:
        place = where = f"{setting}: {file}"
        try:
            for number, value in _values(file):
                where = f"{place}, {number}"
                value = json.loads(value) if isinstance(value, bytes) else value
                if not isinstance(value, dict):
                    raise ValueError(f"expected an object, got a JSON {type(value).__name__}")
                yield Record(value, where)
                where = place
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{where} cannot be read: {error}") from error


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    """The values of the records of a file, lines in bytes; each with its line, row or number."""
    suffix = file.suffix.lower()
    if suffix in (".parquet", ".csv"):
        from pyarrow import csv, parquet  # slow to import

        quoted = csv.ParseOptions(newlines_in_values=True)
        with parquet.ParquetFile(file) if suffix == ".parquet" else csv.open_csv(file, parse_options=quoted) as table:
            batches = table.iter_batches(batch_size=1024) if suffix == ".parquet" else table
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
        return
    with file.open("rb") as lines:
        if suffix == ".json" and (content := lines.read()).lstrip(_BLANK).startswith(b"["):
            yield from ((f"record {number}", value) for number, value in enumerate(json.loads(content), start=1))
            return
        lines.seek(0)
        yield from ((f"line {number}", line) for number, line in enumerate(lines, start=1) if line.strip(_BLANK))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
