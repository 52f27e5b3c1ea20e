"""Checks that loading a checkpoint runs no code: which classes its pickles name, before anything unpickles them.

A pickle may call any function that it names. ``torch.load`` refuses all but tensors and plain Python objects, unless it
is told otherwise, but not everything is read with it: ``torch.distributed.checkpoint`` unpickles the ``.metadata`` of a
folder and its entries without tensors as they are, Lightning unpickles full checkpoints under FSDP, and DeepSpeed its
files. These are therefore read here first, with nothing in them that could run.
"""

import io
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.serialization import safe_globals

from liger_ops.arguments import shown

_ZIP = b"PK\x03\x04"
_VERSION = "pytorch-lightning_version"
_LATEST = ("latest", "latest_universal")
"""The files that tell DeepSpeed which folder to load."""


def load_file(path: Path, weights_only: bool | None = None) -> Any:
    """The contents of a file of ``torch.save``, on the CPU, with tensors that are read when they are used.

    Args:
        path: A local file.
        weights_only: As in :func:`torch.load`, whose default refuses all but tensors and plain Python objects.

    Raises:
        OSError: If the file cannot be opened.
        pickle.UnpicklingError: If it holds objects of other classes; the message names the class, and how to allow it.
        ValueError: If it is not a complete file of ``torch.save``.
    """
    with path.open("rb") as file:
        # Lightning's reader of full checkpoints finds a zip archive in any part of a file, where `torch.load` would
        # read another format.
        if file.read(len(_ZIP)) != _ZIP or path.suffix == ".safetensors":
            raise _not_a_checkpoint(path, "it does not begin as one")
    with loading_errors_explained(path):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


def check_checkpoint(path: Path, weights_only: bool | None = None, allowed: Sequence[type] = ()) -> None:
    """Raises if loading the file, or the folder of a sharded checkpoint, would run code.

    Args:
        path: A checkpoint of any strategy.
        weights_only: As in :func:`load_file`; with False only the ``.metadata`` of a folder is checked.
        allowed: Further classes that files of this kind consist of.

    Raises:
        FileNotFoundError: If there is nothing at ``path``.
        pickle.UnpicklingError: As :func:`load_file`.
        ValueError: As :func:`load_file`, and for a folder that is not a checkpoint.
    """
    with safe_globals(list(allowed)):
        if not path.is_dir():
            _check_file(path, weights_only)
            return
        for file in sorted(path.glob("*.metadata")):
            check_metadata(file, weights_only)
        for file in (path / name for name in _LATEST if (path / name).is_file()):
            if (tag := file.read_text(encoding="utf-8", errors="replace").strip()) != Path(tag).name:
                raise ValueError(f"{file} must hold the name of a folder in {path}, got {tag!r}")
        files = sorted(Path(root, name) for root, _, names in os.walk(path, followlinks=True) for name in names)
        files = [file for file in files if file.suffix == ".pt"]
        if not files:
            raise ValueError(f"{path} is not a checkpoint: the folder has no file that ends in .pt")
        for file in files:
            _check_file(file, weights_only)


def _check_file(file: Path, weights_only: bool | None) -> None:
    if weights_only is False:
        file.open("rb").close()
    else:
        load_file(file, weights_only)


def check_metadata(file: Path, weights_only: bool | None = None) -> None:
    """Raises if ``.metadata``, or an entry without tensors that it locates, holds anything that could run code.

    Args:
        file: The ``.metadata`` of a sharded checkpoint.
        weights_only: As in :func:`load_file`, of the entries.

    Raises:
        OSError: If the file, or one that it names, cannot be opened.
        pickle.UnpicklingError: As :func:`load_file`.
        ValueError: If the file is not the metadata of a sharded checkpoint, or an entry is not complete.
    """
    try:
        with file.open("rb") as opened:
            entries = list(_entries(_MetadataUnpickler(opened, file).load()))
    except (OSError, UnsafePickleError):
        raise
    except Exception as error:
        raise ValueError(
            f"{file} is not the metadata of a sharded checkpoint, or incomplete: {_told(error)}"
        ) from error
    for entry in entries:
        part = file.parent / entry.relative_path
        if part.is_file() and (size := part.stat().st_size) < (end := entry.offset + entry.length):
            raise ValueError(f"{part} is incomplete: {entry.name!r} ends at byte {end}, got a file of {size}")
        if entry.is_tensor or weights_only is False:
            continue
        with part.open("rb") as opened:
            opened.seek(entry.offset)
            content = io.BytesIO(opened.read(entry.length))
        with loading_errors_explained(f"{part} ({entry.name!r})"):
            torch.load(content, map_location="cpu", weights_only=weights_only)


