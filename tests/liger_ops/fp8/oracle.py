"""Float8 in float64: e4m3 by a table of its values, scales by comparison, and draws of rows that are hard to round."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LEAST_EXPONENT = -108


def _value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return math.copysign(math.nan if code & 127 == 127 else magnitude, -1.0 if code & 128 else 1.0)


VALUES = np.array([_value(code) for code in range(256)])
"""Of each byte."""
_POSITIVE = VALUES[:127]
_MIDDLES = (_POSITIVE[:-1] + _POSITIVE[1:]) / 2


def as_numpy(x: Tensor) -> np.ndarray:
    """Values in float64."""
    return x.detach().cpu().to(torch.float64).numpy()


def codes_of(payload: Tensor) -> np.ndarray:
    """The bytes of a payload; of the two that are NaN always the same."""
    assert payload.dtype == E4M3
    codes = payload.detach().cpu().contiguous().view(torch.uint8).numpy()
    return np.where(codes & 127 == 127, 127, codes)


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """The byte of the nearest value, ties to that with an even one; values above the largest are an error."""
    size = np.abs(x)
    assert not np.any(size > 448), size.max()
    below = np.searchsorted(_MIDDLES, size)
    is_tie = size == _MIDDLES[np.minimum(below, len(_MIDDLES) - 1)]
    codes = np.where(is_tie & (below % 2 == 1), below + 1, below)
    return np.where(np.isnan(x), 127, codes | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def scales_of(rows: np.ndarray) -> np.ndarray:
    """The least power of two of each row by which its values are at most 448; NaN if one is infinite."""
    size = np.nan_to_num(np.abs(rows), nan=0.0, posinf=np.inf).max(axis=1)
    mantissa, exponent = np.frexp(np.where(np.isinf(size), 1.0, size))
    exponent = np.where(mantissa > 448 / 512, exponent - 8, exponent - 9)
    exponent = np.where(size == 0, LEAST_EXPONENT, np.maximum(exponent, LEAST_EXPONENT))
    return np.where(np.isinf(size), np.nan, np.ldexp(1.0, exponent))


def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales of rows; the bytes of rows with infinities are those of zeros."""
    scales = scales_of(rows)
    finite = np.where(np.isnan(scales)[:, None], 0.0, rows)
    return round_to_e4m3(finite / np.nan_to_num(scales, nan=1.0)[:, None]), scales


def dequantized(rows: np.ndarray) -> np.ndarray:
    """What is left of rows after quantization."""
    codes, scales = quantize(rows)
    return VALUES[codes] * scales[:, None]


def assert_quantized(payload: Tensor, scale: Tensor, rows: np.ndarray) -> None:
    """Bit for bit, but for the payloads of rows with infinities, and the scales of rows with nothing but NaN."""
    codes, scales = quantize(rows)
    assert scale.dtype == torch.float32
    is_number = ~np.isnan(rows).all(axis=1)
    np.testing.assert_array_equal(as_numpy(scale)[is_number], scales[is_number])
    known = ~np.isnan(scales)
    np.testing.assert_array_equal(codes_of(payload)[known], codes[known])


ROWS = ("normal", "sizes", "zeros", "subnormal", "least", "bound", "ties", "last", "nan", "inf", "huge", "tiny")


def hard_rows(kinds: list[str], num_columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A row of each kind, on the CPU."""
    random = np.random.default_rng(seed)
    rows = [_hard_row(kind, num_columns, dtype, random) for kind in kinds]
    return torch.tensor(np.array(rows)).to(dtype)


def _hard_row(kind: str, num_columns: int, dtype: torch.dtype, random: Any) -> np.ndarray:
    row = random.normal(size=num_columns)
    signs = np.sign(row)
    place = random.integers(num_columns)
    exponent = int(random.integers(-60, 60))
    if kind == "sizes":  # most of them below the payload's normal numbers
        return row * np.exp2(random.uniform(-25, 0, num_columns))
    if kind == "zeros":
        return 0.0 * signs
    if kind == "subnormal":
        return signs * torch.finfo(dtype).smallest_normal * random.random(num_columns)
    if kind == "least":  # around the row of the least scale
        return row * 2.0**-100
    if kind == "bound":  # the largest value with a scale, its neighbours, and what follows from them
        bound = torch.tensor(448.0 * 2.0**exponent, dtype=dtype)
        toward = torch.tensor([0.0, float(bound), torch.inf], dtype=dtype)[random.integers(3)]
        row = signs * random.uniform(0, 448 * 2.0**exponent, num_columns) * 0.9
        row[place] = signs[place] * float(torch.nextafter(bound, toward).double())
        return row
    if kind == "ties":
        row = signs * random.choice(np.concatenate([_MIDDLES, _POSITIVE]), num_columns) * 2.0**exponent
        row[place] = 448 * 2.0**exponent
        return row
    if kind == "last":
        row[-1] = 1e4
    elif kind == "nan":
        row[place] = np.nan
    elif kind == "inf":
        row[place] = signs[place] * np.inf
    return row * {"huge": 1e30, "tiny": 1e-30}.get(kind, 1.0)
