"""A checkpoint is whole or not there, whatever happens while it is saved."""

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_liger import LigerDDPStrategy, LigerModelParallelStrategy, LigerSingleDeviceStrategy, LigerStrategy
from lightning_liger.resuming.atomic_io import AtomicCheckpointIO, replace
from tests.lightning_liger.resuming.workers.faults import files_of_at_most
from tests.lightning_liger.strategies.workers.distributed import build_model

OLD, NEW = {"weight": torch.zeros(3)}, {"weight": torch.arange(300_000.0), "epoch": 4}


def load(path: Path) -> dict[str, Any]:
    return torch.load(path / "data" if path.is_dir() else path, weights_only=True)


def save_in(kind: str, path: Path, value: dict[str, Any]) -> None:
    def save(folder: Path) -> None:
        folder.mkdir()
        with (folder / "data").open("wb") as file:
            torch.save(value, file)

    if kind == "file":
        AtomicCheckpointIO().save_checkpoint(value, path)
    else:
        replace(path, save, on_all_ranks=True)


def die_at(number: int) -> None:
    """Kills this process at a step of saving: in the middle of the contents, or before it changes a folder."""
    steps = itertools.count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == number:
                if function is save:
                    args[1].write(b"half a checkpoint")
                    args[1].flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    save = torch.save
    for owner, name in ((torch, "save"), (os, "fsync"), (os, "rename"), (os, "unlink"), (shutil, "rmtree")):
        setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_new_checkpoint_replaces_a_link_and_not_what_it_names(tmp_path, kind):
    path, other = tmp_path / "saved" / "last.ckpt", tmp_path / "new" / "other.ckpt"
    save_in("file", other, OLD)
    path.parent.mkdir()
    path.symlink_to(other)
    save_in(kind, path, NEW)
    assert path.is_dir() == (kind == "folder")
    assert not path.is_symlink()
    torch.testing.assert_close((load(path), load(other)), (NEW, OLD))
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("before", ["file", "folder"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_process_killed_at_any_step_leaves_whole_checkpoints_and_the_next_one_clears_up(tmp_path, kind, before):
    path, exit_codes = tmp_path / "last.ckpt", []
    while 0 not in exit_codes:
        save_in(before, path, OLD)
        child = os.fork()
        if not child:
            die_at(len(exit_codes))
            save_in(kind, path, NEW)
            os._exit(0)
        exit_codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if path.exists():
            assert load(path)["weight"].numel() in (3, 300_000)
        else:  # between two renames, of which files need one
            assert "folder" in (kind, before)
            assert sorted(load(entry)["weight"].numel() for entry in tmp_path.iterdir()) == [3, 300_000]
        assert all(entry == path or entry.name.startswith(".incomplete-") for entry in tmp_path.iterdir())
        save_in(kind, path, NEW)
        torch.testing.assert_close(load(path), NEW)
        assert list(tmp_path.iterdir()) == [path]
    assert len(exit_codes) > 4


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("is_there", [True, False], ids=["before", "first"])
def test_full_disk_is_an_error_that_names_the_path_and_leaves_the_checkpoint_before(tmp_path, kind, is_there):
    path = tmp_path / "last.ckpt"
    if is_there:
        save_in(kind, path, OLD)
    with files_of_at_most(2**16), pytest.raises(RuntimeError, match=f"cannot save {path}, .*File too large"):
        save_in(kind, path, NEW)
    assert list(tmp_path.iterdir()) == [path] * is_there
    if is_there:
        torch.testing.assert_close(load(path), OLD)


def test_other_errors_name_the_path_too(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"last\.ckpt.* FileExistsError"):
        AtomicCheckpointIO().save_checkpoint(OLD, tmp_path / "file" / "last.ckpt")
    with pytest.raises(RuntimeError, match=r"last\.ckpt.* AttributeError.* local"):
        AtomicCheckpointIO().save_checkpoint({"unpicklable": lambda: None}, tmp_path / "last.ckpt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint(OLD, tmp_path / "last.ckpt", storage_options={})


def test_paths_on_other_file_systems_are_left_to_lightning():
    io, path = AtomicCheckpointIO(), "memory://checkpoints/last.ckpt"
    io.save_checkpoint(NEW, path)
    torch.testing.assert_close(io.load_checkpoint(path, weights_only=True), NEW)
    io.remove_checkpoint(path)
    assert not fsspec.filesystem("memory").exists("checkpoints/last.ckpt")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_removed_folder_loses_its_name_first(tmp_path, monkeypatch, kind):
    path = tmp_path / "last.ckpt"
    if kind == "link":
        path.symlink_to(tmp_path)
    else:
        save_in(kind, path, OLD)
    names: list[str] = []
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda folder: (names.extend(os.listdir(tmp_path)), remove(folder)))
    for _ in range(2):  # nothing is there the second time
        AtomicCheckpointIO().remove_checkpoint(path)
    assert os.listdir(tmp_path) == []
    assert [name[:12] for name in names] == [".incomplete-"] * (kind == "folder")


# Strategies


@pytest.mark.parametrize("fault_tolerance", [True, False])
@pytest.mark.parametrize("strategy", [LigerDDPStrategy, LigerStrategy, LigerModelParallelStrategy])
def test_strategies_write_atomically_unless_told_otherwise(strategy, fault_tolerance):
    made, own = strategy(fault_tolerance=fault_tolerance), TorchCheckpointIO()
    default = AtomicCheckpointIO if fault_tolerance else TorchCheckpointIO
    assert type(made.checkpoint_io) is default
    for inner, kind in ((None, default), (own, TorchCheckpointIO)):
        made.checkpoint_io = given = AsyncCheckpointIO(inner)
        assert made.checkpoint_io is given
        assert type(given.checkpoint_io) is kind


@pytest.mark.parametrize("strategy", [LigerSingleDeviceStrategy, LigerDDPStrategy, LigerStrategy])
def test_strategies_take_a_plugin(strategy):
    for given in (TorchCheckpointIO(), AsyncCheckpointIO()):
        assert strategy(checkpoint_io=given).checkpoint_io is given
    assert type(given.checkpoint_io) is AtomicCheckpointIO


@pytest.mark.parametrize("name", ["liger", "liger_fsdp", "liger_model_parallel"])
def test_fabric_writes_atomically(tmp_path, name):
    fabric = L.Fabric(strategy=name, accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    tokens = torch.arange(6)[None]
    fabric.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    path, state = tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer, "step": 1}
    fabric.save(path, state)
    before = sorted(tmp_path.rglob("*"))
    with files_of_at_most(2**12), pytest.raises(RuntimeError, match=f"cannot save {path}"):
        fabric.save(path, {**state, "step": 2})
    assert sorted(tmp_path.rglob("*")) == before
    loaded = {**state, "step": 0}
    fabric.load(path, loaded)
    assert loaded["step"] == 1
