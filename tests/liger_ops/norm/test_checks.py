"""Arguments that PyTorch's norms take are taken, and rows that are too long for the kernels run in PyTorch."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from liger_ops import add_rms_norm, group_norm, layer_norm, rms_norm
from liger_ops.norm import row_norm
from tests.liger_ops.accuracy import assert_as_accurate

X = torch.arange(24.0).view(2, 3, 4).sin()


@pytest.mark.parametrize("shape", [[4], torch.Size([4]), (np.int64(4),), (3, 4)], ids=repr)
@pytest.mark.parametrize("eps", [0, np.float32(0.5)], ids=repr)
def test_sequences_of_integers_are_shapes_and_numbers_eps(shape: Any, eps: Any) -> None:
    sizes, number = tuple(map(int, shape)), float(eps)
    torch.testing.assert_close(rms_norm(X, shape, None, eps), F.rms_norm(X, sizes, None, number))
    torch.testing.assert_close(add_rms_norm(X, X, shape, None, eps)[0], F.rms_norm(X + X, sizes, None, number))
    torch.testing.assert_close(layer_norm(X, shape, eps=eps), F.layer_norm(X, sizes, eps=number))
    torch.testing.assert_close(group_norm(X, np.int64(3), eps=eps), F.group_norm(X, 3, eps=number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("num_parameters", [0, 1, 2])
def test_calls_of_pytorchs_functions_give_the_same(
    triton_device: torch.device, dtype: torch.dtype, num_parameters: int
) -> None:
    # Inputs this small make eps visible: RMSNorm in half precision must use float32's epsilon, as torch does.
    x = torch.randn(4, 6, 6, device=triton_device).mul(1e-3).to(dtype)
    for ours, theirs, argument, shape in (
        *((layer_norm, F.layer_norm, list(shape), shape) for shape in ((6,), (6, 6))),
        *((rms_norm, F.rms_norm, list(shape), shape) for shape in ((6,), (6, 6)) if num_parameters < 2),
        (group_norm, F.group_norm, 2, (6,)),
    ):
        parameters = [torch.randn(shape, device=triton_device).to(dtype) for _ in range(num_parameters)]
        wide = [each.double() for each in parameters]
        for options in ({}, {"eps": 1e-3}):
            default = {"eps": torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps}
            exact = {**(default if ours is rms_norm else {}), **options}
            y, eager = (function(x, argument, *parameters, **options) for function in (ours, theirs))
            assert_as_accurate(ours.__name__, y, eager, theirs(x.double(), argument, *wide, **exact))


def test_rows_too_long_for_the_kernels_run_in_pytorch(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, row_norm.MAX_HIDDEN_SIZE + 1, device=triton_device)
    monkeypatch.setattr(row_norm, "_row_norm_forward", None)  # fails if it is called
    torch.testing.assert_close(rms_norm(x, x.shape[1:]), F.rms_norm(x, x.shape[1:]))
    torch.testing.assert_close(layer_norm(x, x.shape[1:]), F.layer_norm(x, x.shape[1:]))
    torch.testing.assert_close(add_rms_norm(x, x, x.shape[1:])[0], F.rms_norm(x + x, x.shape[1:]))
