"""Weights held in float8: nothing writes to them unseen."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from liger_ops.fp8.weights import Float8Weight
from liger_ops.optim import AdamW

STOCK = [
    partial(optimizer, **{how: True} if how else {})
    for optimizer in (torch.optim.SGD, torch.optim.AdamW)
    for how in ("", "foreach", "fused")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [*STOCK, AdamW, partial(AdamW, state_dtype="8bit"), partial(AdamW, stochastic_rounding=True)],
    ids=str,
)
def test_optimizers_of_unfrozen_weights_say_what_to_do(optimizer: Any, dtype: torch.dtype) -> None:
    weight = nn.Parameter(Float8Weight.of(torch.randn(16, 256, dtype=dtype)))
    before = weight.detach().dequantize()
    weight.grad = torch.ones_like(before)
    with pytest.raises(TypeError, match=r"held in float8, .* to train it, set hold_frozen=False"):
        optimizer([weight], lr=0.1).step()
    assert torch.equal(weight.detach().dequantize(), before)


def test_arguments_by_name_are_seen_too() -> None:
    held = Float8Weight.of(torch.randn(16, 16))
    with pytest.raises(TypeError, match="held in float8"):
        torch.add(torch.ones(16, 16), 1.0, out=held)