class _Entry(NamedTuple):
    name: str
    is_tensor: bool
    """Whether it is read with ``weights_only=True`` in any case."""
    relative_path: str
    offset: int
    length: int


def _entries(metadata: Any) -> Iterator[_Entry]:
    entries, places = _checked(metadata["state_dict_metadata"], dict), _checked(metadata["storage_data"], dict)
    tensors = {name for name, entry in entries.items() if entry.cls == "TensorStorageMetadata"}
    for index, info in places.items():
        name = _checked(index["fqn"], str)
        if name not in tensors and info.state.get("transform_descriptors"):
            raise ValueError(f"{name!r} is compressed, so that it cannot be checked")
        offset, length = _checked(info["offset"], int), _checked(info["length"], int)
        if offset < 0 or length < 0:
            raise ValueError(f"{name!r} is at {offset}, with {length} bytes")
        yield _Entry(name, name in tensors, _checked(info["relative_path"], str), offset, length)


def _checked(value: Any, cls: type) -> Any:
    if type(value) is not cls:  # a subclass could have other methods
        raise TypeError(f"{shown(value)} instead of a {cls.__name__}")
    return value


@contextmanager
def loading_errors_explained(path: Any) -> Iterator[None]:
    """Names the file in errors of ``torch.load``, and what a user can do about them."""
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # without a name, torch's reader made it
            raise
        found = re.search(r"GLOBAL (\S+) ", str(error))
        if isinstance(error, pickle.UnpicklingError) and found is not None:
            raise _unsafe(path, found[1]) from None
        raise _not_a_checkpoint(path, _told(error)) from error


@contextmanager
def sharded_errors_explained(path: Any) -> Iterator[None]:
    """Names the checkpoint in errors of ``torch.distributed.checkpoint``, which are no ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        failure = next((failure for failure, _ in error.failures.values()), error)
        raise ValueError(f"{path} is incomplete, or does not fit the model: {_told(failure)}") from error


def check_is_of_trainer(checkpoint: Any, path: Any) -> None:
    """Raises ValueError unless ``checkpoint`` is what Lightning's Trainer saves."""
    if not isinstance(checkpoint, dict) or _VERSION not in checkpoint:
        keys = list(checkpoint) if isinstance(checkpoint, dict) else checkpoint
        raise ValueError(f"{path} is not a checkpoint of Lightning's Trainer: no {_VERSION!r} in {shown(keys)}")


class UnsafePickleError(pickle.UnpicklingError):
    """A pickle names a class or function that could run code."""


def _unsafe(path: Any, name: str) -> pickle.UnpicklingError:
    cls = name.rpartition(".")[2]
    return UnsafePickleError(
        f"{path} holds an object of {name}, and loading it could run code: expected tensors and plain Python objects."
        f" Only if you trust the file, call torch.serialization.add_safe_globals([{cls}]) before, or load it with"
        " weights_only=False, an argument of Trainer.fit, validate, test and predict, Fabric.load and export_pretrained"
    )


def _not_a_checkpoint(path: Any, reason: str) -> ValueError:
    return ValueError(f"{path} is not a file of torch.save, or incomplete: {reason}")


def _told(error: BaseException) -> str:
    """The first line of an error's message, without the hints of C++."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].partition('. This is ')[0]}"


# Metadata is unpickled into objects that hold what is in it and do nothing. The C unpickler reads them, as later torch:
# another parser might read a crafted file differently.


class _Inert:
    """What a pickle says about an object of a class, or about the result of a function, that it names."""

    cls: str
    has_state: bool

    def __init__(self, *arguments: Any) -> None:
        if self.has_state and arguments:
            raise TypeError(f"{self.cls} with arguments")

    # Classes have none, so a pickle cannot change these.
    def __setstate__(self, state: Any) -> None:
        if not self.has_state:
            raise TypeError(f"{self.cls} with a state")
        self.state = getattr(self, "state", {}) | state if isinstance(state, dict) else state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_WITH_STATE = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
_WITHOUT_STATE = {
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
}
_METADATA_CLASSES: dict[tuple[str, str], Any] = {
    (module, name): type(name, (_Inert,), {"cls": name, "has_state": classes is _WITH_STATE})
    for classes in (_WITH_STATE, _WITHOUT_STATE)
    for module, names in classes.items()
    for name in names
} | {("collections", "OrderedDict"): OrderedDict, ("builtins", "set"): set, ("builtins", "frozenset"): frozenset}


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, opened: io.BufferedReader, file: Path) -> None:
        super().__init__(opened)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        found = _METADATA_CLASSES.get((module, name))
        if found is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if found is None:
            raise UnsafePickleError(
                f"{self._file} holds an object of {module}.{name}, and loading it could run code: expected the metadata"
                " of a sharded checkpoint only"
            )
        return found
