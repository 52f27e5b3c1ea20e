"""The example of ranking by clicks: its generator, files, layers, losses, and that its parts do what they are for."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.ranking import ClickData, ClickModel, Ranker
from examples.ranking.__main__ import ARMS, COLUMNS, main
from examples.ranking.generator import generate
from examples.ranking.models import ClickNetwork
from lightning_liger import LazyLogits, apply_liger_kernels

ROOT = Path(__file__).parents[2]
CLICKS = ClickModel(num_rows=20_000, num_items=60, num_topics=6, num_segments=5)
SIZES = {"vocab_sizes": [50, 7, 4], "num_numbers": 2, "embedding_size": 8, "hidden_sizes": [16], "item_columns": [0, 1]}


@pytest.fixture(scope="module")
def log():
    return generate(CLICKS)


@pytest.fixture(scope="module")
def data():
    result = ClickData(CLICKS, batch_size=256)
    result.setup("fit")
    return result


def test_rows_are_split_by_time_and_only_training_leaves_out_rows(data, log):
    labels = {name: split.tensors[0].numpy() for name, split in data.splits.items()}
    assert np.array_equal(labels["val"], log.labels[16_000:18_000])
    assert np.array_equal(labels["test"], log.labels[18_000:])
    assert labels["train"].sum() == log.labels[:16_000].sum()
    negatives = (labels["train"] == 0).sum() / (log.labels[:16_000] == 0).sum()
    assert negatives == pytest.approx(0.5, abs=0.03)
    assert np.allclose(data.test_probabilities, log.probabilities[18_000:])


def test_fused_id_loss_and_gradients_are_those_of_whole_logits():
    network = ClickNetwork(**SIZES, num_crosses=1, gating=True, predicts_ids=True)
    ranker = Ranker(calibration=False, id_loss_weight=0.1)
    numbers, labels = torch.randn(12, 2), torch.randint(2, (12,)).float()
    ids = torch.stack([torch.randint(size, (12,)) for size in SIZES["vocab_sizes"]], dim=1)
    parameters = [*network.tower.parameters(), *network.id_head.parameters()]
    logits = network(numbers, ids).ids
    clicked = labels == 1
    expected = F.cross_entropy(logits[clicked], ids[clicked, 0], reduction="sum")
    gradients = torch.autograd.grad(expected, parameters)
    apply_liger_kernels(network)
    logits = network(numbers, ids).ids
    assert isinstance(logits, LazyLogits)
    loss = ranker._id_loss(logits, labels, ids)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_page_has_the_recorded_results(machine):
    page = (ROOT / "docs" / "examples" / "ranking.md").read_text(encoding="utf-8")
    path = ROOT / "benchmarks" / "results" / f"ranking_{machine}.jsonl"
    _, *records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    for record in records:
        cells = (f"{record[name]:.4f}" if name in record else "-" for name in COLUMNS)
        assert f"| {record['model']} | {' | '.join(cells)} |" in page


def test_ablation_improves_with_its_parts(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    options = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.callbacks=null"]
    options += [f"--trainer.default_root_dir={tmp_path}", "--data.init_args.batch_size=256"]
    options += ["--model.init_args.hidden_sizes=[32]", "--model.init_args.embedding_size=8"]
    options += [f"--data.init_args.clicks.{name}={value}" for name, value in vars(CLICKS).items()]
    records = main([f"--out={out}", *options])
    first, *lines = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert lines == records
    assert first["environment"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    by_model = {record["model"]: record for record in records}
    assert list(by_model) == ["popularity", "generator", *ARMS]
    assert all(math.isfinite(record["log_loss"]) for record in records)
    before, after, best = (by_model[name] for name in ("+ ids", "+ calibration", "generator"))
    assert by_model["popularity"]["auc"] == 0.5
    assert by_model["mlp"]["auc"] > 0.6
    assert max(record["auc"] for record in records) == best["auc"]
    assert after["auc"] == pytest.approx(before["auc"], abs=1e-3)
    assert after["calibration_error"] < before["calibration_error"] / 2
    assert after["log_loss"] < before["log_loss"] - 0.01
    assert before["num_fused_losses"] >= before["steps"] > 0
    assert by_model["mlp"]["num_fused_losses"] == 0
    assert "Calibration error" in capsys.readouterr().out
