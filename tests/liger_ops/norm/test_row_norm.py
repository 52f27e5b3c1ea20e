"""RMSNorm, RMSNorm of a sum and LayerNorm: where they round; sizes and options are in test_sizes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import add_rms_norm, layer_norm, rms_norm
from liger_ops.norm.row_norm import CASTINGS, RowNormOptions, row_norm_reference

EPS = 1e-6


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_casting_says_where_values_are_rounded(
    triton_device: torch.device, casting: str, weight_dtype: torch.dtype, offset: float
) -> None:
    # Not bfloat16, to which Triton's interpreter rounds toward zero.
    x = torch.randn(64, 128, device=triton_device).mul(3).half()
    weight = torch.randn(128, device=triton_device).to(weight_dtype)
    equal = {}
    for other in CASTINGS:
        actual = rms_norm(x, (128,), weight, EPS, offset=offset, casting=casting)
        expected = row_norm_reference(x, None, weight, None, (128,), RowNormOptions(128, EPS, offset, other, False))
        equal[other] = actual.double().sub(expected.double()).abs().le(1e-5 * expected.abs()).double().mean().item()
        assert other != casting or actual.dtype == expected.dtype
    # Where rounding comes at another place, a good part of the elements differs by one unit in the last place.
    assert equal.pop(casting) > 0.98
    assert max(equal.values()) < 0.9


@pytest.mark.parametrize("casting", CASTINGS)
def test_norm_of_a_sum_is_that_of_the_rounded_sum(triton_device: torch.device, casting: str) -> None:
    x, residual = torch.randn(2, 6, 123, device=triton_device).half()
    weight, options = torch.randn(123, device=triton_device), {"offset": 1.0, "casting": casting}
    y, total = add_rms_norm(x, residual, (123,), weight, EPS, **options)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, (123,), weight, EPS, **options))


@pytest.mark.parametrize("hidden_size", [507, 12289])
def test_layer_norm_of_a_large_mean_stays_accurate(triton_device: torch.device, hidden_size: int) -> None:
    x = 3 * torch.randn(3, hidden_size, device=triton_device) + 3e3
    parameters, grad_output = torch.randn(2, hidden_size, device=triton_device), torch.randn_like(x)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in (x, *parameters)]
        y = function(leaves[0], (hidden_size,), *leaves[1:])
        return [y, *torch.autograd.grad(y, leaves, grad_output.to(dtype))]

    # A mean's rounding, up to 2**-12 here; the mean square less the squared mean would be off by more than 0.1.
    for actual, truth in zip(run(layer_norm, torch.float32), run(F.layer_norm, torch.float64), strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-3, atol=2e-3)
