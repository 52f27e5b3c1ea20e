"""scale_gradient: one multiplication in float32, one rounding, and nothing at all where it can be avoided."""

import pytest
import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.loss import scale_gradient
from liger_ops.loss.scale_gradient import scale_gradient as scale

BLOCK = 16
FACTORS = [1.0, -2.5, 1 / 3, 0.0]


@pytest.fixture(autouse=True)
def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for each of few programs."""
    monkeypatch.setattr(scale_gradient, "_BLOCK_SIZE", BLOCK)
    monkeypatch.setattr(scale_gradient, "_PROGRAMS_PER_MULTIPROCESSOR", 1)
    monkeypatch.setattr(backend, "num_multiprocessors", lambda device: 2)


def rounded_product(gradient: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    product = gradient.float() * factor
    if dtype == torch.bfloat16 and backend.use_triton(gradient) and not gradient.is_cuda:
        # Triton's interpreter rounds to bfloat16 towards zero.
        product = (product.view(torch.int32) & -(2**16)).view(torch.float32)
    return product.to(dtype)


# Below, at and past one block, and more blocks than programs.
@pytest.mark.parametrize("shape", [(0,), (1,), (BLOCK,), (BLOCK + 1,), (5, 2 * BLOCK + 3)], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
@pytest.mark.parametrize("factor", FACTORS)
def test_every_size_is_scaled(shape: tuple[int, ...], in_place: bool, factor: float, device: torch.device) -> None:
    gradient = torch.randn(shape, device=device)
    before = gradient.clone()
    scaled = scale(gradient, torch.tensor(factor, device=device), torch.float32, in_place=in_place)
    assert torch.equal(scaled, rounded_product(before, factor, torch.float32))
    assert (scaled.data_ptr() == gradient.data_ptr()) == (in_place or gradient.numel() == 0)
    assert in_place or torch.equal(gradient, before)


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
@pytest.mark.parametrize(
    ("from_dtype", "to_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_product_is_rounded_once_to_the_dtype_asked_for(
    from_dtype: torch.dtype, to_dtype: torch.dtype, in_place: bool, device: torch.device
) -> None:
    gradient = torch.randn(3, BLOCK + 5, device=device).to(from_dtype)
    before = gradient.clone()
    factor = 1 / 3  # which bfloat16 rounds by 0.2 %
    scaled = scale(gradient, torch.tensor(factor, device=device), to_dtype, in_place=in_place)
    assert scaled.dtype == to_dtype
    assert torch.equal(scaled, rounded_product(before, torch.tensor(factor).item(), to_dtype))
    is_same_storage = scaled.data_ptr() == gradient.data_ptr()
    assert is_same_storage == (in_place and from_dtype == to_dtype)
    assert is_same_storage or torch.equal(gradient, before)


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
    gradient = bits.view(torch.float32)
    one = torch.ones((), device=triton_device)
    assert scale(gradient, one, torch.float32, in_place=True) is gradient
    assert (bits == 0x7FA00001).all()


@pytest.mark.parametrize("factor", [torch.nan, torch.inf])
def test_factor_that_is_not_finite_shows(factor: float, device: torch.device) -> None:
    gradient = torch.tensor([1.0, 0.0, -2.0], device=device)
    expected = gradient * factor
    scaled = scale(gradient, torch.tensor(factor, device=device), torch.float32, in_place=True)
    torch.testing.assert_close(scaled, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("numel", [0, 2 * BLOCK])
def test_op_passes_opcheck(numel: int, dtype: torch.dtype, device: torch.device) -> None:
    arguments = torch.randn(numel, device=device, dtype=torch.bfloat16), torch.tensor(0.3, device=device), dtype
    torch.library.opcheck(
        torch.ops.liger_ops.scale_gradient.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
def test_elements_past_two_to_the_31_are_scaled(in_place: bool) -> None:
    numel = 2**31 + 12345
    gradient = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    scaled = scale(gradient, torch.tensor(3.0, device="cuda"), torch.bfloat16, in_place=in_place)
    assert (scaled == 3.0).all()
    assert in_place or (gradient == 1.0).all()
