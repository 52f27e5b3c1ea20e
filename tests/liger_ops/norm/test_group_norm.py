"""GroupNorm: kernels against PyTorch's in float64, with PyTorch's in the tested dtype as the yardstick."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.norm.group_norm import choose_launch, group_norm
from tests.liger_ops.accuracy import DTYPES, assert_as_accurate, few

# No positions, small, instance norm, several blocks a group with channels together, several blocks a channel.
SHAPES = [
    *(((5, 6), 3), ((2, 6, 7), 3), ((3, 4, 5, 5), 4), ((2, 6, 33, 31), 2), ((1, 4, 4500), 2)),
    *(((1, 3, 2, 1025), 1), ((1, 2, 4096), 1), ((1, 2, 20000), 1)),
]


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
    draw=st.builds(
        SimpleNamespace,
        case=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        parameter_dtype=st.sampled_from([None, torch.float32]),
        has=st.tuples(st.booleans(), st.booleans()),
        wanted=st.tuples(*3 * [st.booleans()]),
        is_channels_last=st.booleans(),
        seed=st.integers(0, 2**16),
    )
)
@few(80)
def test_no_less_accurate_than_plain_pytorch(draw: Any, triton_device: torch.device) -> None:
    torch.manual_seed(draw.seed)
    wanted, (shape, num_groups) = draw.wanted, draw.case
    x, *parameters, grad_output = make_inputs(*shape, device=triton_device, dtype=draw.dtype)
    if draw.is_channels_last and len(shape) == 4:
        x, grad_output = (each.contiguous(memory_format=torch.channels_last) for each in (x, grad_output))
    given_parameters = [
        each.repeat_interleave(2)[::2].to(draw.parameter_dtype or draw.dtype) if is_given else None
        for each, is_given in zip(parameters, draw.has, strict=True)
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


def test_wide_integers_and_a_large_mean_change_nothing(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_inputs(1, 3, 2, 1025, device=triton_device)
    tensors[0] += 3e3
    actual, truth = run(group_norm, tensors, 1), run(torch_group_norm, tensors, 1, torch.float64)
    # A mean's rounding, up to 2**-12 here; the mean square less the squared mean would be off by more than 0.1.
    for ours, true in zip(actual, truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-3, atol=2e-3)
    monkeypatch.setattr(sys.modules[choose_launch.__module__], "_MAX_INT32_ELEMENTS", 0)
    assert all(map(torch.equal, run(group_norm, tensors, 1), actual))


def test_no_positions_give_no_gradients(triton_device: torch.device) -> None:
    x = torch.empty(2, 6, 0, device=triton_device, requires_grad=True)
    parameters = [torch.ones(6, device=triton_device, requires_grad=True) for _ in range(2)]
    group_norm(x, 3, *parameters).sum().backward()
    assert x.grad.shape == x.shape
    assert all(torch.equal(parameter.grad, torch.zeros(6, device=triton_device)) for parameter in parameters)


@pytest.mark.parametrize("num_positions", [1, 49, 4096, 2**20])
@pytest.mark.parametrize("channels_per_group", [1, 10, 4096])
def test_launches_fit_shared_memory(channels_per_group: int, num_positions: int) -> None:
    launch, _ = choose_launch(channels_per_group, num_positions, 4, 80 * 1024)
    num_elements = launch["BLOCK_CHANNELS"] * launch["BLOCK_POSITIONS"]
    assert num_elements <= 8192
    assert 0 < 2 * 4 * num_elements * (launch["NUM_STAGES"] - 1) <= 80 * 1024
