"""Tables of ragged rows: what is written is read, in any process; damaged files are errors."""

import pickle

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lightning_liger.data.ragged import RaggedTable, RaggedWriter

ROWS = [
    {"ids": np.arange(3, dtype=np.int32), "mask": np.ones(2, dtype=np.uint8), "number": np.float32(1.5)},
    {"ids": np.arange(0, dtype=np.int32), "mask": np.zeros(1, dtype=np.uint8), "number": np.float32(-2)},
    {"ids": np.arange(7, 9, dtype=np.int32), "mask": np.zeros(0, dtype=np.uint8), "number": np.float32(0)},
]


def write(file, rows, **settings):
    with RaggedWriter(file, {"made": "here"}, **settings) as writer:
        for row in rows:
            writer.append(row)
    return RaggedTable(file)


def equal(first, second):
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) and np.asarray(first[key]).dtype == np.asarray(second[key]).dtype
        for key in first
    )


def test_rows_come_back(tmp_path):
    table = write(tmp_path / "a.safetensors", ROWS)
    for each in (table, pickle.loads(pickle.dumps(table))):
        assert len(each) == 3
        assert all(equal(each[index], row) for index, row in enumerate(ROWS))
    assert table.metadata == {"made": "here", "num_rows": "3"}
    assert table.lengths("ids").tolist() == [3, 0, 2]
    assert table.column("number").tolist() == [1.5, -2, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_file_is_a_safetensors_file_like_any_other(tmp_path):
    write(tmp_path / "a.safetensors", ROWS)
    tensors = load_file(tmp_path / "a.safetensors")
    assert tensors["ids"].tolist() == [0, 1, 2, 7, 8]
    assert tensors["ids.offsets"].tolist() == [0, 3, 3, 5]


def test_shared_offsets_and_more_dimensions(tmp_path):
    rows = [{"a": np.arange(n, dtype=np.int32), "b": np.full((n, 2), n, dtype=np.float16)} for n in (1, 3)]
    table = write(tmp_path / "a.safetensors", rows, shares_offsets=True)
    assert set(table.shapes) == {"offsets", "a", "b"}
    assert all(equal(table[index], row) for index, row in enumerate(rows))


def test_empty_table(tmp_path):
    assert len(write(tmp_path / "a.safetensors", [])) == 0


def test_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyError), RaggedWriter(tmp_path / "a.safetensors") as writer:
        writer.append(ROWS[0])
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_rows_must_have_the_columns_of_the_first(tmp_path):
    other = {**ROWS[1], "number": np.float64(1)}
    for row in ({"ids": ROWS[0]["ids"]}, other, {**ROWS[1], "ids": np.int32(3)}):
        with pytest.raises(ValueError, match="rows must have the columns"):
            write(tmp_path / "a.safetensors", [ROWS[0], row])
    with pytest.raises(ValueError, match="all columns of a row must have one length"):
        rows = [{"a": np.arange(2, dtype=np.int32), "b": np.arange(3, dtype=np.int32)}]
        write(tmp_path / "a.safetensors", rows, shares_offsets=True)


def test_damaged_files_are_errors(tmp_path):
    file = tmp_path / "a.safetensors"
    write(file, ROWS)
    whole = file.read_bytes()
    for content in (b"", whole[:5], whole[:100], whole[:-1], b"\xff" * 64, b"\x10" + whole[1:]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.safetensors is not a safetensors file, or a part of one"):
            RaggedTable(file)
    ids = np.arange(4, dtype=np.int32)
    for offsets, problem in (
        (np.array([0, 2, 3]), "must rise from 0 to 4"),
        (np.array([1, 4]), "must rise from 0 to 4"),
        (np.array([0, 3, 2, 4]), "must rise from 0 to 4"),
        (np.array([0, 4], dtype=np.int32), "must be int64"),
        (np.array([], dtype=np.int64), "must be int64"),
        (np.array([[0, 4]]), "must be int64"),
    ):
        save_file({"ids": ids, "ids.offsets": offsets}, file)
        with pytest.raises(ValueError, match=problem):
            RaggedTable(file)
    save_file({"a": ids, "b": ids[:2]}, file)
    with pytest.raises(ValueError, match="the same number of rows"):
        RaggedTable(file)
    save_file({"a": ids.astype(np.float64)}, file)
    with pytest.raises(ValueError, match="dtypes"):
        RaggedTable(file)
    save_file({"a": np.array(1, dtype=np.int32)}, file)
    with pytest.raises(ValueError, match="must have a dimension"):
        RaggedTable(file)
