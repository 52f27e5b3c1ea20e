"""Checks that loading a checkpoint runs no code, before anything unpickles it.

A pickle may call any function that it names. ``torch.load`` refuses all but tensors and plain Python objects, unless it
is told otherwise, but not everything is read with it: ``torch.distributed.checkpoint`` unpickles the ``.metadata`` of a
folder and its entries without tensors as they are, Lightning unpickles full checkpoints under FSDP, and DeepSpeed its
files. These are therefore read here first, with nothing in them that could run.
"""

import copyreg
import dataclasses
import enum
import io
import os
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from liger_ops.arguments import shown

_VERSION = "pytorch-lightning_version"


def load_file(path: Path, weights_only: bool | None = None) -> Any:
    """The contents of a local file of ``torch.save``, on the CPU, with tensors that are read when they are used.

    Raises:
        OSError: If the file cannot be opened.
        pickle.UnpicklingError: If it holds objects of other classes; the message names the class, and how to allow it.
        ValueError: If it is not a complete file of ``torch.save``.
    """
    with path.open("rb") as file:
        # Lightning's reader of full checkpoints finds a zip archive in any part of a file, where `torch.load` would
        # read another format.
        if file.read(4) != b"PK\x03\x04" or path.suffix == ".safetensors":
            raise ValueError(f"{path} is not a file of torch.save, or incomplete: it does not begin as one")
    with loading_errors_explained(path):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


def check_checkpoint(path: Path, weights_only: bool | None = None, allowed: Sequence[type] = ()) -> None:
    """Raises as :func:`load_file` if loading the file, or the folder of a sharded checkpoint, would run code.

    Args:
        path: A checkpoint of any strategy.
        weights_only: As in :func:`torch.load`; with False only the ``.metadata`` of a folder is checked.
        allowed: Further classes that files of this kind consist of.
    """
    with safe_globals(list(allowed)):
        for file in _check_folder(path, weights_only) if path.is_dir() else [path]:
            file.open("rb").close() if weights_only is False else load_file(file, weights_only)


def _check_folder(path: Path, weights_only: bool | None) -> list[Path]:
    """The files in the folder of a sharded checkpoint that are to be checked, after the others were."""
    for file in path.glob("__*.metadata"):  # of single ranks
        _check_names(file)
    if (metadata := path / ".metadata").exists():
        check_metadata(metadata, weights_only)
    for file in filter(Path.is_file, (path / "latest", path / "latest_universal")):  # of DeepSpeed
        if (tag := file.read_text(encoding="utf-8", errors="replace").strip()) != Path(tag).name:
            raise ValueError(f"{file} must hold the name of a folder in {path}, got {tag!r}")
    found = (Path(root, name) for root, _, names in os.walk(path, followlinks=True) for name in names)
    if not (files := sorted(file for file in found if file.suffix == ".pt")):
        raise ValueError(f"{path} is not a checkpoint: the folder has no file that ends in .pt")
    return files


def check_metadata(file: Path, weights_only: bool | None = None) -> None:
    """Raises as :func:`load_file` if ``.metadata``, or an entry without tensors that it locates, could run code."""
    _check_names(file)
    folder = file.parent

    class EntryCheck(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            with loading_errors_explained(f"{folder} ({read_item.dest_index.fqn!r})", value):
                torch.load(value, map_location="cpu", weights_only=weights_only)

    reader = FileSystemReader(folder)
    with _errors_explained(f"{file} is not the metadata of a sharded checkpoint"):
        entries = reader.read_metadata().state_dict_metadata.items()
        others = {name: None for name, entry in entries if isinstance(entry, BytesStorageMetadata)}
    if weights_only is not False:  # tensors are read with weights_only=True in any case
        with warnings.catch_warnings(), sharded_errors_explained(folder):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(others, storage_reader=reader, planner=EntryCheck(), no_dist=True)


def _check_names(file: Path) -> None:
    """Finds what the metadata names, and makes nothing of it; raises for anything that could run code."""

    class Names(pickle.Unpickler):  # in C, as later in torch: another parser might read a crafted file differently
        def find_class(self, module: str, name: str) -> Any:
            found: Any = vars(sys.modules[module]).get(name) if module in sys.modules else None
            is_plain = isinstance(found, torch.dtype) or any(found is each for each in _PLAIN)
            if isinstance(found, type) and found.__module__ in _PLAIN_MODULES:
                is_plain = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum | PurePath)
            if not is_plain:
                raise _UnsafeError(file, f"{module}.{name}")
            return _Inert

    with file.open("rb") as opened, _errors_explained(f"{file} is not the metadata of a sharded checkpoint"):
        Names(opened).load()


_PLAIN = (OrderedDict, set, frozenset, torch.Size, copyreg.dispatch_table[torch.layout](torch.strided)[0])
_PLAIN_MODULES = (BytesStorageMetadata.__module__, FileSystemReader.__module__, *{Path.__module__, "pathlib"})


class _Inert:
    """Stands in for any object. Classes have no state here, so that a pickle that would change one is an error."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


@contextmanager
def loading_errors_explained(path: Any, content: io.BytesIO | None = None) -> Iterator[None]:
    """Names the local file ``path``, or the ``content``, in errors of ``torch.load``, and what a user can do."""
    with _errors_explained(f"{path} is not a file of torch.save"):
        try:
            yield
        except pickle.UnpicklingError as error:
            if content is not None:
                content.seek(0)
            if names := get_unsafe_globals_in_checkpoint(content or path):
                raise _UnsafeError(path, ", ".join(sorted(names))) from error
            raise


@contextmanager
def _errors_explained(what: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, MemoryError, _UnsafeError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # without a name, torch's reader made it
            raise
        raise ValueError(f"{what}, or incomplete: {_told(error)}") from error


@contextmanager
def sharded_errors_explained(path: Any) -> Iterator[None]:
    """Names the checkpoint in errors of ``torch.distributed.checkpoint``, which are no ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        failure = next((failure for failure, _ in error.failures.values()), error)
        if isinstance(failure, OSError | pickle.UnpicklingError):
            raise failure from None
        raise ValueError(f"{path} is incomplete, or does not fit the model: {_told(failure)}") from error


def check_is_of_trainer(checkpoint: Any, path: Any) -> None:
    """Raises ValueError unless ``checkpoint`` is what Lightning's Trainer saves."""
    if not isinstance(checkpoint, dict) or _VERSION not in checkpoint:
        keys = list(checkpoint) if isinstance(checkpoint, dict) else checkpoint
        raise ValueError(f"{path} is not a checkpoint of Lightning's Trainer: no {_VERSION!r} in {shown(keys)}")


class _UnsafeError(pickle.UnpicklingError):
    def __init__(self, path: Any, name: str) -> None:
        super().__init__(
            f"{path} holds an object of {name}, and loading it could run code: expected tensors and plain Python"
            " objects. Only if you trust the file, load it with weights_only=False, an argument of Trainer.fit,"
            " validate, test and predict, Fabric.load and export_pretrained, or allow the class before:"
            f" torch.serialization.add_safe_globals([{name.rpartition('.')[2]}])"
        )


def _told(error: BaseException) -> str:
    """The first line of an error's message, without the hints of C++."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].partition('. This is ')[0]}"
