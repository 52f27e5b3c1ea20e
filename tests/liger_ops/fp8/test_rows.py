"""Rows in float8, bit for bit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_ops.fp8.rows import E4M3, quantize_rows
from tests.liger_ops.accuracy import LAYOUTS, few, lay_out
from tests.liger_ops.fp8.oracle import ROWS, as_numpy, assert_quantized, codes_of, hard_rows, round_to_e4m3


@given(
    draw=st.builds(
        SimpleNamespace,
        kinds=st.lists(st.sampled_from(ROWS), min_size=1, max_size=17),
        parts=st.lists(st.sampled_from([1, 7, 16, 129, 300, 1024]), min_size=1, max_size=4),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        layout=st.sampled_from(LAYOUTS),
        channels=st.sampled_from([None, torch.float32, torch.bfloat16]),
        is_given=st.booleans(),
        seed=st.integers(0, 2**16),
    )
)
@few(80)
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_payloads_and_scales(draw: Any, device: torch.device) -> None:
    """Of one tensor or several side by side, laid out in any way, into new memory or into slices of given memory."""
    num_rows, num_columns = len(draw.kinds), sum(draw.parts)
    x = hard_rows(draw.kinds, num_columns, draw.dtype, draw.seed).to(device)
    parts = [lay_out(part, draw.layout) for part in x.split(draw.parts, dim=1)]
    wide = torch.cat(parts, dim=1).float().cpu()
    channels = None
    if draw.channels is not None:
        torch.manual_seed(draw.seed)
        channels = torch.randint(-9, 3, (num_columns,)).double().exp2().to(device, draw.channels)
        wide *= channels.cpu().float()
    payload = scale = None
    if draw.is_given:
        memory = torch.zeros(num_rows + 2, num_columns + 5, device=device).to(E4M3)
        scales = torch.zeros(num_rows + 2, device=device)
        payload, scale = memory[1:-1, 3:-2], scales[1:-1]
    found = quantize_rows(parts if len(parts) > 1 else parts[0], channels, payload, scale)
    assert_quantized(*found, as_numpy(wide))
    if draw.is_given:
        assert found[0] is payload
        assert found[1] is scale
        inner = codes_of(memory[1:-1, 3:-2])
        assert np.count_nonzero(codes_of(memory)) == np.count_nonzero(inner)  # nothing was written around it
        assert scales[0] == scales[-1] == 0


@pytest.mark.parametrize(
    "parts",
    [
        (16384,), (16385,), (24581,), (9000,),  # held in registers, and read twice
        (8192, 8192), (8191, 5), (4096, 4096, 4096), (8192, 4096, 4096), (8193, 4097), (12288, 16, 2048),
        (2048, 512, 512, 1024),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, -1])
def test_long_rows(device: torch.device, parts: tuple[int, ...], place: int) -> None:
    """The largest value may be in any part, and so may the only one that differs from zero."""
    x = torch.randn(3, sum(parts)).bfloat16()
    x[0, place] = 5000.0
    x[1, 1:-1] = 0.0
    channels = torch.randint(-3, 3, (sum(parts),)).float().exp2()
    wide = as_numpy(x) * as_numpy(channels)
    assert_quantized(*quantize_rows(list(x.to(device).split(parts, dim=1)), channels.to(device)), wide)


def test_no_rows(device: torch.device) -> None:
    payload, scale = quantize_rows(torch.empty(0, 32, device=device))
    assert payload.shape == (0, 32)
    assert scale.shape == (0,)


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    from liger_ops.fp8.transpose import transpose

    x = torch.empty(2**19 + 48, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    payload, scale = quantize_rows(x)
    assert_quantized(payload[-64:], scale[-64:], as_numpy(x[-64:]))
    factor = torch.ones_like(scale)
    factor[-7:] = 0.25
    tail = payload[-64:].float() * factor[-64:, None]
    np.testing.assert_array_equal(codes_of(transpose(payload, factor)[:, -64:]), round_to_e4m3(as_numpy(tail)).T)
    del x
    wide = payload.view(4096, 2**19 + 48)  # few rows, the last offsets of which are large
    columns = transpose(wide, torch.ones(4096, device="cuda"))
    np.testing.assert_array_equal(codes_of(columns[-64:]), codes_of(wide[:, -64:]).T)
    np.testing.assert_array_equal(codes_of(columns[:64]), codes_of(wide[:, :64]).T)
