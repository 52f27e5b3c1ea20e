"""GroupNorm: kernels against PyTorch's in float64, with PyTorch's in the tested dtype as the yardstick."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.norm.group_norm import choose_launch, group_norm, group_norm_reference
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARAMETERS = [(True, True), (True, False), (False, True), (False, False)]
NAMES = ["weight and bias", "weight", "bias", "neither"]
# The interpreter's two multiprocessors share a group only where there is a single one: the last two.
SHAPES = [
    pytest.param((5, 6), 3, id="no positions"),
    pytest.param((2, 6, 7), 3, id="small"),
    pytest.param((3, 4, 5, 5), 4, id="instance norm"),
    pytest.param((2, 6, 33, 31), 2, id="several blocks a group, channels together"),
    pytest.param((1, 4, 4500), 2, id="several blocks a channel"),
    pytest.param((1, 3, 2, 1025), 1, id="a shared group, odd"),
    pytest.param((1, 2, 4096), 1, id="a shared group, even"),
]


def make_inputs(*shape: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and an upstream gradient, rounded to ``dtype``."""
    channels = torch.randn(shape[1], *([1] * (len(shape) - 2)), device=device)
    x = torch.randn(shape, device=device).mul(3).add(channels)
    weight, bias = torch.randn(2, shape[1], device=device)
    return tuple(tensor.to(dtype) for tensor in (x, weight, bias, torch.randn(shape, device=device)))


def torch_group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """PyTorch's, whose backward on the CPU fails for a bias without a weight."""
    return F.group_norm(x, num_groups, x.new_ones(x.shape[1]) if weight is None else weight, bias)


