"""Distillation of a tiny student: losses and gradients against whole logits, the teacher's state, accumulation."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import DistillationOptions, LigerDistillation, LigerDistillationMixin, apply_liger_kernels
from tests.lightning_liger.losses.test_distillation import on_support
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients
from tests.lightning_liger.post_training.training import Recorded, fit, loader, metrics_of
from tests.lightning_liger.tiny import TINY_CONFIG, VOCAB_SIZE, quiet_trainer, tiny_batch, tiny_llama, tiny_model


class Student(LigerDistillationMixin, Recorded):
    """The teacher is wider, and of another architecture."""

    def __init__(self, teacher: nn.Module | None = None, **options: Any) -> None:
        super().__init__(distillation=DistillationOptions(**options))
        self.model = tiny_llama()
        self._made = (tiny_teacher() if teacher is None else teacher,)

    def configure_teacher(self) -> nn.Module | None:
        return self._made[0]


class Alone(Student):
    def configure_teacher(self) -> None:
        return None


def patched(module: Student) -> Student:
    apply_liger_kernels(module, "linear_cross_entropy")
    return module


def tiny_teacher(**overrides: Any) -> nn.Module:
    return tiny_model("qwen2", hidden_size=48, **overrides)


def whole(module: Student, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of student and teacher, ``[n, vocab_size]``, and the labels, of all tokens with one."""
    labels = batch["labels"][:, 1:]
    with torch.no_grad():
        teacher = module._made[0].eval()(batch["input_ids"]).logits
    student = module.model(batch["input_ids"]).logits
    pair = [(each[:, :-1][labels >= 0] / temperature).log_softmax(-1) for each in (student, teacher)]
    return pair[0], pair[1], labels[labels >= 0]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def on_top_ids(module: Student, batch: dict[str, Tensor], mode: str) -> Tensor:
    """Forward KL on the teacher's 7 likeliest ids, at temperature 2, by definition."""
    student, teacher, _ = whole(module, batch, 2.0)
    return on_support(mode, teacher.exp(), student.exp(), teacher.topk(7).indices, 0.0)


def expected_losses() -> dict[str, tuple[dict[str, Any], Any]]:
    """Options by id, with the losses of tokens by definition."""

    def reverse(module: Student, batch: dict[str, Tensor]) -> Tensor:
        student, teacher, _ = whole(module, batch, 1.3)
        return 1.3**2 * kl(student, teacher)

    def mixed(module: Student, batch: dict[str, Tensor]) -> Tensor:
        student, teacher, labels = whole(module, batch)
        return 0.7 * kl(teacher, student) + 0.3 * F.nll_loss(student, labels, reduction="none")

    def sampled(module: Student, batch: dict[str, Tensor]) -> Tensor:
        student, teacher, labels = whole(module, batch)
        student_log_probs, teacher_log_probs = (each.gather(-1, labels[:, None])[:, 0] for each in (student, teacher))
        return (student_log_probs - teacher_log_probs).detach() * student_log_probs

    def uld(module: Student, batch: dict[str, Tensor]) -> Tensor:
        student, teacher, _ = whole(module, batch, 1.3)
        return 1.3**2 * (student.exp().sort().values - teacher.exp().sort().values).abs().sum(-1)

    return {
        "reverse": ({"divergence": "reverse_kl", "temperature": 1.3, "t_squared": True}, reverse),
        "mixed": ({"crossentropy_weight": 0.3, "distillation_weight": 0.7}, mixed),
        "topk_tail": (
            {"distillation_mode": "topk_logits", "distillation_topk": 7, "temperature": 2.0},
            lambda module, batch: on_top_ids(module, batch, "tail"),
        ),
        "topk_renormalized": (
            {"distillation_mode": "topk_logits", "distillation_topk": 7, "temperature": 2.0,
             "support_mode": "renormalize"},
            lambda module, batch: on_top_ids(module, batch, "renormalize"),
        ),
        "sampled": ({"distillation_mode": "sampled_token"}, sampled),
        "uld": ({"distillation_mode": "uld", "temperature": 1.3, "t_squared": True}, uld),
    }  # fmt: skip


@pytest.mark.parametrize("case", expected_losses())
def test_loss_and_gradients_match_whole_logits(case: str) -> None:
    options, formula = expected_losses()[case]
    module, twin, batch = Student(**options), Student(**options), tiny_batch()
    if case == "uld":
        batch |= {f"teacher_{name}": value for name, value in batch.items()}
    losses = formula(twin, batch)
    losses.mean().backward()
    loss = patched(module).training_step(batch, 0)
    loss.backward()
    torch.testing.assert_close(loss, losses.mean().detach(), check_dtype=False, rtol=1e-4, atol=1e-5)
    assert_same_gradients(twin.model, module.model)


