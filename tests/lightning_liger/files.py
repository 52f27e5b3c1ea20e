"""Wrong files: how contents are broken, and a check that a call leaves what is on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "first bytes": lambda content: content[:20],
    "half": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n",
    "zeros": lambda content: bytes(len(content)),
}
"""By name, what can happen to the contents of a file."""


def broken(file: Path, kind: str) -> Path:
    """``file``, with contents that are broken in this way."""
    file.write_bytes(BREAKS[kind](file.read_bytes()))
    return file


def on_disk(folder: Path) -> dict[str, bytes | None]:
    """Everything in ``folder``: the contents of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def leaves_disk(write: Callable[[Path], Any], call: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Calls ``call`` with what ``write`` returned, and checks that files are the same after it."""

    def run(tmp_path: Path) -> None:
        written = write(tmp_path)
        before = on_disk(tmp_path)
        try:
            call(written)
        finally:
            assert on_disk(tmp_path) == before

    return run
