"""RMSNorm, RMSNorm of a sum and LayerNorm: kernels against plain PyTorch in float64 at all sizes and options."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import add_rms_norm, layer_norm, rms_norm
from liger_ops.norm.rms_norm import CASTINGS
from liger_ops.norm.row_norm import RowNormOptions, row_norm_reference
from tests.liger_ops.accuracy import DTYPES, assert_as_accurate, few, lay_out

EPS = 1e-6
# Where tiles, masks and blocks change; 17 rows of 1024 take three tiles on the interpreter's two programs.
SHAPES = [
    *((5, 4), (1, 6), (2, 3, 123), (200, 64), (17, 1024), (2, 3, 507), (7, 4096), (3, 5000)),
    *((3, 9000), (3, 12288), (3, 16384)),
]


class Call(NamedTuple):
    """Options of a norm."""

    casting: str | None  # None for LayerNorm
    offset: float
    weighted: bool
    biased: bool
    added: bool


def take_apart(call: Call, others: Sequence[Tensor]) -> list[Tensor | None]:
    """The residual, the weight and the bias that a call has."""
    rest = iter(others)
    return [next(rest) if has else None for has in (call.added, call.weighted, call.biased)]


def plain(call: Call, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The formulas of Hugging Face's Gemma and Llama layers, of a layer without casts, and PyTorch's LayerNorm."""
    residual, weight, bias = take_apart(call, others)
    total = x if residual is None else x + residual
    if call.casting is None:
        wide = (None if each is None else each.to(total.dtype) for each in (weight, bias))
        return (F.layer_norm(total, total.shape[-1:], *wide, EPS),)
    wide = total if call.casting == "none" else total.to(torch.promote_types(total.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if call.casting != "gemma" or weight is None:
        y = y.to(total.dtype)
    if weight is not None:
        y = y * (call.offset + (weight.to(wide.dtype) if call.casting == "gemma" else weight))
    y = y.to(total.dtype) if call.casting == "gemma" else y
    return (y, total) if call.added else (y,)


def fused(call: Call, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    residual, weight, bias = take_apart(call, others)
    if call.casting is None:
        return (layer_norm(x, x.shape[-1:], weight, bias, EPS),)
    options: Any = {"offset": call.offset, "casting": call.casting}
    if residual is not None:
        return add_rms_norm(x, residual, x.shape[-1:], weight, EPS, **options)
    return (rms_norm(x, x.shape[-1:], weight, EPS, **options),)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    casting, weighted = draw(st.sampled_from([*CASTINGS, None])), draw(st.booleans())
    if casting is None:
        return Call(None, 0.0, weighted, draw(st.booleans()), False)
    return Call(casting, draw(st.sampled_from([0.0, 1.0])) if weighted else 0.0, weighted, False, draw(st.booleans()))


@given(
    draw=st.builds(
        SimpleNamespace,
        call=calls(),
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        parameter_dtype=st.sampled_from([None, torch.float32]),
        residual_dtype=st.sampled_from([None, torch.float32]),
        layouts=st.tuples(*2 * [st.sampled_from(["contiguous", "sliced", "transposed"])]),
        wanted=st.sets(st.integers(0, 3)),
        used=st.sampled_from([(True, True), (True, False), (False, True)]),
        seed=st.integers(0, 2**16),
    )
)
@few(150)
def test_no_less_accurate_than_plain_pytorch(draw: Any, triton_device: torch.device) -> None:
    """With gradients of some inputs, of one output or both."""
    torch.manual_seed(draw.seed)
    call, shape, dtype = draw.call, draw.shape, draw.dtype
    num_parameters = call.weighted + call.biased
    dtypes = [draw.residual_dtype or dtype] * call.added + [draw.parameter_dtype or dtype] * num_parameters
    sizes = [shape] * call.added + [shape[-1:]] * num_parameters
    inputs = [lay_out((3 * torch.randn(shape)).to(triton_device, dtype), draw.layouts[0])]
    inputs += [torch.randn(size).to(triton_device, each) for size, each in zip(sizes, dtypes, strict=True)]
    needs = [index in draw.wanted or not draw.wanted & {*range(len(inputs))} for index in range(len(inputs))]
    upstream = [lay_out(torch.randn(shape, device=triton_device).to(dtype), draw.layouts[1]) for _ in range(2)]

    def run(function: Callable[..., tuple[Tensor, ...]], in_dtype: torch.dtype | None) -> list[Tensor | None]:
        leaves = [each.detach().to(in_dtype or each.dtype) for each in inputs]
        asked = [leaf.requires_grad_() for leaf, need in zip(leaves, needs, strict=True) if need]
        outputs = function(call, *leaves)
        chosen = [each for each in zip(outputs, upstream, draw.used, strict=False) if each[2] and each[0].requires_grad]
        if not chosen:
            return [*outputs, *([None] * len(asked))]
        ys, gradients = zip(*((y, gradient.to(y)) for y, gradient, _ in chosen), strict=True)
        return [*outputs, *torch.autograd.grad(ys, asked, gradients, allow_unused=True)]

    actual, eager, truth = run(fused, None), run(plain, None), run(plain, torch.float64)
    # Triton's interpreter rounds to bfloat16 toward zero, which doubles the error that float32 results carry along.
    factor = 4.0 if torch.bfloat16 in (dtype, *dtypes) and torch.float32 in dtypes else 2.0
    for index, (ours, theirs, true) in enumerate(zip(actual, eager, truth, strict=True)):
        assert (ours is None) == (true is None), index
        if ours is not None and theirs is not None and true is not None:
            assert ours.dtype == theirs.dtype
            assert_as_accurate(f"result {index}", ours, theirs, true, factor=factor)


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
