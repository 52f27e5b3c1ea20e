"""GroupNorm: kernels against PyTorch's in float64, with PyTorch's in the tested dtype as the yardstick."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.norm.group_norm import choose_launch, group_norm
from tests.liger_ops.accuracy import assert_as_accurate, few

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# No positions, small, instance norm, several blocks a group with channels together, several blocks a channel. The
# interpreter's two multiprocessors share a group only where there is a single one, as in the others.
SHAPES = [
    *(((5, 6), 3), ((2, 6, 7), 3), ((3, 4, 5, 5), 4), ((2, 6, 33, 31), 2), ((1, 4, 4500), 2)),
    *(((1, 3, 2, 1025), 1), ((1, 2, 4096), 1), ((1, 1, 2049), 1)),
]
SHARED = pytest.mark.parametrize(("shape", "num_groups"), [((3, 4, 5), 2), ((1, 3, 2, 1025), 1)], ids=str)


def make_inputs(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight, bias and an upstream gradient."""
    channels = torch.randn(shape[1], *([1] * (len(shape) - 2)), device=device)
    x = torch.randn(shape, device=device).mul(3).add(channels)
    weight, bias = torch.randn(2, shape[1], device=device)
    return [tensor.to(dtype) for tensor in (x, weight, bias, torch.randn(shape, device=device))]


def torch_group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """PyTorch's, whose backward on the CPU fails for a bias without a weight."""
    wide = [None if each is None else each.to(x.dtype) for each in (weight, bias)]
    return F.group_norm(x, num_groups, x.new_ones(x.shape[1]) if wide[0] is None else wide[0], wide[1])


def run(
    function: Callable[..., Tensor],
    tensors: list[Tensor | None],
    num_groups: int,
    dtype: torch.dtype | None = None,
    wanted: tuple[bool, ...] = (True, True, True),
) -> list[Tensor]:
    """The output and the gradients that are wanted."""
    *inputs, grad_output = (None if each is None else each.detach().to(dtype or each.dtype) for each in tensors)
    leaves = [each for each, is_wanted in zip(inputs, wanted, strict=True) if is_wanted and each is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    y = function(inputs[0], num_groups, *inputs[1:])
    return [y, *torch.autograd.grad(y, leaves, grad_output.to(y.dtype))] if leaves else [y]


@given(
    case=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    parameter_dtype=st.sampled_from([None, torch.float32]),
    has=st.tuples(st.booleans(), st.booleans()),
    wanted=st.tuples(*3 * [st.booleans()]),
    is_channels_last=st.booleans(),
    seed=st.integers(0, 2**16),
)
@few(80)
def test_no_less_accurate_than_plain_pytorch(
    case: tuple[tuple[int, ...], int],
    dtype: torch.dtype,
    parameter_dtype: torch.dtype | None,
    has: tuple[bool, bool],
    wanted: tuple[bool, bool, bool],
    is_channels_last: bool,
    seed: int,
    triton_device: torch.device,
) -> None:
    torch.manual_seed(seed)
    shape, num_groups = case
    x, *parameters, grad_output = make_inputs(*shape, device=triton_device, dtype=dtype)
    if is_channels_last and len(shape) == 4:
        x, grad_output = (each.contiguous(memory_format=torch.channels_last) for each in (x, grad_output))
    given_parameters = [
        each.repeat_interleave(2)[::2].to(parameter_dtype or dtype) if is_given else None
        for each, is_given in zip(parameters, has, strict=True)
    ]
    tensors = [x, *given_parameters, grad_output]
    actual = run(group_norm, tensors, num_groups, wanted=wanted)
    # PyTorch's backward on the CPU fails for some gradients alone.
    eager, truth = (run(torch_group_norm, tensors, num_groups, each) for each in (None, torch.float64))
    asked = [is_wanted for each, is_wanted in zip(tensors, wanted, strict=False) if each is not None]
    plain = [each for each, is_asked in zip(zip(eager, truth, strict=True), [True, *asked], strict=True) if is_asked]
    for index, results in enumerate((ours, *others) for ours, others in zip(actual, plain, strict=True)):
        assert results[0].dtype == results[1].dtype
        assert_as_accurate(f"result {index}", *results)


@SHARED
def test_wide_integers_give_the_same(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], num_groups: int
) -> None:
    tensors = make_inputs(*shape, device=triton_device)
    expected = run(group_norm, tensors, num_groups)
    monkeypatch.setattr(sys.modules[choose_launch.__module__], "_MAX_INT32_ELEMENTS", 0)
    for actual, same in zip(run(group_norm, tensors, num_groups), expected, strict=True):
        assert torch.equal(actual, same)


