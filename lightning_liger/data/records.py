"""Records: the objects of JSON lines, JSON and Parquet files, whose errors name the file and the line."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from liger_ops.arguments import shown
from lightning_liger.data.sources import decode_json, files_at

SUFFIXES = (".jsonl", ".json", ".parquet")
ACCEPTED = f"a file or a folder with files that end in {', '.join(SUFFIXES)}"
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*,?\s*")

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

    def _wrong(self, key: str, expected: str, value: Any) -> ValueError:
        return self.error(f"the field {key!r} must be {expected}, got {shown(value)}")

    def text(self, key: str) -> str:
        """A string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def text_or_messages(self, key: str) -> Text:
        """A string, or the messages of a conversation."""
        return self.text(key) if isinstance(self._get(key), str) else self.messages(key)

    def messages(self, key: str) -> list[Message]:
        """A list of messages: each has a ``role`` and a ``content`` (or calls of tools), all of them strings."""
        return self.as_messages(key, self._get(key))

    def as_messages(self, key: str, value: Any) -> list[Message]:
        """``value``, which is part of the field ``key``, as messages."""
        if not isinstance(value, list) or not value:
            raise self._wrong(key, "a string, or a list of messages that is not empty", value)
        return [self._message(f"{key}[{index}]", message) for index, message in enumerate(value)]

    def _message(self, key: str, message: Any) -> Message:
        if not isinstance(message, dict):
            raise self._wrong(key, "a message, an object with 'role' and 'content'", message)
        message = {name: value for name, value in message.items() if value is not None}
        if not isinstance(message.get("role"), str):
            raise self._wrong(key, "a message with a string 'role'", message)
        content = message.get("content")
        if content is None and ("tool_calls" in message or "function_call" in message):
            return message
        if isinstance(content, list):  # parts, as models that read images take them
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise self._wrong(key, "a message whose 'content' is text", message)
            message["content"] = "".join(part["text"] for part in content)
        elif not isinstance(content, str):
            raise self._wrong(key, "a message with a string 'content'", message)
        return message

    def flag(self, key: str) -> bool:
        """True or False."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._get(key)
        if not _is_number(value):
            raise self._wrong(key, "a finite number", value)
        return float(value)

    def numbers(self, key: str, length: int | None = None) -> list[float]:
        """A list of finite numbers."""
        return self.as_numbers(key, self._get(key), length)

    def as_numbers(self, key: str, value: Any, length: int | None = None) -> list[float]:
        """``value``, which is part of the field ``key``, as finite numbers."""
        if not isinstance(value, list) or not all(map(_is_number, value)) or length not in (None, len(value)):
            raise self._wrong(key, f"a list of {'' if length is None else f'{length} '}finite numbers", value)
        return [float(each) for each in value]

    def as_ids(self, key: str, value: Any) -> list[int]:
        """``value``, which is part of the field ``key``, as token ids."""
        if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 2**31 for each in value):
            raise self._wrong(key, "a list of token ids", value)
        return value

    def items(self, key: str) -> list[Any]:
        """A list of any values, at least one."""
        value = self._get(key)
        if not isinstance(value, list) or not value:
            raise self._wrong(key, "a list that is not empty", value)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, or one as JSON text (tables cannot hold objects with different keys); empty if it is missing."""
        value = self._decoded(key) if self.has(key) else {}
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return value

    def tools(self) -> list[Any] | None:
        """The field ``tools``: a list of JSON schemas, or one as JSON text; None if it is missing."""
        value = self._decoded("tools") if self.has("tools") else None
        if value is not None and (not isinstance(value, list) or not all(isinstance(each, dict) for each in value)):
            raise self._wrong("tools", "a list of JSON schemas", value)
        return value or None

    def _decoded(self, key: str) -> Any:
        value = self.values[key]
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.error(f"the field {key!r} is text that is not JSON: {error}") from error

    def strings(self) -> Iterator[str]:
        """All strings in the record, for the training of a tokenizer."""
        yield from _strings(self.values)


