"""The example of next-item prediction: its generator, rankings, metrics, and that it learns."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.next_item import Course, NextItem, NextItemData
from examples.next_item.__main__ import main, scores
from examples.next_item.data import IGNORE_INDEX
from examples.next_item.generator import KINDS, generate
from examples.next_item.metrics import label_ranks
from lightning_liger import LazyLogits, apply_liger_kernels, materialize

ROOT = Path(__file__).parents[2]
COURSE = Course(num_topics=8, num_steps=5, num_formats=2, num_students=800, max_events=24, spacing=3, revisit=0.3)
NEXT, TOPIC, SWITCH, REVISIT = range(len(KINDS))


@pytest.fixture(scope="module")
def log():
    return generate(COURSE)


@pytest.fixture(scope="module")
def data():
    result = NextItemData(COURSE, batch_size=32)
    result.setup("fit")
    return result


def test_splits_are_by_time_and_rows_have_the_whole_history(data, log):
    assert sum(int((split.tensors[1] != IGNORE_INDEX).sum()) for split in data.splits.values()) == int(
        (log.lengths - 1).clip(min=0).sum()
    )
    for name, (start, stop) in {"train": (0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1)}.items():
        inputs, labels, kinds = data.splits[name].tensors
        is_event = np.arange(COURSE.max_events) < log.lengths[:, None]
        expected = is_event & (log.times >= start) & (log.times < stop)
        rows = expected[:, 1:].any(axis=1)
        assert np.array_equal(labels.numpy() != IGNORE_INDEX, expected[rows, 1:])
        assert np.array_equal(inputs.numpy(), log.items[rows, :-1])
        assert np.array_equal(kinds.numpy(), log.kinds[rows, 1:])


@pytest.mark.parametrize("chunk_bytes", [1, 500, 2**20])
def test_ranks_and_metrics_are_those_of_sorted_logits(chunk_bytes):
    hidden_states, weight, labels = torch.randn(30, 8), torch.randn(20, 8), torch.randint(20, (30,))
    ranks = label_ranks(hidden_states, weight, labels, chunk_bytes)
    order = (hidden_states @ weight.T).argsort(dim=1, descending=True).tolist()
    expected = [row.index(label) + 1 for row, label in zip(order, labels.tolist(), strict=True)]
    assert ranks.tolist() == expected
    kinds = torch.arange(30) % 4
    found = scores(ranks.numpy(), kinds.numpy())
    assert found["hit@5"] == pytest.approx(sum(rank <= 5 for rank in expected) / 30, abs=1e-4)
    assert found["mrr"] == pytest.approx(sum(1 / rank for rank in expected) / 30, abs=1e-4)
    of_kind = [rank for rank, kind in zip(expected, kinds, strict=True) if kind == SWITCH]
    assert found["hit@10_switch"] == pytest.approx(sum(rank <= 10 for rank in of_kind) / len(of_kind), abs=1e-4)


@pytest.mark.parametrize("encoder", ["transformer", "lstm"])
def test_fused_loss_and_gradients_are_those_of_whole_logits(encoder):
    module = NextItem(num_items=80, encoder=encoder, hidden_size=16, num_heads=2)
    module.configure_model()
    inputs, labels = torch.randint(80, (3, 7)), torch.randint(80, (3, 7))
    labels[1, 4:] = IGNORE_INDEX
    expected = F.cross_entropy(module.model(inputs).logits.flatten(0, 1), labels.flatten())
    expected_gradients = torch.autograd.grad(expected, list(module.model.parameters()))
    ranks = label_ranks(
        module.model.model(inputs).last_hidden_state.detach()[labels >= 0],
        module.model.lm_head.weight,
        labels[labels >= 0],
    )
    apply_liger_kernels(module.model)
    logits = module.model(inputs).logits
    assert isinstance(logits, LazyLogits)
    loss = module.lm_loss(logits, labels, shifted=True)
    gradients = torch.autograd.grad(loss, list(module.model.parameters()))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(module.ranks(inputs, labels), ranks)
    order = materialize(module.model(inputs).logits.detach())[labels >= 0].argsort(dim=1, descending=True)
    found = [row.index(label) + 1 for row, label in zip(order.tolist(), labels[labels >= 0].tolist(), strict=True)]
    assert np.mean(np.array(found) != ranks.numpy()) < 0.1  # but for equal logits


def test_comparison_learns_more_than_the_baselines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["main"])
    course = [f"--data.init_args.course.{name}={value}" for name, value in vars(COURSE).items()]
    out = tmp_path / "results.jsonl"
    options = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.callbacks=null"]
    options += ["--trainer.max_epochs=8", "--trainer.limit_val_batches=0", f"--trainer.default_root_dir={tmp_path}"]
    options += [
        "--model.init_args.num_items=80",
        "--model.init_args.hidden_size=32",
        "--model.init_args.learning_rate=0.02",
    ]
    records = main([f"--out={out}", *options, *course])
    first, *lines = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert lines == records
    assert first["command"].startswith("python -m examples.next_item")
    assert first["environment"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    by_model = {record["model"]: record for record in records}
    assert list(by_model) == ["syllabus", "3-gram", "lstm", "transformer"]
    for record in records:
        assert 0 <= record["hit@1"] <= record["hit@5"] <= record["hit@10"] <= 1
        assert math.isfinite(record["mrr"])
    hits = {name: record["hit@5"] for name, record in by_model.items()}
    assert hits["3-gram"] > hits["syllabus"] + 0.05
    assert hits["lstm"] > hits["3-gram"] + 0.02
    assert hits["transformer"] > hits["3-gram"] + 0.02
    assert by_model["transformer"]["num_fused_losses"] == by_model["transformer"]["steps"] > 0
    assert "Next item out of 80" in capsys.readouterr().out


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_page_has_the_recorded_results(machine):
    page = (ROOT / "docs" / "examples" / "next_item.md").read_text(encoding="utf-8")
    path = ROOT / "benchmarks" / "results" / f"next_item_{machine}.jsonl"
    _, *records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    names = ("hit@1", "hit@5", "hit@10", "mrr", *(f"hit@10_{kind}" for kind in KINDS))
    for record in records:
        assert " | ".join(f"{record[name]:.3f}" for name in names) in page