@SHARED
def test_large_mean_stays_accurate(triton_device: torch.device, shape: tuple[int, ...], num_groups: int) -> None:
    tensors = make_inputs(*shape, device=triton_device)
    tensors[0] += 3e3
    # A mean's rounding, up to 2**-12 here; the mean square less the squared mean would be off by more than 0.1.
    for actual, truth in zip(
        run(group_norm, tensors, num_groups), run(torch_group_norm, tensors, num_groups, torch.float64), strict=True
    ):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("num_parameters", [0, 1, 2])
def test_call_compatible_with_torch(triton_device: torch.device, dtype: torch.dtype, num_parameters: int) -> None:
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


def test_no_positions_give_no_gradients(triton_device: torch.device) -> None:
    x = torch.empty(2, 6, 0, device=triton_device, requires_grad=True)
    parameters = [torch.ones(6, device=triton_device, requires_grad=True) for _ in range(2)]
    group_norm(x, 3, *parameters).sum().backward()
    assert x.grad.shape == x.shape
    assert all(torch.equal(parameter.grad, torch.zeros(6, device=triton_device)) for parameter in parameters)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_that_is_not_finite_spoils_no_other(triton_device: torch.device, value: float) -> None:
    tensors = make_inputs(2, 4, 33, device=triton_device)
    tensors[0][1, 2, 7] = value
    *results, grad_weight, grad_bias = run(group_norm, tensors, 2)
    for result in results:
        assert result[1, 2:].isnan().all()
        assert not result[0].isnan().any()
        assert not result[1, :2].isnan().any()
    assert grad_weight.isnan().tolist() == [False, False, True, True]
    assert not grad_bias.isnan().any()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_weight", [True, False])
def test_reference_gradients_are_right(has_weight: bool, has_bias: bool) -> None:
    x, *parameters = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) if has else None
        for shape, has in (((2, 4, 3), True), (4, has_weight), (4, has_bias))
    )
    assert torch.autograd.gradcheck(lambda x, *parameters: group_norm(x, 2, *parameters, 1e-3), (x, *parameters))


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
def test_wrong_arguments_are_named(shape: tuple[int, ...], arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_norm(torch.ones(shape), *arguments)


@pytest.mark.parametrize("num_positions", [1, 49, 4096, 2**20])
@pytest.mark.parametrize("channels_per_group", [1, 10, 4096])
def test_launches_leave_no_program_without_work(channels_per_group: int, num_positions: int) -> None:
    for num_rows in (1, 32, 131, 132, 4096):
        launch = choose_launch(num_rows, channels_per_group, num_positions, 4, 132, 80 * 1024)
        num_elements = launch.block_channels * launch.block_positions
        assert num_elements <= 8192
        assert 0 < 2 * 4 * num_elements * (launch.num_stages - 1) <= 80 * 1024
        assert launch.num_slices == 1 or num_rows < 132
        assert launch.num_slices <= -(-num_positions // launch.block_positions)
        assert launch.num_slices <= -(-channels_per_group * num_positions // launch.block_size)
        if channels_per_group * num_positions == 2**20:
            assert num_rows * launch.num_slices >= 132
