"""What linear layers and gated MLPs in float8 save, write to, and refuse, as functions of autograd."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from liger_ops.fp8 import linear
from liger_ops.fp8.gated_mlp import scaled_gated_mlp
from liger_ops.fp8.linear import scaled_linear
from liger_ops.fp8.products import Float8Options, scaled_product
from liger_ops.fp8.transpose import transpose


def _linear(x: Tensor, *parameters: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return scaled_linear(x, parameters[:2], [parameters[2], None], **options)


def _gated_mlp(x: Tensor, *weights: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (scaled_gated_mlp(x, weights[:2], weights[2], **options),)


@dataclass(frozen=True)
class Layer:
    """A function of x, two weights that multiply it, and a parameter more, with the shapes of the others."""

    function: Callable[..., tuple[Tensor, ...]]
    parameters: Sequence[tuple[int, ...]]
    outputs: Sequence[int]

    def draw(
        self, device: torch.device, *lead: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[list[Tensor], list[Tensor]]:
        """x and parameters, which need gradients, and upstream gradients."""
        leaves = [torch.randn(shape, device=device).to(dtype) for shape in ((*lead, 32), *self.parameters)]
        grads = [torch.randn(*lead, size, device=device).to(dtype) for size in self.outputs]
        return [leaf.requires_grad_() for leaf in leaves], grads


LAYERS = {
    "linear": Layer(_linear, [(32, 32), (16, 32), (32,)], [32, 16]),
    "mlp": Layer(_gated_mlp, [(16, 32), (16, 32), (32, 16)], [32]),
    "mlp that saves payloads": Layer(
        partial(_gated_mlp, options=Float8Options(save_payloads=True)), [(16, 32), (16, 32), (32, 16)], [32]
    ),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return LAYERS[request.param]


def are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return all(torch.equal(*each) for each in zip(first, second, strict=True))


@pytest.mark.parametrize("needs", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1)])
def test_only_what_is_needed_is_computed_and_saved(device: torch.device, layer: Layer, needs: tuple[int, ...]) -> None:
    """x for gradients of what multiplies it alone; ``before_output`` sees what is saved, in that order, once."""
    leaves, grads = layer.draw(device, 7)
    expected = torch.autograd.grad(layer.function(*leaves), leaves, grads)
    some = [leaf.detach().requires_grad_(bool(need)) for leaf, need in zip(leaves, needs, strict=True)]
    packed: list[int] = []
    seen: list[list[int]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.data_ptr()) or x, lambda x: x):
        outputs = layer.function(*some, before_output=lambda saved: seen.append([x.data_ptr() for x in saved]))
    assert seen == [packed]
    assert (some[0].data_ptr() in packed) == any(needs[1:3])
    torch.autograd.backward(outputs, grads)
    for leaf, gradient in zip(some, expected, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        assert leaf.grad is None or torch.equal(leaf.grad, gradient)


def test_gradients_are_the_same_each_time(device: torch.device, layer: Layer) -> None:
    """Of a graph that is kept, of the second of two graphs, accumulated; and outputs without one."""
    leaves, grads = layer.draw(device, 7)
    first, second = layer.function(*leaves), layer.function(*leaves)
    expected = torch.autograd.grad(first, leaves, grads, retain_graph=True)
    assert are_equal(torch.autograd.grad(first, leaves, grads, retain_graph=True), expected)
    assert are_equal(torch.autograd.grad(first, leaves, grads), expected)
    assert are_equal(torch.autograd.grad(second, leaves, grads), expected)
    for _ in range(2):
        torch.autograd.backward(layer.function(*leaves), grads)
    assert are_equal([leaf.grad for leaf in leaves], [2 * each for each in expected])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert are_equal(layer.function(*leaves), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(first, leaves, grads)


def test_tensors_that_others_hold_stay(device: torch.device, layer: Layer) -> None:
    leaves, grads = layer.draw(device, 7)
    expected = torch.autograd.grad(layer.function(*leaves), leaves, grads)
    held: list[Tensor] = [*leaves, *grads]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        outputs = layer.function(*leaves)
    copies = [each.detach().float().clone() for each in held]
    assert are_equal(torch.autograd.grad(outputs, leaves, grads), expected)
    assert are_equal([each.float() for each in held], copies)


def test_payloads_are_freed_before_products_of_their_transposes(
    device: torch.device, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the outputs' gradients, which lie in the largest tensors that backward holds."""
    sources: list[StorageWeakRef] = []
    are_freed: list[bool] = []

    def transpose_(source: Tensor, factor: Tensor) -> Tensor:
        sources.append(StorageWeakRef(source.untyped_storage()))
        return transpose(source, factor)

    def product(*args: Any, **options: Any) -> Tensor:
        if sources:
            gc.collect()  # the interpreter leaves cycles
            are_freed.append(sources[0].expired())
            sources.clear()
        return scaled_product(*args, **options)

    leaves, grads = layer.draw(device, 7)
    outputs = layer.function(*leaves)
    monkeypatch.setattr(linear, "transpose", transpose_)
    monkeypatch.setattr(linear, "scaled_product", product)
    torch.autograd.backward(outputs, grads)
    assert are_freed
    assert all(are_freed)


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_tokens(device: torch.device, layer: Layer, lead: tuple[int, ...]) -> None:
    leaves, grads = layer.draw(device, *lead)
    outputs = layer.function(*leaves)
    assert [each.shape for each in outputs] == [(*lead, size) for size in layer.outputs]
    torch.autograd.backward(outputs, grads)
    assert not any(leaf.grad.any() for leaf in leaves)
    assert leaves[0].grad.shape == leaves[0].shape


def test_autocast_of_float32(device: torch.device, layer: Layer) -> None:
    """Outputs of autocast's dtype, gradients of the parameters' dtype and not rounded to the other in between."""
    leaves, grads = layer.draw(device, 7, dtype=torch.float32)
    grads = [grad.bfloat16() for grad in grads]
    wide = layer.function(*leaves)
    expected = [*wide, *torch.autograd.grad(wide, leaves, [grad.float() for grad in grads])]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        outputs = layer.function(*leaves)
    assert {each.dtype for each in outputs} == {torch.bfloat16}
    found = torch.autograd.grad(outputs, leaves, grads)
    assert {each.dtype for each in found} == {torch.float32}
    assert not torch.equal(found[1], found[1].bfloat16().float())
    for actual, truth in zip((*outputs, *found), expected, strict=True):
        assert (actual - truth).norm() <= 0.06 * truth.norm()


def test_second_derivatives_and_writes_to_saved_tensors_raise(device: torch.device, layer: Layer) -> None:
    leaves, grads = layer.draw(device, 7)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(layer.function(*leaves), leaves, grads, create_graph=True)
    for leaf in leaves:
        if leaf.dim() == 2:  # biases are not saved
            outputs = layer.function(*leaves)
            with torch.no_grad():
                leaf.mul_(2.0)
            with pytest.raises(RuntimeError, match="inplace"):
                torch.autograd.grad(outputs, leaves, grads)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(layer: Layer, dynamic: bool) -> None:
    leaves, grads = layer.draw(torch.device("cuda"), 48)
    torch.compiler.reset()
    for leaf in leaves[1:]:
        torch._dynamo.mark_static(leaf)  # as sizes of modules' parameters are
    compiled = torch.compile(layer.function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = [
        (*outputs, *torch.autograd.grad(outputs, leaves, grads))
        for outputs in (function(*leaves) for function in (layer.function, compiled))
    ]
    torch.testing.assert_close(results[1], results[0])
