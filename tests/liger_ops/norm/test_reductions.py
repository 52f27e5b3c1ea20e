"""Sums of partial sums."""

import pytest
import torch

from liger_ops.norm.reductions import sum_parts
from tests.liger_ops.accuracy import assert_as_accurate


@pytest.mark.parametrize("wanted", ["weight", "bias", "both"])
@pytest.mark.parametrize("shape", [(0, 5), (1, 64), (63, 33), (132, 70)], ids=str)
def test_parts_are_added_up(triton_device: torch.device, shape: tuple[int, int], wanted: str) -> None:
    parts = torch.randint(-9, 9, (1 + (wanted == "both"), *shape), device=triton_device).float()
    grad_weight = None if wanted == "bias" else torch.empty(shape[1], device=triton_device)
    grad_bias = None if wanted == "weight" else torch.empty(shape[1], dtype=torch.bfloat16, device=triton_device)
    sum_parts(parts, grad_weight, grad_bias)
    if grad_weight is not None:
        assert torch.equal(grad_weight, parts[0].sum(dim=0))
    if grad_bias is not None:
        expected = parts[-1].sum(dim=0)
        assert_as_accurate("grad_bias", grad_bias, expected.bfloat16(), expected)
