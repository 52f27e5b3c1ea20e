"""A resumed run reproduces the uninterrupted run, wherever it was interrupted, on CPUs bit for bit."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from tests.lightning_liger.resuming.workers.resume import (
    EXCHANGES,
    MICRO_BATCHES,
    NUM_BATCHES,
    NUM_EPOCHS,
    POINTS,
    ROWS,
    STRATEGIES,
    DropoutLM,
    Rows,
    Run,
    fit,
    num_left,
    shuffled_loader,
)
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, launch, make_trainer

TOLERANCE = {"cpu": 0.0, "cuda": 1e-5}


def assert_goes_on(run: Run, uninterrupted: Run, left: int, tolerance: float = 0.0) -> None:
    """``run`` is the last ``left`` batches of ``uninterrupted``."""
    assert run.global_step == uninterrupted.global_step
    assert run.learning_rates == pytest.approx(uninterrupted.learning_rates[-left:], rel=1e-12)
    exact = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(run.losses, uninterrupted.losses[-left:], **exact)
    torch.testing.assert_close(run.parameters, uninterrupted.parameters, **exact)
    for epoch, metrics in run.metrics.items():
        expected = uninterrupted.metrics[epoch]  # validation before the interruption is not run again
        torch.testing.assert_close(metrics, {name: expected[name] for name in metrics}, **exact)
        assert {"train_loss", "train_perplexity", "train_mean_token_accuracy"} <= metrics.keys()
    assert run.metrics.keys() >= {NUM_EPOCHS - 1}


# One process

ANYWHERE = {
    "first": ("batch", 0, 0),
    "boundary": ("batch", 0, 1),
    "window": ("batch", 0, 2),
    "last-batch": ("batch", 0, NUM_BATCHES - 1),
    "epoch": ("epoch", 0, NUM_BATCHES - 1),
    "second": ("batch", 1, 0),
    "second-window": ("batch", 1, 4),
    # Only with validation after each third batch: in the middle of a step, and after one.
    "validation-in-step": ("validation", 1, 2),
    "validation": ("validation", 0, 5),
}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The rows in the order of a shuffle with global random numbers, of a length that is not known."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = Rows(NUM_BATCHES * ROWS, is_random=False)
        yield from (rows[index] for index in torch.randperm(len(rows)).tolist())


def generator_loader() -> DataLoader[Any]:
    rows, generator = Rows(NUM_BATCHES * ROWS), torch.Generator().manual_seed(5)
    return DataLoader(rows, batch_size=ROWS, sampler=RandomSampler(rows, generator=generator))


def workers_loader() -> DataLoader[Any]:
    # Random numbers of workers start anew when they do.
    return shuffled_loader(is_random=False, num_workers=2, persistent_workers=True)


WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "shuffled": ({}, list(ANYWHERE)[:-2]),
    "not-accumulated": ({"accumulate_grad_batches": 1}, ["second-window"]),
    "three-accumulated": ({"accumulate_grad_batches": 3}, ["second-window"]),
    "generator": ({"loader": generator_loader}, ["epoch", "second-window"]),
    "persistent workers": ({"loader": workers_loader}, ["epoch", "second-window"]),
    "stream": ({"loader": lambda: DataLoader(Stream(), batch_size=ROWS)}, ["epoch", "second-window"]),
    "max-steps": ({"max_steps": 8, "max_epochs": -1}, ["last-batch", "epoch"]),
    "limited": (
        {"limit_train_batches": NUM_BATCHES, "loader": lambda: shuffled_loader(num_ranks=2)},
        ["epoch", "second-window"],
    ),
    "validated": ({"val_check_interval": 3}, ["window", "second-window", "validation-in-step", "validation"]),
}
"""Options of a run, and the points at which it is resumed."""


@pytest.mark.parametrize("way", WAYS)
def test_one_process_goes_on_from_anywhere(way, tmp_path):
    options, names = WAYS[way]
    options = {"strategy": "liger", **options}
    uninterrupted = fit(tmp_path, points=ANYWHERE, **options)
    assert len(set(uninterrupted.losses)) == len(uninterrupted.losses)  # epochs differ, and dropout is random
    for name in names:
        run = fit(tmp_path, seed=90, ckpt_path=tmp_path / name, **options)
        left = num_left(ANYWHERE[name], options.get("accumulate_grad_batches", MICRO_BATCHES))
        assert_goes_on(run, uninterrupted, left)
        if way != "max-steps":  # where Lightning itself counts one more
            assert run.logged_step == uninterrupted.logged_step


def test_checkpoint_of_an_exception_starts_with_the_step_that_it_interrupted(tmp_path):
    # In the second micro-batch of a step, after its first was processed.
    class FailsInStep(DropoutLM):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_epoch == 1 and batch_idx == 3:
                raise InterruptedError("once")
            return super().training_step(batch, batch_idx)

    uninterrupted = fit(tmp_path, strategy="liger")
    saves = ModelCheckpoint(dirpath=tmp_path, filename="exception", save_on_exception=True)
    with pytest.raises(InterruptedError, match="once"):
        fit(tmp_path, strategy="liger", module=FailsInStep(), callbacks=[saves], enable_checkpointing=True)
    run = fit(tmp_path, strategy="liger", seed=90, ckpt_path=tmp_path / "exception.ckpt")
    assert_goes_on(run, uninterrupted, num_left(("batch", 1, 1)))


def test_epoch_that_was_stopped_is_over(tmp_path):
    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.fit_loop.batch_idx == 2

    points = {"stopped": ("epoch", 0, 2)}
    fit(tmp_path, strategy="liger", points=points, callbacks=[Stops()], limit_val_batches=0)
    run = fit(tmp_path, strategy="liger", seed=90, ckpt_path=tmp_path / "stopped")
    assert len(run.losses) == (NUM_EPOCHS - 1) * NUM_BATCHES


def test_lightnings_checkpoint_goes_on_with_the_batches_not_yet_seen(tmp_path):
    seen: list[int] = []

    class Notes(DropoutLM):
        def training_step(self, batch, batch_idx):
            seen.extend(batch["input_ids"][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(NUM_BATCHES * ROWS, is_random=False), batch_size=ROWS)

    for options in ({"strategy": "auto", "points": {"point": ("batch", 0, 3)}}, {"ckpt_path": tmp_path / "point"}):
        fit(tmp_path, **{"strategy": "liger", "module": Notes(0.0), "loader": loader, "max_epochs": 1, **options})
    assert seen[NUM_BATCHES * ROWS :] == seen[4 * ROWS : NUM_BATCHES * ROWS]


def test_checkpoint_loads_in_lightnings_strategy(tmp_path):
    points = {"point": ANYWHERE["second-window"]}
    uninterrupted = fit(tmp_path, strategy="liger", points=points, module=DropoutLM(0.0), limit_val_batches=0)
    run = fit(tmp_path, strategy="auto", ckpt_path=tmp_path / "point", module=DropoutLM(0.0), limit_val_batches=0)
    # The batches come in another order: Lightning neither keeps random states nor skips batches that were seen.
    assert len(run.losses) == num_left(ANYWHERE["second-window"])
    assert run.learning_rates == pytest.approx(uninterrupted.learning_rates[-len(run.losses) :])
    assert run.global_step == uninterrupted.global_step


def test_state_of_a_checkpoint_is_dropped_if_its_run_does_not_train(tmp_path):
    trainer = make_trainer(root=tmp_path, strategy="liger", max_steps=1)
    trainer.fit(DropoutLM(), shuffled_loader())
    trainer.save_checkpoint(tmp_path / "done.ckpt")
    trainer.fit(DropoutLM(), shuffled_loader(), ckpt_path=tmp_path / "done.ckpt")  # has no steps left
    assert trainer.strategy._rank_states._loaded is None


class OwnLoader:
    """A data loader that keeps its state itself."""

    def __init__(self) -> None:
        self.batches = list(shuffled_loader(is_random=False))
        self.start = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.start %= len(self.batches)
        while self.start < len(self.batches):
            self.start += 1
            yield self.batches[self.start - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["start"]


def test_other_stateful_loaders_go_on_and_steps_that_they_cannot_repeat_are_told(tmp_path):
    options = {"strategy": "liger", "loader": OwnLoader}
    points = {"boundary": ("batch", 1, 3)}
    uninterrupted = fit(tmp_path, points=points, **options)
    run = fit(tmp_path, ckpt_path=tmp_path / "boundary", **options)
    assert_goes_on(run, uninterrupted, num_left(points["boundary"]))
    with pytest.warns(UserWarning, match="between the micro-batches of an optimizer step, with a stateful data"):
        fit(tmp_path, points={"window": ("batch", 1, 4)}, **options)


# Several processes


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """What all ranks got out of every run, with the device and their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    results = launch(request.param, folder, worker="tests.lightning_liger.resuming.workers.resume")
    return request.param, results, folder


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("way", STRATEGIES)
def test_ranks_go_on_as_if_they_had_not_been_interrupted(ranks, way, point):
    device, results, _ = ranks
    assert len({tuple(result[way]["uninterrupted"]["losses"]) for result in results}) == NUM_RANKS
    for result in results:
        run, uninterrupted = Run(**result[way][point]), Run(**result[way]["uninterrupted"])
        assert_goes_on(run, uninterrupted, num_left(POINTS[point]), TOLERANCE[device])


