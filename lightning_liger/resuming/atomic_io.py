"""Atomic checkpoints: written under a temporary name in the same folder, synced to disk, then renamed.

If a process is killed while it saves, or the disk is full, the previous checkpoint is left as it was, and no incomplete
one has its name. A file replaces a file in one rename. A folder cannot be renamed onto another: the old one gets a
temporary name, the new one the name, and the old one is removed. Between the two renames nothing has the name.
"""

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
from fsspec import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint import CheckpointException
from typing_extensions import override

from liger_ops.arguments import check_path
from lightning_liger.resuming.safe_loading import loading_errors_explained

_FAILURES = (Exception, CheckpointException)  # the latter is a BaseException only
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``TorchCheckpointIO`` with atomic writes: a local file has its name only once it is complete.

    It writes to a hidden file in the same folder, so the disk must hold the old and the new checkpoint at the same
    time, and makes no copy in memory. A file that a killed process left is overwritten when a checkpoint of the same
    name is saved. Other file systems (``s3://`` …) are written as in Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint.

        Raises:
            OSError: When the disk is full; the message has the path, and the bytes that are free.
            TypeError: For any ``storage_options``, as in Lightning.
        """
        check_path("path", path)
        local = _local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(local) as temporary, temporary.open("wb") as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint file, by default of tensors and plain Python objects only, from any file system.

        Raises:
            FileNotFoundError: If there is no file at ``path``.
            pickle.UnpicklingError: If it holds objects of other classes; the message names the class, and how to allow
                it.
            ValueError: If it is a folder, or not a complete file of ``torch.save``.
        """
        check_path("path", path)
        local = _local_path(path)
        if local is not None and local.is_dir():
            raise ValueError(
                f"path must be a file, got the folder {str(path)!r}: a sharded checkpoint is loaded by the strategy"
                " that saved it"
            )
        if weights_only is None and str(path).startswith("http"):
            weights_only = True  # Lightning's default is False for these alone
        with loading_errors_explained(path):
            return super().load_checkpoint(path, map_location, weights_only)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file, link or folder; a folder is renamed before its files are removed."""
        check_path("path", path)
        local = _local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        elif os.path.lexists(local):
            temporary = _temporary_path(local)
            _remove(temporary)
            local.rename(temporary)
            _remove(temporary)


def atomic_by_default(checkpoint_io: CheckpointIO | None) -> CheckpointIO:
    """``checkpoint_io`` with :class:`AtomicCheckpointIO` where Lightning would choose its ``TorchCheckpointIO``.

    That is for None, and inside a wrapper, such as ``AsyncCheckpointIO()``, that was made without a plugin to wrap.
    """
    if checkpoint_io is None:
        return AtomicCheckpointIO()
    if hasattr(checkpoint_io, "checkpoint_io"):  # Lightning's base class of wrappers is private
        inner = atomic_by_default(checkpoint_io.checkpoint_io)
        if checkpoint_io.checkpoint_io is None:
            checkpoint_io.checkpoint_io = inner
    return checkpoint_io


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file or folder to, which gets the name ``path`` at the end of the block, unless that raises.

    Raises:
        OSError: When the disk is full.
    """
    temporary = _temporary_path(path)
    with _full_disk_explained(path):
        try:
            _make_room(temporary)
            yield temporary
            _commit(temporary, path)
        except BaseException:
            if temporary.parent.is_dir():
                _remove(temporary)
            raise


def save_on_all_ranks(path: Path, save: Callable[[Path], None]) -> None:
    """Saves a folder that all ranks write, or a file that rank 0 writes, as ``path`` once all ranks are done.

    Args:
        path: On a file system that all ranks share. An existing file or folder is replaced.
        save: Called on each rank with the path to write to.

    Raises:
        OSError: On all ranks, when the disk is full for one of them.
        RuntimeError: When ``save`` failed on another rank.
    """
    temporary = _temporary_path(path)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with _full_disk_explained(path):
        try:
            fail_together(path, lambda: _make_room(temporary) if is_first else None)
            fail_together(path, lambda: save(temporary))
            fail_together(path, lambda: _commit(temporary, path) if is_first else None)
        except BaseException:
            if is_first:
                _remove(temporary)
            raise


def fail_together(path: Any, action: Callable[[], None]) -> None:
    """Runs a part of saving ``path`` on all ranks; if one fails, all raise, instead of waiting for it forever.

    Raises:
        OSError: When another rank's disk was full.
        RuntimeError: When ``action`` raised anything else on another rank.
    """
    error: BaseException | None = None
    try:
        action()
    except _FAILURES as caught:
        error = caught
    failures = gather_objects(None if error is None else (f"{type(error).__name__}: {error}", _full_disk_errno(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            message = f"saving the checkpoint {path} failed on rank {rank}: {failure[0]}"
            raise RuntimeError(message) if failure[1] is None else OSError(failure[1], message)


def gather_objects(value: Any) -> list[Any]:
    """The picklable ``value`` of each rank, by rank; to be called on all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _local_path(path: Any) -> Path | None:
    """``path`` on the local file system, None if it is on another one."""
    file_system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def _temporary_path(path: Path) -> Path:
    """Where the future ``path`` is written: hidden, and no name that Lightning could take for a checkpoint's."""
    return path.with_name(f".incomplete-{zlib.crc32(path.name.encode()):08x}.part")  # torch.save wants a stem


def _make_room(temporary: Path) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    _remove(temporary)


def _commit(temporary: Path, path: Path) -> None:
    """Syncs a file or folder to disk and renames it to ``path``, whose previous file or folder it replaces."""
    for child in (*temporary.rglob("*"), temporary):
        _sync(child)
    old = _temporary_path(temporary)
    _remove(old)
    if os.path.lexists(path) and (temporary.is_dir() or path.is_dir()):
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        if os.path.lexists(old):
            old.rename(path)
        raise
    _remove(old)
    _sync(path.parent)


@contextmanager
def _full_disk_explained(path: Path) -> Iterator[None]:
    """Turns the errors that libraries raise for a full disk into an OSError that says so."""
    try:
        yield
    except _FAILURES as error:
        free = shutil.disk_usage(next(each for each in path.absolute().parents if each.exists())).free
        code = _full_disk_errno(error)
        if code is None and isinstance(error, RuntimeError) and free < 2**20:
            code = errno.ENOSPC  # PyTorch's file writer raises a RuntimeError without a reason
        if code is None:
            raise
        previous = "; the previous checkpoint is unchanged" if os.path.lexists(path) else ""
        message = f"{os.strerror(code)}: cannot save the checkpoint ({free:,} bytes are free){previous}"
        raise OSError(code, message, str(path)) from error


def _full_disk_errno(error: BaseException | None) -> int | None:
    """The errno, if a full disk or an exhausted quota caused ``error``."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return error.errno
        if isinstance(error, CheckpointException):
            return next(filter(None, (_full_disk_errno(failure) for failure, _ in error.failures.values())), None)
        error = error.__cause__ or error.__context__
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
