"""scale_gradient: one multiplication in float32, one rounding, and nothing at all where it can be avoided."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import backend
from liger_ops.loss import scale_gradient
from liger_ops.loss.scale_gradient import scale_gradient as scale
from tests.liger_ops.accuracy import DTYPES, few

BLOCK = 16


@pytest.fixture(autouse=True)
def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for each of few programs."""
    monkeypatch.setattr(scale_gradient, "_BLOCK_SIZE", BLOCK)
    monkeypatch.setattr(scale_gradient, "_PROGRAMS_PER_MULTIPROCESSOR", 1)
    few_programs = backend.hardware(torch.device("cpu"))
    monkeypatch.setattr(backend, "hardware", lambda device: few_programs)


def rounded_product(gradient: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    product = gradient.float() * factor
    if dtype == torch.bfloat16 and backend.use_triton(gradient) and not gradient.is_cuda:
        # Triton's interpreter rounds to bfloat16 toward zero.
        product = (product.view(torch.int32) & -(2**16)).view(torch.float32)
    return product.to(dtype)


@given(
    shape=st.sampled_from([(0,), (1,), (BLOCK,), (BLOCK + 1,), (5, 2 * BLOCK + 3)]),
    factor=st.sampled_from([1.0, -2.5, 1 / 3, 0.0, torch.nan, torch.inf]),  # bfloat16 rounds a third by 0.2%
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    in_place=st.booleans(),
)
@few(80)
def test_product_is_rounded_once_to_the_dtype_asked_for(
    shape: tuple[int, ...],
    factor: float,
    dtypes: tuple[torch.dtype, torch.dtype],
    in_place: bool,
    device: torch.device,
) -> None:
    gradient = torch.randn(shape, device=device).to(dtypes[0])
    before, number = gradient.clone(), torch.tensor(factor, device=device)
    scaled = scale(gradient, number, dtypes[1], in_place=in_place)
    assert scaled.dtype == dtypes[1]
    # Alone in one dtype a factor of 1 is no multiplication, in which the interpreter would round.
    expected = before if factor == 1.0 and dtypes[0] == dtypes[1] else rounded_product(before, number.item(), dtypes[1])
    torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)
    is_same = in_place and dtypes[0] == dtypes[1]
    assert (scaled is gradient) == is_same
    assert is_same or torch.equal(gradient, before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
def test_float64_keeps_its_precision(in_place: bool, device: str) -> None:
    gradient = torch.randn(40, dtype=torch.float64, device=device)
    expected = gradient * (1 / 3)
    factor = torch.tensor(1 / 3, dtype=torch.float64, device=device)
    assert torch.equal(scale(gradient, factor, torch.float64, in_place=in_place), expected)


def test_factor_of_one_in_place_leaves_the_memory_alone(triton_device: torch.device) -> None:
    # A NaN with a payload, which no multiplication keeps.
    bits = torch.full((40,), 0x7FA00001, dtype=torch.int32, device=triton_device)
    one = torch.ones((), device=triton_device)
    scale(bits.view(torch.float32), one, torch.float32, in_place=True)
    assert (bits == 0x7FA00001).all()


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
def test_elements_past_two_to_the_31_are_scaled(in_place: bool) -> None:
    numel = 2**31 + 12345
    gradient = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    scaled = scale(gradient, torch.tensor(3.0, device="cuda"), torch.bfloat16, in_place=in_place)
    assert (scaled == 3.0).all()
    assert in_place or (gradient == 1.0).all()
