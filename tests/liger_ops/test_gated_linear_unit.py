"""activation(gate) * up: kernels against the reference in float64, with plain PyTorch as the yardstick."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops.gated_linear_unit import (
    choose_launch,
    gated_unit_reference,
    gelu_mul,
    relu_squared,
    relu_squared_mul,
    silu_mul,
)
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Unit = tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]


def gelu_tanh_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return gelu_mul(gate, up, approximate="tanh")


UNITS = {
    "silu": (silu_mul, F.silu),
    "gelu": (gelu_mul, F.gelu),
    "gelu_tanh": (gelu_tanh_mul, lambda gate: F.gelu(gate, approximate="tanh")),
    "relu_squared": (relu_squared_mul, lambda gate: F.relu(gate).square()),
}


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest) -> Unit:
    """One of our functions, and its activation in PyTorch."""
    return UNITS[request.param]


def make_inputs(*shape: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and an upstream gradient, rounded to ``dtype``."""
    gate, up, grad_output = (torch.randn(shape, device=device).mul(3).to(dtype) for _ in range(3))
    return gate, up, grad_output


def assert_matches_reference(gate: Tensor, up: Tensor, grad_output: Tensor, unit: Unit = UNITS["silu"]) -> None:
    """Compares the output and both gradients."""
    function, activation = unit

    def run(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in (gate, up)]
        y = function(*leaves)
        return [y, *torch.autograd.grad(y, leaves, grad_output.to(y.dtype))]

    actual, eager = run(function, None), run(lambda gate, up: activation(gate) * up, None)
    truth = run(lambda gate, up: activation(gate) * up, torch.float64)
    for name, *results in zip(("y", "grad_gate", "grad_up"), actual, eager, truth, strict=True):
        assert results[0].dtype == results[1].dtype
        assert_as_accurate(name, *results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (1, 1), (3, 507), (1, 1024), (2, 3, 683)], ids=str
)  # the last: four blocks and two columns
def test_unit_matches_reference(
    triton_device: torch.device, unit: Unit, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    assert_matches_reference(*make_inputs(*shape, dtype=dtype, device=triton_device), unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2,), (3, 2 * 123), (2, 3, 2 * 600)], ids=str)
