"""The counts and the speed of ``TrainingSummary``."""

import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_liger import LigerCallback, LigerStrategy, TrainingSummary
from lightning_liger.monitor import clock as clock_module
from lightning_liger.monitor.clock import peak_memory
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.strategies.workers.distributed import LM, VOCAB_SIZE, make_loader, make_trainer

NUM_BATCHES, TOKENS = 5, 2 * 13


class Clock:
    """Stands in for the time module: each of the trainer's steps takes two seconds, validation a thousand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Ticking(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_) -> None:
        self.clock.now += 2.0

    def on_validation_batch_end(self, *_) -> None:
        self.clock.now += 1000.0


@pytest.fixture
def ticking(monkeypatch) -> Ticking:
    clock = Clock()
    monkeypatch.setattr(clock_module, "time", clock)
    return Ticking(clock)


@pytest.mark.parametrize("strategy", ["liger_fsdp", "auto"])
def test_results_hold_counts_of_a_fit(tmp_path, strategy):
    summary = TrainingSummary(skip_steps=1)
    callbacks = [summary] if strategy == "liger_fsdp" else [LigerCallback(), summary]
    trainer = make_trainer(*callbacks, root=tmp_path, strategy=strategy)
    trainer.fit(LM(), make_loader(0, NUM_BATCHES), make_loader(1, 2))
    results = summary.results
    assert (results["steps"], results["processes"]) == (NUM_BATCHES, 1)
    assert (results["num_fused_losses"], results["whole_logits"]) == (NUM_BATCHES + 2, 0)
    assert results["tokens_per_second"] > 0
    assert results["peak_memory_bytes"] > 2**20
    for name in ("train_loss", "train_perplexity", "train_accuracy", "val_loss", "val_perplexity", "val_accuracy"):
        assert results[name] == pytest.approx(float(trainer.callback_metrics[name]))


@pytest.mark.parametrize("chunk_size", [TOKENS, 8, 1])
def test_bytes_avoided_are_the_logits_minus_one_chunk_for_each_loss(tmp_path, monkeypatch, chunk_size):
    # By name, as the package has a function of the module's name.
    module = importlib.import_module("lightning_liger.lazy.head")
    monkeypatch.setattr(module, "default_chunk_size", lambda *_: chunk_size)
    summary = TrainingSummary()
    make_trainer(summary, root=tmp_path, strategy="liger_fsdp").fit(LM(), make_loader(0, NUM_BATCHES))
    assert summary.results["logits_bytes_avoided"] == NUM_BATCHES * (TOKENS - chunk_size) * VOCAB_SIZE * 4


@pytest.mark.parametrize(
    ("skip_steps", "accumulate", "timed_batches"), [(0, 1, 5), (2, 1, 3), (2, 2, 1), (5, 1, 0), (9, 1, 0)]
)
def test_speed_leaves_out_the_first_steps(tmp_path, ticking, skip_steps, accumulate, timed_batches):
    summary = TrainingSummary(skip_steps=skip_steps)
    # The clock ticks first, so that the end of a batch is in the time of that batch.
    trainer = make_trainer(ticking, summary, root=tmp_path, accumulate_grad_batches=accumulate)
    trainer.fit(LM(), make_loader(0, NUM_BATCHES))
    assert summary._num_tokens == timed_batches * TOKENS
    assert summary.results["tokens_per_second"] == (TOKENS / 2.0 if timed_batches else 0.0)


def test_speed_is_that_of_the_last_fit(tmp_path, ticking):
    class Stops(LM):
        def on_train_batch_end(self, *_):
            raise RuntimeError("stop")

    summary = TrainingSummary(skip_steps=0)
    for module in (Stops(), LM()):
        with contextlib.suppress(RuntimeError):
            make_trainer(ticking, summary, root=tmp_path).fit(module, make_loader(0, NUM_BATCHES))
    assert summary._num_tokens == NUM_BATCHES * TOKENS
    assert summary.results["tokens_per_second"] == TOKENS / 2.0


def test_speed_leaves_out_validation(tmp_path, ticking):
    summary = TrainingSummary(skip_steps=1)
    trainer = make_trainer(ticking, summary, root=tmp_path, val_check_interval=2)
    trainer.fit(LM(), make_loader(0, NUM_BATCHES), make_loader(1, 1))
    assert ticking.clock.now > 2000.0
    assert summary.results["tokens_per_second"] == TOKENS / 2.0


@pytest.mark.parametrize(("num_replicas", "times"), [(4, 4), (2, 2), (1, 1)], ids=["data", "pairs", "one_group"])
def test_ranks_that_share_batches_count_their_tokens_once(num_replicas, times):
    """Of four ranks, all with the same numbers, as tensor and context parallelism have it."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda totals, reduce_op: totals * 4)
    trainer = SimpleNamespace(
        strategy=strategy,
        world_size=4,
        global_step=1,
        callback_metrics={},
        distributed_sampler_kwargs={"num_replicas": num_replicas, "rank": 0},
    )
    summary = TrainingSummary()
    summary._num_tokens, summary._seconds = 100, 2.0
    summary.on_fit_end(trainer, nn.Module())
    assert summary.results["tokens_per_second"] == times * 100 / 2.0


