"""Tensors of several devices: every op refuses them, at the first call and at every later one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import cross_entropy, linear_cross_entropy
from tests.liger_ops.test_ops import CASES, assert_same

DEVICES = [pytest.param("cpu", "meta")]
if torch.cuda.is_available():
    DEVICES = [pytest.param("cuda", other, marks=pytest.mark.gpu) for other in ("cpu", "meta")]
    DEVICES.append(pytest.param("cuda:0", "cuda:1", marks=pytest.mark.multi_gpu))


def all_of_cross_entropy(input: Tensor, target: Tensor, weight: Tensor, token_weight: Tensor) -> Tensor:
    return cross_entropy(
        input, target, weight, token_weight=token_weight, label_smoothing=0.1, z_loss_weight=0.1, reduction="sum"
    )


def all_of_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    token_weight: Tensor,
    *adapter: Tensor,
) -> Tensor:
    return linear_cross_entropy(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, token_weight=token_weight,
        adapter=adapter, z_loss_weight=0.1, reduction="sum", chunk_bytes=256,
    )  # fmt: skip


def make_calls() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Ops with all their tensors, on the CPU; those with a single one have nothing to be apart from."""
    target, weights = torch.tensor([1, 0, -100, 10]), [torch.rand(11), torch.rand(4)]
    head = [torch.randn(4, 16), torch.randn(11, 16), target, torch.randn(11)]
    calls = {
        "cross_entropy": (all_of_cross_entropy, [torch.randn(4, 11), target, *weights]),
        "linear_cross_entropy": (
            all_of_linear_cross_entropy,
            [*head, *weights, torch.randn(4, 2), torch.randn(11, 2)],
        ),
    }
    for name, case in CASES.items():
        inputs, constants = case.make(2, 3, 16)
        calls[f"case_{name}"] = case.fused, [*inputs, *constants]
    return {name: call for name, call in calls.items() if len(call[1]) > 1}


CALLS = make_calls()


@pytest.mark.parametrize(("device", "other"), DEVICES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("with_gradient", [False, True], ids=["", "gradient"])
def test_tensor_of_another_device_raises_before_and_after_good_calls(
    name: str, with_gradient: bool, device: str, other: str
) -> None:
    function, tensors = CALLS[name]
    tensors = [x.to(device) for x in tensors]
    if with_gradient:
        tensors[0].requires_grad_()

    def run() -> list[Tensor]:
        found = function(*tensors)
        return list(found) if isinstance(found, tuple) else [found]

    def assert_each_raises() -> None:
        for index, tensor in enumerate(tensors):
            moved = [*tensors[:index], tensor.to(other), *tensors[index + 1 :]]
            with pytest.raises((ValueError, RuntimeError), match="device"):
                function(*moved)

    assert_each_raises()
    expected = run()
    assert_each_raises()
    # An access to memory that is not there would break every later call.
    assert_same(run(), expected)