def record_files(setting: str, path: Any) -> list[Path]:
    """The files that :func:`read_records` would read, in the same order.

    Args:
        setting: The name of the path in errors.
        path: A file or a folder, which is searched recursively without hidden names.

    Raises:
        FileNotFoundError: If there is nothing at ``path``, or only a folder without such files.
        TypeError: If ``path`` is no path.
        ValueError: If ``path`` is empty, is no such file, or is one that the file system cannot have.
    """
    return files_at(setting, path, "files with records", SUFFIXES, ACCEPTED)


def read_records(setting: str, files: Sequence[Path]) -> Iterator[Record]:
    """Iterates over the records of files, in order.

    Args:
        setting: The name of the path in errors, such as data.path.
        files: Those of :func:`record_files`. A .jsonl file has one object on each line; a .json file a list of objects,
            or lines; a .parquet file one record per row.

    Raises:
        ModuleNotFoundError: For a Parquet file without the package pyarrow.
        ValueError: For a file that is not UTF-8 or not Parquet, a line that is not JSON, and a record that is no
            object.
    """
    for file in files:
        try:
            if file.suffix.lower() == ".parquet":
                yield from _read_parquet(setting, file)
            elif file.suffix.lower() == ".json":
                yield from _read_json(setting, file)
            else:
                with file.open(encoding="utf-8-sig") as lines:
                    yield from _read_lines(setting, file, lines)
        except UnicodeDecodeError as error:
            message = f"{setting}: {file} is not UTF-8 text ({error.reason} at byte {error.start})."
            raise ValueError(message) from error


def _read_lines(setting: str, file: Path, lines: Any) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{setting}: {file}, line {number}"
            yield _checked(decode_json(place, line), place, line)


def _read_json(setting: str, file: Path) -> Iterator[Record]:
    text = file.read_text(encoding="utf-8-sig")
    position, line = _SPACE.match(text).end(), 1  # type: ignore[union-attr]  # it matches nothing too
    if text[position : position + 1] != "[":
        yield from _read_lines(setting, file, text.split("\n"))
        return
    line += text.count("\n", 0, position)
    decoder = json.JSONDecoder()
    start, is_first = position + 1, True
    while True:
        begin = (_SPACE if is_first else _SEPARATOR).match(text, start).end()  # type: ignore[union-attr]
        line += text.count("\n", position, begin)
        position = begin
        place = f"{setting}: {file}, line {line}"
        if text[position : position + 1] == "]":
            if rest := text[position + 1 :].strip():
                raise ValueError(f"{place}: the list of records must end the file, got {shown(rest[:40])} after it")
            return
        if not is_first and "," not in text[start:begin]:
            raise ValueError(f"{place} is not JSON: expected ',' or ']' after a record.")
        try:
            value, start = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(f"{setting}: {file}, line {error.lineno} is not JSON: {error}.") from error
        except ValueError as error:  # an integer of more than 4300 digits
            raise ValueError(f"{place} is not JSON: {error}.") from error
        except RecursionError as error:
            raise ValueError(f"{place} is JSON that is nested too deeply.") from error
        yield _checked(value, place, text[position:start])
        is_first = False


def _checked(value: Any, place: str, text: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is a JSON {type(value).__name__}, expected an object.")
    if "\\u" in text:  # JSON can hold half a surrogate pair, which UTF-8 cannot encode
        for each in _strings(value):
            try:
                each.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{place} is not valid Unicode: {error}.") from error
    return Record(value, place)


def _read_parquet(setting: str, file: Path) -> Iterator[Record]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        message = f"{setting}: {file} needs pyarrow (pip install pyarrow), or convert it to JSON lines: {error}"
        raise ModuleNotFoundError(message) from error
    row = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    row += 1
                    yield Record(values, f"{setting}: {file}, row {row}")
    except (OSError, import_module("pyarrow").ArrowException) as error:
        raise ValueError(f"{setting}: {file} cannot be read as Parquet after row {row}: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _strings(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)
