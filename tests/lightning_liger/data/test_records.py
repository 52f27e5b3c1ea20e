"""Files are read with the places of their records and in a fixed order, and mistakes are errors that name the place."""

import json
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_liger.data.records import Record, read_records
from lightning_liger.data.sources import fingerprints, python_library_files, read_documents, record_files, source_files

ROWS = [{"prompt": "a"}, {"prompt": "ü", "n": 1.5}, {"prompt": "[c], {d}"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def read(file: Path, content: str | bytes) -> list[Record]:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_records("data.path", record_files("data.path", file)))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=5), blank=st.integers(1, 3), data=st.data())
def test_all_forms_of_a_file_hold_the_same_records_with_their_places(tmp_path_factory, rows, blank, data):
    folder = tmp_path_factory.mktemp("records")
    ascii_only, bom = data.draw(st.booleans()), data.draw(st.sampled_from(["", "\ufeff"]))
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    for name, content, kind, step in (
        ("a.jsonl", ("\n" * blank).join(lines), "line", blank),
        ("b.JSON", "\r\n".join(lines), "line", 1),
        ("c.json", json.dumps(rows, indent=data.draw(st.none() | st.just(1))), "record", 1),
    ):
        found = read(folder / name, bom + content)
        assert [record.values for record in found] == rows
        places = [f"data.path: {folder / name}, {kind} {1 + index * step}" for index in range(len(rows))]
        assert [record.place for record in found] == places


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"prompt": "a", "label": True}, {"prompt": None, "label": False}])
    parquet.write_table(table, tmp_path / "a.parquet")
    found = list(read_records("data.path", record_files("data.path", tmp_path / "a.parquet")))
    assert [record.values for record in found] == table.to_pylist()
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: the field 'prompt' is null"):
        found[1].text("prompt")
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read as Parquet"):
        read(tmp_path / "b.parquet", b"no table")


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
    record = Record({"a": "x", "b": [{"c": "y"}, 1, None, ["z"]]}, "here")
    assert sorted(record.strings()) == ["x", "y", "z"]


def test_python_library_has_its_modules_in_fixed_order_and_no_tests(tmp_path, monkeypatch):
    files = python_library_files()
    library = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(library).as_posix() for file in files]
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
    assert not [name for name in names if "_sysconfigdata" in name]
    assert next(read_documents()).startswith(files[0].read_text(encoding="utf-8")[:100])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"data\.path was not given.*a text file"):
        read_documents()


def test_text_file_of_any_suffix_is_one_document(tmp_path, monkeypatch):
    (tmp_path / "notes.log").write_text("one\n\ntwo\n")
    assert list(read_documents(tmp_path / "notes.log")) == ["one\n\ntwo\n"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(read_documents("~/notes.log")) == ["one\n\ntwo\n"]


def test_folder_is_read_recursively_in_order_without_hidden_and_other_files(tmp_path):
    for name in ("b.md", "a.txt", "sub/deep/c.PY", "sub/d.rst", ".hidden.txt", ".git/e.txt", "g.json", "h.csv", "i"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a.jsonl").write_text('{"text": "line 1"}\n\n{"text": " \\n"}\n{"text": "line 2", "body": "x"}\n')
    assert list(read_documents(tmp_path)) == ["line 1", "line 2", "a.txt", "b.md", "sub/d.rst", "sub/deep/c.PY"]
    with pytest.raises(ValueError, match=r"data\.text_field='body'.*a\.jsonl, line 1: the field 'body' is missing"):
        list(read_documents(tmp_path, text_field="body"))
    (tmp_path / "a.jsonl").write_text('{"text": 3}')
    with pytest.raises(ValueError, match="line 1: the field 'text' must be a string, got 3"):
        list(read_documents(tmp_path))


def test_missing_files_are_reported_at_the_call_with_what_is_accepted(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path='.*absent' does not exist.*\.jsonl.*folder.*\.txt"):
        read_documents(tmp_path / "absent")
    (tmp_path / "image.png").touch()
    with pytest.raises(FileNotFoundError, match=r"data\.path='.*' is a folder without text files.*\.md"):
        source_files(tmp_path)


def test_fingerprint_changes_with_the_content(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = fingerprints([file])
    assert fingerprints([file]) == before
    file.write_text("three")
    assert fingerprints([file]) != before
