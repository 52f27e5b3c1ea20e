"""The examples of next-item prediction and of ranking: their data and metrics, and that they learn."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.next_item import Course, NextItemData
from examples.next_item.__main__ import main as next_item_main
from examples.next_item.__main__ import scores
from examples.next_item.data import IGNORE_INDEX
from examples.next_item.generator import KINDS
from examples.next_item.generator import generate as generate_course
from examples.next_item.metrics import label_ranks
from examples.ranking import ClickData, ClickModel
from examples.ranking.__main__ import ARMS, COLUMNS
from examples.ranking.__main__ import main as ranking_main
from examples.ranking.generator import generate as generate_clicks

ROOT = Path(__file__).parents[2]
COURSE = Course(num_topics=8, num_steps=5, num_formats=2, num_students=800, max_events=24, spacing=3, revisit=0.3)
CLICKS = ClickModel(num_rows=20_000, num_items=60, num_topics=6, num_segments=5)


def run(main, folder: Path, *options: str) -> dict[str, dict]:
    """The records by model, which are those of the file."""
    out = folder / "results.jsonl"
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.callbacks=null"]
    records = main([f"--out={out}", *quiet, f"--trainer.default_root_dir={folder}", *options])
    first, *lines = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert lines == records
    assert first["command"].startswith("python -m examples.")
    assert first["environment"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    return {record["model"]: record for record in records}


def test_splits_are_by_time_and_hold_what_they_should():
    log, data = generate_course(COURSE), NextItemData(COURSE, batch_size=32)
    data.setup("fit")
    for name, (start, stop) in {"train": (0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1)}.items():
        inputs, labels, kinds = data.splits[name].tensors  # rows have the whole history
        is_event = np.arange(COURSE.max_events) < log.lengths[:, None]
        expected = is_event & (log.times >= start) & (log.times < stop)
        rows = expected[:, 1:].any(axis=1)
        assert np.array_equal(labels.numpy() != IGNORE_INDEX, expected[rows, 1:])
        assert np.array_equal(inputs.numpy(), log.items[rows, :-1])
        assert np.array_equal(kinds.numpy(), log.kinds[rows, 1:])
    log, data = generate_clicks(CLICKS), ClickData(CLICKS, batch_size=256)
    data.setup("fit")
    labels = {name: split.tensors[0].numpy() for name, split in data.splits.items()}
    assert np.array_equal(np.concatenate((labels["val"], labels["test"])), log.labels[16_000:])
    assert labels["train"].sum() == log.labels[:16_000].sum()
    negatives = (labels["train"] == 0).sum() / (log.labels[:16_000] == 0).sum()
    assert negatives == pytest.approx(0.5, abs=0.03)  # only training leaves out rows
    assert np.allclose(data.test_probabilities, log.probabilities[18_000:])


@pytest.mark.parametrize("chunk_bytes", [1, 500, 2**20])
def test_ranks_and_metrics_are_those_of_sorted_logits(chunk_bytes):
    hidden_states, weight, labels = torch.randn(30, 8), torch.randn(20, 8), torch.randint(20, (30,))
    ranks = label_ranks(hidden_states, weight, labels, chunk_bytes)
    order = (hidden_states @ weight.T).argsort(dim=1, descending=True).tolist()
    expected = np.array([row.index(label) + 1 for row, label in zip(order, labels.tolist(), strict=True)])
    assert ranks.tolist() == expected.tolist()
    kinds = np.arange(30) % len(KINDS)
    found = scores(ranks.numpy(), kinds)
    switched = expected[kinds == KINDS.index("switch")]
    for name, value in (("hit@5", expected <= 5), ("mrr", 1 / expected), ("hit@10_switch", switched <= 10)):
        assert found[name] == pytest.approx(value.mean(), abs=1e-4)


def test_next_items_are_learned_better_than_by_the_baselines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["main"])
    sizes = ["--model.init_args.num_items=80", "--model.init_args.hidden_size=32"]
    steps = ["--model.init_args.learning_rate=0.02", "--trainer.max_epochs=8", "--trainer.limit_val_batches=0"]
    course = [f"--data.init_args.course.{name}={value}" for name, value in vars(COURSE).items()]
    models = run(next_item_main, tmp_path, *sizes, *steps, *course)
    assert list(models) == ["syllabus", "3-gram", "lstm", "transformer"]
    for record in models.values():
        assert 0 <= record["hit@1"] <= record["hit@5"] <= record["hit@10"] <= 1
        assert math.isfinite(record["mrr"])
    hits = {name: record["hit@5"] for name, record in models.items()}
    assert hits["syllabus"] + 0.05 < hits["3-gram"] < min(hits["lstm"], hits["transformer"]) - 0.02
    assert all(models[name]["num_fused_losses"] == models[name]["steps"] > 0 for name in ("lstm", "transformer"))
    assert "Next item out of 80" in capsys.readouterr().out


def test_ranking_improves_with_its_parts(tmp_path, capsys):
    sizes = ["--model.init_args.hidden_sizes=[32]", "--model.init_args.embedding_size=8"]
    clicks = [f"--data.init_args.clicks.{name}={value}" for name, value in vars(CLICKS).items()]
    models = run(ranking_main, tmp_path, "--data.init_args.batch_size=256", *sizes, *clicks)
    assert list(models) == ["popularity", "generator", *ARMS]
    assert all(math.isfinite(record["log_loss"]) for record in models.values())
    before, after, best = (models[name] for name in ("+ ids", "+ calibration", "generator"))
    assert models["popularity"]["auc"] == 0.5
    assert models["mlp"]["auc"] > 0.6
    assert max(record["auc"] for record in models.values()) == best["auc"]
    assert after["auc"] == pytest.approx(before["auc"], abs=1e-3)
    assert after["calibration_error"] < before["calibration_error"] / 2
    assert after["log_loss"] < before["log_loss"] - 0.01
    assert before["num_fused_losses"] >= before["steps"] > 0
    assert models["mlp"]["num_fused_losses"] == 0
    assert "Calibration error" in capsys.readouterr().out


@pytest.mark.parametrize("machine", ["cpu", "h200"])
@pytest.mark.parametrize("study", ["next_item", "ranking"])
def test_page_has_the_recorded_results(study, machine):
    page = (ROOT / "docs" / "examples" / f"{study}.md").read_text(encoding="utf-8")
    path = ROOT / "benchmarks" / "results" / f"{study}_{machine}.jsonl"
    _, *records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    columns = [("hit@1", "hit@5", "hit@10", "mrr", *(f"hit@10_{kind}" for kind in KINDS)), COLUMNS][study == "ranking"]
    digits = 4 if study == "ranking" else 3
    for record in records:
        assert " | ".join(f"{record[name]:.{digits}f}" if name in record else "-" for name in columns) in page
