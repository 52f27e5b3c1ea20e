"""Layers that do what models seldom do: in every mode the same as without, and nothing is left in memory."""

import copy
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from liger_ops.recipes import made
from lightning_liger.activations import frames
from lightning_liger.activations.frames import _MAX_COPIED
from tests.lightning_liger.activations.programs import HIDDEN_SIZE, MODES, controlled, fused, rms_norm, silu_mul


class Layer(nn.Module):
    """Applies ``function`` to itself and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.q, self.k = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE), nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("other", torch.ones(HIDDEN_SIZE))
        self.register_buffer("counts", torch.ones(HIDDEN_SIZE, dtype=torch.int64))
        self.register_buffer("large_counts", torch.ones(_MAX_COPIED + 1, dtype=torch.int64))
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.cache_len = 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self, x)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, b * 3

    @staticmethod
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor]:
        return grad_a * 2, grad_b * 3


def two_outputs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled():
        return a * 2, b * 3
    return made(_Doubled.apply(a, b), two_outputs, a, b, keeps_inputs=False)


def casts_of_two_outputs(layer: Any, x: Tensor) -> Tensor:
    q, k = two_outputs(rms_norm(layer.q(x).float()), rms_norm(layer.k(x).float()))
    return layer.q(q).float() * layer.k(k).float()


def cast_to_another_layout(layer: Any, x: Tensor) -> Tensor:
    y = fused(lambda x: (x * 2).transpose(0, 1).contiguous().transpose(0, 1), x)
    return layer.q(y.to(torch.bfloat16, memory_format=torch.contiguous_format)).float()


def cast_after_a_write(layer: Any, x: Tensor) -> Tensor:
    y = rms_norm(x)
    with torch.no_grad():
        y.mul_(3)
    return layer.q(y).float()


def negative_view(layer: Any, x: Tensor) -> Tensor:
    y = rms_norm(x)
    return y * torch._neg_view(y)


def batch_norm(layer: Any, x: Tensor) -> Tensor:
    return layer.norm(layer.q(x))


def buffers_that_grow(layer: Any, x: Tensor) -> Tensor:
    """Written in place, replaced, and replaced by a larger one."""
    layer.scale.mul_(1.5)
    layer.counts += 1
    layer.other = layer.other * 1.5
    layer.large_counts = torch.cat((layer.large_counts, layer.large_counts))
    num_large = len(layer.large_counts) // (_MAX_COPIED + 1)
    return layer.q(x) * layer.scale.clone() / layer.counts * layer.other / num_large


def cache_that_grows(layer: Any, x: Tensor) -> Tensor:
    layer.counts += 1
    wanted = int(layer.counts[0])
    if layer.cache_len < wanted:
        layer.cache_len = wanted
        layer.register_buffer("cache", 1 / torch.arange(1.0, wanted + 1), persistent=False)
    return layer.q(x) * layer.cache[wanted - 1]


def random_numbers(layer: Any, x: Tensor) -> Tensor:
    return layer.q(x) * torch.rand(HIDDEN_SIZE) if torch.rand(()) < 0.5 else layer.q(x)


def catches_errors(layer: Any, x: Tensor) -> Tensor:
    try:
        return torch.tanh(layer.q(x))
    except Exception:
        return torch.sigmoid(layer.q(x))


def takes_gradients_of_gradients(layer: Any, x: Tensor) -> Tensor:
    return layer.k(torch.tanh(layer.q(x)))


def train(model: nn.Module, autocast: bool) -> list[Tensor | None]:
    """The gradients of the input and of all parameters after three steps, the buffers, and the next random number."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x * 1)
        y.float().square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers(), torch.rand(())]


def layers_of(function: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(function), Layer(function))


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        assert got is None or want is None or torch.equal(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("function", "autocast"),
    [
        *((each, True) for each in (casts_of_two_outputs, cast_to_another_layout, cast_after_a_write)),
        *((each, False) for each in (cast_after_a_write, negative_view, batch_norm, buffers_that_grow)),
        *((each, False) for each in (cache_that_grows, random_numbers, catches_errors)),
    ],
)
def test_gradients_and_buffers_are_those_of_the_plain_layers(
    function: Callable[[Any, Tensor], Tensor], autocast: bool, mode: Any
) -> None:
    model = layers_of(function)
    expected = train(copy.deepcopy(model), autocast)
    controlled(model, mode)
    assert_same(train(model, autocast), expected)


def test_buffers_are_the_same_in_every_backward_over_one_graph() -> None:
    model = layers_of(buffers_that_grow)
    controlled(model, "recompute")
    x = torch.ones(2, 3, HIDDEN_SIZE, requires_grad=True)
    y = model(x * 1).sum()
    first, *others = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


