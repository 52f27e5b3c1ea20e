"""One module through fit, validate, test, predict and fit again, under one engine and from one to another."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.lightning_liger.strategies.workers.distributed import (
    NUM_RANKS,
    Batch,
    build_model,
    make_optimizer,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.engines import ENGINES
from tests.lightning_liger.strategies.workers.lifecycle import MOVES, NUM_BATCHES, live, move

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}


class Life(NamedTuple):
    """The losses of each rank's batches, what validation says in between, predicted tokens of each rank's batches."""

    losses: list[list[float]]
    validation: dict[str, float]
    predictions: list[list[Tensor]]
    parameters: dict[str, Tensor]


def plain_life(num_ranks: int, num_fits: int, device: str = "cpu") -> Life:
    """One process, stock model: an epoch with a new optimizer for each fit; validation after the first."""
    model = build_model().to(device)
    of_ranks = [make_uneven_batches(rank, NUM_BATCHES) for rank in range(num_ranks)]
    losses: list[list[float]] = [[] for _ in of_ranks]
    validation, predictions = {}, []
    for _ in range(num_fits):
        optimizer = make_optimizer(model.parameters())
        for window in zip(*of_ranks, strict=True):
            optimizer.zero_grad()
            of_window = [_loss(model, batch, device) for batch in window]
            total = sum(count for _, count in of_window)
            for rank, (loss, count) in enumerate(of_window):
                losses[rank].append(loss.item() if count else 0.0)
                if count:
                    (loss * count / total).backward()
            optimizer.step()
        if not predictions:
            with torch.no_grad():
                found = [_loss(model, batch, device) for batches in of_ranks for batch in batches]
                predictions = [
                    [model(batch["input_ids"].to(device)).logits.argmax(-1).cpu() for batch in batches]
                    for batches in of_ranks
                ]
            total = sum(count for _, count in found)
            validation = {"val_loss": sum(loss.item() * count for loss, count in found if count) / total}
    return Life(losses, validation, predictions, {name: value.cpu() for name, value in model.state_dict().items()})


def _loss(model: nn.Module, batch: Batch, device: str) -> tuple[Tensor, int]:
    loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
    return loss, int((batch["labels"][:, 1:] != -100).sum())


def assert_lives(found: dict[str, Any], expected: Life, rank: int, device: str = "cpu") -> None:
    rtol = TOLERANCE[device]
    torch.testing.assert_close(found["losses"], expected.losses[rank], rtol=rtol, atol=1e-7)
    for name, parameter in found["whole"].items():
        torch.testing.assert_close(parameter, expected.parameters[name], rtol=0.0, atol=10 * rtol)


def assert_lives_through_all_stages(found: dict[str, Any], expected: Life, rank: int, device: str = "cpu") -> None:
    assert_lives(found, expected, rank, device)
    validation, test = (found["stages"][stage][0] for stage in ("validate", "test"))
    assert validation["val_loss"] == pytest.approx(expected.validation["val_loss"], rel=TOLERANCE[device])
    assert test["test_loss"] == validation["val_loss"]
    for tokens, other in zip(found["stages"]["predict"], expected.predictions[rank], strict=True):
        assert tokens.equal(other)
    # Patched once, reported once, nothing added by later set-ups.
    assert found["num_replaced"] == 10
    assert found["same_report"]
    first, *others = found["traces"]
    assert others == [first] * 2
    # Three fits and two evaluations without logits; predictions are made of them.
    assert found["logit_counts"] == (5 * NUM_BATCHES, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_live_through_all_stages_and_fit_again(engine_runs, engine):
    expected = plain_life(NUM_RANKS, 3, engine_runs.device)
    for rank, found in enumerate(engine_runs.of(f"life-{engine}")):
        assert_lives_through_all_stages(found, expected, rank, engine_runs.device)


@pytest.mark.parametrize("engines", MOVES, ids="-".join)
def test_two_ranks_go_on_under_another_engine(engine_runs, engines):
    expected = plain_life(NUM_RANKS, len(engines), engine_runs.device)
    for rank, found in enumerate(engine_runs.of(f"move-{'-'.join(engines)}")):
        assert_lives(found, expected, rank, engine_runs.device)
        assert found["logit_counts"] == (len(engines) * NUM_BATCHES, 0)


@pytest.mark.parametrize("engine", ["liger", *ENGINES])
def test_one_process_lives_through_all_stages_and_fits_again(tmp_path, engine):
    found = live(engine, make_uneven_batches(0, NUM_BATCHES), root=tmp_path)
    assert_lives_through_all_stages(found, plain_life(1, 3), rank=0)


def test_one_process_goes_on_under_every_other_engine(tmp_path):
    engines = ("liger", "liger_ddp", "liger_fsdp")
    found = move(engines, make_uneven_batches(0, NUM_BATCHES), root=tmp_path)
    assert_lives(found, plain_life(1, 3), rank=0)
    assert found["logit_counts"] == (3 * NUM_BATCHES, 0)
