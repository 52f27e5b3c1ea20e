"""Stored teachers: what is written is served, in tokens that fit, and files of other layouts are errors."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from lightning_liger.data import TeacherTopKDataModule, tokenizer_hash, write_teacher_topk
from lightning_liger.data.teacher_topk import TeacherTopKFile
from lightning_liger.data.tokenizer import load_tokenizer, train_bpe_tokenizer
from tests.lightning_liger.data.kinds import EXAMPLES, TOKENIZER


def rows(count: int = 6, top_k: int = 3, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        log_probs, ids = torch.randn(3 + index, 20, generator=generator).log_softmax(-1).topk(top_k)
        input_ids = torch.randint(0, 20, (3 + index,), generator=generator)
        found.append({"input_ids": input_ids, "teacher_topk_ids": ids, "teacher_topk_log_probs": log_probs})
    return found


def ready(**settings):
    data = TeacherTopKDataModule(**{"batch_size": 2, "validation_fraction": 0, **settings})
    data.setup("fit")
    return data


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_served_as_they_were_written(tmp_path, dtype):
    written = rows()
    written[1]["labels"] = torch.full((4,), -100)
    for name, part in (("a", written[:2]), ("b", written[2:])):
        write_teacher_topk(tmp_path / f"{name}.safetensors", part, temperature=2, dtype=dtype)
    data = ready(path=tmp_path, batch_size=1)
    assert (data.top_k, data.temperature, len(data.train_data)) == (3, 2.0, 6)
    found = {batch["input_ids"].shape[1]: batch for batch in data.train_dataloader()}
    assert len(found) == 6
    for row in written:
        batch = {key: values[0] for key, values in found[len(row["input_ids"])].items()}
        assert torch.equal(batch["labels"], row.get("labels", row["input_ids"]))
        for key in ("input_ids", "teacher_topk_ids"):
            assert torch.equal(batch[key], row[key])
        expected = row["teacher_topk_log_probs"].to(getattr(torch, dtype)).float()
        assert torch.equal(batch["teacher_topk_log_probs"], expected)


def test_layout_is_the_documented_one(tmp_path):
    file = tmp_path / "a.safetensors"
    write_teacher_topk(file, rows(2))
    tensors = load_file(file)
    assert {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()} == {
        "offsets": ("int64", (3,)),
        "input_ids": ("int32", (7,)),
        "labels": ("int32", (7,)),
        "teacher_topk_ids": ("int32", (7, 3)),
        "teacher_topk_log_probs": ("float32", (7, 3)),
    }
    assert tensors["offsets"].tolist() == [0, 3, 7]
    metadata = {"format": "lightning_liger.teacher_topk", "format_version": "1", "num_rows": "2", "top_k": "3"}
    assert TeacherTopKFile(file).metadata == metadata | {"temperature": "1.0", "tokenizer_hash": ""}


def test_values_may_be_lists_arrays_or_tensors_of_any_precision(tmp_path):
    row = rows(1)[0]
    log_probs = row["teacher_topk_log_probs"]
    few = {"teacher_topk_log_probs": log_probs.index_fill(1, torch.tensor([1, 2]), -torch.inf)}
    forms = [
        {key: value.tolist() for key, value in row.items()},
        {key: value.numpy() for key, value in row.items()},
        {**row, "teacher_topk_log_probs": log_probs.double(), "input_ids": row["input_ids"].int()},
        {**row, "teacher_topk_log_probs": log_probs.bfloat16()},
        {**row, **few, "teacher_topk_ids": torch.zeros_like(row["teacher_topk_ids"])},
    ]
    write_teacher_topk(tmp_path / "a.safetensors", iter(forms))
    table = TeacherTopKFile(tmp_path / "a.safetensors")
    for index in range(3):
        assert all(np.allclose(table[index][key], value, atol=1e-6) for key, value in row.items())
    assert np.isneginf(table[4]["teacher_topk_log_probs"][:, 1:]).all()


def test_layouts(tmp_path):
    write_teacher_topk(tmp_path / "a.safetensors", rows(8))
    data = ready(path=tmp_path, validation_fraction=0.25, padding_free=True, pad_to_multiple_of=32)
    (batch,) = data.val_dataloader()
    assert batch["teacher_topk_ids"].shape == (1, 32, 3)
    assert len(batch["cu_seq_lens_q"]) == 3
    batch = next(iter(ready(path=tmp_path, validation_path=tmp_path, max_length=4, pad_token_id=7).val_dataloader()))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 4)
    assert batch["input_ids"][0, 3] == 7


def test_tokenizer_must_be_the_one_of_the_file(tmp_path):
    shipped, other = load_tokenizer(TOKENIZER), train_bpe_tokenizer(["some other text"], 270)
    assert tokenizer_hash(shipped) != tokenizer_hash(other)
    other.save_pretrained(tmp_path / "other")
    stored = EXAMPLES / "teacher_topk.safetensors"
    data = ready(path=stored, tokenizer=TOKENIZER)
    assert data.text_tokenizer.decode(next(iter(data.train_dataloader()))["input_ids"][0]).startswith(("How", "W"))
    with pytest.raises(ValueError, match=r"topk\.safetensors was made with a different tokenizer .*than data\.tok"):
        ready(path=stored, tokenizer=tmp_path / "other")
    for index, tokenizer in enumerate((shipped, other)):
        write_teacher_topk(tmp_path / f"{index}.safetensors", rows(1), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"1\.safetensors was made with a different tokenizer .*than other files"):
        ready(path=tmp_path)


def test_files_of_other_layouts_are_errors_that_name_the_file(tmp_path):
    file = tmp_path / "a.safetensors"
    write_teacher_topk(file, rows(2))
    whole, tensors, metadata = file.read_bytes(), load_file(file), TeacherTopKFile(file).metadata
    entry = {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]}
    header = json.dumps({"offsets": entry}).encode()
    claims_too_much = len(header).to_bytes(8, "little") + header + b"\0" * 64
    for content in (whole[:-1], whole[:50], b"", claims_too_much):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.safetensors is not a complete safetensors file"):
            ready(path=file)

    def fails(problem, removed=(), header=None, **changed) -> None:
        kept = {key: value for key, value in (tensors | changed).items() if key not in removed}
        save_file(kept, file, {**metadata, **(header or {})})
        with pytest.raises(ValueError, match=rf"a\.safetensors.*{problem}"):
            ready(path=file)

    for name in tensors:
        fails(f"'{name}' must be .* got None", removed=(name,))
    fails("'teacher_topk_ids' must be", teacher_topk_ids=tensors["teacher_topk_ids"][:, :2].copy())
    fails("'input_ids' must be", input_ids=tensors["input_ids"].astype(np.int64))
    fails("'teacher_topk_log_probs' must be", teacher_topk_log_probs=tensors["teacher_topk_ids"])
    fails("must rise from 0 to 7", offsets=np.array([0, 3, 9]))
    fails(r"'labels' must be", labels=tensors["labels"][:5].copy())
    fails(r"'offsets' must be", header={"num_rows": "7"})
    fails("'format' must be 'lightning_liger.teacher_topk', got 'other'", header={"format": "other"})
    fails("'format_version' must be '1', got '2'", header={"format_version": "2"})
    fails("must be .*4", header={"top_k": "4"})
    for value in ("", "x", "0", "-1", "nan", "inf"):
        fails(f"'temperature' must be a number above 0, got {value!r}", header={"temperature": value})
    write_teacher_topk(file, rows(2))
    write_teacher_topk(tmp_path / "b.safetensors", rows(2, top_k=4))
    with pytest.raises(ValueError, match=r"b\.safetensors has top_k=4 and temperature=1\.0, others top_k=3"):
        ready(path=tmp_path)