def test_writes_to_large_integer_buffers_are_an_error() -> None:
    model = layers_of(lambda layer, x: layer.q(x) / layer.large_counts.add_(1)[0])
    controlled(model, "recompute")
    with pytest.raises(RuntimeError, match=r"writes to its buffer 'large_counts' of torch.int64 and shape \[1025\]"):
        train(model, False)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_gradients(mode: Any) -> None:
    def penalty(model: nn.Module) -> list[Tensor | None]:
        x = torch.ones(2, 3, HIDDEN_SIZE, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x * 1).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    model = layers_of(takes_gradients_of_gradients)
    expected = penalty(copy.deepcopy(model))
    controlled(model, mode)
    assert_same(penalty(model), expected)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("in_attention", [False, True])
def test_evaluation_between_forward_and_backward(in_attention: bool, mode: Any) -> None:
    def dropped(layer: Any, x: Tensor) -> Tensor:
        p = 0.5 if layer.training else 0.0
        return F.scaled_dot_product_attention(x, layer.q(x), x, dropout_p=p) if in_attention else F.dropout(x, p)

    def run(model: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(1)
        x = torch.ones(2, 3, HIDDEN_SIZE, requires_grad=True)
        y = model(x * 1)
        model.eval()
        y.square().sum().backward()
        assert not any(module.training for module in model.modules())
        return [x.grad]

    model = layers_of(dropped)
    expected = run(copy.deepcopy(model))
    controlled(model, mode)
    assert_same(run(model), expected)


@pytest.mark.parametrize("mode", MODES)
def test_tuples_with_masks_made_in_inference_mode(mode: Any) -> None:
    class Masked(Layer):
        calls = 0

        def forward(self, pair: Any) -> Any:
            self.calls += 1
            x, mask = pair
            return x + self.q(x).masked_fill(mask == 0, 0), mask

    model = nn.Sequential(Masked(batch_norm), Masked(batch_norm))
    controlled(model, mode)
    with torch.inference_mode():
        mask = torch.ones(2, 3, 1)
    x = torch.ones(2, 3, HIDDEN_SIZE, requires_grad=True)
    model((x * 1, mask))[0].sum().backward()
    assert x.grad is not None
    assert [layer.calls for layer in model] == [2 if mode in ("recompute", "offload") else 1] * 2


@pytest.mark.parametrize("mode", MODES)
def test_threads_that_run_backward_over_one_graph(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers_of(lambda layer, x: layer.k(silu_mul(layer.q(rms_norm(x)), x)))
    x = torch.ones(2, 3, HIDDEN_SIZE, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x * 1).sum(), x)
    controlled(model, mode)
    y = model(x * 1).sum()
    found: list[Tensor] = []

    def work() -> None:
        found.extend(torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(15))

    threads = [threading.Thread(target=work) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 60
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("end", ["abandoned", "backward", "error"])
@pytest.mark.parametrize("mode", MODES)
def test_no_tensor_outlives_its_graph(mode: Any, end: str, request: pytest.FixtureRequest) -> None:
    """Not even outputs that their own op saves, and not without a backward that frees what was saved."""
    request.addfinalizer(gc.enable)
    gc.disable()
    watched: list[StorageWeakRef] = []

    def watch(tensor: Tensor) -> Tensor:
        watched.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def function(layer: Any, x: Tensor) -> Tensor:
        y = watch(torch.tanh(layer.q(watch(rms_norm(x)))))
        return watch(layer.k(watch(silu_mul(y, watch(torch.softmax(y, -1))))))

    model = layers_of(function)
    controlled(model, mode)
    y = model(torch.ones(2, 3, HIDDEN_SIZE, requires_grad=True) * 1)
    if end == "backward":
        y.sum().backward()
    elif end == "error":
        y.register_hook(lambda gradient: gradient / (1 // 0))
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
    del y
    assert len(watched) >= 10
    assert all(each.expired() for each in watched)


def test_error_before_a_second_run_leaves_nothing_behind() -> None:
    model = layers_of(batch_norm)
    controlled(model, "recompute")
    x = torch.ones(2, 3, HIDDEN_SIZE, requires_grad=True) * 1
    y = model(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert getattr(frames._running, "frame", None) is None


@pytest.mark.parametrize("mode", ["cheap", "recompute"])
def test_compiled_models_have_whole_graphs(mode: Any) -> None:
    model = layers_of(takes_gradients_of_gradients)
    expected = train(copy.deepcopy(model), False)
    controlled(model, mode)
    torch._dynamo.reset()
    assert_same(train(torch.compile(model, fullgraph=True, backend="aot_eager"), False), expected)  # type: ignore[arg-type]
