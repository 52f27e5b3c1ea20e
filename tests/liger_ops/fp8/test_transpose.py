"""Transposed payloads bit for bit, and rows that are brought to one scale."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.fp8.rows import E4M3, quantize_rows
from liger_ops.fp8.transpose import align, transpose
from tests.liger_ops.accuracy import LAYOUTS, few, lay_out
from tests.liger_ops.fp8.oracle import ROWS, VALUES, as_numpy, codes_of, hard_rows, round_to_e4m3


def powers_of_two(low: int, high: int, size: int) -> Tensor:
    """Random ones, float32."""
    return torch.randint(low, high + 1, (size,)).double().exp2().float()


@given(
    draw=st.builds(
        SimpleNamespace,
        num_rows=st.sampled_from([1, 2, 15, 16, 17, 37, 255, 257, 300]),
        num_columns=st.sampled_from([1, 3, 16, 63, 64, 65, 130]),
        source=st.sampled_from([E4M3, torch.bfloat16, torch.float32]),
        factor=st.sampled_from([torch.float32, torch.bfloat16]),
        layout=st.sampled_from(LAYOUTS[:-1]),
        inverse=st.booleans(),
        target=st.sampled_from(["new", "columns", "padded columns"]),
        seed=st.integers(0, 2**16),
    )
)
@few(40)
def test_transposed_rows(draw: Any, device: torch.device) -> None:
    """Times a factor a row or divided by it, with zeros in columns that fill up, and nothing written around them."""
    torch.manual_seed(draw.seed)
    num_rows, num_columns = draw.num_rows, draw.num_columns
    factor = powers_of_two(-12, 0, num_rows)
    if draw.source == E4M3:
        codes = torch.randint(0, 256, (num_rows, num_columns), dtype=torch.uint8)
        source = lay_out(codes.to(device), draw.layout).view(E4M3)
        values = VALUES[codes.numpy()]
    else:
        factor *= 2.0**20
        source = torch.randn(num_rows, num_columns).clamp(-4, 4).mul_(factor.reciprocal()[:, None] * 100.0)
        source = source.to(device, draw.source)
        values = as_numpy(source)
        source = lay_out(source, draw.layout)
    given_factor = (factor.reciprocal() if draw.inverse else factor).to(device, draw.factor)
    expected = round_to_e4m3(values * as_numpy(factor)[:, None]).T
    if draw.target == "new":
        found = transpose(source, given_factor, inverse=draw.inverse)
        assert found.shape == (num_columns, num_rows + -num_rows % 16)
    else:
        padded = num_rows if draw.target == "columns" else num_rows + 9
        memory = torch.full((num_columns, padded + 21), 3.0, device=device).to(E4M3)
        found = memory[:, 5 : 5 + padded]
        assert transpose(source, given_factor, inverse=draw.inverse, target=found) is found
        around = torch.cat((memory[:, :5].float(), memory[:, 5 + padded :].float()), dim=1)
        assert torch.all(around == 3.0)
    codes_found = codes_of(found)
    np.testing.assert_array_equal(codes_found[:, :num_rows], expected)
    assert not codes_found[:, num_rows:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inverse_of_scales_gives_the_payload(device: torch.device, dtype: torch.dtype) -> None:
    """So that payloads can be made again, transposed, of rows and their scales."""
    x = hard_rows([kind for kind in ROWS if kind != "inf"], 47, dtype, seed=3).to(device)
    payload, scale = quantize_rows(x)
    found = transpose(x, scale, inverse=True)
    np.testing.assert_array_equal(codes_of(found)[:, : len(x)], codes_of(payload).T)


@given(
    draw=st.builds(
        SimpleNamespace,
        num_rows=st.sampled_from([1, 2, 17, 1000, 4096, 5000, 9001]),
        num_channels=st.sampled_from([16, 4096, 4100, 9000]),
        spread=st.sampled_from([0, 3, 40]),
        is_payload=st.booleans(),
        channel_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        seed=st.integers(0, 2**16),
    )
)
@few(40)
def test_aligned_factors_give_back_each_scale(draw: Any, device: torch.device) -> None:
    """Of any two operands: factors that are at most 1, halves of one shift, the largest of which is none."""
    torch.manual_seed(draw.seed)
    x_scale, g_scale = (powers_of_two(-draw.spread, draw.spread, draw.num_rows) for _ in range(2))
    x_scale, channel_scale = x_scale * 2.0**7, powers_of_two(-20, 5, draw.num_channels)
    found = align(
        x_scale.to(device),
        g_scale.to(device),
        channel_scale.to(device, draw.channel_dtype),
        x_is_payload=draw.is_payload,
    )
    assert all(each.dtype == torch.float32 for each in found)
    x_factor, g_factor, weight_scale = map(as_numpy, found)
    if not draw.is_payload:
        x_factor = x_factor * as_numpy(x_scale)
    common = weight_scale * as_numpy(channel_scale)
    assert np.all(common == common[0])
    np.testing.assert_array_equal(x_factor * g_factor * common[0], as_numpy(x_scale) * as_numpy(g_scale))
    shifts = np.log2(x_factor), np.log2(g_factor)
    assert shifts[0].max() <= 0
    assert shifts[1].max() <= 0
    assert np.abs(shifts[0] - shifts[1]).max() <= 1
    assert (shifts[0] + shifts[1]).max() == 0


def sum_of_rows(x: Tensor, g: Tensor, device: torch.device, *, is_payload: bool) -> np.ndarray:
    """The sum over rows of the outer products of g's and x's rows, of their payloads, in float64."""
    (x_payload, x_scale), (g_payload, g_scale) = (quantize_rows(each.to(device)) for each in (x, g))
    x_factor, g_factor, scale = align(x_scale, g_scale, torch.ones(g.shape[1], device=device), x_is_payload=is_payload)
    operand = transpose(x_payload if is_payload else x.to(device), x_factor)
    return as_numpy(scale)[:, None] * (as_numpy(transpose(g_payload, g_factor)) @ as_numpy(operand).T)


@pytest.mark.parametrize("is_payload", [False, True])
def test_rows_of_zeros_count_for_nothing(device: torch.device, is_payload: bool) -> None:
    """Neither those of x nor those of g, nor do they shift others, even of sizes 2**20 apart."""
    x, g = torch.randn(9, 24) * 2.0**-10, torch.randn(9, 32) * 2.0**-20
    expected = sum_of_rows(x, g, device, is_payload=is_payload)
    zeros = torch.zeros(4, 24), torch.zeros(4, 32)
    others = torch.randn(4, 24) * 2.0**10, torch.randn(4, 32)
    longer = [torch.cat((x, zeros[0], others[0])), torch.cat((g, others[1], zeros[1]))]
    np.testing.assert_array_equal(sum_of_rows(*longer, device, is_payload=is_payload), expected)


@pytest.mark.parametrize("name", ["x", "g", "channel"])
def test_lost_rows_lose_the_sum(device: torch.device, name: str) -> None:
    scales = {"x": torch.ones(5000), "g": torch.ones(5000), "channel": torch.ones(64)}
    scales[name][33] = torch.nan
    *_, scale = align(*(each.to(device) for each in scales.values()), x_is_payload=False)
    lost = scale.isnan().cpu()
    assert lost[33]
    assert lost.all() == (name != "channel")


def test_sums_beyond_float32_are_not_finite(device: torch.device) -> None:
    large = torch.full((3,), 2.0**100, device=device)
    *_, scale = align(large, large, torch.ones(16, device=device), x_is_payload=True)
    assert not scale.isfinite().any()


@pytest.mark.parametrize("is_payload", [False, True])
def test_elements_that_are_nan_stay(device: torch.device, is_payload: bool) -> None:
    x, g = torch.randn(9, 24), torch.randn(9, 32)
    x[3] *= 8
    g[3] *= 8
    x[3, 5] = g[3, 6] = torch.nan
    lost = np.isnan(sum_of_rows(x, g, device, is_payload=is_payload))
    assert lost[6].all()
    assert lost[:, 5].all()
    assert lost.sum() == 24 + 32 - 1
