"""Files are read with the places of their records and in a fixed order, and mistakes are errors that name the place."""

import json
import sysconfig
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lightning_liger.data.records import Record, read_records, strings
from lightning_liger.data.sources import TEXT_SUFFIXES, files_at, python_library_files, read_documents

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def read_texts(path: Path | str, text_field: str = "text") -> list[str]:
    files = files_at("data.path", path, TEXT_SUFFIXES, other_files=True)
    return list(read_documents("data.path", files, text_field))


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
        (folder / name).write_bytes((bom + content).encode())
        found = list(read_records("data.path", [folder / name]))
        assert [record.values for record in found] == rows
        places = [f"data.path: {folder / name}, {kind} {1 + index * step}" for index in range(len(rows))]
        assert [record.place for record in found] == places


def test_parquet(tmp_path):
    table = pyarrow.Table.from_pylist([{"prompt": "a", "label": True}, {"prompt": None, "label": False}])
    parquet.write_table(table, tmp_path / "a.parquet")
    found = list(read_records("data.path", [tmp_path / "a.parquet"]))
    assert [record.values for record in found] == table.to_pylist()
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: the field 'prompt' is null"):
        found[1].text("prompt")


def test_values_of_other_forms_are_understood():
    record = Record({"tools": '[{"type": "function"}]', "kwargs": '{"a": 1}', "none": None}, "here")
    assert record.decoded("tools", list, "") == [{"type": "function"}]
    assert record.decoded("kwargs", dict, "") == {"a": 1}
    assert record.decoded("none", dict, "") == record.decoded("absent", dict, "") == {}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "tool_calls": None}]
    assert record.as_messages("m", parts) == [{"role": "user", "content": "ab"}]
    calls = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert record.as_messages("m", calls) == [{"role": "assistant", "tool_calls": [{}]}]
    assert sorted(strings(Record({"a": "x", "b": [{"c": "y"}, 1, None, ["z"]]}, "here"))) == ["x", "y", "z"]


def test_python_library_has_its_modules_in_fixed_order_and_no_tests(tmp_path, monkeypatch):
    files = python_library_files()
    names = [file.relative_to(sysconfig.get_path("stdlib")).as_posix() for file in files]
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    unwanted = ("test/", "tests/", "idle_test/", "site-packages/", "lib2to3/", "__pycache__/", "_sysconfigdata")
    assert not [name for name in names if any(f"/{part}" in f"/{name}" for part in unwanted)]
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"data\.path was not given.*a text file"):
        python_library_files()


@pytest.mark.parametrize("or_on_hub", [False, True])
def test_names_on_the_hub_are_suggested_where_they_are_taken(or_on_hub):
    with pytest.raises(FileNotFoundError, match="does not exist") as raised:
        files_at("data.path", "imdb", TEXT_SUFFIXES, or_on_hub=or_on_hub)
    assert ("or owner/name of a data set on the Hub" in str(raised.value)) == or_on_hub


def test_files_are_read_in_order_without_hidden_and_other_ones(tmp_path, monkeypatch):
    for name in ("b.md", "a.txt", "sub/deep/c.PY", "sub/d.rst", ".hidden.txt", ".git/e.txt", "g.json", "h.csv", "i"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n\n.")
    (tmp_path / "a.jsonl").write_text('{"text": "line 1"}\n\n{"text": " \\n"}\n{"text": "line 2", "body": "x"}\n')
    found = [text.removesuffix("\n\n.") for text in read_texts(tmp_path)]
    assert found == ["line 1", "line 2", "a.txt", "b.md", "sub/d.rst", "sub/deep/c.PY"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_texts("~/i") == ["i\n\n."]
    with pytest.raises(ValueError, match=r"data\.text_field='body'.*a\.jsonl, line 1: the field 'body' is missing"):
        read_texts(tmp_path, "body")
