"""What ``path`` may be: a file, a folder, or the source code of Python's standard library; and its documents."""

import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from liger_ops.arguments import check_path, check_text, shown, wrong_type, wrong_value
from lightning_liger.data.records import read_records

JSON_LINES_SUFFIX = ".jsonl"
RECORD_SUFFIXES = (JSON_LINES_SUFFIX, ".json", ".parquet")
# Files that are read from a folder. Not JSON, CSV and HTML: which part of them is text cannot be known.
FOLDER_SUFFIXES = (".txt", ".md", ".rst", ".py", JSON_LINES_SUFFIX)
ACCEPTED = (
    f"a text file (one document), a {JSON_LINES_SUFFIX} file (one document per line), a folder with files that end in "
    f"{', '.join(FOLDER_SUFFIXES)}, or nothing for the sources of Python's standard library"
)

# Folders of the standard library that hold tests, third-party code, or tables of characters instead of programs.
_LIBRARY_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "encodings", "__pycache__"}
)


def python_library_files() -> list[Path]:
    """The ``.py`` files of the running Python's standard library in a fixed order, without tests and build settings.

    Raises:
        FileNotFoundError: If this Python is installed without its sources, as some embedded ones are.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, (".py",), _LIBRARY_SKIPPED) if "sysconfigdata" not in file.name]
    if not files:
        raise FileNotFoundError(
            f"data.path was not given, and this Python has no library sources at {root}. Give one of: {ACCEPTED}."
        )
    return files


def source_files(path: str | Path | None = None) -> list[Path]:
    """The files that `read_documents` would read, in the same order.

    Raises:
        FileNotFoundError: If there is nothing at ``path``, or only a folder without text files.
        TypeError: If ``path`` is no path.
        ValueError: If ``path`` is empty, or one that the file system cannot have.
    """
    check_is_path("data.path", path, optional=True)
    if path is None:
        return python_library_files()
    return files_at("data.path", path, "text files", FOLDER_SUFFIXES, ACCEPTED, other_files=True)


def record_files(setting: str, path: Any) -> list[Path]:
    """The files with records at ``path``, as :func:`files_at` finds them."""
    accepted = f"a file or a folder with files that end in {', '.join(RECORD_SUFFIXES)}"
    return files_at(setting, path, "files with records", RECORD_SUFFIXES, accepted)


def check_is_path(setting: str, value: Any, *, optional: bool = False) -> None:
    """Raises unless ``value`` is a path that is not empty; says what to do with objects that are read from paths."""
    if hasattr(value, "save_pretrained"):
        raise wrong_type(setting, "the path of a folder, to which its save_pretrained(folder) writes it", value)
    if setting.endswith("path") and isinstance(value, Iterable) and not isinstance(value, str | bytes | os.PathLike):
        expected = f"a path{' or None' if optional else ''}: write records to a {JSON_LINES_SUFFIX} file, one a line"
        raise wrong_type(setting, expected, value)
    check_path(setting, value, optional=optional)


def files_at(
    setting: str, path: Any, kind: str, suffixes: tuple[str, ...], accepted: str, *, other_files: bool = False
) -> list[Path]:
    """The file at ``path``, or all in the folder that have one of the suffixes, in a fixed order.

    Args:
        setting: The name of the path in errors.
        path: A file or a folder, which is searched recursively without hidden names.
        kind: The files in plural, as errors name them.
        suffixes: Of the files in folders.
        accepted: The paths that errors recommend.
        other_files: Whether a path to a file may have any suffix.

    Raises:
        FileNotFoundError: If there is nothing at ``path``, or only a folder without such files.
        TypeError: If ``path`` is no path.
        ValueError: If ``path`` is empty, is no such file, or is one that the file system cannot have.
    """
    check_is_path(setting, path)
    try:
        root = Path(path).expanduser()
        is_file, is_folder = root.is_file(), root.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or ~ of a user that does not exist
        raise ValueError(f"{setting} must be a path that can be read, got {shown(str(path))}: {error}") from error
    if is_file:
        if not other_files and root.suffix.lower() not in suffixes:
            raise wrong_value(setting, accepted, str(path))
        return [root]
    if not is_folder:
        raise FileNotFoundError(f"{setting}={str(path)!r} does not exist. Accepted: {accepted}.")
    files = _walk(root, suffixes)
    if not files:
        raise FileNotFoundError(
            f"{setting}={str(path)!r} is a folder without {kind} (hidden ones are skipped). Accepted: {accepted}."
        )
    return files


def read_documents(path: str | Path | None = None, *, text_field: str = "text") -> Iterator[str]:
    """Iterates over the documents of a corpus, one string each, in a fixed order; those of white space are left out.

    Args:
        path: A text file is one document. A file that ends in ``.jsonl`` has one document on each line. A folder is
            searched recursively for both, without hidden files and folders. ``None`` is `python_library_files`.
        text_field: The key of the text in the lines of a ``.jsonl`` file.

    Raises:
        FileNotFoundError: At the call, if there is nothing to read at ``path``.
        TypeError: At the call, if an argument is of another type.
        ValueError: At the call, if an argument is empty. While iterating, if a file is not UTF-8 text, or a line is not
            a JSON object with a string under ``text_field``.
    """
    check_text("data.text_field", text_field)
    texts = (text for file in source_files(path) for text in _texts(file, text_field))
    return (text for text in texts if text.strip())


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


def _texts(file: Path, text_field: str) -> Iterator[str]:
    if file.suffix.lower() == JSON_LINES_SUFFIX:
        for record in read_records(f"data.path (data.text_field={text_field!r})", [file]):
            yield record.text(text_field)
        return
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: {file} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    if (place := text.find("\0")) >= 0:  # binary data or UTF-16, which may also be valid UTF-8
        raise ValueError(f"data.path: {file} is not UTF-8 text (the character {place} is a null character).")
    yield text
