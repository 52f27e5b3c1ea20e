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
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.serialization import safe_globals

from liger_ops.arguments import shown

_ZIP = b"PK\x03\x04"
_VERSION = "pytorch-lightning_version"


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
            raise _incomplete(f"{path} is not a file of torch.save", "it does not begin as one")
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
        files = [path] if not path.is_dir() else _check_folder(path, weights_only)
        for file in files:
            file.open("rb").close() if weights_only is False else load_file(file, weights_only)


def _check_folder(path: Path, weights_only: bool | None) -> list[Path]:
    """The files in the folder of a sharded checkpoint that are to be checked, after the others were."""
    for file in sorted(path.glob("*.metadata")):
        check_metadata(file, weights_only)
    for file in filter(Path.is_file, (path / "latest", path / "latest_universal")):  # of DeepSpeed
        if (tag := file.read_text(encoding="utf-8", errors="replace").strip()) != Path(tag).name:
            raise ValueError(f"{file} must hold the name of a folder in {path}, got {tag!r}")
    found = (Path(root, name) for root, _, names in os.walk(path, followlinks=True) for name in names)
    if not (files := sorted(file for file in found if file.suffix == ".pt")):
        raise ValueError(f"{path} is not a checkpoint: the folder has no file that ends in .pt")
    return files


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
    with file.open("rb") as opened:
        unpickler = _MetadataUnpickler(opened)
        try:
            entries = list(_entries(unpickler.load()))
        except Exception as error:
            if unpickler.refused is not None:
                raise _unsafe(file, unpickler.refused) from None
            raise _incomplete(f"{file} is not the metadata of a sharded checkpoint", error) from error
    for name, is_tensor, part, offset, length in entries:
        path = file.parent / part
        if path.is_file() and (size := path.stat().st_size) < offset + length:
            raise ValueError(f"{path} is incomplete: {name!r} ends at byte {offset + length}, got a file of {size}")
        if not is_tensor and weights_only is not False:  # tensors are read with weights_only=True in any case
            with path.open("rb") as opened:
                opened.seek(offset)
                content = io.BytesIO(opened.read(length))
            with loading_errors_explained(f"{path} ({name!r})"):
                torch.load(content, map_location="cpu", weights_only=weights_only)


def _entries(metadata: Any) -> Iterator[tuple[str, bool, str, int, int]]:
    """Of each entry the name, whether it is a tensor, the file, the offset and the length in it."""
    kinds = _checked(metadata["state_dict_metadata"], dict)
    tensors = {name for name, entry in kinds.items() if type(entry).__name__ == "TensorStorageMetadata"}
    for index, info in _checked(metadata["storage_data"], dict).items():
        name, place = _checked(index["fqn"], str), [_checked(info[key], int) for key in ("offset", "length")]
        if name not in tensors and info.state.get("transform_descriptors"):
            raise ValueError(f"{name!r} is compressed, so that it cannot be checked")
        if min(place) < 0:
            raise ValueError(f"{name!r} is at {place[0]}, with {place[1]} bytes")
        yield name, name in tensors, _checked(info["relative_path"], str), *place


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
        raise _incomplete(f"{path} is not a file of torch.save", error) from error


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


def _unsafe(path: Any, name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"{path} holds an object of {name}, and loading it could run code: expected tensors and plain Python objects."
        " Only if you trust the file, load it with weights_only=False, an argument of Trainer.fit, validate, test and"
        " predict, Fabric.load and export_pretrained, or allow the class before:"
        f" torch.serialization.add_safe_globals([{name.rpartition('.')[2]}])"
    )


def _incomplete(what: str, reason: Any) -> ValueError:
    return ValueError(f"{what}, or incomplete: {_told(reason) if isinstance(reason, BaseException) else reason}")


def _told(error: BaseException) -> str:
    """The first line of an error's message, without the hints of C++."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].partition('. This is ')[0]}"


class _Inert:
    """Stands in for an object of a class, or the result of a function, that metadata names. It does nothing.

    It holds the state that a pickle gives it; what is called with arguments has none, as all that is read here is in
    states. Classes have no state, so that a pickle cannot change these.
    """

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments or {}

    def __setstate__(self, state: Any) -> None:
        # An error if there are arguments, a tuple.
        self.state = vars(self).get("state", {}) | state if isinstance(state, dict) else state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_KNOWN_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
}
_KNOWN: dict[tuple[str, str], Any] = {
    (module, name): type(name, (_Inert,), {}) for module, names in _KNOWN_NAMES.items() for name in names
} | {("collections", "OrderedDict"): OrderedDict, ("builtins", "set"): set, ("builtins", "frozenset"): frozenset}


class _MetadataUnpickler(pickle.Unpickler):
    """The C unpickler reads metadata, as later torch: another parser might read a crafted file differently."""

    refused: str | None = None

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if found is None:
            self.refused = f"{module}.{name}"
            raise pickle.UnpicklingError(self.refused)
        return found
