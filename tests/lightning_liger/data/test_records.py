"""Records of all formats are read with their lines, and wrong ones are errors that name file and line."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_liger.data import records
from lightning_liger.data.records import Record, read_records, record_files

ROWS = [{"prompt": "a"}, {"prompt": "ü", "n": 1.5}, {"prompt": "[c], {d}"}]


def read(file: Path, content: str | bytes) -> list[Record]:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_records("data.path", record_files("data.path", file)))


def lines_of(found: list[Record]) -> list[int]:
    return [int(record.place.rpartition(" ")[2]) for record in found]


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, ROWS)), [1, 2, 3]),
        ("a.jsonl", "\n\n".join(map(json.dumps, ROWS)) + "\n \n", [1, 3, 5]),
        ("a.jsonl", "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), [1, 2, 3]),
        ("a.json", json.dumps(ROWS), [1, 1, 1]),
        ("a.json", json.dumps(ROWS, indent=1), [2, 5, 9]),
        ("a.json", "[\n" + "\n,".join(map(json.dumps, ROWS)) + "\n]\n", [2, 3, 4]),
        ("a.json", "\n".join(map(json.dumps, ROWS)), [1, 2, 3]),
        ("a.JSON", "\n [" + ",\n\n".join(map(json.dumps, ROWS)) + "]", [2, 4, 6]),
    ],
)
def test_files_hold_the_same_records_with_their_lines(tmp_path, name, content, lines):
    found = read(tmp_path / name, content)
    assert [dict(record.values) for record in found] == ROWS
    assert lines_of(found) == lines
    assert all(str(tmp_path / name) in record.place for record in found)


def test_empty_lists_and_files(tmp_path):
    for name, content in (("a.json", "[]"), ("b.json", " [ ] "), ("c.jsonl", ""), ("d.json", "")):
        assert read(tmp_path / name, content) == []


def test_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name in ("b.jsonl", "a.json", ".hidden.jsonl", "notes.txt"):
        (tmp_path / name).write_text(json.dumps({"from": name}))
    found = read_records("data.path", record_files("data.path", tmp_path))
    assert [record.values["from"] for record in found] == ["a.json", "b.jsonl"]


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"prompt": "a", "label": True}, {"prompt": None, "label": False}])
    parquet.write_table(table, tmp_path / "a.parquet")
    found = list(read_records("data.path", record_files("data.path", tmp_path / "a.parquet")))
    assert [record.values for record in found] == table.to_pylist()
    assert found[1].place.endswith("a.parquet, row 2")
    with pytest.raises(ValueError, match="row 2: the field 'prompt' is null"):
        found[1].text("prompt")
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read as Parquet"):
        read(tmp_path / "b.parquet", b"no table")


def test_parquet_goes_through_pyarrow(tmp_path, monkeypatch):
    class ParquetFile:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def iter_batches(self, batch_size):
            rows = json.loads(self.file.read_text())
            yield SimpleNamespace(to_pylist=lambda: rows[:1])
            yield SimpleNamespace(to_pylist=lambda: rows[1:])

    modules = {
        "pyarrow.parquet": SimpleNamespace(ParquetFile=ParquetFile),
        "pyarrow": SimpleNamespace(ArrowException=KeyError),
    }
    monkeypatch.setattr(records, "import_module", modules.__getitem__)
    found = read(tmp_path / "a.parquet", json.dumps(ROWS))
    assert [record.values for record in found] == ROWS
    assert lines_of(found) == [1, 2, 3]


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(records, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"a\.parquet needs pyarrow \(pip install pyarrow\)"):
        read(tmp_path / "a.parquet", b"")


def test_renamed_columns():
    record = Record({"question": "q", "prompt": "p", "id": 3}, "here").renamed({"prompt": "question"})
    assert record.values == {"prompt": "q", "id": 3}
    swapped = Record({"a": 1, "b": 2}, "here").renamed({"a": "b", "b": "a"})
    assert swapped.values == {"a": 2, "b": 1}
    with pytest.raises(ValueError, match=r"here: the field 'prompt' is missing; keys found: .'id'"):
        Record({"id": 3}, "here").renamed({"prompt": "question"}).text("prompt")


def test_values_of_other_forms_are_understood():
    record = Record({"tools": '[{"type": "function"}]', "kwargs": '{"a": 1}', "none": None, "empty": []}, "here")
    assert record.tools() == [{"type": "function"}]
    assert record.mapping("kwargs") == {"a": 1}
    assert record.mapping("none") == record.mapping("absent") == {}
    assert Record({"tools": []}, "here").tools() is None
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "tool_calls": None}]
    assert Record({"m": parts}, "here").messages("m") == [{"role": "user", "content": "ab"}]
    calls = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert Record({"m": calls}, "here").messages("m") == [{"role": "assistant", "tool_calls": [{}]}]


def test_all_strings_of_a_record():
    record = Record({"a": "x", "b": [{"c": "y"}, 1, None, ["z"]]}, "here")
    assert sorted(record.strings()) == ["x", "y", "z"]
