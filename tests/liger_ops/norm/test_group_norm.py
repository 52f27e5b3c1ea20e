"""GroupNorm: wide integers, a large mean, no positions and launches; sizes and options are in test_sizes."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.norm.group_norm import choose_launch, group_norm


def test_wide_integers_and_a_large_mean_change_nothing(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, upstream = 3 * torch.randn(2, 1, 3, 2, 1025, device=triton_device)
    x, parameters = x + 3e3, torch.randn(2, 3, device=triton_device)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in (x, *parameters)]
        y = function(leaves[0], 1, *leaves[1:])
        return [y, *torch.autograd.grad(y, leaves, upstream.to(dtype))]

    actual = run(group_norm, torch.float32)
    # A mean's rounding, up to 2**-12 here; the mean square less the squared mean would be off by more than 0.1.
    for ours, true in zip(actual, run(F.group_norm, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-3, atol=3e-3)
    monkeypatch.setattr(sys.modules[choose_launch.__module__], "_MAX_INT32_ELEMENTS", 0)
    assert all(map(torch.equal, run(group_norm, torch.float32), actual))


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
