"""activation(gate) * up: whose memory its gradients take; sizes and options are in test_sizes."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.liger_ops.test_sizes import UNITS

Unit = tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]


SILU = UNITS["silu"]


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest) -> Unit:
    """One of our functions, and its activation in PyTorch."""
    return UNITS[request.param]


def test_float64_is_taken(triton_device: torch.device, unit: Unit) -> None:
    gate, up = torch.randn(2, 3, 123, device=triton_device)
    torch.testing.assert_close(unit[0](gate.double(), up), unit[1](gate.double()) * up)


def project(device: torch.device, *sizes: int) -> list[Tensor]:
    """Outputs of a product each, which saves none of them, as those of a linear layer."""
    x = torch.randn(5, 7, device=device, requires_grad=True)
    return [x @ torch.randn(7, size, device=device) for size in sizes]


def loss_of(unit: Unit, inputs: list[Tensor]) -> Tensor:
    """A loss after the unit; empties ``inputs``, so that nobody else holds what they were."""
    y = unit[0](*inputs)
    inputs.clear()
    gc.collect()  # the interpreter leaves cycles behind that hold memory
    return y.square().sum()


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_take_the_memory_of_the_inputs(triton_device: torch.device, unit: Unit, packed: bool) -> None:
    inputs = project(triton_device, *([16] if packed else [8, 8]))
    copies = [each.detach().clone().requires_grad_() for each in inputs]
    expected = torch.autograd.grad(loss_of(unit, list(copies)), copies)
    addresses, found = [each.data_ptr() for each in inputs], {}
    for index in range(len(inputs)):
        inputs[index].register_hook(
            lambda gradient, index=index: found.__setitem__(index, (gradient.data_ptr(), gradient.clone()))
        )
    loss_of(unit, inputs).backward()
    for index, gradient in enumerate(expected):
        assert found[index][0] == addresses[index]
        assert torch.equal(found[index][1], gradient)


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "the tensor": (lambda gate: gate, lambda held: held),
    "a view": (lambda gate: gate[:1], lambda held: held),
    "a detached one": (lambda gate: gate.detach(), lambda held: held),
    "its storage": (
        lambda gate: gate.untyped_storage(),
        lambda held: torch.empty(0, device=held.device).set_(held, 0, (5, 8), (8, 1)),
    ),
    "what an op saved": (lambda gate: gate.square(), lambda held: held.grad_fn._saved_self),
    "a closure": (lambda gate: lambda: gate, lambda held: held()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_inputs_that_others_hold_stay(triton_device: torch.device, holder: str) -> None:
    hold, get = HOLDERS[holder]
    inputs = project(triton_device, 8, 8)
    held, copy, address = hold(inputs[0]), inputs[0].detach().clone(), inputs[0].data_ptr()
    loss_of(SILU, inputs).backward()
    memory = get(held)
    assert memory.data_ptr() == address
    assert torch.equal(memory, copy[: len(memory)])


def test_arrays_that_a_hook_keeps_stay(triton_device: torch.device) -> None:
    """Memory that PyTorch did not allocate has owners that it does not count."""
    arrays: dict[int, np.ndarray] = {}

    def pack(tensor: Tensor) -> int:
        arrays[len(arrays)] = tensor.detach().cpu().numpy().copy()
        return len(arrays) - 1

    def unpack(key: int) -> Tensor:
        tensor = torch.from_numpy(arrays[key])
        return tensor.to(triton_device) if triton_device.type == "cuda" else tensor

    inputs = project(triton_device, 8, 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = loss_of(SILU, inputs)
    before = {key: array.copy() for key, array in arrays.items()}
    loss.backward()
    assert all(np.array_equal(array, before[key]) for key, array in arrays.items())


def test_tensors_that_a_dispatch_mode_keeps_stay(triton_device: torch.device) -> None:
    kept: list[tuple[Tensor, Tensor]] = []  # tensors that share memory with what operations return, and copies

    class Keeper(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                kept.append((result.detach(), result.detach().clone()))
            return result

    with Keeper():
        loss_of(SILU, project(triton_device, 8, 8)).backward()
    assert len(kept) >= 2
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)


def test_transposed_inputs_stay_what_they_are(triton_device: torch.device) -> None:
    x = torch.randn(8, 5, device=triton_device, requires_grad=True)
    copy = x.detach().clone().requires_grad_()
    loss_of(SILU, [x.t().contiguous().t() * 1.0, x.t().contiguous().t() * 2.0]).backward()
    F.silu(copy).mul(2 * copy).square().sum().backward()
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-4, atol=1e-4)


def test_leaves_and_shared_memory_stay(triton_device: torch.device) -> None:
    leaves = [torch.randn(3, 8, device=triton_device, requires_grad=True) for _ in range(2)]
    before = [leaf.detach().clone() for leaf in leaves]
    loss_of(SILU, list(leaves)).backward()
    assert all(torch.equal(leaf, each) for leaf, each in zip(leaves, before, strict=True))
    (both,) = project(triton_device, 16)
    copy = both.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(SILU, [*copy.chunk(2, dim=-1)]), copy)
    (actual,) = torch.autograd.grad(loss_of(SILU, [*both.chunk(2, dim=-1)]), both)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_op_in_place_is_well_formed(triton_device: torch.device, packed: bool) -> None:
    op = torch.ops.liger_ops.gated_unit_backward_.default
    gate, up = torch.randn(3, 8, device=triton_device), None if packed else torch.randn(3, 8, device=triton_device)
    grad_y = torch.randn(3, 4 if packed else 8, device=triton_device)
    arguments = grad_y, gate, up, "silu", packed, 0.5, True, [True, not packed]
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
