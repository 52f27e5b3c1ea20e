"""The tables of ``LigerMonitor``, and its counts of losses."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_liger import LigerCallback, LigerMonitor, LigerStrategy
from lightning_liger.callbacks.summary import Summary
from lightning_liger.monitor.clock import peak_memory
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.monitor.test_callback import TOKENS, clock  # noqa: F401  # a fixture
from tests.lightning_liger.strategies.workers.distributed import LM, VOCAB_SIZE, make_loader, make_trainer

NUM_BATCHES = 5


@pytest.mark.parametrize("strategy", ["liger_fsdp", "auto"])
def test_replacements_are_printed_before_training_and_the_summary_after(tmp_path, capsys, strategy):
    printed = {}

    class Peeking(Callback):
        def on_train_start(self, trainer, pl_module):
            printed["start"] = capsys.readouterr().out

    callbacks = [LigerCallback()] if strategy == "auto" else []
    monitor = LigerMonitor(skip_steps=0)
    trainer = make_trainer(*callbacks, monitor, Peeking(), root=tmp_path, strategy=strategy)
    trainer.fit(LM(), make_loader(0, NUM_BATCHES), make_loader(1, 2))
    end = capsys.readouterr().out
    assert all(name in printed["start"] for name in ("fused kernels", "LlamaRMSNorm", "LlamaMLP", "LazyLogits"))
    assert "Training summary" not in printed["start"]
    assert all(name in end for name in ("Training summary", "Tokens/s", "Training loss", "Logits never allocated"))
    assert f"{NUM_BATCHES} on 1 cpu process " in end
    results = monitor.results
    counts = {"steps": NUM_BATCHES, "processes": 1, "num_fused_losses": NUM_BATCHES + 2, "whole_logits": 0}
    assert results.items() >= counts.items()
    assert results["peak_memory_bytes"] == results["memory_peak_gib"] * 2**30 > 2**20
    for stage, metric in itertools.product(("train", "val"), ("loss", "perplexity", "mean_token_accuracy")):
        name = f"{stage}_{metric}"
        assert results[name] == pytest.approx(float(trainer.callback_metrics[name]))


@pytest.mark.parametrize(("chunk_size", "row"), [(TOKENS, None), (8, "34.1 KiB in total, 6.8 KiB per loss")])
def test_bytes_avoided_are_the_logits_minus_one_chunk_for_each_loss(tmp_path, monkeypatch, capsys, chunk_size, row):
    monkeypatch.setattr("lightning_liger.lazy.chunks.default_chunk_size", lambda *_: chunk_size)
    monitor = LigerMonitor(page=None)
    make_trainer(monitor, root=tmp_path, strategy="liger_fsdp").fit(LM(), make_loader(0, NUM_BATCHES))
    assert monitor.results["logits_bytes_avoided"] == NUM_BATCHES * (TOKENS - chunk_size) * VOCAB_SIZE * 4
    printed = capsys.readouterr().out
    assert ("Logits never allocated" in printed) == (row is not None)
    assert row is None or row in printed


def test_too_few_steps_to_tell_a_speed_are_said(tmp_path, clock, capsys):  # noqa: F811
    monitor = LigerMonitor(skip_steps=NUM_BATCHES, page=None)
    make_trainer(clock, monitor, root=tmp_path).fit(LM(), make_loader(0, NUM_BATCHES))
    assert (monitor.results["seconds"], "tokens_per_second" in monitor.results) == (0, False)
    assert "too few steps" in capsys.readouterr().out


def test_plan_of_a_budget_is_in_the_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "memory_of", lambda device: FakeMemory(2**30))
    monitor = LigerMonitor()
    make_trainer(monitor, root=tmp_path, strategy=LigerStrategy(memory_budget=0.5)).fit(LM(), make_loader(0, 3))
    assert "all 2 layers stored" in monitor.rows()["Activations"]


def test_peak_memory_survives_the_resets_of_measured_steps(monkeypatch):
    stats = {"allocated_bytes": {"all": {"peak": 7}}, "reserved_bytes": {"all": {"peak": 11}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    for before, expected in ((5, 7), (9, 9)):
        strategy = SimpleNamespace(root_device=torch.device("cuda"), peak_before_resets=before)
        assert peak_memory(strategy) == (expected, 11)


def test_of_several_monitors_one_measures(tmp_path, capsys):
    summary = Summary(skip_steps=0)
    monitor = LigerMonitor(skip_steps=0)
    make_trainer(summary, monitor, root=tmp_path).fit(LM(), make_loader(0, 3))
    printed = capsys.readouterr().out
    assert printed.count("Training summary") == printed.count("Peak memory") == printed.count("no kernels were") == 1
    assert (monitor.results["tokens"], summary.results, summary.skip_steps) == (3 * TOKENS, {}, 0)
    assert "Page" in monitor.rows()