def test_negative_skip_steps_are_refused():
    with pytest.raises(ValueError, match="skip_steps must be an integer of at least 0, got -1"):
        TrainingSummary(skip_steps=-1)
    assert TrainingSummary().skip_steps == 2


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_replacements_are_printed_before_training_and_the_summary_after(tmp_path, capsys, way):
    printed = {}

    class Peeking(Callback):
        def on_train_start(self, trainer, pl_module):
            printed["start"] = capsys.readouterr().out

    callbacks = [LigerCallback()] if way == "callback" else []
    strategy = LigerStrategy() if way == "strategy" else "auto"
    trainer = make_trainer(*callbacks, TrainingSummary(skip_steps=0), Peeking(), root=tmp_path, strategy=strategy)
    trainer.fit(LM(), make_loader(0, NUM_BATCHES))
    end = capsys.readouterr().out
    assert all(name in printed["start"] for name in ("fused kernels", "LlamaRMSNorm", "LlamaMLP", "LazyLogits"))
    assert "Training summary" not in printed["start"]
    assert all(name in end for name in ("Training summary", "Tokens/s", "Training loss", "Logits never allocated"))
    assert f"{NUM_BATCHES} on 1 cpu process" in end
    assert "processes" not in end


def test_plan_of_a_budget_is_in_the_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(activations, "memory_of", lambda device: FakeMemory(2**30))
    strategy = LigerStrategy(memory_budget=0.5)
    make_trainer(TrainingSummary(), root=tmp_path, strategy=strategy).fit(LM(), make_loader(0, 3))
    assert "all 2 layers stored" in strategy.activation_plan
    printed = " ".join(capsys.readouterr().out.split())
    assert "Activations" in printed
    assert "all 2 layers stored" in printed


@pytest.mark.parametrize("later_peak", [3, 9])
def test_peak_memory_survives_the_resets_of_measured_steps(monkeypatch, later_peak):
    stats = {"allocated_bytes": {"all": {"peak": later_peak}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    strategy = SimpleNamespace(root_device=torch.device("cuda"), peak_before_resets=5)
    assert peak_memory(strategy) == max(5, later_peak)


def test_without_kernels_it_says_so(tmp_path, capsys):
    summary = TrainingSummary()
    make_trainer(summary, root=tmp_path).fit(LM(), make_loader(0, 1))
    printed = capsys.readouterr().out
    assert "no kernels were applied" in printed
    assert "too few steps" in printed
    assert (summary.results["num_fused_losses"], summary.results["logits_bytes_avoided"]) == (0, 0)


def test_a_rank_other_than_zero_prints_nothing(tmp_path, capsys, monkeypatch):
    trainer = make_trainer(TrainingSummary(), root=tmp_path)
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    trainer.fit(LM(), make_loader(0, 1))
    printed = capsys.readouterr().out
    assert "Training summary" not in printed
    assert "no kernels" not in printed


@pytest.mark.parametrize(("chunk_size", "row"), [(8, "34.1 KiB in all, 6.8 KiB in each loss"), (TOKENS, None)])
def test_logits_that_each_loss_held_at_once_have_no_row(tmp_path, monkeypatch, capsys, chunk_size, row):
    module = importlib.import_module("lightning_liger.lazy.head")
    monkeypatch.setattr(module, "default_chunk_size", lambda *_: chunk_size)
    make_trainer(TrainingSummary(), root=tmp_path, strategy="liger").fit(LM(), make_loader(0, NUM_BATCHES))
    printed = capsys.readouterr().out
    assert ("Logits never allocated" in printed) == (row is not None)
    assert row is None or row in printed  # 5 losses of 18 tokens less, 97 classes, 4 bytes