def test_stored_top_k_needs_no_teacher_and_changes_temperature() -> None:
    """Stored for the whole vocabulary at temperature 1, the loss at 2 is that of the teacher's logits."""
    batch = tiny_batch()
    options: dict[str, Any] = {"distillation_mode": "topk_logits", "support_mode": "renormalize", "temperature": 2.0}
    module = patched(Alone(**options))
    with torch.no_grad():
        stored = module._made[0](batch["input_ids"]).logits.log_softmax(-1)
    student, teacher, _ = whole(module, batch, 2.0)
    top = stored.topk(VOCAB_SIZE)
    log_probs = top.values.masked_fill(top.values < -30, -torch.inf)
    top.indices[0, 2, -1] = 0  # an absent id may stand for anything
    log_probs[0, 2, -1] = -torch.inf
    columns = {"teacher_topk_ids": top.indices, "teacher_topk_log_probs": log_probs}
    result = module.step_loss("train", {**batch, **columns})
    loss = result.terms[0].total / result.terms[0].count
    torch.testing.assert_close(loss, kl(teacher, student).mean(), check_dtype=False, rtol=1e-3, atol=1e-4)
    masses = result.metrics["teacher_mass"]
    assert masses[0] / masses[1] == pytest.approx(1, abs=1e-4)
    assert module.teacher is None


def test_teacher_is_frozen_and_in_no_checkpoint_and_no_optimizer(tmp_path: Path) -> None:
    module = Student(tiny_teacher(attention_dropout=0.5).train())
    before = [parameter.clone() for parameter in module._made[0].parameters()]
    trainer = quiet_trainer(max_steps=2, strategy="liger", enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(module, loader([tiny_batch()] * 2))
    teacher = module.teacher
    assert teacher is not None
    assert not teacher.training
    assert all(torch.equal(new, old) for new, old in zip(teacher.parameters(), before, strict=True))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    optimized = {id(each) for group in trainer.optimizers[0].param_groups for each in group["params"]}
    assert optimized.isdisjoint(map(id, teacher.parameters()))
    checkpoint = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=False)
    assert all(name.startswith("model.") or "metric" in name for name in checkpoint["state_dict"])
    assert len(checkpoint["state_dict"]) < len(module.state_dict()) + 1


def test_metrics_and_all_masked_batches() -> None:
    batches = [tiny_batch(2, 9, seed=1), tiny_batch(1, 6, 6, seed=2)]  # the second one has no label at all
    for options in ({"log_entropy": True}, {"crossentropy_weight": 0.5}, {"distillation_mode": "sampled_token"}):
        module = Student(**options)
        (metrics,) = quiet_trainer(strategy="liger").validate(module, loader(batches), verbose=False)
        student, teacher, labels = (each.detach() for each in whole(module, batches[0]))
        expected = {
            "entropy": -(student.exp() * student).sum(-1).mean(),
            "mean_token_accuracy": (student.argmax(-1) == labels).float().mean(),
        }
        if "crossentropy_weight" in options:
            expected["cross_entropy"] = F.nll_loss(student, labels)
            expected["loss"] = kl(teacher, student).mean() + expected["cross_entropy"] / 2
        for name, value in expected.items():
            assert metrics[f"val_{name}"] == pytest.approx(float(value), rel=1e-4), name
        fit(module, batches[1:])
        assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_teacher_with_another_vocabulary() -> None:
    """Rows in both tokenizations: the i-th labeled token of one is compared with the i-th of the other."""
    module = patched(Student(tiny_teacher(vocab_size=97), distillation_mode="uld"))
    batch = tiny_batch(2, 9, 3)
    other = {f"teacher_{name}": value % 97 for name, value in tiny_batch(2, 7, 2, seed=5).items()}
    other["teacher_labels"][0, :2] = -100
    result = module.step_loss("train", {**batch, **other})
    total, count = 0.0, 0
    for row in range(2):
        first, second = batch["labels"][row, 1:] >= 0, other["teacher_labels"][row, 1:] >= 0
        number = int(min(first.sum(), second.sum()))
        with torch.no_grad():
            q = module.model(batch["input_ids"][row : row + 1]).logits[0, :-1][first][:number].softmax(-1)
            p = module._made[0](other["teacher_input_ids"][row : row + 1]).logits[0, :-1][second][:number].softmax(-1)
        p = F.pad(p.sort(descending=True).values, (0, VOCAB_SIZE - 97))
        total, count = total + float((q.sort(descending=True).values - p).abs().sum()), count + number
    assert float(result.terms[0].total) == pytest.approx(total, rel=1e-4)
    assert float(result.terms[0].count) == count


