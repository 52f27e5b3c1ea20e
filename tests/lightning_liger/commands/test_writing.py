"""Files of commands are written as a whole or not at all."""

import os
from pathlib import Path

import pytest

from lightning_liger.commands import writing
from lightning_liger.commands.writing import check_output, write_files


def test_all_files_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, nested = tmp_path / "old.txt", tmp_path / "new.txt", tmp_path / "a" / "b" / "nested.txt"
    old.write_bytes(b"old")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"file/x' cannot be written: "):
        write_files({new: b"1", nested: b"2", tmp_path / "file" / "x": b"3"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old.txt"]

    def full(*paths: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "replace", full)
        with pytest.raises(OSError, match=r"old.txt' cannot be written: No space left on device"):
            write_files({old: b"longer"})
    assert old.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old.txt"]
    write_files({old: b"1", nested: b"2"})
    assert (old.read_bytes(), nested.read_bytes()) == (b"1", b"2")
    assert [path.name for path in nested.parent.iterdir()] == ["nested.txt"]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_files({link: b"new"})
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    reader, writer = os.pipe()
    write_files({Path(f"/dev/fd/{writer}"): b"content"})
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    os.close(writer)


def test_outputs_that_are_no_files_are_refused(tmp_path: Path) -> None:
    check_output(tmp_path / "new.json")
    for output, error, message in (
        ("", ValueError, "the name of a file, got ''"),
        (tmp_path, ValueError, "the name of a file, got"),
        (tmp_path / "no" / "x", FileNotFoundError, "in a folder that exists"),
    ):
        with pytest.raises(error, match=message):
            check_output(output)
