"""The checks of arguments that need more than a table of bad inputs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from liger_ops.arguments import check_choice, check_floating, check_same_device, did_you_mean


def test_similar_names_are_proposed() -> None:
    names = ("fsdp", "fsdp2", "ddp", None)
    assert did_you_mean("FSDP", names, most=3, cutoff=0.5) == " (did you mean 'fsdp', 'fsdp2' or 'ddp'?)"
    assert did_you_mean("zebra", names) == did_you_mean(3, names) == ""
    with pytest.raises(ValueError, match=r"^strategy must be one of 'fsdp', .*, got 'dpp' \(did you mean 'ddp'\?\)$"):
        check_choice("strategy", "dpp", names)


def test_tensors_of_one_device_and_none_pass() -> None:
    x = torch.ones(2)
    check_same_device("x", x, weight=torch.nn.Parameter(x), bias=None, other=torch.tensor(3))
    check_same_device("x", x.to("meta"), weight=torch.ones(3, device="meta"))
    check_same_device("x", x)


@pytest.mark.parametrize(("device", "other"), [("cpu", "meta"), ("meta", "cpu")])
def test_tensor_of_another_device_is_named(device: str, other: str) -> None:
    message = rf"^bias must be on x's device {device}, got a tensor of shape \(3,\), torch.float32 on {other}$"
    with pytest.raises(ValueError, match=message):
        x, bias = torch.ones(2, device=device), torch.ones(3, device=other)
        check_same_device("x", x, weight=torch.ones(2, device=device), bias=bias)


@pytest.mark.parametrize("value", ["x", 1.0, [1.0], np.ones(1)], ids=["str", "float", "list", "array"])
def test_what_is_no_tensor_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="weight must be a tensor or None, got "):
        check_same_device("x", torch.ones(2), weight=value)


def test_fake_tensors_are_where_they_say() -> None:
    with FakeTensorMode():
        x, weight = torch.ones(2), torch.ones(2)
        check_same_device("x", x, weight=weight)
    with pytest.raises(ValueError, match="weight must be on x's device cpu"):
        check_same_device("x", x, weight=torch.ones(2, device="meta"))


def test_distributed_tensors_are_where_their_parts_are() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sharded = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Replicate()])
    check_same_device("x", sharded, weight=sharded, bias=torch.ones(2))
    with pytest.raises(ValueError, match="bias must be on x's device cpu"):
        check_same_device("x", sharded, bias=torch.ones(2, device="meta"))


def test_compiler_sees_no_break() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        check_floating("x", x)
        check_same_device("x", x, weight=weight, bias=bias)
        return x * weight

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2), torch.ones(2), None).tolist() == [1.0, 1.0]


def test_choice_is_none_of_what_cannot_be_compared() -> None:
    for value in (torch.ones(2), torch.ones(()), np.ones(2), [1], {}):
        with pytest.raises(ValueError, match="number must be one of 1, 2, got "):
            check_choice("number", value, (1, 2))