def test_values_of_the_policy_that_sampled() -> None:
    """At their tokens, as rollouts have them, so that the one at t belongs to the label that t - 1 predicts."""
    batch = tiny_batch(2, 7, 0)
    module = patched(Alone(distillation_mode="sampled_token", distillation_is_clip=1.5))
    student, teacher, labels = whole(module, batch)
    chosen = [each.gather(-1, labels[:, None])[:, 0].view(2, 6) for each in (student, teacher)]
    student_log_probs, teacher_log_probs = chosen
    age = torch.linspace(-1, 1, 12).view(2, 6)
    columns = {
        "old_per_token_logps": F.pad(student_log_probs.detach() - age, (1, 0)),
        "teacher_per_token_logps": F.pad(teacher_log_probs, (1, 0)),
    }
    result = module.step_loss("train", {**batch, **columns})
    expected = (student_log_probs - teacher_log_probs) * student_log_probs * age.exp().clamp(max=1.5)
    torch.testing.assert_close(result.terms[0].total, expected.sum().detach(), check_dtype=False, rtol=1e-4, atol=1e-4)


def test_teacher_with_fewer_ids_than_the_text_is_refused() -> None:
    for mode in ("full_logits", "topk_logits", "sampled_token"):
        module = Student(distillation_mode=mode, **({"vocab": "common"} if "logits" in mode else {}))
        module.configure_teacher = lambda: tiny_model("qwen2", vocab_size=40)  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=r"ids below 40, the size of the teacher's vocabulary, got \d+"):
            module.step_loss("train", tiny_batch())
        ids = tiny_batch()["input_ids"] % 37
        assert module.step_loss("train", {"input_ids": ids, "labels": ids}).terms[0].total.isfinite()


def test_sources_of_the_teacher_are_checked_before_work_starts() -> None:
    module = LigerDistillation(teacher="no/such/folder", config=TINY_CONFIG)
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        quiet_trainer(max_steps=1).fit(module, loader([tiny_batch()]))


def test_support_of_both_models_counts_each_id_once() -> None:
    """With K as large as the vocabulary, the union has each id twice, and the divergence is that of all ids."""
    batch = tiny_batch()
    for support, top_k in (("union", VOCAB_SIZE), ("student", VOCAB_SIZE), ("union", 4)):
        options: dict[str, Any] = {"distillation_topk": top_k, "distillation_support": support}
        module = patched(Student(distillation_mode="topk_logits", divergence="jsd", beta=0.3, **options))
        q, p, _ = (each.detach() for each in whole(module, batch))
        if top_k < VOCAB_SIZE:
            ids = torch.zeros_like(p).scatter(-1, torch.cat((p.topk(4).indices, q.topk(4).indices), -1), 1.0).bool()
            p, q = (each.exp().masked_fill(~ids, 0.0) for each in (p, q))
            p, q = (torch.cat((each, 1 - each.sum(-1, keepdim=True)), -1).log() for each in (p, q))
        m = (0.3 * p.exp() + 0.7 * q.exp()).log()
        terms = 0.3 * p.exp() * (p - m) + 0.7 * q.exp() * (q - m)
        loss = module.step_loss("train", batch).terms[0].total
        torch.testing.assert_close(loss, terms.nan_to_num().sum(), check_dtype=False, rtol=1e-3, atol=1e-4)


def test_rows_of_completions_and_rollouts_are_taken() -> None:
    batch = tiny_batch(2, 9, 3)
    mask = (batch.pop("labels") >= 0).long()
    extra = {"completion_mask": mask, "sequence_ids": mask, "num_sequences": 1, "advantages": torch.ones(2)}
    module = patched(Student())
    terms = [module.step_loss("train", each).terms[0] for each in ({**batch, **extra}, tiny_batch(2, 9, 3))]
    torch.testing.assert_close(terms[0].total, terms[1].total)
    assert float(terms[0].count) == float(terms[1].count)


def test_topk_of_a_larger_vocabulary_learns_the_ids_that_both_have() -> None:
    """Ids that the student lacks are part of the tail."""
    batch, teacher = tiny_batch(), tiny_teacher(vocab_size=VOCAB_SIZE + 30)
    for support in ("teacher", "union"):
        settings: dict[str, Any] = {"distillation_mode": "topk_logits", "distillation_support": support}
        module = Student(teacher, vocab="common", distillation_topk=VOCAB_SIZE + 30, **settings)
        found = module.step_loss("train", batch).terms[0]
        student, other, _ = whole(module, batch)
        seen = other[:, :VOCAB_SIZE]
        tail = 1 - seen.exp().sum(-1)  # of the student it is taken as 1e-6
        expected = (seen.exp() * (seen - student)).sum(-1) + tail * (tail.log() - math.log(1e-6))
        torch.testing.assert_close(found.total, expected.sum(), rtol=1e-3, atol=0.0)
        with pytest.raises(ValueError, match="vocab must be 'common'"):
            Student(teacher, **settings).step_loss("train", batch)


def test_importance_weights_are_logged_where_there_are_any() -> None:
    batch = tiny_batch()
    shape = batch["input_ids"].shape
    for old in ({}, {"old_per_token_logps": torch.full(shape, -2.0)}):
        metrics = metrics_of(fit(Student(distillation_mode="sampled_token"), [{**batch, **old}]))
        assert ("train_importance_weight" in metrics) == bool(old)
        assert all(map(math.isfinite, metrics.values()))
