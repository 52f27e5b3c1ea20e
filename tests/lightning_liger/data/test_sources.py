"""Reading files, folders, JSON lines and Python's standard library, and the error for each mistake."""

import json
import sysconfig
from pathlib import Path

import pytest

from lightning_liger.data.sources import fingerprints, python_library_files, read_documents, source_files


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def write_json_lines(file: Path, *records: object) -> Path:
    return write(file, "".join(json.dumps(record) + "\n" for record in records))


def test_python_library_has_its_modules_in_fixed_order_and_no_tests():
    files = python_library_files()
    library = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(library).as_posix() for file in files]
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
    assert not [name for name in names if "_sysconfigdata" in name]


def test_python_library_without_sources_asks_for_a_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"data\.path was not given.*a text file"):
        read_documents()


def test_no_path_means_the_python_library():
    assert next(read_documents()).startswith(python_library_files()[0].read_text(encoding="utf-8")[:100])


def test_text_file_of_any_suffix_is_one_document(tmp_path):
    file = write(tmp_path / "notes.log", "one\n\ntwo\n")
    assert list(read_documents(file)) == list(read_documents(str(file))) == ["one\n\ntwo\n"]


def test_folder_is_read_recursively_in_order_without_hidden_and_other_files(tmp_path):
    for name in ("b.md", "a.txt", "sub/deep/c.PY", "sub/d.rst"):
        write(tmp_path / name, name)
    for name in (".hidden.txt", ".git/e.txt", "sub/.venv/f.py", "g.json", "h.csv", "i"):
        write(tmp_path / name, "unwanted")
    write_json_lines(tmp_path / "a.jsonl", {"text": "line 1"}, {"text": "line 2"})
    assert list(read_documents(tmp_path)) == ["line 1", "line 2", "a.txt", "b.md", "sub/d.rst", "sub/deep/c.PY"]


def test_a_home_folder_may_be_written_as_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "at home")
    assert list(read_documents("~/a.txt")) == ["at home"]


def test_json_lines_take_the_named_field_and_skip_empty_lines(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"body": "x\\ny", "text": "no"}\n\n{"body": "z"}\n')
    assert list(read_documents(file, text_field="body")) == ["x\ny", "z"]


def test_blank_documents_are_left_out(tmp_path):
    file = write_json_lines(tmp_path / "a.jsonl", {"text": " \n"}, {"text": "word"}, {"text": ""})
    assert list(read_documents(file)) == ["word"]


def test_missing_path_is_reported_at_the_call_with_what_is_accepted(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path='.*absent' does not exist.*\.jsonl.*folder.*\.txt"):
        read_documents(tmp_path / "absent")


def test_folder_without_text_files_is_an_error(tmp_path):
    write(tmp_path / "image.png", "")
    with pytest.raises(FileNotFoundError, match=r"data\.path='.*' is a folder without text files.*\.md"):
        source_files(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{oops", r"a\.jsonl, line 2 is not JSON", id="not JSON"),
        pytest.param("[1]", r"line 2 is a JSON list, expected an object with the field 'text'", id="no object"),
        pytest.param(
            '{"b": 1, "a": 2}', r"line 2: the field 'text' .* is missing; keys found: \['a', 'b'\]", id="field"
        ),
        pytest.param('{"text": 3}', r"line 2: the field 'text' .* is not a string; keys found: \['text'\]", id="type"),
        pytest.param('{"text": "\\ud800"}', r"line 2 is not valid Unicode", id="lone surrogate"),
    ],
)
def test_bad_json_line_is_reported_with_file_line_and_field(tmp_path, line, message):
    file = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(read_documents(file))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_file_that_is_not_utf8_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(ValueError, match=rf"data\.path: .*{name} is not UTF-8 text"):
        list(read_documents(tmp_path))


def test_corpus_of_empty_files_is_an_error(tmp_path):
    write(tmp_path / "a.txt", "  \n")
    with pytest.raises(ValueError, match=r"data\.path='.*' holds no text"):
        list(read_documents(tmp_path))


def test_fingerprint_changes_with_the_content(tmp_path):
    file = write(tmp_path / "a.txt", "one")
    before = fingerprints([file])
    assert fingerprints([file]) == before
    write(file, "three")
    assert fingerprints([file]) != before
