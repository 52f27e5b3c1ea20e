"""Metrics of a stage: exact over batches, in float64, on any device, in any mode."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_liger.post_training.metrics import KINDS, Mean, SumOfMeans
from lightning_liger.training.metrics import Perplexity, RunningMean, RunningMetric

numbers = st.floats(-100, 100)
batches = st.lists(st.lists(st.tuples(numbers, st.integers(1, 9)), max_size=4), min_size=1, max_size=4)


def t(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@settings(derandomize=True, deadline=None)
@given(batches)
def test_every_kind_is_that_of_all_batches_at_once(split: list[list[tuple[float, int]]]) -> None:
    """Batches may be empty; a metric without any value is NaN, a sum 0."""
    metrics: dict[str, RunningMetric] = {kind: make() for kind, make in KINDS.items()}
    metrics |= {"terms": SumOfMeans(), "perplexity": Perplexity()}
    for batch in split:
        total, count = sum(value for value, _ in batch), sum(number for _, number in batch)
        mean = Mean(t(total), t(count))
        metrics["mean"].update(*mean)
        metrics["perplexity"].update(t(total / 100), count)
        metrics["sum"].update(t(total))
        metrics["max"].update(t(max((value for value, _ in batch), default=-math.inf)))
        metrics["min"].update(t(min((value for value, _ in batch), default=math.inf)))
        metrics["difference"].update(mean, Mean(t(2.0 * len(batch)), len(batch)))
        metrics["terms"].update(torch.stack([torch.stack(mean), torch.stack((t(3.0 * len(batch)), t(len(batch))))]))
    values = [value for batch in split for value, _ in batch]
    count = sum(number for batch in split for _, number in batch)
    mean = sum(values) / count if values else math.nan
    expected = {"mean": mean, "sum": sum(values), "perplexity": math.exp(mean / 100), "difference": mean - 2}
    expected |= {"max": max(values, default=math.nan), "min": min(values, default=math.nan)}
    expected["terms"] = mean + 3 if values else 0.0
    found = {name: metric.compute().item() for name, metric in metrics.items()}
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
    for metric in metrics.values():
        resumed = type(metric)()
        resumed.parts = metric.parts.clone()
        torch.testing.assert_close(resumed.compute(), metric.compute(), equal_nan=True)
        metric.reset()
        assert torch.equal(metric.parts, type(metric)().parts)


@pytest.mark.parametrize(
    "convert",
    [
        lambda metric: metric.to(torch.bfloat16),
        lambda metric: metric.bfloat16(),
        lambda metric: metric.to("cpu", torch.float32),
        lambda metric: metric.to_empty(device="cpu"),
    ],
    ids=["to_bfloat16", "bfloat16", "to_float32", "to_empty"],
)
def test_sums_are_float64_whatever_the_module_is_converted_to(convert: Callable[..., Any]) -> None:
    (metric,) = convert(nn.ModuleList([RunningMean()]))
    number = 2**24 + 1  # the first integer that float32 cannot hold
    for _ in range(3):
        metric.update(torch.tensor(1.0, requires_grad=True) * number, number)
    assert metric.parts[1].item() == 3 * number
    assert not metric.compute().requires_grad


def test_metrics_that_inference_mode_has_reset_go_on_outside_of_it() -> None:
    metric = RunningMean()
    with torch.inference_mode():  # of trainer.validate; validation in fit runs in no_grad
        metric.update(t(2.0), 1)
        metric.reset()
    metric.update(t(6.0), 3)
    assert metric.compute().item() == 2.0
