"""Files that commands write: all of them or, after an error, none."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def check_output(output: str | Path) -> None:
    """Raises unless ``output`` names a file, new or not, in a folder that exists."""
    if not str(output) or Path(output).is_dir():
        raise ValueError(f"output must be the name of a file, got {str(output)!r}")
    if not Path(output).parent.is_dir():
        raise FileNotFoundError(f"output must be in a folder that exists, got {str(output)!r}")


def make_folder(output: str | Path) -> Path:
    """The folder ``output``, which is made with its parents unless it exists; OSError if that is not possible."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"output must be a folder, or a new one, got {str(output)!r}: {error.strerror}") from error
    return folder


def write_files(files: Mapping[Path, bytes]) -> None:
    """Writes files and the folders that they need: all contents next to the files, which they replace at the end."""
    parts: dict[Path, Path] = {}
    with contextlib.ExitStack() as undo:
        try:
            for path, content in files.items():
                if path.exists() and not path.is_file():  # a pipe or a device, which nothing may replace
                    path.write_bytes(content)
                    continue
                for folder in reversed([folder for folder in path.parents if not folder.exists()]):
                    folder.mkdir()
                    undo.callback(folder.rmdir)
                path.parent.mkdir(exist_ok=True)  # which may be a file
                target = path.resolve()  # a link stays one
                part = target.with_name(f"{target.name}.part")
                parts[part] = target
                undo.callback(part.unlink, missing_ok=True)
                part.write_bytes(content)
            for part, path in parts.items():
                os.replace(part, path)
            undo.pop_all()
        except OSError as error:
            raise OSError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
