"""Atomic checkpoints: written under a temporary name in the same folder, synced to disk, then renamed.

If a process is killed while it saves, or the disk is full, the previous checkpoint is left as it was, and no incomplete
one has its name. A file replaces a file in one rename. A folder cannot be renamed onto another: the old one gets a
temporary name, the new one the name, and the old one is removed. Between the two renames nothing has the name.
"""

import os
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsspec import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint import CheckpointException
from typing_extensions import override

from liger_ops.arguments import check_path


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``TorchCheckpointIO`` with atomic writes: a local file has its name only once it is complete.

    It makes no copy in memory. A file that a killed process left is overwritten when a checkpoint of the same name is
    saved. Other file systems (``s3://`` …) are written as in Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint; any ``storage_options`` are an error, as in Lightning."""
        local = _local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return

        def save(temporary: Path) -> None:
            with temporary.open("wb") as file:  # which tells of a full disk, as torch's own does not
                torch.save(checkpoint, file)

        replace(local, save)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file, link or folder; a folder is renamed before its files are removed."""
        local = _local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        elif os.path.lexists(local):
            temporary = _temporary_path(local)
            _remove(temporary)
            local.rename(temporary)
            _remove(temporary)


def atomic_by_default(checkpoint_io: CheckpointIO | None) -> CheckpointIO:
    """:class:`AtomicCheckpointIO` for None, also inside of an ``AsyncCheckpointIO``; all others stay as they are."""
    if isinstance(checkpoint_io, AsyncCheckpointIO) and checkpoint_io.checkpoint_io is None:
        checkpoint_io.checkpoint_io = AtomicCheckpointIO()
    return checkpoint_io or AtomicCheckpointIO()


def replace(path: Path, save: Callable[[Path], None], *, on_all_ranks: bool = False) -> None:
    """Calls ``save`` with a path to write a file or folder to, which replaces what is at ``path`` at the end.

    Args:
        on_all_ranks: Whether all ranks call this, to write a folder that they share, or a file on rank 0.

    Raises as :func:`fail_together`.
    """
    is_first = not on_all_ranks or not dist.is_initialized() or dist.get_rank() == 0
    run = partial(fail_together, path, on_all_ranks=on_all_ranks)
    temporary = _temporary_path(path)
    run(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    try:
        run(lambda: _remove(temporary) if is_first else None)
        run(lambda: save(temporary))
        run(lambda: _commit(temporary, path) if is_first else None)
    finally:
        if is_first:
            _remove(temporary)


def fail_together(path: Any, action: Callable[[], None], *, on_all_ranks: bool = True) -> None:
    """Runs a part of saving ``path``; if it fails on one rank, all raise, instead of waiting for that one forever.

    Raises:
        RuntimeError: With the reason; what was at ``path`` before is unchanged.
    """
    reason = cause = None
    try:
        action()
    except (Exception, CheckpointException) as error:  # the latter is a BaseException only
        cause = failure = next((each for each, _ in getattr(error, "failures", {}).values()), error)
        while failure is not None and not isinstance(failure, OSError):  # which torch's own errors hide
            failure = failure.__context__
        reason = repr(failure or cause)
    reasons = gather_objects(reason) if on_all_ranks else [reason]
    if any(reasons):
        failed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each)
        raise RuntimeError(f"cannot save {path}, any previous file is unchanged: {failed}") from cause


def gather_objects(value: Any) -> list[Any]:
    """The picklable ``value`` of each rank, by rank; to be called on all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _local_path(path: Any) -> Path | None:
    """``path`` on the local file system, None if it is on another one."""
    check_path("path", path)
    file_system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def _temporary_path(path: Path) -> Path:
    """Where the future ``path`` is written: hidden, and no name that Lightning could take for a checkpoint's."""
    return path.with_name(f".incomplete-{zlib.crc32(path.name.encode()):08x}.part")  # torch.save wants a stem


def _commit(temporary: Path, path: Path) -> None:
    """Syncs a file or folder to disk and renames it to ``path``, whose previous file or folder it replaces."""
    for child in (*temporary.rglob("*"), temporary):
        _sync(child)
    old = _temporary_path(temporary)
    _remove(old)
    if os.path.lexists(path) and (temporary.is_dir() or path.is_dir()):
        path.rename(old)
    temporary.rename(path)
    _remove(old)
    _sync(path.parent)


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
