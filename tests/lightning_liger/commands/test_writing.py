"""Files of commands are written as a whole or not at all."""

import os
from pathlib import Path

import pytest

from lightning_liger.commands import writing
from lightning_liger.commands.writing import write_files


def test_all_files_are_written_or_none(tmp_path, monkeypatch):
    old, new, nested, link = (tmp_path / name for name in ("old.txt", "new.txt", "a/b/nested.txt", "link"))
    old.write_bytes(b"old")
    link.symlink_to(old)
    (tmp_path / "file").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"file/x' cannot be written: "):
        write_files({old: b"0", new: b"1", nested: b"2", tmp_path / "file" / "x": b"3"})

    def full(*paths):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "replace", full)
        with pytest.raises(OSError, match=r"old.txt' cannot be written: No space left on device"):
            write_files({old: b"longer"})
    assert (old.read_bytes(), sorted(tmp_path.iterdir())) == (b"old", before)
    write_files({link: b"1", nested: b"2"})
    assert (old.read_bytes(), nested.read_bytes(), link.is_symlink()) == (b"1", b"2", True)
    assert [path.name for path in nested.parent.iterdir()] == ["nested.txt"]


def test_pipes_stay_what_they_are():
    reader, writer = os.pipe()
    write_files({Path(f"/dev/fd/{writer}"): b"content"})
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    os.close(writer)
