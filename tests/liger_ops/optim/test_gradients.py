"""The norm of many tensors and their scaling, against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.optim.gradients import Batch
from tests.liger_ops.accuracy import few

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, 7, 2047, 2048, 4096, 70_000]
"""Around a block, and of more than a chunk."""


def make(size: int, dtype: torch.dtype, layout: str, device: torch.device) -> Tensor:
    """Random numbers; a view that is not aligned, or not contiguous, or a sparse tensor."""
    if layout == "sparse" and size:
        index = torch.randint(size, (1, 5), device=device)  # may repeat
        return torch.sparse_coo_tensor(index, torch.randn(5, device=device).to(dtype), (size,))
    if layout == "transposed":
        return torch.randn(3, size, device=device).to(dtype).T
    return torch.randn(size + 1, device=device).to(dtype)[1 if layout == "shifted" else 0 :][:size]


def truth(tensors: list[Tensor]) -> float:
    dense = [(each.to_dense() if each.is_sparse else each).double().flatten() for each in tensors]
    return float(torch.cat([*dense, torch.zeros(1, dtype=torch.float64, device=dense[0].device)]).norm())


@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(SIZES), st.sampled_from(DTYPES), st.sampled_from(["whole"] * 4 + ["shifted", "transposed"])
        ),
        min_size=1,
        max_size=8,
    ),
    factor=st.sampled_from([1.0, 0.37, 0.0, float("nan")]),
    seed=st.integers(0, 99),
)
@few(60)
def test_norm_and_product_are_those_of_float64(kinds: Any, factor: float, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    tensors = [make(*kind, device) for kind in kinds]
    batch = Batch(tensors)
    norm = batch.norm(device)
    assert norm.shape == ()
    assert norm.dtype == (
        torch.float64 if any(each.dtype == torch.float64 for each in tensors if each.numel()) else torch.float32
    )
    assert float(norm) == pytest.approx(truth(tensors), rel=3e-6)
    before, versions = [each.clone() for each in tensors], [each._version for each in tensors]
    batch.multiply_(torch.tensor(factor, device=device))
    for tensor, old, version in zip(tensors, before, versions, strict=True):
        want = (old.double() * float(torch.tensor(factor))).to(tensor.dtype)
        # PyTorch rounds the factor to a tensor's dtype first.
        torch.testing.assert_close(tensor, want, rtol=2 * torch.finfo(tensor.dtype).eps, atol=1e-7, equal_nan=True)
        assert tensor._version > version or not tensor.numel()


def test_kernels_take_all_tensors_that_are_aligned(triton_device: torch.device, monkeypatch: Any) -> None:
    launched = []
    add = Batch._square_sum
    monkeypatch.setattr(Batch, "_square_sum", lambda self, kind: launched.append(self._alike[kind]) or add(self, kind))
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    tensors = [
        torch.ones(size, dtype=dtype, device=triton_device) for size, dtype in zip((9, 70_000, 3), dtypes, strict=True)
    ]
    assert float(Batch(tensors).norm(triton_device)) == pytest.approx(70_012**0.5)
    assert [[id(each) for each in group] for group in launched] == [
        [id(tensors[0]), id(tensors[2])],
        [id(tensors[1])],
    ]


def test_what_is_not_finite_is_kept(device: torch.device) -> None:
    for value in (float("inf"), float("nan")):
        tensors = [torch.ones(3000, device=device), torch.tensor([1.0, value], device=device)]
        assert str(float(Batch(tensors).norm(device))) == str(value)
        Batch(tensors).multiply_(torch.tensor(0.5, device=device))
        assert tensors[0].eq(0.5).all()
        assert str(float(tensors[1][1])) == str(value)


@pytest.mark.parametrize("norm_type", [1.0, 3.0, float("inf")])
def test_other_norms(norm_type: float, device: torch.device) -> None:
    tensors = [torch.randn(size, device=device) for size in (5, 0, 3000)]
    want = torch.cat(tensors).double().norm(norm_type)
    assert float(Batch(tensors).norm(device, norm_type)) == pytest.approx(float(want), rel=1e-6)


def test_sparse_complex_and_no_tensors() -> None:
    device = torch.device("cpu")
    tensors = [make(50, torch.float32, "sparse", device), torch.tensor([3 + 4j])]
    assert float(Batch(tensors).norm(device)) == pytest.approx((truth(tensors[:1]) ** 2 + 25) ** 0.5)
    want = [tensors[0].to_dense() * 0.5, tensors[1] * 0.5]
    Batch(tensors).multiply_(torch.tensor(0.5))
    torch.testing.assert_close([tensors[0].to_dense(), tensors[1]], want)
    assert float(Batch([]).norm(device)) == 0.0


def test_sums_are_those_of_the_last_call(triton_device: torch.device) -> None:
    """Addresses are read anew: tensors of the same sizes lie elsewhere."""
    for value in (1.0, 2.0, 3.0):
        tensors = [torch.full((5000,), value, device=triton_device) for _ in range(3)]
        assert float(Batch(tensors).norm(triton_device)) == pytest.approx(value * 15_000**0.5)
        Batch(tensors[1:]).multiply_(torch.tensor(2.0, device=triton_device))
        assert [float(each.mean()) for each in tensors] == [value, 2 * value, 2 * value]