@pytest.mark.parametrize(("saved_by", "resumed_by"), EXCHANGES)
def test_other_engines_go_on_from_a_whole_checkpoint(ranks, saved_by, resumed_by):
    for result in ranks[1]:
        run = Run(**result[f"{saved_by} to {resumed_by}"])
        expected = Run(**result[f"fixed-{resumed_by}"])
        assert len(run.losses) == NUM_BATCHES
        torch.testing.assert_close(run.losses, expected.losses[-NUM_BATCHES:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("saved_by", "expected_of", "strategies", "tolerance"),
    [
        ("fixed-liger_fsdp", "fixed-liger_fsdp", ["liger", "liger_ddp", "liger_fsdp"], 1e-5),
        ("fixed-liger_model_parallel-full", "fixed-liger_model_parallel-full", ["liger", "liger_fsdp"], 1e-5),
        ("liger_fsdp-sharded", "liger_ddp", ["liger_fsdp-sharded"], 1e-4),
        ("liger_model_parallel", "liger_ddp", ["liger_model_parallel"], 1e-4),
    ],
)
def test_one_process_goes_on_from_the_checkpoint_of_several(
    ranks, saved_by, expected_of, strategies, tolerance, tmp_path
):
    def loader() -> DataLoader[Any]:  # the same data for each strategy
        rows = Rows(NUM_BATCHES * ROWS, is_random=False)
        return DataLoader(rows, batch_size=ROWS, sampler=DistributedSampler(rows, num_replicas=1, rank=0))

    options = {"module": DropoutLM(0.0), "loader": loader, "limit_val_batches": 0}
    expected = fit(tmp_path, strategy="auto", ckpt_path=ranks[2] / expected_of / "epoch.ckpt", **options).losses
    assert len(expected) == NUM_BATCHES
    for name in strategies:
        strategy = STRATEGIES.get(name, lambda name=name: name)()
        options["module"] = DropoutLM(0.0)
        losses = fit(tmp_path, strategy=strategy, ckpt_path=ranks[2] / saved_by / "epoch.ckpt", **options).losses
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
