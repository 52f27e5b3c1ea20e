"""What ``path`` may be: a file, a folder, or the source code of Python's standard library; and its documents."""

import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from liger_ops.arguments import check_path, wrong_value
from lightning_liger.data.records import read_records

RECORD_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
# Files that are read from a folder. Not JSON, CSV and HTML: which part of them is text cannot be known.
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
_TEXT_IN_A_FIELD = (".jsonl", ".parquet", ".csv")
# Folders of the standard library that hold tests, third-party code, or tables of characters instead of programs.
_LIBRARY_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "encodings",
    "__pycache__",
}


def python_library_files() -> list[Path]:
    """The ``.py`` files of the running Python's standard library in a fixed order, without tests and build settings."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, (".py",), _LIBRARY_SKIPPED) if "sysconfigdata" not in file.name]
    if not files:  # as of some embedded ones
        raise FileNotFoundError(
            f"data.path was not given, and this Python has no library sources at {root}: give a text file, or a folder"
            f" with files that end in {', '.join(TEXT_SUFFIXES)}."
        )
    return files


def files_at(
    setting: str, path: Any, suffixes: tuple[str, ...], *, other_files: bool = False, or_on_hub: bool = False
) -> list[Path]:
    """The file at ``path``, or all in the folder that have one of the suffixes, in a fixed order without hidden ones.

    ``setting`` names the path in errors. With ``other_files`` a file may have another suffix.
    ``or_on_hub`` says that the setting also takes names on the Hub.
    """
    check_path(setting, path)
    root = Path(os.path.expanduser(path))  # Path.expanduser raises for unknown users
    kind = "a text file" if other_files else "a file"
    accepted = f"{kind}, or a folder with files that end in {', '.join(suffixes)} (hidden ones are skipped)"
    if os.path.isfile(root):  # Path.is_file raises for names that are too long
        if not other_files and root.suffix.lower() not in suffixes:
            raise wrong_value(setting, accepted, str(path))
        return [root]
    if not (files := _walk(root, suffixes)):
        problem = "is a folder without such files" if os.path.isdir(root) else "does not exist"
        accepted += ", or owner/name of a data set on the Hub" if or_on_hub else ""
        raise FileNotFoundError(f"{setting}={str(path)!r} {problem}: expected {accepted}.")
    return files


def read_documents(setting: str, files: Iterable[Path], text_field: str = "text") -> Iterator[str]:
    """Iterates over documents, but for those of white space: each file, or each record of files with records."""
    for file in files:
        if file.suffix.lower() in _TEXT_IN_A_FIELD:
            records = read_records(f"{setting} (data.text_field={text_field!r})", [file])
            yield from filter(str.strip, (record.text(text_field) for record in records))
        elif (text := _text(setting, file)).strip():
            yield text


def fingerprints(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size and modification time of each file: cheap to read; an edit changes the time."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _walk(root: Path, suffixes: tuple[str, ...], skipped: Collection[str] = ()) -> list[Path]:
    """All files below ``root`` with one of the suffixes, sorted; hidden names and folders in ``skipped`` left out."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        found += [Path(folder, name) for name in names if not name.startswith(".") and name.lower().endswith(suffixes)]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _text(setting: str, file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{setting}: {file} is not UTF-8 text: {error}") from error
    if (place := text.find("\0")) >= 0:  # binary data or UTF-16, which may also be valid UTF-8
        raise ValueError(f"{setting}: {file} is not UTF-8 text: the character {place} is a null character")
    return text
