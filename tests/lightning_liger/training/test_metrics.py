"""Metrics weighted by tokens."""

import math
from collections.abc import Callable

import pytest
import torch

from lightning_liger.training.metrics import TokenMetrics


def update(metrics: TokenMetrics, loss: float, num_correct: int, num_tokens: int) -> None:
    metrics.update_tokens(torch.tensor(loss), torch.tensor(num_correct), torch.tensor(num_tokens))


def computed(metrics: TokenMetrics) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.compute().items()}


def test_metrics_weigh_batches_by_their_tokens() -> None:
    metrics = TokenMetrics("val")
    update(metrics, 2.0, 1, 3)
    update(metrics, 6.0, 1, 1)
    expected = {"val_loss": 3.0, "val_perplexity": math.exp(3.0), "val_accuracy": 0.5}
    assert computed(metrics) == pytest.approx(expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["last", "first"])
def test_batch_without_tokens_changes_nothing(order: tuple[int, int]) -> None:
    metrics = TokenMetrics("train")
    for index in order:
        update(metrics, *[(1.5, 2, 4), (math.nan, 0, 0)][index])
    expected = {"train_loss": 1.5, "train_perplexity": math.exp(1.5), "train_accuracy": 0.5}
    assert computed(metrics) == pytest.approx(expected)


def test_nan_loss_of_real_tokens_stays_visible() -> None:
    metrics = TokenMetrics("val")
    update(metrics, math.nan, 0, 4)
    assert math.isnan(computed(metrics)["val_loss"])


@pytest.mark.parametrize(
    "convert",
    [
        lambda metrics: metrics.to(torch.bfloat16),
        lambda metrics: metrics.bfloat16(),
        lambda metrics: metrics.to("cpu", torch.float32),
        lambda metrics: metrics.to_empty(device="cpu"),
    ],
    ids=["to_bfloat16", "bfloat16", "to_float32", "to_empty"],
)
def test_sums_are_float64_whatever_the_module_is_converted_to(convert: Callable[..., TokenMetrics]) -> None:
    metrics = convert(TokenMetrics("val"))
    num_batches, num_tokens = 3, 2**24 + 1  # the first integer that float32 cannot hold
    for _ in range(num_batches):
        update(metrics, 1.0, num_tokens, num_tokens)
    assert metrics["loss"].num_tokens.item() == num_batches * num_tokens
    assert computed(metrics)["val_accuracy"] == 1.0


def test_reset_forgets_and_stages_are_apart() -> None:
    train, val = TokenMetrics("train"), TokenMetrics("val")
    update(train, 2.0, 0, 5)
    update(val, 4.0, 0, 5)
    train.reset()
    update(train, 1.0, 5, 5)
    assert computed(train) == pytest.approx({"train_loss": 1.0, "train_perplexity": math.e, "train_accuracy": 1.0})
    assert computed(val)["val_loss"] == pytest.approx(4.0)


def test_metrics_built_on_the_meta_device_still_count() -> None:
    with torch.device("meta"):
        metrics = TokenMetrics("val")
    metrics.to_empty(device="cpu")
    update(metrics, 2.0, 1, 4)
    assert computed(metrics)["val_accuracy"] == 0.25


def test_metrics_keep_no_graph() -> None:
    metrics = TokenMetrics("train")
    loss = torch.tensor(2.0, requires_grad=True) * 1.0
    metrics.update_tokens(loss, torch.tensor(1), torch.tensor(2))
    assert not any(value.requires_grad for value in metrics.compute().values())


def test_metrics_that_inference_mode_has_reset_go_on_outside_of_it() -> None:
    metrics = TokenMetrics("val")
    with torch.inference_mode():  # of trainer.validate; validation in fit runs in no_grad
        update(metrics, 2.0, 1, 3)
        metrics.reset()
    update(metrics, 2.0, 1, 3)
    assert computed(metrics)["val_loss"] == 2.0