def test_packed_tensor_is_gate_then_up(
    triton_device: torch.device, unit: Unit, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    packed, _, grad_output = make_inputs(*shape, dtype=dtype, device=triton_device)
    grad_output = grad_output[..., : shape[-1] // 2]
    gate, up = (half.clone().requires_grad_() for half in packed.chunk(2, dim=-1))
    expected = unit[0](gate, up)
    gradients = torch.autograd.grad(expected, (gate, up), grad_output)
    leaf = packed.clone().requires_grad_()
    actual = unit[0](leaf)
    (gradient,) = torch.autograd.grad(actual, leaf, grad_output)
    assert torch.equal(actual, expected)
    assert torch.equal(gradient, torch.cat(gradients, dim=-1))
    assert gradient.is_contiguous()


def test_packed_rows_may_lie_apart(triton_device: torch.device, unit: Unit) -> None:
    wide, _, _ = make_inputs(4, 100, dtype=torch.float32, device=triton_device)
    packed = wide[:, 3:67]
    torch.testing.assert_close(unit[0](packed), unit[0](*packed.contiguous().chunk(2, dim=-1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_squared_matches_pytorch(triton_device: torch.device, dtype: torch.dtype) -> None:
    x, _, grad_output = make_inputs(3, 507, dtype=dtype, device=triton_device)
    x[0, :3] = torch.tensor([0.0, -0.0, float("nan")])

    def run(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        return [y, *torch.autograd.grad(y, leaf, grad_output.to(y.dtype))]

    results = [run(relu_squared, x), run(UNITS["relu_squared"][1], x), run(UNITS["relu_squared"][1], x.double())]
    for name, *values in zip(("y", "gradient"), *results, strict=True):
        assert all(value[0, 2].isnan() for value in values)
        assert_as_accurate(name, *(value.nan_to_num(0.0) for value in values))


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_infinity_and_nan_propagate_as_in_pytorch(triton_device: torch.device, unit: Unit, special: float) -> None:
    gate, up, _ = make_inputs(2, 8, dtype=torch.float32, device=triton_device)
    gate[0, 1] = up[1, 2] = special
    # F.gelu of infinity is NaN on some CPUs.
    activated = gate * torch.special.ndtr(gate) if unit[1] is F.gelu else unit[1](gate)
    torch.testing.assert_close(unit[0](gate, up), activated * up, equal_nan=True)


def test_silu_mul_promotes_mixed_dtypes(triton_device: torch.device) -> None:
    gate, up, grad_output = make_inputs(3, 123, dtype=torch.bfloat16, device=triton_device)
    assert_matches_reference(gate, up.float(), grad_output)
    assert_matches_reference(gate.double(), up, grad_output)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_reads_the_halves_of_a_packed_tensor(triton_device: torch.device, dtype: torch.dtype) -> None:
    packed, _, grad_output = make_inputs(2, 3, 2 * 1100, dtype=dtype, device=triton_device)
    assert_matches_reference(*packed.chunk(2, dim=-1), grad_output[..., :1100])


def test_silu_mul_reads_any_strides(triton_device: torch.device) -> None:
    gate, up, grad_output = make_inputs(4, 6, 8, dtype=torch.float32, device=triton_device)
    assert_matches_reference(gate.transpose(0, 1), up.transpose(0, 1), grad_output.transpose(0, 1))
    assert_matches_reference(gate.mT, up.mT, grad_output.mT)
    assert_matches_reference(gate[..., ::2], up[..., :4], grad_output[..., 4:])


def test_silu_mul_takes_an_expanded_upstream_gradient(triton_device: torch.device) -> None:
    gate, up, _ = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    assert_matches_reference(gate, up, torch.tensor(0.7, device=triton_device).expand(6, 64))
    assert_matches_reference(gate, up, torch.randn(64, device=triton_device).expand(6, 64))


def test_silu_mul_of_nothing(triton_device: torch.device) -> None:
    gate = torch.empty(0, 64, device=triton_device, requires_grad=True)
    y = silu_mul(gate, gate.detach())
    y.sum().backward()
    assert y.shape == gate.grad.shape == (0, 64)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy, in the interpreter
def test_silu_mul_stays_finite_for_large_gates(triton_device: torch.device) -> None:
    gate = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30], device=triton_device)
    assert_matches_reference(gate, torch.ones_like(gate), torch.ones_like(gate))


@pytest.mark.parametrize("wanted", [0, 1], ids=["gate", "up"])
def test_silu_mul_computes_only_the_gradient_asked_for(triton_device: torch.device, wanted: int) -> None:
    *inputs, grad_output = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    both = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(silu_mul(*both), both, grad_output)
    inputs[wanted].requires_grad_()
    silu_mul(*inputs).backward(grad_output)
    assert inputs[1 - wanted].grad is None
    torch.testing.assert_close(inputs[wanted].grad, expected[wanted])


def test_silu_mul_backward_twice_and_inputs_unchanged(triton_device: torch.device) -> None:
    gate, up, grad_output = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    y = silu_mul(*leaves)
    upstream = grad_output.clone()
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, 2 * upstream)
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice)
    for before, after in zip((gate, up, grad_output), (*leaves, upstream), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("activation", UNITS)
def test_reference_gradients_are_right(activation: str) -> None:
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda gate, up: gated_unit_reference(gate, up, activation, False), (gate, up))


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_ops_are_well_formed(triton_device: torch.device, packed: bool) -> None:
    gate, up, grad_output = make_inputs(2, 3, 16, dtype=torch.bfloat16, device=triton_device)
    ops, checks = torch.ops.liger_ops, ("test_schema", "test_faketensor")
    up = None if packed else up.float()
    torch.library.opcheck(ops.gated_unit_forward.default, (gate, up, "gelu", packed), test_utils=checks)
    grad_output = grad_output[..., :8] if packed else grad_output
    for needs in ((True, False),) if packed else ((True, True), (True, False), (False, True)):
        arguments = (grad_output, gate.mT.contiguous().mT, up, "silu", packed, *needs)
        torch.library.opcheck(ops.gated_unit_backward.default, arguments, test_utils=checks)


def test_silu_mul_compiles_to_one_graph(triton_device: torch.device) -> None:
    packed, _, grad_output = make_inputs(3, 128, dtype=torch.float32, device=triton_device)

    def run(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = packed.clone().requires_grad_()
        y = function(leaf)
        return [y, *torch.autograd.grad(y, leaf, grad_output[:, :64])]

    def layer(packed: Tensor) -> Tensor:
        return silu_mul(*packed.chunk(2, dim=-1)) * 2 + gelu_mul(packed)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(run(compiled), run(layer), strict=True):
        torch.testing.assert_close(actual, expected)


def test_silu_mul_off_cuda_is_the_reference() -> None:
    gate, up, _ = make_inputs(3, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert torch.equal(silu_mul(gate, up), gated_unit_reference(gate, up, "silu", False))


def test_silu_mul_rejects_different_shapes() -> None:
    with pytest.raises(ValueError, match=r"up must be .* shape \(2, 4\) \(gate's\), got .* \(4,\)"):
        silu_mul(torch.ones(2, 4), torch.ones(4))


def test_packed_tensor_must_have_an_even_number_of_columns() -> None:
    with pytest.raises(ValueError, match=r"even number of columns, without up, got .* shape \(2, 3\)"):
        gelu_mul(torch.ones(2, 3))


def test_kernel_has_no_activation_of_another_name(triton_device: torch.device) -> None:
    with pytest.raises(Exception, match=r"unknown activation|_activate") as raised:  # the compiler names the call,
        torch.ops.liger_ops.gated_unit_forward(torch.ones(2, 4, device=triton_device), None, "relu", False)
    causes = [raised.value, raised.value.__cause__, getattr(raised.value.__cause__, "__cause__", None)]
    assert any("unknown activation" in str(cause) for cause in causes)  # and its cause the reason


def test_unknown_approximation_raises() -> None:
    with pytest.raises(ValueError, match="approximate must be one of 'none', 'tanh', got 'erf'"):
        gelu_mul(torch.ones(2, 4), approximate="erf")


@pytest.mark.parametrize(("num_columns", "expected"), [(1, (1, 1)), (507, (512, 2)), (14336, (1024, 4))])
def test_choose_launch(num_columns: int, expected: tuple[int, int]) -> None:
    launch = choose_launch(num_columns)
    assert (launch.block_size, launch.num_warps) == expected


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


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda gate: gate,
    "a view": lambda gate: gate[:1],
    "a detached one": lambda gate: gate.detach(),
    "its storage": lambda gate: gate.untyped_storage(),
    "what an op saved": lambda gate: gate.square(),
    "a closure": lambda gate: lambda: gate,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_inputs_that_others_hold_stay(triton_device: torch.device, unit: Unit, holder: str) -> None:
    inputs = project(triton_device, 8, 8)
    held, copies = HOLDERS[holder](inputs[0]), [each.detach().clone() for each in inputs]
    address = inputs[0].data_ptr()
    loss_of(unit, inputs).backward()
    memory = torch.empty(0, device=triton_device)
    if holder == "its storage":
        memory = torch.empty(0, device=triton_device).set_(held, 0, (5, 8), (8, 1))
    elif holder == "what an op saved":
        memory = held.grad_fn._saved_self
    else:
        memory = held() if callable(held) and not isinstance(held, Tensor) else held
    assert memory.data_ptr() == address
    assert torch.equal(memory, copies[0][: len(memory)])


def test_arrays_that_a_hook_keeps_stay(triton_device: torch.device, unit: Unit) -> None:
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
        loss = loss_of(unit, inputs)
    before = {key: array.copy() for key, array in arrays.items()}
    loss.backward()
    assert all(np.array_equal(array, before[key]) for key, array in arrays.items())


class FromArray(torch.autograd.Function):
    """Returns the memory of an array."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_arrays_of_others_stay(triton_device: torch.device) -> None:
    if triton_device.type == "cuda":
        pytest.skip("an array is on the CPU")
    arrays = [np.random.default_rng(seed).standard_normal((5, 8), dtype=np.float32) for seed in (1, 2)]
    copies = [array.copy() for array in arrays]
    x = torch.randn(5, 8, requires_grad=True)
    loss_of(UNITS["silu"], [FromArray.apply(x, array) for array in arrays]).backward()
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True))


class Keeper(TorchDispatchMode):
    """Keeps what each operation returns, as a tensor that shares its memory, and a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.kept.append((result.detach(), result.detach().clone()))
        return result


def test_tensors_that_a_dispatch_mode_keeps_stay(triton_device: torch.device, unit: Unit) -> None:
    with Keeper() as keeper:
        loss_of(unit, project(triton_device, 8, 8)).backward()
    assert len(keeper.kept) >= 2
    assert all(torch.equal(tensor, copy) for tensor, copy in keeper.kept)


def test_transposed_inputs_stay_what_they_are(triton_device: torch.device, unit: Unit) -> None:
    x = torch.randn(8, 5, device=triton_device, requires_grad=True)
    copy = x.detach().clone().requires_grad_()
    loss_of(unit, [x.t().contiguous().t() * 1.0, x.t().contiguous().t() * 2.0]).backward()
    unit[1](copy).mul(2 * copy).square().sum().backward()
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-4, atol=1e-4)


def test_inputs_of_a_graph_that_is_kept_stay(triton_device: torch.device, unit: Unit) -> None:
    x = torch.randn(5, 7, device=triton_device, requires_grad=True)
    loss = loss_of(unit, [x @ torch.randn(7, 8, device=triton_device) for _ in range(2)])
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_leaves_and_shared_memory_stay(triton_device: torch.device, unit: Unit) -> None:
    leaves = [torch.randn(3, 8, device=triton_device, requires_grad=True) for _ in range(2)]
    before = [leaf.detach().clone() for leaf in leaves]
    loss_of(unit, list(leaves)).backward()
    assert all(torch.equal(leaf, each) for leaf, each in zip(leaves, before, strict=True))
    (both,) = project(triton_device, 16)
    copy = both.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(unit, [*copy.chunk(2, dim=-1)]), copy)
    (actual,) = torch.autograd.grad(loss_of(unit, [*both.chunk(2, dim=-1)]), both)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_op_in_place_is_well_formed(triton_device: torch.device, packed: bool) -> None:
    op = torch.ops.liger_ops.gated_unit_backward_.default
    gate, up = torch.randn(3, 8, device=triton_device), None if packed else torch.randn(3, 8, device=triton_device)
    grad_y = torch.randn(3, 4 if packed else 8, device=triton_device)
    torch.library.opcheck(op, (grad_y, gate, up, "silu", packed), test_utils=("test_schema", "test_faketensor"))
