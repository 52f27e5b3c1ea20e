"""Linear layers that share their input, against F.linear in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from liger_ops.shared_linear import shared_linear
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_inputs(device: torch.device, dtype: torch.dtype, *sizes: int, shape: tuple[int, ...] = (2, 5)) -> list[Tensor]:
    """An input and a weight of each size."""
    tensors = [torch.randn(*shape, 24), *(torch.randn(size, 24) / 5 for size in sizes)]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def results(inputs: list[Tensor], fused: bool, upstream: list[Tensor | None]) -> list[Tensor]:
    x, *weights = inputs
    outputs = shared_linear(x, weights) if fused else [F.linear(x, weight) for weight in weights]
    used = [(y, gradient.to(y)) for y, gradient in zip(outputs, upstream, strict=True) if gradient is not None]
    wanted = [each for each in inputs if each.requires_grad]
    loss_inputs, grad_outputs = zip(*used, strict=True)
    return [*outputs, *torch.autograd.grad(loss_inputs, wanted, grad_outputs, materialize_grads=True)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(7,), (7, 9), (16, 8, 8)], ids=str)
@pytest.mark.parametrize("unused", [None, 0, -1])
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_matches_separate_layers(
    device: str, dtype: torch.dtype, sizes: tuple[int, ...], unused: int | None, frozen: int | None
) -> None:
    if unused is not None and len(sizes) == 1:
        pytest.skip("no output is used")
    inputs = make_inputs(torch.device(device), dtype, *sizes)
    if frozen is not None:
        inputs[frozen].requires_grad_(False)
    upstream: list[Tensor | None] = [torch.randn(2, 5, size, device=device) for size in sizes]
    if unused is not None:
        upstream[unused] = None
    truth = results([each.detach().double().requires_grad_(each.requires_grad) for each in inputs], False, upstream)
    actual, eager = results(inputs, True, upstream), results(inputs, False, upstream)
    for index, (ours, plain, true) in enumerate(zip(actual, eager, truth, strict=True)):
        assert ours.dtype == dtype
        assert_as_accurate(f"result {index}", ours, plain, true)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 2, 3)], ids=str)
def test_shapes_and_views(shape: tuple[int, ...]) -> None:
    inputs = make_inputs(torch.device("cpu"), torch.float64, 7, 9, shape=shape)
    upstream: list[Tensor | None] = [torch.randn(*shape, 2 * size, dtype=torch.float64)[..., ::2] for size in (7, 9)]
    for ours, true in zip(results(inputs, True, upstream), results(inputs, False, upstream), strict=True):
        torch.testing.assert_close(ours, true)


def test_input_is_not_written_to_and_backward_runs_twice() -> None:
    inputs = make_inputs(torch.device("cpu"), torch.float32, 7, 9)
    copies = [each.detach().clone() for each in inputs]
    first, second = shared_linear(inputs[0], inputs[1:])
    loss = first.square().sum() + second.exp().sum()
    once = torch.autograd.grad(loss, inputs, retain_graph=True)
    twice = torch.autograd.grad(loss, inputs)
    for gradient, again in zip(once, twice, strict=True):
        assert torch.equal(gradient, again)
    for each, copy in zip(inputs, copies, strict=True):
        assert torch.equal(each, copy)


def test_products_are_counted() -> None:
    counts = []
    for fused in (True, False):
        inputs = make_inputs(torch.device("cpu"), torch.float32, 7, 9)
        with FlopCounterMode(display=False) as counter:
            results(inputs, fused, [torch.randn(2, 5, size) for size in (7, 9)])
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_second_derivatives_raise() -> None:
    inputs = make_inputs(torch.device("cpu"), torch.float32, 7, 9)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(shared_linear(inputs[0], inputs[1:])[0].sum(), inputs[0], create_graph=True)
