"""Atomic checkpoints: written under a temporary name in the same folder, synced to disk, then renamed.

If a process is killed while it saves, or the disk is full, the previous checkpoint is left as it was, and no incomplete
one has its name. A file replaces a file in one rename. A folder cannot be renamed onto another: the old one gets a
temporary name, the new one the name, and the old one is removed. Between the two renames nothing has the name.
"""

import contextlib
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
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from typing_extensions import override

from liger_ops.arguments import check_path
from lightning_liger.resuming.safe_loading import loading_errors_explained

_FAILURES = (Exception, CheckpointException)  # the latter is a BaseException only
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SPACE = 2**20  # bytes


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
            OSError: When the disk is full; the message has the path, and the bytes needed and free.
            TypeError: For any ``storage_options``, as in Lightning.
        """
        check_path("path", path)
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        temporary = temporary_path(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        with removed_on_error(temporary), explained_if_disk_is_full(local, lambda: _num_bytes(checkpoint)):
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
            commit(temporary, local)

    @override
    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint file, by default of tensors and plain Python objects only, from any file system.

        Raises:
            FileNotFoundError: If there is no file at ``path``.
            pickle.UnpicklingError: If it holds objects of other classes; the message names the class, and how to allow
                it.
            ValueError: If it is a folder, or not a complete file of ``torch.save``.
        """
        check_path("path", path)
        local = local_path(path)
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
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        elif os.path.lexists(local):
            temporary = temporary_path(local)
            _remove(temporary)
            local.rename(temporary)
            _remove(temporary)


def atomic_by_default(checkpoint_io: CheckpointIO | None) -> CheckpointIO:
    """``checkpoint_io`` with :class:`AtomicCheckpointIO` where Lightning would choose its ``TorchCheckpointIO``.

    That is for None, and inside a wrapper, such as ``AsyncCheckpointIO()``, that was made without a plugin to wrap.
    """
    if checkpoint_io is None:
        return AtomicCheckpointIO()
    # Lightning's base class of wrappers is private; their attribute checkpoint_io is not.
    innermost: Any = checkpoint_io
    while getattr(innermost, "checkpoint_io", None) is not None:
        innermost = innermost.checkpoint_io
    if hasattr(innermost, "checkpoint_io"):
        innermost.checkpoint_io = AtomicCheckpointIO()
    return checkpoint_io


def save_on_all_ranks(path: Path, save: Callable[[Path], None]) -> None:
    """Saves a folder that all ranks write, or a file that rank 0 writes, as ``path`` once all ranks are done.

    Args:
        path: On a file system that all ranks share. An existing file or folder is replaced.
        save: Called on each rank with the path to write to.

    Raises:
        OSError: On all ranks, when the disk is full for one of them.
        RuntimeError: When ``save`` failed on another rank.
    """
    temporary = temporary_path(path)
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def prepare() -> None:
        if is_first:
            _remove(temporary)
            path.parent.mkdir(parents=True, exist_ok=True)

    def finish() -> None:
        if is_first:
            commit(temporary, path)

    with removed_on_error(temporary) if is_first else contextlib.nullcontext(), explained_if_disk_is_full(path):
        for step in (prepare, lambda: save(temporary), finish):
            fail_together(path, step)


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
    failures = of_all_ranks(None if error is None else (f"{type(error).__name__}: {error}", _full_disk_errno(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            message = f"saving the checkpoint {path} failed on rank {rank}: {failure[0]}"
            raise RuntimeError(message) if failure[1] is None else OSError(failure[1], message)


def of_all_ranks(value: Any) -> list[Any]:
    """The picklable ``value`` of each rank, by rank; to be called on all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local_path(path: Any) -> Path | None:
    """``path`` on the local file system, None if it is on another one."""
    file_system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def temporary_path(path: Path) -> Path:
    """Where the future ``path`` is written: hidden, and no name that Lightning could take for a checkpoint's."""
    return path.with_name(f".incomplete-{zlib.crc32(path.name.encode()):08x}")


def commit(temporary: Path, path: Path) -> None:
    """Syncs a file or folder to disk and renames it to ``path``, whose previous file or folder it replaces."""
    _sync(temporary)
    if temporary.is_dir() or path.is_dir():
        old = temporary_path(temporary)
        is_replaced = os.path.lexists(path)
        if is_replaced:
            _remove(old)
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if is_replaced:
                old.rename(path)
            raise
        _remove(old)
    else:
        temporary.replace(path)
    _sync_entry(path.parent)


@contextmanager
def removed_on_error(temporary: Path) -> Iterator[None]:
    """Removes the incomplete ``temporary`` when the block raises."""
    try:
        yield
    except BaseException:
        _remove(temporary)
        raise


@contextmanager
def explained_if_disk_is_full(path: Path, num_bytes: Callable[[], int] | None = None) -> Iterator[None]:
    """Turns the errors that libraries raise for a full disk into an OSError that says so."""
    try:
        yield
    except _FAILURES as error:
        free = shutil.disk_usage(_existing(path.parent)).free
        code = _full_disk_errno(error)
        if code is None and isinstance(error, RuntimeError) and free < _NO_SPACE:
            code = errno.ENOSPC  # PyTorch's file writer raises a RuntimeError without a reason
        if code is None:
            raise
        needed = "" if num_bytes is None else f"about {num_bytes():,} bytes are needed, "
        previous = "; the previous checkpoint is unchanged" if os.path.lexists(path) else ""
        raise OSError(
            code, f"{os.strerror(code)}: cannot save the checkpoint ({needed}{free:,} are free){previous}", str(path)
        ) from error


def _full_disk_errno(error: BaseException | None) -> int | None:
    """The errno, if a full disk or an exhausted quota caused ``error``."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return error.errno
        if isinstance(error, CheckpointException):
            return next(filter(None, (_full_disk_errno(failure) for failure, _ in error.failures.values())), None)
        error = error.__cause__ or error.__context__
    return None


def _num_bytes(checkpoint: dict[str, Any]) -> int:
    from torch.utils._pytree import tree_leaves  # private to torch: not imported with the package

    storages = (leaf.untyped_storage() for leaf in tree_leaves(checkpoint) if type(leaf) is Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _sync(path: Path) -> None:
    """Syncs a file, or a folder with all its files, to disk."""
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
