"""Layers that do what models seldom do: in every mode the same as without, and nothing is left in memory."""

import copy
import functools
import gc
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_liger.activations.frames import _MAX_COPIED
from tests.lightning_liger.activations.programs import (
    HIDDEN_SIZE,
    MODES,
    Layer,
    assert_equal,
    controlled,
    fused,
    gated,
    layers_of,
    outcome,
    rms_norm,
    silu_mul,
    tokens,
)


def casts_of_two_outputs(layer: Any, x: Tensor) -> Tensor:
    norms = rms_norm(layer.q(x).float()), rms_norm(layer.k(x).float())
    q, k = fused(lambda a, b: (a * 2, b * 3), *norms, saves=False)
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
    if getattr(layer, "cache_len", 1) < wanted:
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


def smooth(layer: Any, x: Tensor) -> Tensor:
    return layer.k(torch.tanh(layer.q(x)))


def dropped(layer: Any, x: Tensor) -> Tensor:
    p = 0.5 if layer.training else 0.0
    return F.dropout(F.scaled_dot_product_attention(x, layer.q(x), x, dropout_p=p), p)


def three_steps(model: nn.Module) -> Any:
    return outcome(model, num_steps=3)


def half_steps(model: nn.Module) -> Any:
    return outcome(model, half=True, num_steps=3)


def backward_twice_and_of_a_part(model: Any) -> Any:
    x = tokens()
    y = model(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert_equal(first, second)
    return first, torch.autograd.grad(y, model[1].q.weight)[0]


def gradients_of_gradients(model: nn.Module) -> Any:
    x = tokens()
    (gradient,) = torch.autograd.grad(model(x * 1).square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), (x, *model.parameters()), allow_unused=True)


def function_transform(model: nn.Module) -> Any:
    with torch.no_grad():
        assert not model(tokens()).requires_grad
    return torch.func.grad(lambda x: model(x).sum())(tokens().detach())


def evaluation_between_forward_and_backward(model: nn.Module) -> Any:
    torch.manual_seed(1)
    x = tokens()
    y = model(x * 1)
    model.eval()
    y.square().sum().backward()
    assert not any(module.training for module in model.modules())
    return x.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("run", "function"),
    [
        *((half_steps, each) for each in (casts_of_two_outputs, cast_to_another_layout, cast_after_a_write)),
        *((three_steps, each) for each in (cast_after_a_write, negative_view, batch_norm, buffers_that_grow)),
        *((three_steps, each) for each in (cache_that_grows, random_numbers, catches_errors)),
        *((backward_twice_and_of_a_part, each) for each in (gated, buffers_that_grow)),
        *((each, smooth) for each in (gradients_of_gradients, function_transform)),
        (evaluation_between_forward_and_backward, dropped),
    ],
)
def test_gradients_and_buffers_are_those_of_the_plain_layers(run: Any, function: Any, mode: Any) -> None:
    model = layers_of(function)
    expected = run(copy.deepcopy(model))
    controlled(model, mode)
    assert_equal(run(model), expected)


def test_writes_to_large_integer_buffers_are_an_error() -> None:
    model = layers_of(lambda layer, x: layer.q(x) / layer.large_counts.add_(1)[0])
    controlled(model, "recompute")
    with pytest.raises(RuntimeError, match=r"modifies its buffer 'large_counts' of torch.int64 and shape \[1025\]"):
        outcome(model)


@pytest.mark.parametrize("mode", MODES)
def test_tuples_with_masks_made_in_inference_mode(mode: Any) -> None:
    class Masked(Layer):
        calls = 0

        def forward(self, pair: Any) -> Any:
            self.calls += 1
            x, mask = pair
            return x + self.q(x).masked_fill(mask == 0, 0), mask

    model, x = layers_of(gated, Masked), tokens()
    controlled(model, mode)
    with torch.inference_mode():
        mask = torch.ones(2, 3, 1)
    model((x * 1, mask))[0].sum().backward()
    assert x.grad is not None
    assert [layer.calls for layer in model] == [2 if mode in ("recompute", "offload") else 1] * 2


@pytest.mark.parametrize("mode", MODES)
def test_threads_that_run_backward_over_one_graph(mode: Any, request: pytest.FixtureRequest) -> None:
    model, x = layers_of(gated), tokens()
    (expected,) = torch.autograd.grad(model(x * 1).sum(), x)
    controlled(model, mode)
    y = model(x * 1).sum()
    found: list[Tensor] = []

    def work() -> None:
        found.extend(torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(15))

    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(found, [expected] * 60)


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
    y = model(tokens() * 1)
    if end == "backward":
        y.sum().backward()
    elif end == "error":
        y.register_hook(lambda gradient: gradient / (1 // 0))
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
    del y
    assert len(watched) >= 10
    assert all(each.expired() for each in watched)


@pytest.mark.parametrize("mode", ["cheap", "recompute"])
def test_compiled_models_have_whole_graphs(mode: Any) -> None:
    model = layers_of(smooth)
    expected = outcome(copy.deepcopy(model))
    controlled(model, mode)
    torch._dynamo.reset()
    assert_equal(outcome(model, forward=torch.compile(model, fullgraph=True, backend="aot_eager")), expected)
