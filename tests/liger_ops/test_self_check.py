"""The self-checks that users run: they cover every public op, pass, and find ops that are wrong."""

import inspect
import itertools
import math
from typing import Any

import pytest
import torch

import liger_ops
from liger_ops import backend, self_check
from liger_ops.fp8 import linear
from liger_ops.optim import moments
from liger_ops.self_check import CASES, COMPARED, NAMES, run_self_checks


def test_every_public_op_has_a_self_check() -> None:
    assert set(CASES) == {name for name in liger_ops.__all__ if inspect.isfunction(getattr(liger_ops, name))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_ops_pass(device: str, dtype: torch.dtype) -> None:
    results = list(run_self_checks(device=device, dtype=dtype))
    assert [result.op for result in results] == list(NAMES)
    assert [result for result in results if result.message] == []
    assert all(result.error <= result.allowed for result in results)
    paths = {"triton"} if device == "cuda" else {"pytorch", "emulated"}
    assert {result.path for result in results} == paths


def test_kernels_pass(triton_device: torch.device) -> None:
    names = ("rms_norm", "silu_mul", "apply_rotary", "linear_token_loss")  # the last is no case of test_ops
    results = list(run_self_checks(names, triton_device, torch.bfloat16))
    assert [(result.path, result.message) for result in results] == 4 * [("triton", "")]


def _spoilt(op: Any, what: str) -> Any:
    """``op`` with a fault of one kind."""

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y * 1.01 if what == "output" else y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * {"gradient": 1.01, "nan": math.nan}.get(what, 1.0)

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        if what == "error":
            raise RuntimeError("no kernel image is available\nfor this device")
        return Fault.apply(op(*args, **kwargs))

    return spoilt


@pytest.mark.parametrize("what", ["output", "gradient", "nan", "error"])
def test_an_op_that_is_wrong_is_found_and_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("silu_mul", "cross_entropy", "rms_norm"):
        monkeypatch.setattr(liger_ops, name, _spoilt(getattr(liger_ops, name), what))
    wrong = {result.op: result for result in run_self_checks() if result.message}
    assert set(wrong) == {"silu_mul", "cross_entropy", "rms_norm"}
    where = {"output": "output 0 is wrong", "error": "RuntimeError: no kernel image is available"}
    for result in wrong.values():
        assert result.message.startswith(where.get(what, "gradient of argument 0 is wrong"))
        assert "\n" not in result.message
        assert not result.error <= result.allowed


def test_kernels_of_small_moments_pass_unless_they_are_wrong(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = run_self_checks(["adamw_moments"], triton_device)
    assert result.message == ""
    encode, calls = moments.encode, itertools.count()  # four of each device
    monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    monkeypatch.setattr(moments, "encode", lambda x, *rest: encode(1.1 * x if next(calls) < 4 else x, *rest))
    (result,) = run_self_checks(["adamw_moments"], triton_device)
    assert result.message.startswith("it is wrong")


def test_float8_products_that_are_wrong_or_unsupported_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    product, calls = linear.scaled_product, []

    def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)  # the fourth is the gradient of the weights, after two outputs and that of the input
        return product(*args, **kwargs) * (1.1 if len(calls) == 4 else 1.0)

    monkeypatch.setattr(linear, "scaled_product", spoilt)
    found = []
    for name in list(COMPARED)[:3]:
        calls.clear()
        found += [(result.op, result.message[:11]) for result in run_self_checks([name]) if result.message]
    assert found == [("float8_wgrad", "it is wrong")]
    monkeypatch.setattr(self_check, "unsupported", lambda device: "too old")
    (result,) = run_self_checks(["float8_fprop"])
    assert (result.message, result.is_unsupported, result.is_error) == ("too old", True, False)
