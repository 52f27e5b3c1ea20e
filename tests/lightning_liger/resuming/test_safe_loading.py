"""Files that would run code are refused before anything unpickles them, and honest ones are not."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
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


def stock_metadata(folder: Path) -> Any:
    return FileSystemReader(folder).read_metadata()


def by_name(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls what it finds under that name."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + b"".join(map(text, arguments)) + b"tR."


def change_of_a_class() -> bytes:
    """A pickle that sets an attribute of the class Metadata."""
    attributes = b"(N}X\x05\x00\x00\x00helloK\x01st"  # (None, {"hello": 1})
    return b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n" + attributes + b"b."


METADATA = {
    "function": lambda marker: pickle.dumps(Payload(marker)),
    "old protocol": lambda marker: pickle.dumps(Payload(marker), protocol=0),
    "in a dict": lambda marker: pickle.dumps({"state_dict_metadata": [Payload(marker)]}),
    "dotted name": lambda marker: by_name("torch.distributed.checkpoint.metadata", "os.mkdir", str(marker)),
    "name in an allowed module": lambda marker: by_name("torch.distributed.checkpoint.metadata", "os"),
    "torch's loader": lambda marker: by_name("torch", "load", str(marker)),
    "eval": lambda marker: by_name("builtins", "eval", f"__import__('os').mkdir({str(marker)!r})"),
}


@pytest.mark.parametrize("kind", METADATA)
@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
@pytest.mark.parametrize("weights_only", [None, False])
def test_metadata_that_names_anything_else_is_refused(tmp_path, marker, kind, name, weights_only):
    folder = with_metadata(tmp_path / "evil", METADATA[kind](marker), name)
    with pytest.raises(pickle.UnpicklingError, match=r"metadata holds an object of .*, and loading it could run code"):
        check_checkpoint(folder, weights_only)


def test_metadata_must_not_change_classes(tmp_path):
    folder = with_metadata(tmp_path / "evil", change_of_a_class())
    before = dict(vars(metadata.Metadata))
    with pytest.raises(ValueError, match="is not the metadata of a sharded checkpoint"):
        check_checkpoint(folder)
    assert dict(vars(metadata.Metadata)) == before
    pickle.loads(change_of_a_class())  # what it is refused for
    assert metadata.Metadata.hello == 1
    del metadata.Metadata.hello


def entry_with_a_payload(folder: Path, marker: Path) -> Any:
    """The metadata of a folder one of whose entries, which is no tensor, runs code."""
    return stock_metadata(write_sharded(folder, optimizer_0={"lr": Payload(marker)}))


def test_entries_that_are_no_tensors_are_read_without_running_code(tmp_path, marker):
    entry_with_a_payload(tmp_path / "evil", marker)
    with pytest.raises(pickle.UnpicklingError, match=r"__0_0\.distcp \('optimizer_0\.lr'\) holds .* (posix|nt)\.mkdir"):
        check_checkpoint(tmp_path / "evil")
    check_metadata(tmp_path / "evil" / ".metadata", weights_only=False)


def as_subclass(found: Any, kind: str) -> None:
    entries = OrderedDict(found.storage_data)
    vars(entries)["items"] = OrderedDict  # a pickle can set it: the empty dict that it returns has nothing to check
    found.storage_data = entries


def as_compressed(found: Any, _: Any) -> None:
    for info in found.storage_data.values():
        info.transform_descriptors = ["zstd"]


def as_tensor_name(found: Any, _: Any) -> None:
    found.storage_data = {index.fqn: info for index, info in found.storage_data.items()}


def as_negative(found: Any, _: Any) -> None:
    for info in found.storage_data.values():
        info.offset = -1


def as_called(found: Any, _: Any) -> None:
    """What is compressed is an argument, and all else is in the state."""

    class Called:
        def __init__(self, info: Any) -> None:
            self.info = info

        def __reduce__(self) -> Any:
            state = {key: vars(self.info)[key] for key in ("relative_path", "offset", "length")}
            return type(self.info), (*state.values(), ["zstd"]), state

    found.storage_data = {index: Called(info) for index, info in found.storage_data.items()}


@pytest.mark.parametrize("disguise", [as_subclass, as_compressed, as_tensor_name, as_negative, as_called])
def test_entries_cannot_hide(tmp_path, marker, disguise):
    found = entry_with_a_payload(tmp_path / "evil", marker)
    disguise(found, None)
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata of a sharded checkpoint"):
        check_checkpoint(tmp_path / "evil")


def test_attributes_that_a_pickle_sets_one_after_the_other_are_all_seen(tmp_path, marker):
    found = entry_with_a_payload(tmp_path / "evil", marker)
    as_compressed(found, None)
    content = pickle.dumps(found, protocol=2)
    # Sets the attributes once more, without the transforms; PyTorch keeps those set before.
    again = content.replace(b"X\x15\x00\x00\x00transform_descriptors", b"X\x15\x00\x00\x00transform_descriptorz")
    assert again != content
    (tmp_path / "evil" / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="is compressed, so that it cannot be checked"):
        check_checkpoint(tmp_path / "evil")


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


def behind_an_old_format(file: Path, marker: Path) -> Path:
    """A file that ``torch.load`` reads as its old format, and others as a zip archive."""
    torch.save({}, file, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(io.BytesIO(saved(Payload(marker)))) as archive, zipfile.ZipFile(file, "a") as polyglot:
        for name in archive.namelist():
            polyglot.writestr(name, archive.read(name))
    return file


def named_safetensors(file: Path, marker: Path) -> Path:
    """A file that ``torch.load`` reads as safetensors because of its name, and others as a zip archive."""
    return file_of(Payload)(file.with_suffix(".safetensors"), marker)


def file_of(value: Any) -> Any:
    def write(file: Path, marker: Path) -> Path:
        torch.save(value(marker), file)
        return file

    return write


FILES = {
    "weights": file_of(lambda marker: {"state_dict": Payload(marker)}),
    "hyperparameters": file_of(lambda marker: {"state_dict": {}, "hyper_parameters": {"x": Payload(marker)}}),
    "states of ranks": file_of(lambda marker: {"state_dict": {}, "lightning_liger": {"ranks": [Payload(marker)]}}),
    "optimizer states": file_of(lambda marker: {"state_dict": {}, "optimizer_states": [{"state": Payload(marker)}]}),
}
FOLDERS = {
    "meta.pt": lambda folder, marker: file_of(Payload)(write_sharded(folder) / "meta.pt", marker).parent,
    "model of deepspeed": lambda folder, marker: write_deepspeed(folder, {"module": Payload(marker)}),
    "optimizer of deepspeed": lambda folder, marker: write_deepspeed(folder, {}, {"state": Payload(marker)}),
    "deepspeed, through a link": deepspeed_link,
}


@pytest.mark.parametrize("kind", [*FILES, *FOLDERS])
def test_files_are_refused_with_the_function_that_they_name(tmp_path, marker, kind):
    path = (FILES | FOLDERS)[kind](tmp_path / "evil", marker)
    for load in (check_checkpoint, *([AtomicCheckpointIO().load_checkpoint] if kind in FILES else [])):
        with pytest.raises(
            pickle.UnpicklingError, match=rf"{tmp_path}.* holds an object of (posix|nt)\.mkdir"
        ) as raised:
            load(path)
    assert "torch.serialization.add_safe_globals([mkdir])" in str(raised.value)
    assert "weights_only=False" in str(raised.value)


@pytest.mark.parametrize("write", [behind_an_old_format, named_safetensors, deepspeed_elsewhere])
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
    value = {"state_dict": {}, "hyper_parameters": Settings()}
    torch.save(value, tmp_path / "own.ckpt")
    sharded = write_sharded(tmp_path / "sharded", optimizer_0={"settings": Settings()})
    for load in (load_file, check_checkpoint, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(pickle.UnpicklingError, match=r"holds an object of tests\.\S+\.Settings.*\(\[Settings\]\)"):
            load(tmp_path / "own.ckpt")
        load(tmp_path / "own.ckpt", weights_only=False)
        with safe_globals([Settings]):
            load(tmp_path / "own.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Settings"):
        check_checkpoint(sharded)
    check_checkpoint(sharded, weights_only=False)
    check_checkpoint(sharded, allowed=[Settings])
    with pytest.raises(pickle.UnpicklingError, match="Settings"):
        check_checkpoint(sharded)


def test_honest_checkpoints_pass(tmp_path):
    tensors = {"weight": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor(1), "empty": torch.empty(0)}
    check_checkpoint(write_sharded(tmp_path / "sharded", optimizer_0={"lr": 0.1, "betas": (0.9, 0.95), **tensors}))
    check_checkpoint(write_deepspeed(tmp_path / "deepspeed", {"module": tensors}))
    torch.save({"state_dict": tensors}, tmp_path / "file.ckpt")
    check_checkpoint(tmp_path / "file.ckpt")
    assert torch.equal(load_file(tmp_path / "file.ckpt")["state_dict"]["weight"], tensors["weight"])


def test_classes_of_deepspeed_are_plain(tmp_path):
    pytest.importorskip("deepspeed")
    from lightning_liger.strategies.deepspeed import _classes_in_checkpoints

    classes = _classes_in_checkpoints()
    value = {"loss_scaler": classes[1](1.0), "stage": classes[2](2), "place": classes[3](numel=1, start=0)}
    folder = write_deepspeed(tmp_path / "deepspeed", {}, value)
    check_checkpoint(folder, allowed=classes)
    with pytest.raises(pickle.UnpicklingError, match=r"deepspeed\."):
        check_checkpoint(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_that_cannot_be_opened_is_named(tmp_path):
    torch.save({}, tmp_path / "secret.ckpt")
    (tmp_path / "secret.ckpt").chmod(0)
    with pytest.raises(PermissionError, match=r"secret\.ckpt"):
        check_checkpoint(tmp_path / "secret.ckpt")
