"""Checkpoints that are whole or not there: written beside their place, brought to disk, then renamed.

A process that is killed while it saves, or a full disk, leaves the checkpoint that was there before, and nothing under
the new one's name.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_leaves
from typing_extensions import override

_FAILURES = (Exception, CheckpointException)  # the latter is no Exception
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SPACE = 2**20  # bytes
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``TorchCheckpointIO`` whose local files appear under their name only once they are whole.

    It writes beside, into a hidden file of the same folder, so the old and the new checkpoint need space at the same
    time; and without a copy in memory. What a killed process left there is overwritten when a checkpoint of the same
    name is saved. Other file systems (``s3://`` …) are written as in Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint.

        Raises:
            OSError: When the disk is full, with the path, and the bytes needed and free.
            TypeError: For any ``storage_options``, as in Lightning.
        """
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        beside = path_beside(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        with removed_on_error(beside), explained_if_disk_is_full(local, lambda: _num_bytes(checkpoint)):
            with beside.open("wb") as file:
                torch.save(checkpoint, file)
            put_in_place(beside, local)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file, link or folder; a folder loses its name before it loses its files."""
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        elif os.path.lexists(local):
            beside = path_beside(local)
            _remove(beside)
            local.rename(beside)
            _remove(beside)


def save_on_all_ranks(path: Path, save: Callable[[Path], None]) -> None:
    """Lets all ranks write a folder, or the first of them a file, which appears as ``path`` once all are done.

    Args:
        path: On a file system that all ranks share. What is there is replaced.
        save: Called on each rank with the path to write to.

    Raises:
        OSError: On all ranks, when the disk is full for one of them.
        RuntimeError: When ``save`` failed on another rank.
    """
    beside = path_beside(path)
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def prepare() -> None:
        if is_first:
            _remove(beside)
            path.parent.mkdir(parents=True, exist_ok=True)

    def finish() -> None:
        if is_first:
            put_in_place(beside, path)

    with removed_on_error(beside) if is_first else contextlib.nullcontext(), explained_if_disk_is_full(path):
        for step in (prepare, lambda: save(beside), finish):
            fail_together(path, step)


def fail_together(path: Any, action: Callable[[], None]) -> None:
    """Runs a part of saving ``path``; an error on one rank is an error on all, which would wait for it otherwise.

    Raises:
        OSError: When another rank's disk was full.
        RuntimeError: When ``action`` raised anything else on another rank.
    """
    error: BaseException | None = None
    try:
        action()
    except _FAILURES as caught:
        error = caught
    failures = of_all_ranks(None if error is None else (f"{type(error).__name__}: {error}", _full_disk_errno(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            message = f"saving the checkpoint {path} failed on rank {rank}: {failure[0]}"
            raise RuntimeError(message) if failure[1] is None else OSError(failure[1], message)


def of_all_ranks(value: Any) -> list[Any]:
    """The picklable ``value`` of each rank; to be called on all of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local_path(path: Any) -> Path | None:
    """``path`` on the local file system, None for a path on another."""
    file_system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def path_beside(path: Path) -> Path:
    """Where what will be ``path`` is written: hidden, and no name that Lightning could take for a checkpoint's."""
    return path.with_name(f".incomplete-{zlib.crc32(path.name.encode()):08x}")


def put_in_place(beside: Path, path: Path) -> None:
    """Brings a written file or folder to disk and gives it its name; what had that name is gone afterwards."""
    _sync(beside)
    if path.is_dir() or beside.is_dir():
        # A folder can be renamed onto nothing but an empty one.
        if os.path.lexists(path) and not _exchange(beside, path):
            old = path_beside(beside)
            _remove(old)
            path.rename(old)
            beside.rename(path)
            beside = old
        elif not os.path.lexists(path):
            beside.rename(path)
        _remove(beside)
    else:
        beside.replace(path)
    _sync_entry(path.parent)


@contextmanager
def removed_on_error(beside: Path) -> Iterator[None]:
    """Removes what was written so far when the block raises."""
    try:
        yield
    except BaseException:
        _remove(beside)
        raise


@contextmanager
def explained_if_disk_is_full(path: Path, num_bytes: Callable[[], int] | None = None) -> Iterator[None]:
    """Turns the errors that libraries make of a full disk into an OSError that says so."""
    try:
        yield
    except _FAILURES as error:
        free = shutil.disk_usage(_existing(path.parent)).free
        code = _full_disk_errno(error)
        if code is None and isinstance(error, RuntimeError) and free < _NO_SPACE:
            code = errno.ENOSPC  # PyTorch's own writing of files tells no more
        if code is None:
            raise
        needed = "" if num_bytes is None else f"about {num_bytes():,} bytes are needed, "
        previous = "; the one that was there before is as it was" if os.path.lexists(path) else ""
        raise OSError(
            code, f"{os.strerror(code)}: cannot save the checkpoint ({needed}{free:,} are free){previous}", str(path)
        ) from error


def _full_disk_errno(error: BaseException | None) -> int | None:
    """The errno, if a full disk or a quota is behind ``error``."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return error.errno
        if isinstance(error, CheckpointException):
            return next(filter(None, (_full_disk_errno(failure) for failure, _ in error.failures.values())), None)
        error = error.__cause__ or error.__context__
    return None


def _num_bytes(checkpoint: dict[str, Any]) -> int:
    storages = (leaf.untyped_storage() for leaf in tree_leaves(checkpoint) if type(leaf) is Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _sync(path: Path) -> None:
    """Brings a file, or all of a folder, to disk."""
    if path.is_dir():
        for child in path.iterdir():
            _sync(child)
    _sync_entry(path)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges what has the two names at once; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
