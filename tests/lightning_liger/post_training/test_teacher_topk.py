"""Files of a teacher's top-k: rows against whole logits, and a student that learns from the file alone."""

from pathlib import Path

import pytest
import torch

from lightning_liger import LigerDistillation, apply_liger_kernels, store_teacher_topk, teacher_topk_rows
from lightning_liger.cli import main
from lightning_liger.data import TeacherTopKDataModule
from tests.lightning_liger.post_training.training import Recorded
from tests.lightning_liger.tiny import (
    TINY_CONFIG,
    VOCAB_SIZE,
    TensorSizes,
    quiet_trainer,
    tiny_batch,
    tiny_llama,
    tiny_model,
)

K = 6


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_rows_are_those_of_whole_logits_without_padding(patched: bool) -> None:
    model = tiny_llama(attention_dropout=0.5).train()
    batch = tiny_batch(2, 9, 3)
    batch["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    batch["labels"][1, 6:] = -100
    with torch.no_grad():
        expected = (model.eval()(batch["input_ids"], batch["attention_mask"]).logits / 2).log_softmax(-1)
    model.train()
    if patched:
        apply_liger_kernels(model, "linear_cross_entropy")
    rows = list(teacher_topk_rows(model, [batch], top_k=K, temperature=2.0))
    assert [len(row["input_ids"]) for row in rows] == [9, 6]
    assert model.training
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        assert row["teacher_topk_ids"].shape == row["teacher_topk_log_probs"].shape == (length, K)
        own = expected[index, :length]
        torch.testing.assert_close(row["teacher_topk_log_probs"], own.topk(K).values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.gather(-1, row["teacher_topk_ids"]), own.topk(K).values, rtol=1e-4, atol=1e-5)
        assert torch.equal(row["labels"][1:], batch["labels"][index, 1:length])


def test_documents_become_rows_and_samples_sum_to_one() -> None:
    model = tiny_llama()
    ids = tiny_batch(1, 9, 0)["input_ids"]
    packed = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0]])}
    rows = list(teacher_topk_rows(model, [packed], top_k=K))
    assert [len(row["input_ids"]) for row in rows] == [4, 3]
    (alone,) = teacher_topk_rows(model, [{"input_ids": ids[:, 4:7], "labels": ids[:, 4:7]}], top_k=K)
    torch.testing.assert_close(rows[1]["teacher_topk_log_probs"], alone["teacher_topk_log_probs"], rtol=1e-4, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    (sampled, *_) = teacher_topk_rows(model, [packed], num_samples=12, generator=generator)
    torch.testing.assert_close(sampled["teacher_topk_log_probs"].exp().sum(-1), torch.ones(4))


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    apply_liger_kernels(model, "linear_cross_entropy")
    monkeypatch.setattr("lightning_liger.post_training.teacher._CHUNK_BYTES", 8 * 16 * VOCAB_SIZE)
    with TensorSizes(monkeypatch) as sizes:
        list(teacher_topk_rows(model, [tiny_batch(8, 24)], top_k=K))
    assert sizes.largest < 8 * 24 * VOCAB_SIZE


class Student(LigerDistillation, Recorded):
    configure_optimizers = Recorded.configure_optimizers


def test_student_learns_from_the_file_at_the_stored_temperature(tmp_path: Path) -> None:
    batches = [tiny_batch(2, 9, 0, seed=seed) for seed in range(2)]
    store_teacher_topk(tiny_model("qwen2"), batches, tmp_path / "t.safetensors", top_k=K, temperature=2.0)
    data = TeacherTopKDataModule(path=tmp_path / "t.safetensors", validation_fraction=0, batch_size=2)
    module = Student(distillation_mode="topk_logits", config=TINY_CONFIG, min_lr_ratio=1.0)
    trainer = quiet_trainer(strategy="liger", max_epochs=6)
    trainer.fit(module, datamodule=data)
    assert module._stored_temperature == 2.0
    assert module.steps[-1]["train_loss_step"] < module.steps[0]["train_loss_step"]
    assert 0 < trainer.callback_metrics["train_teacher_mass"] < 1


def test_command_writes_a_file(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "teacher")
    data = tmp_path / "data.safetensors"  # of one row more than whole batches
    store_teacher_topk(tiny_llama(), [tiny_batch(3, 9, 0)], data, top_k=2)
    arguments = ["--model", "lightning_liger.LigerCausalLM", f"--model.pretrained={tmp_path / 'teacher'}"]
    arguments += ["--data", "lightning_liger.data.TeacherTopKDataModule", f"--data.path={data}"]
    arguments += ["--data.validation_fraction=0", "--data.batch_size=2", "--top_k=5", "--temperature=1.5"]
    main(["teacher_topk", *arguments, f"--output={tmp_path / 'out.safetensors'}"])
    found = TeacherTopKDataModule(path=tmp_path / "out.safetensors", validation_fraction=0, batch_size=1)
    found.setup("fit")
    assert (found.top_k, found.temperature) == (5, 1.5)
    assert found.train_data is not None
    assert sorted(row["input_ids"].tolist() for row in found.train_data) == sorted(  # type: ignore[attr-defined]
        tiny_batch(3, 9, 0)["input_ids"].tolist()
    )
