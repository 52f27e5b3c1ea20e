"""Each check of arguments takes every right value, and says of a wrong one its name, the value and what is right."""

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from liger_ops import arguments as checks
from liger_ops.arguments import check_choice, check_floating, check_same_device, did_you_mean, shown

FIXED = settings(derandomize=True, deadline=None)
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(), st.complex_numbers(max_magnitude=9),
    st.text(max_size=8), st.binary(max_size=3), st.lists(st.integers(), max_size=2), st.tuples(st.text(max_size=2)),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2), st.builds(torch.ones, st.just((2,))),
    st.builds(torch.tensor, st.floats(width=32)), st.builds(np.ones, st.just(2)), st.builds(np.float32, st.just(0.5)),
    st.builds(Fraction, st.integers(), st.integers(1, 5)), st.builds(Path, st.just("a")), st.builds(object),
    st.sampled_from((torch.float32, torch.int64, torch.device("cpu"), torch.nn.ReLU(), "cpu", "b", float, int)),
    st.sampled_from([torch.ones(2, dtype=dtype) for dtype in (torch.bool, torch.int64, torch.cfloat, torch.half)]),
)  # fmt: skip


def judge(
    check: Callable[..., Any], value: Any, is_right: bool, expected: str, *arguments: Any, **options: Any
) -> None:
    """Fails unless the check takes a right value, and names a wrong one in a message that has all ``expected``."""
    if is_right:
        check("the_name", value, *arguments, **options)
        return
    with pytest.raises((TypeError, ValueError)) as raised:
        check("the_name", value, *arguments, **options)
    message = str(raised.value)
    assert message.startswith("the_name must be "), message
    assert f"got {shown(value)}" in message, message
    assert all(word in message for word in expected.split("|")), message
    assert ("or None" in message) == options.get("optional", "or None" in message)


def is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool | np.bool_)


@FIXED
@given(
    ANYTHING, st.sampled_from([-1.5, 0, 0.5, 3]), st.sampled_from([-1.5, 0, 0.5, 3]), st.integers(0, 3), st.booleans()
)
def test_numbers(value: Any, low: float, high: float, kind: int, optional: bool) -> None:
    lower, upper = (("above", "at_least")[kind % 2], low), (("below", "at_most")[kind // 2], high)
    is_right = value is None and optional
    if is_number(value, int, float, np.float32, Fraction) and -math.inf < value < math.inf:
        is_right = (value > low or (value == low and kind % 2 == 1)) and (value < high or (value == high and kind > 1))
    words = f"a finite number|{lower[0].replace('_', ' ')} {low}|{upper[0].replace('_', ' ')} {high}"
    judge(checks.check_number, value, is_right, words, optional=optional, **dict((lower, upper)))


@FIXED
@given(ANYTHING, st.integers(-3, 3), st.integers(-3, 9), st.booleans())
def test_integers(value: Any, low: int, high: int, optional: bool) -> None:
    is_right = (value is None and optional) or (is_number(value, int) and low <= value <= high)
    words = f"an integer|of at least {low}|at most {high}"
    judge(checks.check_integer, value, is_right, words, at_least=low, at_most=high, optional=optional)
    is_right = (value is None and optional) or (is_number(value, int) and -(2**63) <= value < 2**63)
    judge(checks.check_integer, value, is_right, "an integer", optional=optional)


@FIXED
@given(ANYTHING, st.booleans())
def test_other_kinds(value: Any, optional: bool) -> None:
    is_none = value is None and optional
    is_tensor, is_text, is_path = (isinstance(value, each) for each in (Tensor, str, str | Path))
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    judge(checks.check_bool, value, is_none or isinstance(value, bool), "True or False", optional=optional)
    judge(checks.check_tensor, value, is_none or is_tensor, "a tensor", optional=optional)
    judge(
        check_floating, value, is_none or (is_tensor and value.dtype in floats), "a floating-point", optional=optional
    )
    judge(checks.check_text, value, is_none or (is_text and value != ""), "that is not empty", optional=optional)
    judge(checks.check_path, value, is_none or (is_path and value != ""), "a path", optional=optional)
    judge(
        checks.check_floating_dtype,
        value,
        value in (None, float, *floats) if not is_tensor and not isinstance(value, np.ndarray) else False,
        "torch.float32|bfloat16|float16",
    )
    judge(check_choice, value, isinstance(value, str) and value in ("b", "cpu"), "one of 'b', 'cpu'", ("b", "cpu"))
    if is_tensor:
        judge(checks.check_shape, value, value.shape == (2,), "of shape (2,)|the pair's", (2,), "the pair's")
        others = {"other": None, "the_name": value}
        judge(lambda name, value: check_same_device("x", torch.ones(1), **others), value, True, "")
        judge(
            lambda name, value: check_same_device("x", torch.ones(1, device="meta"), **others), value, False, "on x's"
        )
    elif not is_none:
        judge(
            lambda name, value: checks.check_floating_tensors("x", torch.ones(1), optional=optional, the_name=value),
            value,
            False,
            "a floating-point",
        )


def test_similar_names_are_proposed() -> None:
    names = ("fsdp", "fsdp2", "ddp", None)
    assert did_you_mean("FSDP", names, most=3, cutoff=0.5) == " (did you mean 'fsdp', 'fsdp2' or 'ddp'?)"
    assert did_you_mean("zebra", names) == did_you_mean(3, names) == ""
    with pytest.raises(ValueError, match=r"^strategy must be one of 'fsdp', .*, got 'dpp' \(did you mean 'ddp'\?\)$"):
        check_choice("strategy", "dpp", names)


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
