"""Weights held in float8: nothing writes to them unseen."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    with pytest.raises(RuntimeError, match=r"held in float8, .* to train it .* set hold_frozen=False"):
        optimizer([weight], lr=0.1).step()
    assert torch.equal(weight.detach().dequantize(), before)


def add_to_data(weight: Any) -> None:
    weight.data += 1.0  # as peft merges adapters


def add(weight: Any) -> None:
    weight += 1.0


def assign_data(weight: Any) -> None:
    weight.data = torch.ones_like(weight)


def set_row(weight: Any) -> None:
    weight.data[0] = 5.0


WRITES: list[Callable[[Any], Any]] = [
    add_to_data,
    add,
    assign_data,
    set_row,
    lambda weight: weight.data.mul_(2.0),
    lambda weight: nn.init.normal_(weight),
    lambda weight: weight.detach()[0].copy_(torch.ones(16)),
    lambda weight: weight.T.t()[0][1:3].zero_(),
    lambda weight: weight.view(-1).add_(weight.t().reshape(-1)),
    lambda weight: weight.chunk(2)[1].fill_(1.0),
    lambda weight: torch._foreach_add_([weight.data], 1.0),
    lambda weight: torch.add(torch.ones(16, 16), 1.0, out=weight),
    lambda weight: torch.add(torch.ones(16, 16), 1.0, out=weight.t()),
    lambda weight: nn.utils.vector_to_parameters(torch.ones(256), [weight]),
]


@pytest.mark.parametrize("write", WRITES)
def test_writes_that_would_be_lost_or_rounded_are_refused(write: Callable[[Any], Any]) -> None:
    weight = nn.Parameter(Float8Weight.of(torch.randn(16, 16)), requires_grad=False)
    before = weight.dequantize()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"held in float8, .* merge adapters into it, call undo"):
        write(weight)
    assert torch.equal(weight.dequantize(), before)


def test_results_are_plain_tensors_that_may_be_written_to() -> None:
    weight, x = Float8Weight.of(torch.randn(16, 16)), torch.randn(3, 16, requires_grad=True)
    values = weight.dequantize()
    for y, expected in (
        (F.linear(x, weight), F.linear(x, values)),
        (weight.t() @ weight, values.t() @ values),
        (weight[2:] + 1.0, values[2:] + 1.0),
    ):
        assert type(y) is Tensor
        torch.testing.assert_close(y.detach().clone().mul_(2.0), 2.0 * expected)
    other = Float8Weight.of(torch.randn(16, 16))
    weight.data = other
    assert torch.equal(weight.dequantize(), other.dequantize())
    weight.copy_(values)
    assert torch.equal(weight.dequantize(), values)
