"""Files that commands write: all of them or, after an error, none."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def check_output(output: str | Path) -> None:
    """Raises unless ``output`` names a file, new or not, in a folder that exists.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If it is empty, or a folder.
    """
    if not str(output) or Path(output).is_dir():
        raise ValueError(f"output must be the name of a file, got {str(output)!r}")
    if not Path(output).parent.is_dir():
        raise FileNotFoundError(f"output must be in a folder that exists, got {str(output)!r}")


def write_files(files: Mapping[Path, bytes]) -> None:
    """Writes files and the folders that they need; after an error, those that were not there before are gone.

    Raises:
        OSError: Naming the file that could not be written.
    """
    new: list[Path] = []
    try:
        for path, content in files.items():
            new += [each for each in (path, *path.parents) if not each.exists()]
            _write(path, content)
    except OSError as error:
        for each in sorted(set(new), key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                each.rmdir() if each.is_dir() else each.unlink()
        raise OSError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a pipe or a device, which nothing may replace
        path.write_bytes(content)
        return
    path = path.resolve()  # a link stays one
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
