"""Layers that are recomputed do the same as in forward, or there is an error."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_liger.activations import repeats
from lightning_liger.activations.layers import control_layers
from lightning_liger.activations.repeats import check_outputs, samples_of


class Layer(nn.Module):
    """Scales what ``scale`` returns for the layer into its linear map."""

    def __init__(self, scale: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = scale
        self.num_calls = 0
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("counts", torch.ones(4, dtype=torch.int64))
        self.cache_len = 1
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.register_buffer("large_counts", torch.ones(repeats._MAX_COPIED + 1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * self.scale(self))


def train(scale: Callable[[Any], Any], mode: Any = None, num_steps: int = 2) -> list[Any]:
    """Gradients, buffers and the next random numbers after two forwards and backwards."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(scale), Layer(scale))
    control = None if mode is None else control_layers(model)
    if control is not None:
        control.modes[:] = [mode] * 2
    random.seed(0)
    np.random.seed(0)
    for _ in range(num_steps):
        model(torch.ones(3, 4, requires_grad=True) * 1).square().sum().backward()
    tensors = [*(parameter.grad for parameter in model.parameters()), *model.buffers()]
    numbers = random.random(), np.random.uniform(), float(torch.rand(()))
    return [*(None if each is None else each.tolist() for each in tensors), numbers]


def counts(layer: Any) -> Tensor:
    layer.counts += 1
    return 1 / layer.counts


def grows(layer: Any) -> Any:
    layer.large_counts = torch.cat((layer.large_counts, layer.large_counts))
    return 1 / len(layer.large_counts)


def caches(layer: Any) -> Any:
    layer.counts += 1
    wanted = int(layer.counts[0])  # grows from step to step
    if layer.cache_len < wanted:
        layer.cache_len = wanted
        layer.register_buffer("cache", 1 / torch.arange(1.0, wanted + 1), persistent=False)
    return layer.cache[wanted - 1]


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize(
    "scale",
    [
        lambda layer: random.random(),
        lambda layer: np.random.uniform(),
        lambda layer: torch.rand(4).tanh() if random.random() < 0.5 else 1.0,
        counts,
        grows,
        caches,
    ],
    ids=["python", "numpy", "branch", "integer_buffer", "buffer_that_grows", "cache_that_grows"],
)
def test_random_numbers_and_buffers_are_those_of_the_first_run(scale: Callable[[Any], Any], mode: Any) -> None:
    assert train(scale, mode, num_steps=4) == train(scale, num_steps=4)


def calls(layer: Any) -> float:
    layer.num_calls += 1
    return 1 / layer.num_calls


@pytest.mark.parametrize(
    "scale", [calls, lambda layer: torch.rand(4, generator=layer.generator)], ids=["counter", "generator"]
)
def test_state_that_no_second_run_gets_back_is_an_error(scale: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="had other outputs when it was recomputed"):
        train(scale, "recompute")
    train(scale, "cheap")


def test_writes_to_large_integer_buffers_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"writes to its buffer 'large_counts' of torch.int64 and shape \[1025\]"):
        train(lambda layer: 1 / layer.large_counts.add_(1)[0], "recompute")


def test_outputs_are_compared_once() -> None:
    runs = []

    def scale(layer: Any) -> float:
        runs.append(layer)
        return 1.0

    train(scale, "recompute", num_steps=3)
    assert len(runs) == 2 * 2 * 3


def test_rounding_is_a_warning_and_nan_equals_nan(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    check_outputs([x, x[:0], torch.full((2,), float("nan"))], [x.clone(), x[:0], torch.full((2,), float("nan"))])
    assert not recwarn
    for other in (x.nan_to_num(nan=0.0), x.nan_to_num(nan=float("nan"), posinf=1e4)):
        with pytest.raises(RuntimeError, match="had other outputs"):
            check_outputs([x], [other])
    y = torch.ones(100)
    with pytest.warns(UserWarning, match="were a little different"):
        check_outputs([y], [y * 1.01])  # of TF32 or bfloat16 inside
    for other in (y * 1.02, y.double(), y[:99]):
        with pytest.raises(RuntimeError, match="had other outputs"):
            check_outputs([y], [other])
    with pytest.raises(RuntimeError, match="had other outputs"):
        check_outputs([y.int()], [y.int() + 1])
    with pytest.raises(RuntimeError, match="had other outputs"):
        check_outputs([y], [])


def test_outputs_of_any_layout_may_be_returned() -> None:
    x = torch.tensor([1 + 2j, 3j])
    assert samples_of([x.conj()])[0].tolist() == [1, -2, 0, -3]
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    assert not samples_of([torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), nested])


def test_frozen_layers_are_not_copied_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_liger.activations.frames.samples_of", pytest.fail)
    model = nn.Sequential(Layer(lambda layer: 1.0), Layer(lambda layer: 1.0)).requires_grad_(False)
    control = control_layers(model)
    assert control is not None
    control.modes[:] = ["recompute"] * 2
    model(torch.ones(3, 4))


def test_samples_are_few_copies() -> None:
    x = torch.arange(300_000.0).view(3, 100_000)
    (sample,) = samples_of([x.t(), x.to("meta")])
    assert 2**16 <= len(sample) < 2**17
    x.zero_()
    assert sample.count_nonzero() > 0
    x = torch.arange(300_000.0).view(3, 100_000)
    assert torch.equal(samples_of([x.t()])[0], x.t().reshape(-1)[:: x.numel() // 2**16])
    assert len(samples_of([torch.ones(()).expand(2**20, 2**20)])[0]) == 2**16  # whole, it would take 4 TiB
    assert [len(each) for each in samples_of([torch.ones(()), torch.ones(2, 0), torch.ones(0, 3).t()])] == [1, 0, 0]
