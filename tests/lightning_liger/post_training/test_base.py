"""Losses of several items do not depend on how a step was split; metrics are exact over micro-batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lightning_liger.post_training.base import LigerPostTrainingMixin, StepLoss, Term
from lightning_liger.post_training.metrics import Mean
from tests.lightning_liger.post_training import training
from tests.lightning_liger.post_training.training import Recorded, loader, metrics_of
from tests.lightning_liger.tiny import quiet_trainer

DATA = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) for rows in (2, 1, 4, 3)]
"""Micro-batches with unequal numbers of rows (first item) and of positive values (second item)."""


class TwoUnits(LigerPostTrainingMixin, Recorded):
    """Mean over rows of the square of a projection + 0.5 * mean over positive values of its cube."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 1)
        nn.init.constant_(self.model.weight, 0.3)
        nn.init.constant_(self.model.bias, 0.1)

    def step_loss(self, stage: str, batch: dict[str, Tensor]) -> StepLoss:
        rows = batch["rows"]
        projected = self.model(rows)[:, 0]
        cubes = (projected[:, None] ** 3 * rows).masked_fill(rows <= 0, 0).sum()
        count = (rows > 0).sum()
        return StepLoss(
            (Term(projected.square().sum(), len(rows), "rows"), Term(0.5 * cubes, count, "positives")),
            {"mean/x": Mean(rows.sum(), rows.numel()), "max": rows.max(), "min": rows.min(), "num": count},
        )

    def metric_kinds(self) -> dict[str, str]:
        return {"mean/x": "mean", "max": "max", "min": "min", "num": "sum"}

    def count_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor | float]:
        return {"rows": len(batch["rows"]), "positives": (batch["rows"] > 0).sum()}


class Unsized(IterableDataset):
    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def fit(module: Any, batches: list[Tensor], sized: bool = True, **options: Any) -> Any:
    data: Any = [{"rows": rows} for rows in batches]
    return training.fit(module, data if sized else Unsized(data), strategy="auto", **options)


def expected(steps: list[Tensor]) -> TwoUnits:
    module = TwoUnits()
    optimizer = module.configure_optimizers()
    for rows in steps:
        optimizer.zero_grad()
        squares, cubes = module.step_loss("train", {"rows": rows}).terms
        (squares.total / squares.count + cubes.total / cubes.count).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("sized", [True, False])
def test_loss_of_two_units_does_not_depend_on_the_split_of_a_step(sized: bool) -> None:
    everything = torch.cat(DATA)
    splits = {1: [everything], 2: [everything[:3], everything[3:]], 4: DATA}
    want = expected([everything])
    for number, batches in splits.items():
        module = TwoUnits()
        trainer = fit(module, batches, sized, accumulate_grad_batches=number)
        torch.testing.assert_close(module.model.weight, want.model.weight, rtol=1e-6, atol=1e-7)
        squares, cubes = TwoUnits().step_loss("train", {"rows": everything}).terms
        loss = float(squares.total / squares.count + cubes.total / cubes.count)
        assert module.steps[-1]["train_loss_step"] == pytest.approx(loss, rel=1e-6)
        metrics = metrics_of(trainer)
        assert metrics["train_loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["train_mean/x"] == pytest.approx(float(everything.mean()), rel=1e-6)
        assert metrics["train_mean/x_step"] == pytest.approx(float(everything.mean()), rel=1e-6)
        assert metrics["train_max"] == float(everything.max())
        assert metrics["train_min"] == float(everything.min())
        assert metrics["train_num"] == metrics["train_num_step"] == int((everything > 0).sum())
        assert "train_aux_loss" not in metrics


def test_validation_before_and_during_training_has_the_same_metrics() -> None:
    module, data = TwoUnits(), loader([{"rows": rows} for rows in DATA])
    (before,) = quiet_trainer().validate(module, data, verbose=False)
    module.learning_rate = 0.0
    options: dict[str, Any] = {"max_epochs": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(accumulate_grad_batches=3, **options)
    trainer.fit(module, data, data)
    during = {name: value for name, value in metrics_of(trainer).items() if name.startswith("val_")}
    assert during == pytest.approx(before, rel=1e-12)


def test_compiled_modules_train_as_others() -> None:
    module = TwoUnits()
    fit(torch.compile(module, backend="eager"), DATA[:2], accumulate_grad_batches=2)  # type: ignore[arg-type]
    torch.testing.assert_close(module.model.weight, expected([torch.cat(DATA[:2])]).model.weight, rtol=1e-6, atol=1e-7)


def test_former_name_of_means_over_steps_warns() -> None:
    with pytest.warns(FutureWarning, match="renamed to 'tokens'"):
        assert type("Old", (TwoUnits,), {"loss_normalization": "step"})().loss_normalization == "tokens"


def test_losses_of_the_model_are_added_and_logged() -> None:
    class Router(TwoUnits):
        def step_loss(self, stage: str, batch: dict[str, Tensor]) -> StepLoss:
            return super().step_loss(stage, batch)._replace(auxiliary=self.model.weight.sum() * len(batch["rows"]))

    module, plain = Router(), TwoUnits()
    trainers = [fit(each, DATA[:2], accumulate_grad_batches=2) for each in (module, plain)]
    found = [metrics_of(each) for each in trainers]
    expected = 0.9 * (2 * 2 + 1 * 1) / 3  # weighted by rows
    assert found[0]["train_aux_loss"] == pytest.approx(expected, rel=1e-5)
    assert found[0]["train_loss"] - found[1]["train_loss"] == pytest.approx(expected, rel=1e-5)
    shift = (plain.model.weight - module.model.weight).flatten()
    torch.testing.assert_close(shift, torch.full((3,), 0.1 * (2 * 2 + 1 * 1) / 3))
