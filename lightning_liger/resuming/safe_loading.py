"""Loading a checkpoint runs no code that is in it.

A pickle may call any function that it names. ``torch.load`` can refuse all but tensors and plain Python objects, but
``torch.distributed.checkpoint`` and DeepSpeed tell it not to. While a checkpoint is read it therefore refuses them
whatever it is told. Two readers bypass it: the one of a folder's ``.metadata``, and Lightning's of full checkpoints of
sharded models. What they unpickle is read here first, with nothing in it that could run.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, metadata
from torch.serialization import safe_globals

from liger_ops.arguments import shown

_VERSION = "pytorch-lightning_version"
_SAFE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
_IN_METADATA = {
    *(str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)),
    *(f"{metadata.__name__}.{name}" for name, each in vars(metadata).items() if is_dataclass(each)),
    *(f"torch.distributed.checkpoint.{name}" for name in ("metadata._MEM_FORMAT_ENCODING", "filesystem._StorageInfo")),
    *("torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"),
}


@contextmanager
def loading_safely(path: Any, weights_only: bool | None = None, allowed: Sequence[type] = ()) -> Iterator[None]:
    """In this context ``torch.load`` takes tensors, plain Python objects and ``allowed`` classes only.

    With ``weights_only=False`` it does what it is told. Errors of what is read name ``path``.

    Raises:
        pickle.UnpicklingError: For other classes; the message names the class, and how to allow it.
        ValueError: If the checkpoint is not complete, or does not fit the model.
    """
    before = {name: os.environ.get(name, "0") for name in _SAFE}
    os.environ.update(_SAFE if weights_only is not False else {})
    try:
        with safe_globals(list(allowed)):
            yield
    except (CheckpointException, EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        cause = next((failure for failure, _ in getattr(error, "failures", {}).values()), error)
        if isinstance(cause, pickle.UnpicklingError):
            raise pickle.UnpicklingError(
                f"{path} is incomplete, or loading it could run code. Only if you trust it, set weights_only=False, an"
                " argument of Trainer.fit, validate, test and predict, Fabric.load and export_pretrained, or allow the"
                f" class: {str(cause).rpartition('WeightsUnpickler error: ')[2]}"
            ) from error
        if isinstance(cause, OSError | RuntimeError) and type(cause) not in (OSError, RuntimeError):
            raise cause from None  # such as that of a missing file
        raise ValueError(f"{path} is incomplete, or does not fit the model: {type(cause).__name__}: {cause}") from error
    finally:
        os.environ.update(before)


def load_file(path: Path, weights_only: bool | None = None) -> Any:
    """The contents of a local file of ``torch.save``, on the CPU, with tensors that are read when they are used.

    Raises as :func:`loading_safely`, and OSError if the file cannot be opened.
    """
    with loading_safely(path, weights_only), path.open("rb") as file:
        # Lightning's reader of full checkpoints finds a zip archive in any part of a file, where `torch.load` would
        # read another format.
        if file.read(4) != b"PK\x03\x04" or path.name.endswith(".safetensors"):
            raise EOFError("it does not begin as a file of torch.save")
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)


def check_checkpoint(path: Path, weights_only: bool | None = None) -> None:
    """Raises as :func:`load_file` if what is not read with ``torch.load`` would run code; metadata in any case."""
    for file in path.glob("*.metadata"):  # of all ranks, or of single ones
        with loading_safely(file), file.open("rb") as opened:
            _Names(opened).load()
    if weights_only is not False and not path.is_dir():
        load_file(path)


class _Names(pickle.Unpickler):  # in C, as later in torch: another parser might read a crafted file differently
    """Finds what the metadata names, and makes nothing of it."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _IN_METADATA:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not part of metadata.")
        return _Inert


class _Inert:
    """Stands in for any object. Classes have no state here, so that a pickle that would change one is an error."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def check_is_of_trainer(checkpoint: Any, path: Any) -> None:
    """Raises ValueError unless ``checkpoint`` is what Lightning's Trainer saves."""
    if not isinstance(checkpoint, dict) or _VERSION not in checkpoint:
        keys = list(checkpoint) if isinstance(checkpoint, dict) else checkpoint
        raise ValueError(f"{path} is not a checkpoint of Lightning's Trainer: no {_VERSION!r} in {shown(keys)}")
