"""Files that would run code are refused before anything unpickles them, and honest ones are not."""

import pickle
import zipfile
from io import BytesIO
from pathlib import Path
from shutil import copy
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load, metadata
from torch.serialization import safe_globals

from lightning_liger import LigerSingleDeviceStrategy
from lightning_liger.resuming.safe_loading import check_checkpoint, load_file, loading_safely
from tests.lightning_liger.malicious import Payload, saved, with_metadata, write_sharded


class Settings:
    """A user's class, in a checkpoint."""


@pytest.fixture
def marker(tmp_path):
    """Where code that must not run would make a folder."""
    marker = tmp_path / "code was run"
    yield marker
    assert not marker.exists()


def by_name(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls what it finds under that name."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + b"".join(map(text, arguments)) + b"tR."


METADATA = {
    "dotted name": lambda marker: by_name("torch.distributed.checkpoint.metadata", "os.mkdir", str(marker)),
    "name in an allowed module": lambda marker: by_name("torch.distributed.checkpoint.metadata", "os"),
    "function in an allowed module": lambda marker: by_name("torch.distributed.checkpoint.filesystem", "dataclass"),
    "class in an allowed module": lambda marker: by_name(
        "torch.distributed.checkpoint.filesystem", "FileSystemWriter", str(marker)
    ),
    "torch's loader": lambda marker: by_name("torch", "load", str(marker)),
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_that_names_anything_else_is_refused(tmp_path, marker, kind):
    for name in (".metadata", "__0.metadata"):
        folder = with_metadata(tmp_path / f"evil{name}", METADATA[kind](marker), name)
        for weights_only in (None, False):
            with pytest.raises(pickle.UnpicklingError, match="metadata is incomplete, or loading it could run code"):
                check_checkpoint(folder, weights_only)


def test_metadata_must_not_change_classes(tmp_path):
    attributes = b"(N}X\x05\x00\x00\x00helloK\x01st"  # (None, {"hello": 1})
    change = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n" + attributes + b"b."
    folder = with_metadata(tmp_path / "evil", change)
    with pytest.raises(TypeError, match="__setstate__"):
        check_checkpoint(folder)
    assert not hasattr(metadata.Metadata, "hello")
    pickle.loads(change)  # what it is refused for
    assert metadata.Metadata.hello == 1
    del metadata.Metadata.hello


def read_entry(folder: Path) -> Any:
    state = {"optimizer_0": {"lr": torch.zeros(4, 2)}}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state["optimizer_0"]["lr"]


def as_it_is(found: Any) -> None: ...


def as_tensor(found: Any) -> None:
    """What is called a tensor is read as one, by weights alone."""
    found.state_dict_metadata["optimizer_0.lr"] = found.state_dict_metadata["model.model.weight"]


def as_compressed(found: Any) -> None:
    for info in found.storage_data.values():
        info.transform_descriptors = ["zstd"]


def elsewhere(found: Any) -> None:
    for info in found.storage_data.values():
        info.relative_path = f"../evil/{info.relative_path}"


@pytest.mark.parametrize("disguise", [as_it_is, as_tensor, as_compressed, elsewhere])
def test_entries_that_are_no_tensors_are_read_without_running_code(tmp_path, marker, disguise):
    folder = write_sharded(tmp_path / "evil", optimizer_0={"lr": Payload(marker)})
    found = FileSystemReader(folder).read_metadata()
    disguise(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    check_checkpoint(folder)
    refused = ValueError if disguise in (as_tensor, as_compressed) else pickle.UnpicklingError
    for weights_only in (None, True):
        with pytest.raises(refused, match=rf"^{folder}"), loading_safely(folder, weights_only):
            read_entry(folder)


def after_an_old_format(file: Path, marker: Path) -> Path:
    """A file that ``torch.load`` reads as its old format, and others as a zip archive."""
    torch.save({}, file, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(BytesIO(saved(Payload(marker)))) as archive, zipfile.ZipFile(file, "a") as polyglot:
        for name in archive.namelist():
            polyglot.writestr(name, archive.read(name))
    return file


def named_safetensors(file: Path, marker: Path) -> Path:
    """A file that ``torch.load`` reads as safetensors because of its name, and others as a zip archive."""
    torch.save(Payload(marker), file.with_suffix(".safetensors"))
    return file.with_suffix(".safetensors")


@pytest.mark.parametrize("write", [after_an_old_format, named_safetensors])
def test_what_another_reader_would_find_is_refused(tmp_path, marker, write):
    with pytest.raises(ValueError, match=rf"{tmp_path / 'evil'}"):
        check_checkpoint(write(tmp_path / "evil", marker))


def test_files_of_web_servers_are_refused_too(tmp_path, monkeypatch, marker):
    torch.save({"state_dict": Payload(marker)}, tmp_path / "file.ckpt")
    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io.get_filesystem", lambda path: MagicMock())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(
        torch.hub, "download_url_to_file", lambda url, to, *args, **options: copy(tmp_path / "file.ckpt", to)
    )
    with pytest.raises(pickle.UnpicklingError, match="could run code"):
        LigerSingleDeviceStrategy().load_checkpoint("http://localhost/file.ckpt")


def test_environment_is_what_it_was(tmp_path, monkeypatch):
    """Only the argument decides, and only as long as something is loaded."""
    torch.save(Settings(), tmp_path / "own.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for loads in (load_file, check_checkpoint):
        with pytest.raises(pickle.UnpicklingError, match="could run code"):
            loads(tmp_path / "own.pt")
    torch.load(tmp_path / "own.pt")
    with loading_safely(tmp_path, weights_only=False):
        torch.load(tmp_path / "own.pt", weights_only=False)


def test_users_decide_otherwise(tmp_path):
    value = {"state_dict": {}, "hyper_parameters": Settings(), "pytorch-lightning_version": "2.6.0"}
    torch.save(value, tmp_path / "own.ckpt")
    refused = r"own.ckpt is incomplete, or loading it could run code.*add_safe_globals\(\[.*Settings\]\)"
    for loads in (load_file, check_checkpoint, LigerSingleDeviceStrategy(fault_tolerance=False).load_checkpoint):
        with pytest.raises(pickle.UnpicklingError, match=refused):
            loads(tmp_path / "own.ckpt")
        loads(tmp_path / "own.ckpt", weights_only=False)
        with safe_globals([Settings]):
            loads(tmp_path / "own.ckpt")


def test_users_decide_about_entries(tmp_path):
    folder = write_sharded(tmp_path / "sharded", optimizer_0={"lr": Settings()})
    for arguments in ((), (True,)):
        with (
            pytest.raises(pickle.UnpicklingError, match=r"could run code.*Settings"),
            loading_safely(folder, *arguments),
        ):
            read_entry(folder)
    for arguments in ((False,), (None, [Settings])):
        with loading_safely(folder, *arguments):
            assert isinstance(read_entry(folder), Settings)
