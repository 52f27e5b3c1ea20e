"""Arguments that PyTorch's norms take are taken, and rows that are too long for the kernels run in PyTorch."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from liger_ops import add_rms_norm, group_norm, layer_norm, rms_norm
from liger_ops.norm import row_norm

X = torch.arange(24.0).view(2, 3, 4).sin()


@pytest.mark.parametrize("shape", [[4], torch.Size([4]), (np.int64(4),), (torch.tensor(4),), (3, 4)], ids=repr)
def test_sequences_of_integers_are_shapes(shape: Any) -> None:
    torch.testing.assert_close(rms_norm(X, shape), F.rms_norm(X, tuple(map(int, shape))))
    torch.testing.assert_close(layer_norm(X, shape), F.layer_norm(X, tuple(map(int, shape))))


@pytest.mark.parametrize("eps", [0, 1, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor(1)], ids=repr)
def test_numbers_are_eps(eps: Any) -> None:
    torch.testing.assert_close(rms_norm(X, (4,), None, eps), F.rms_norm(X, (4,), eps=float(eps)))
    torch.testing.assert_close(add_rms_norm(X, X, (4,), None, eps)[0], F.rms_norm(X + X, (4,), eps=float(eps)))
    torch.testing.assert_close(layer_norm(X, (4,), eps=eps), F.layer_norm(X, (4,), eps=float(eps)))
    torch.testing.assert_close(group_norm(X, 3, eps=eps), F.group_norm(X, 3, eps=float(eps)))


@pytest.mark.parametrize("num_groups", [np.int64(3), torch.tensor(3)], ids=repr)
def test_integers_are_numbers_of_groups(num_groups: Any) -> None:
    torch.testing.assert_close(group_norm(X, num_groups), F.group_norm(X, 3))


def test_rows_too_long_for_the_kernels_run_in_pytorch(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = X.to(triton_device)
    monkeypatch.setattr(row_norm, "MAX_HIDDEN_SIZE", 3)
    monkeypatch.setattr(row_norm, "_row_norm_forward", None)  # fails if it is called
    torch.testing.assert_close(rms_norm(x, (4,)), F.rms_norm(x, (4,)))
    torch.testing.assert_close(layer_norm(x, (4,)), F.layer_norm(x, (4,)))
    torch.testing.assert_close(add_rms_norm(x, x, (4,))[0], F.rms_norm(x + x, (4,)))
