"""Records: the objects of JSON lines, JSON and Parquet files, whose errors name the file and the line or row.

Files are read here, and not by ``datasets``: it takes the type of a field from its first values, so that a prompt that
is a string in one record and messages in another is an error, text that looks like a date is not text, and errors do
not say which record is wrong.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_ops.arguments import shown

Message = dict[str, Any]
Text = str | list[Message]
"""A text, or the messages of a conversation."""


@dataclass(frozen=True)
class Record:
    """One object of a file.

    Args:
        values: By key.
        place: The setting, the file and the line, as errors name them.
    """

    values: Mapping[str, Any]
    place: str

    def error(self, problem: str) -> ValueError:
        """The error for a record with this problem."""
        return ValueError(f"{self.place}: {problem}")

    def check(self, is_right: bool, key: str, expected: str, value: Any) -> None:
        """Raises ValueError that names the field ``key``, unless ``value``, or a part of it, is right."""
        if not is_right:
            raise self.error(f"the field {key!r} must be {expected}, got {shown(value)}")

    def renamed(self, columns: Mapping[str, str]) -> "Record":
        """The record with other keys: those of ``columns``, each for the key in the file."""
        taken = set(columns.values())
        values = {key: value for key, value in self.values.items() if key not in taken and key not in columns}
        return Record(values | {own: self._get(key) for own, key in columns.items() if key in self.values}, self.place)

    def has(self, key: str) -> bool:
        """Whether there is a value; tables have null where there is none."""
        return self.values.get(key) is not None

    def _get(self, key: str) -> Any:
        if not self.has(key):
            problem = "is null" if key in self.values else "is missing"
            raise self.error(f"the field {key!r} {problem}; keys found: {shown(sorted(map(str, self.values)))}")
        return self.values[key]

    def text(self, key: str) -> str:
        """A string."""
        value = self._get(key)
        self.check(isinstance(value, str), key, "a string", value)
        return str(value)

    def text_or_messages(self, key: str) -> Text:
        """A string, or the messages of a conversation."""
        return self.text(key) if isinstance(self._get(key), str) else self.messages(key)

    def messages(self, key: str) -> list[Message]:
        """A list of messages: each has a ``role`` and a ``content`` (or calls of tools), all of them strings."""
        return self.as_messages(key, self._get(key))

    def as_messages(self, key: str, value: Any) -> list[Message]:
        """``value``, which is part of the field ``key``, as messages."""
        is_right = isinstance(value, list) and len(value) > 0
        self.check(is_right, key, "a string, or a list of messages that is not empty", value)
        return [self._message(f"{key}[{index}]", message) for index, message in enumerate(value)]

    def _message(self, key: str, message: Any) -> Message:
        self.check(isinstance(message, dict), key, "a message, an object with 'role' and 'content'", message)
        message = {name: value for name, value in message.items() if value is not None}
        self.check(isinstance(message.get("role"), str), key, "a message with a string 'role'", message)
        content = message.get("content")
        if content is None and ("tool_calls" in message or "function_call" in message):
            return message
        if isinstance(content, list):  # parts, as models that read images take them
            are_texts = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
            self.check(are_texts, key, "a message whose 'content' is text", message)
            content = "".join(part["text"] for part in content)
        self.check(isinstance(content, str), key, "a message with a string 'content'", message)
        return message | {"content": content}

    def flag(self, key: str) -> bool:
        """True or False."""
        value = self._get(key)
        self.check(isinstance(value, bool), key, "true or false", value)
        return bool(value)

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._get(key)
        self.check(_is_number(value), key, "a finite number", value)
        return float(value)

    def numbers(self, key: str, length: int) -> list[float]:
        """A list of ``length`` finite numbers."""
        return self.as_numbers(key, self._get(key), length)

    def as_numbers(self, key: str, value: Any, length: int) -> list[float]:
        """``value``, which is part of the field ``key``, as finite numbers."""
        is_right = isinstance(value, list) and all(map(_is_number, value)) and length == len(value)
        self.check(is_right, key, f"a list of {length} finite numbers", value)
        return [float(each) for each in value]

    def as_ids(self, key: str, value: Any) -> list[int]:
        """``value``, which is part of the field ``key``, as token ids."""
        is_right = isinstance(value, list) and all(type(each) is int and 0 <= each < 2**31 for each in value)
        self.check(is_right, key, "a list of token ids", value)
        return list(value)

    def items(self, key: str) -> list[Any]:
        """A list of any values, at least one."""
        value = self._get(key)
        self.check(isinstance(value, list) and len(value) > 0, key, "a list that is not empty", value)
        return list(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, or one as JSON text (tables cannot hold objects with different keys); empty if it is missing."""
        value = self._decoded(key) if self.has(key) else {}
        self.check(isinstance(value, dict), key, "an object", value)
        return dict(value)

    def tools(self) -> list[Any] | None:
        """The field ``tools``: a list of JSON schemas, or one as JSON text; None if it is missing."""
        value = self._decoded("tools") if self.has("tools") else []
        is_right = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        self.check(is_right, "tools", "a list of JSON schemas", value)
        return value or None

    def _decoded(self, key: str) -> Any:
        value = self.values[key]
        try:
            return json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise self.error(f"the field {key!r} is text that is not JSON: {error}") from error

    def strings(self) -> Iterator[str]:
        """All strings in the record, for the training of a tokenizer."""
        left: list[Any] = [self.values]
        while left:
            value = left.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, Mapping | list):
                left.extend(value.values() if isinstance(value, Mapping) else value)


def read_records(setting: str, files: Sequence[Path]) -> Iterator[Record]:
    """Iterates over the records of files, in order.

    Args:
        setting: The name of the path in errors, such as data.path.
        files: A .parquet file has one record per row; a .json file has a list of objects, or lines; all others have
            one object on each line.

    Raises:
        ValueError: For a file that is not UTF-8 or not Parquet, a line that is not JSON, and a record that is no
            object.
    """
    for file in files:
        place = f"{setting}: {file}"
        try:
            for where, value in _values(place, file):
                if not isinstance(value, dict):
                    raise ValueError(f"{where} is a JSON {type(value).__name__}, expected an object.")
                yield Record(value, where)
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not UTF-8 text ({error.reason} at byte {error.start}).") from error


def _values(place: str, file: Path) -> Iterator[tuple[str, Any]]:
    """The places and values of the records of a file."""
    if file.suffix.lower() == ".parquet":
        for number, row in enumerate(_parquet_rows(place, file), start=1):
            yield f"{place}, row {number}", row
        return
    with file.open(encoding="utf-8-sig") as lines:
        if file.suffix.lower() == ".json" and (text := lines.read()).lstrip()[:1] == "[":
            for number, value in enumerate(_from_json(place, text), start=1):
                yield f"{place}, record {number}", value
            return
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{place}, line {number}", _from_json(f"{place}, line {number}", line)


def _from_json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}.") from error


def _parquet_rows(place: str, file: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException, parquet  # slow to import

    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise ValueError(f"{place} cannot be read as Parquet: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