def run(
    function: Callable[..., Tensor],
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    grad: Tensor,
) -> dict[str, Tensor]:
    """The output and every gradient by name."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items() if t is not None}
    y = function(leaves["x"], num_groups, leaves.get("weight"), leaves.get("bias"))
    gradients = torch.autograd.grad(y, list(leaves.values()), grad.to(y.dtype))
    return {"y": y, **{f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}}


def assert_matches_torch(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, grad_output: Tensor
) -> None:
    """Compares the output and every gradient."""

    def by(function: Callable[..., Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        tensors = (None if t is None else t.to(dtype or t.dtype) for t in (x, weight, bias, grad_output))
        x_, *rest = tensors
        return run(function, x_, num_groups, *rest)

    actual, eager, truth = by(group_norm, None), by(torch_group_norm, x.dtype), by(torch_group_norm, torch.float64)
    for name, gradient in actual.items():
        of = {"grad_weight": weight, "grad_bias": bias}.get(name, x)
        assert gradient.dtype == of.dtype
        assert_as_accurate(name, gradient, eager[name], truth[name])


@pytest.mark.parametrize(("shape", "num_groups"), SHAPES)
@pytest.mark.parametrize(("weighted", "biased"), PARAMETERS, ids=NAMES)
def test_group_norm_matches_torch(
    triton_device: torch.device, weighted: bool, biased: bool, shape: tuple[int, ...], num_groups: int
) -> None:
    x, weight, bias, grad_output = make_inputs(*shape, dtype=torch.float32, device=triton_device)
    assert_matches_torch(x, num_groups, weight if weighted else None, bias if biased else None, grad_output)


@pytest.mark.parametrize(("shape", "num_groups"), [((3, 4, 5), 2), ((1, 3, 2, 1025), 1)], ids=str)
def test_group_norm_in_wide_integers_is_the_same(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], num_groups: int
) -> None:
    x, weight, bias, grad_output = make_inputs(*shape, dtype=torch.float32, device=triton_device)
    expected = run(group_norm, x, num_groups, weight, bias, grad_output)
    monkeypatch.setattr(sys.modules[choose_launch.__module__], "_MAX_INT32_ELEMENTS", 0)
    for name, actual in run(group_norm, x, num_groups, weight, bias, grad_output).items():
        assert torch.equal(actual, expected[name])


@pytest.mark.parametrize("parameter_dtype", [None, torch.float32], ids=["same parameters", "float32 parameters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 7), (1, 2, 1500)], ids=str)
def test_group_norm_in_half_precision(
    triton_device: torch.device, dtype: torch.dtype, parameter_dtype: torch.dtype | None, shape: tuple[int, ...]
) -> None:
    x, weight, bias, grad_output = make_inputs(*shape, dtype=dtype, device=triton_device)
    weight, bias = (tensor.to(parameter_dtype or dtype) for tensor in (weight, bias))
    assert_matches_torch(x, 1, weight, bias, grad_output)


@pytest.mark.parametrize(("shape", "num_groups"), [((3, 4, 6, 5), 2), ((1, 3, 2, 1025), 1)], ids=str)
def test_group_norm_of_a_large_mean_stays_accurate(
    triton_device: torch.device, shape: tuple[int, ...], num_groups: int
) -> None:
    x, weight, bias, grad_output = make_inputs(*shape, dtype=torch.float32, device=triton_device)
    x += 3e3
    actual = run(group_norm, x, num_groups, weight, bias, grad_output)
    truth = run(torch_group_norm, x.double(), num_groups, weight.double(), bias.double(), grad_output.double())
    # A mean's rounding, up to 2**-12 here; the mean square less the squared mean would be off by more than 0.1.
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor.double(), truth[name], rtol=1e-3, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("num_parameters", [0, 1, 2])
def test_group_norm_is_call_compatible_with_torch(
    triton_device: torch.device, dtype: torch.dtype, num_parameters: int
) -> None:
    # Inputs this small make eps visible.
    x = torch.randn(4, 6, 5, device=triton_device).mul(1e-2).to(dtype)
    parameters = [torch.randn(6, device=triton_device).to(dtype) for _ in range(num_parameters)]
    for eps in ({}, {"eps": 1e-3}):
        actual, expected = (function(x, 2, *parameters, **eps) for function in (group_norm, F.group_norm))
        if dtype == torch.float64:
            torch.testing.assert_close(actual, expected)
        else:
            truth = F.group_norm(x.double(), 2, *(p.double() for p in parameters), **eps)
            assert_as_accurate("y", actual, expected, truth)


def test_group_norm_takes_any_memory_layout(triton_device: torch.device) -> None:
    x, weight, bias, grad_output = make_inputs(2, 6, 4, 5, dtype=torch.float32, device=triton_device)
    expected = run(group_norm, x, 2, weight, bias, grad_output)
    last = torch.channels_last
    layouts = run(
        group_norm,
        x.contiguous(memory_format=last),
        2,
        weight.repeat_interleave(2)[::2],
        bias.repeat_interleave(3)[::3],
        grad_output.contiguous(memory_format=last),
    )
    for name, result in expected.items():
        assert torch.equal(layouts[name], result)
    assert_matches_torch(x, 2, weight, bias, torch.tensor(0.7, device=triton_device).expand_as(x))


@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0)], ids=str)
def test_group_norm_of_nothing(triton_device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=triton_device, requires_grad=True)
    weight, bias = (torch.ones(6, device=triton_device, requires_grad=True) for _ in range(2))
    y = group_norm(x, 3, weight, bias)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize(("shape", "num_groups"), [((3, 4, 5), 2), ((1, 3, 2, 1025), 1)], ids=str)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_group_norm_computes_only_the_gradient_asked_for(
    triton_device: torch.device, wanted: str, shape: tuple[int, ...], num_groups: int
) -> None:
    x, weight, bias, grad_output = make_inputs(*shape, dtype=torch.float32, device=triton_device)
    expected = run(group_norm, x, num_groups, weight, bias, grad_output)[f"grad_{wanted}"]
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves[wanted].requires_grad_()
    group_norm(x, num_groups, weight, bias).backward(grad_output)
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [wanted]
    assert torch.equal(leaves[wanted].grad, expected)


def test_group_norm_without_gradients_is_the_same(triton_device: torch.device) -> None:
    x, weight, bias, _ = make_inputs(3, 4, 5, dtype=torch.float32, device=triton_device)
    expected = group_norm(x, 2, weight.requires_grad_(), bias)
    assert expected.requires_grad
    with torch.no_grad():
        assert torch.equal(group_norm(x, 2, weight, bias), expected)


@pytest.mark.parametrize(("shape", "num_groups"), [((3, 4, 5), 2), ((1, 3, 2, 1025), 1)], ids=str)
def test_group_norm_backward_twice_and_inputs_unchanged(
    triton_device: torch.device, shape: tuple[int, ...], num_groups: int
) -> None:
    tensors = make_inputs(*shape, dtype=torch.float32, device=triton_device)
    leaves, upstream = [t.clone().requires_grad_() for t in tensors[:3]], tensors[3].clone()
    y = group_norm(leaves[0], num_groups, leaves[1], leaves[2])
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, 2 * upstream)
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice)
    for before, after in zip(tensors, (*leaves, upstream), strict=True):
        assert torch.equal(before, after)


def test_one_group_is_layer_norm_and_order_of_positions_does_not_matter(triton_device: torch.device) -> None:
    x, weight, bias, _ = make_inputs(3, 4, 50, dtype=torch.float32, device=triton_device)
    y = group_norm(x, 1, weight, bias)
    spread = [parameter[:, None].expand(4, 50) for parameter in (weight, bias)]
    torch.testing.assert_close(y, F.layer_norm(x, (4, 50), *spread))
    order = torch.randperm(50, device=triton_device)
    torch.testing.assert_close(group_norm(x[..., order], 1, weight, bias), y[..., order])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_that_is_not_finite_spoils_no_other(triton_device: torch.device, value: float) -> None:
    x, weight, bias, grad_output = make_inputs(2, 4, 33, dtype=torch.float32, device=triton_device)
    x[1, 2, 7] = value
    result = run(group_norm, x, 2, weight, bias, grad_output)
    for name in ("y", "grad_x"):
        assert result[name][1, 2:].isnan().all()
        assert not result[name][0].isnan().any()
        assert not result[name][1, :2].isnan().any()
    assert torch.equal(result["grad_weight"].isnan(), torch.tensor([False, False, True, True], device=triton_device))
    assert not result["grad_bias"].isnan().any()


@pytest.mark.parametrize(("weighted", "biased"), PARAMETERS, ids=NAMES)
def test_reference_gradients_are_right(weighted: bool, biased: bool) -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    parameters = [
        torch.randn(4, dtype=torch.float64, requires_grad=True) if has else None for has in (weighted, biased)
    ]
    assert torch.autograd.gradcheck(lambda x, w, b: group_norm_reference(x, 2, w, b, 1e-3), (x, *parameters))


@pytest.mark.parametrize(("weighted", "biased"), PARAMETERS, ids=NAMES)
def test_group_norm_ops_are_well_formed(triton_device: torch.device, weighted: bool, biased: bool) -> None:
    x, weight, bias, grad_output = make_inputs(2, 4, 5, dtype=torch.bfloat16, device=triton_device)
    parameters = (weight.float() if weighted else None, bias if biased else None)
    checks = ("test_schema", "test_faketensor")
    forward, backward = torch.ops.liger_ops.group_norm_forward.default, torch.ops.liger_ops.group_norm_backward.default
    torch.library.opcheck(forward, (x, *parameters, 2, 1e-5), test_utils=checks)
    y, statistics = forward(x, *parameters, 2, 1e-5)
    assert y.dtype == torch.bfloat16
    for needs in ((True, weighted, biased), (True, False, False), (False, weighted, biased)):
        torch.library.opcheck(backward, (grad_output, x, *parameters, statistics, 2, *needs), test_utils=checks)


def test_group_norm_compiles_to_one_graph(triton_device: torch.device) -> None:
    x, *rest = make_inputs(2, 4, 5, dtype=torch.float32, device=triton_device)

    def layer(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor) -> Tensor:
        return group_norm(x * 2, num_groups, weight, bias) + x

    compiled = run(torch.compile(layer, fullgraph=True, backend="aot_eager"), x, 2, *rest)
    for name, expected in run(layer, x, 2, *rest).items():
        torch.testing.assert_close(compiled[name], expected)


def test_group_norm_off_cuda_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    x, weight, bias, _ = make_inputs(2, 4, 5, dtype=torch.bfloat16, device=torch.device("cpu"))
    actual = group_norm(x, 2, weight.float(), bias, 1e-3)
    assert torch.equal(actual, group_norm_reference(x, 2, weight, bias, 1e-3))
    assert_as_accurate("y", actual, actual, F.group_norm(x.double(), 2, weight.double(), bias.double(), 1e-3))


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        pytest.param((4,), (2,), r"input must be .* shape \[batch_size, num_channels, \*\], got .* \(4,\)", id="input"),
        pytest.param((2, 4), (3,), r"num_groups must be a divisor of num_channels = 4, got 3", id="no divisor"),
        pytest.param((2, 4), (0,), r"num_groups must be a divisor of num_channels = 4, got 0", id="no groups"),
        pytest.param((2, 4, 3), (2, torch.ones(3)), r"weight must be .* shape \(4,\) .*, got .* \(3,\)", id="weight"),
        pytest.param(
            (2, 4, 3), (2, None, torch.ones(4, 1)), r"bias must be .* shape \(4,\) .*, got .* \(4, 1\)", id="bias"
        ),
    ],
)
def test_group_norm_rejects(shape: tuple[int, ...], arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_norm(torch.ones(shape), *arguments)


@pytest.mark.parametrize("num_positions", [1, 49, 4096, 2**20])
@pytest.mark.parametrize("channels_per_group", [1, 10, 4096])
@pytest.mark.parametrize("num_rows", [1, 32, 131, 132, 4096])
def test_launches_leave_no_program_without_work(num_rows: int, channels_per_group: int, num_positions: int) -> None:
    launch = choose_launch(num_rows, channels_per_group, num_positions, 4, 132, 80 * 1024)
    num_elements = launch.block_channels * launch.block_positions
    assert num_elements <= 8192
    assert 2 * 4 * num_elements * (launch.num_stages - 1) <= 80 * 1024
    assert launch.num_stages > 1
    assert launch.num_slices == 1 or num_rows < 132
    assert launch.num_slices <= -(-num_positions // launch.block_positions)
    assert launch.num_slices <= -(-channels_per_group * num_positions // launch.block_size)
    if channels_per_group * num_positions == 2**20:
        assert num_rows * launch.num_slices >= 132
