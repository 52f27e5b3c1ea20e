"""Files that would run code are refused before anything unpickles them, and honest ones are not."""

import pickle
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.serialization import safe_globals

from lightning_liger.resuming.atomic_io import AtomicCheckpointIO
from lightning_liger.resuming.safe_loading import check_checkpoint, check_metadata, load_file
from tests.lightning_liger.malicious import Payload, saved, with_metadata, write_deepspeed, write_sharded


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
            with pytest.raises(pickle.UnpicklingError, match=r"metadata holds an object of .* could run code"):
                check_checkpoint(folder, weights_only)


def test_metadata_must_not_change_classes(tmp_path):
    attributes = b"(N}X\x05\x00\x00\x00helloK\x01st"  # (None, {"hello": 1})
    change = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n" + attributes + b"b."
    folder = with_metadata(tmp_path / "evil", change)
    with pytest.raises(ValueError, match="is not the metadata of a sharded checkpoint"):
        check_checkpoint(folder)
    assert not hasattr(metadata.Metadata, "hello")
    pickle.loads(change)  # what it is refused for
    assert metadata.Metadata.hello == 1
    del metadata.Metadata.hello


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
    check_metadata(folder / ".metadata", weights_only=False)
    if disguise is as_tensor:
        check_checkpoint(folder)
        return
    refused = ValueError if disguise is as_compressed else pickle.UnpicklingError
    for weights_only in (None, True):
        with pytest.raises(refused, match=rf"^{folder}"):
            check_checkpoint(folder, weights_only)


def deepspeed_elsewhere(folder: Path, marker: Path) -> Path:
    """DeepSpeed's file that names the folder to load names another one."""
    write_deepspeed(folder.parent / "elsewhere", {"module": Payload(marker)})
    write_deepspeed(folder, {})
    (folder / "latest").write_text("../elsewhere/checkpoint")
    return folder


def deepspeed_link(folder: Path, marker: Path) -> Path:
    """The folder that DeepSpeed loads is a link."""
    write_deepspeed(folder.parent / "elsewhere", {"module": Payload(marker)})
    folder.mkdir()
    (folder / "latest").write_text("link")
    (folder / "link").symlink_to(folder.parent / "elsewhere" / "checkpoint", target_is_directory=True)
    return folder


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


def meta_file(folder: Path, marker: Path) -> Path:
    torch.save(Payload(marker), write_sharded(folder) / "meta.pt")
    return folder


@pytest.mark.parametrize("write", [meta_file, deepspeed_link])
def test_files_are_refused_with_the_function_that_they_name(tmp_path, marker, write):
    with pytest.raises(pickle.UnpicklingError, match=rf"{tmp_path}.* holds an object of posix\.mkdir") as raised:
        check_checkpoint(write(tmp_path / "evil", marker))
    assert "torch.serialization.add_safe_globals([mkdir])" in str(raised.value)


@pytest.mark.parametrize("write", [after_an_old_format, named_safetensors, deepspeed_elsewhere])
def test_what_another_reader_would_find_is_refused(tmp_path, marker, write):
    with pytest.raises(ValueError, match=rf"{tmp_path / 'evil'}"):
        check_checkpoint(write(tmp_path / "evil", marker))


def test_files_of_web_servers_are_refused_too(monkeypatch):
    calls = []
    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io.get_filesystem", lambda path: MagicMock())
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **options: calls.append(options))
    for weights_only in (None, False):
        AtomicCheckpointIO().load_checkpoint("http://localhost/file.ckpt", weights_only=weights_only)
    assert [call["weights_only"] for call in calls] == [True, False]


def test_users_decide_otherwise(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": Settings()}, tmp_path / "own.ckpt")
    sharded = write_sharded(tmp_path / "sharded", optimizer_0={"settings": Settings()})
    refused = r"holds an object of tests\.\S+\.Settings.*\(\[Settings\]\)"
    for path, loads in (
        (tmp_path / "own.ckpt", (load_file, check_checkpoint, AtomicCheckpointIO().load_checkpoint)),
        (sharded, (check_checkpoint,)),
    ):
        for load in loads:
            with pytest.raises(pickle.UnpicklingError, match=refused):
                load(path)
            load(path, weights_only=False)
            with safe_globals([Settings]):
                load(path)
    check_checkpoint(sharded, allowed=[Settings])
    with pytest.raises(pickle.UnpicklingError, match="Settings"):
        check_checkpoint(sharded)
