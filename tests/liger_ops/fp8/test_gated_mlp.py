"""Gated MLPs in float8: equal to the composition of their parts, and close to float64."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import backend
from liger_ops.fp8.gated_mlp import gated_rows, gated_rows_backward, scaled_gated_mlp
from liger_ops.fp8.products import Float8Options, scaled_product
from liger_ops.fp8.rows import E4M3
from liger_ops.fp8.weights import Float8Weight
from tests.liger_ops.accuracy import LAYOUTS, few, lay_out
from tests.liger_ops.fp8.oracle import VALUES, as_numpy, codes_of, hard_rows, quantize
from tests.liger_ops.fp8.test_linear import error_of, leaves_of

HIDDEN, WIDTH = 48, 32
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "relu_squared": lambda gate: F.relu(gate).square(),
}
MEMORY = [Float8Options(), Float8Options(save_payloads=True)]


def draw_mlp(
    device: torch.device, lead: tuple[int, ...] = (7,), dtype: torch.dtype = torch.bfloat16, width: int = WIDTH
) -> list[Tensor]:
    """x, down, gate, up and an upstream gradient."""
    shapes = [(*lead, HIDDEN), (HIDDEN, width), (width, HIDDEN), (width, HIDDEN), (*lead, HIDDEN)]
    x, *weights, grad = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return [x, *(weight / weight.shape[1] ** 0.5 for weight in weights), grad]


def run(x: Tensor, down: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The output, and the gradients of x, down, and the weights of gate and up."""
    *gate_up, grad = rest
    leaves = leaves_of(x, down, *gate_up)
    y = scaled_gated_mlp(leaves[0], leaves[2:], leaves[1], **options)
    return y, *torch.autograd.grad(y, leaves, grad)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle's payload and scales."""
    codes, scales = quantize(as_numpy(rows))
    payload = torch.from_numpy(codes).to(rows.device).view(E4M3)
    return payload, torch.from_numpy(scales).float().to(rows.device)


def transposed(payload: Tensor) -> Tensor:
    return payload.view(torch.uint8).t().contiguous().view(E4M3)


def values(payload: Tensor, scale: Tensor) -> np.ndarray:
    return VALUES[codes_of(payload)] * as_numpy(scale)[:, None]


def composed(
    x: Tensor, down: Tensor, gate_up: Tensor, grad: Tensor, activation: str, up_first: bool, options: Float8Options
) -> list[Tensor | np.ndarray]:
    """The same of the oracle's payloads, PyTorch's activations and single products, those of weights in float64."""
    settings: dict[str, Any] = {"dtype": x.dtype, "emulate": options.emulate}
    (x_q, x_scale), (w_q, w_scale), (down_q, down_scale) = map(quantized, (x, gate_up, down))
    middle = scaled_product(x_q, w_q, x_scale, w_scale, fast_accum=True, **settings)
    kept = torch.from_numpy(values(*quantized(middle))).float().to(x.device) if options.save_payloads else middle

    def gated(halves: Tensor) -> Tensor:
        gate, up = halves.chunk(2, dim=1)[:: -1 if up_first else 1]
        return ACTIVATIONS[activation](gate) * up

    h_q, h_scale = quantized(gated(middle.float()))
    y = scaled_product(h_q, down_q, h_scale, down_scale, fast_accum=True, **settings)

    g_q, g_scale = quantized(grad.float() * down_scale)
    grad_h = scaled_product(g_q, transposed(down_q), g_scale, None, fast_accum=False, **settings)
    leaf = kept.float().detach().requires_grad_()
    again = gated(leaf)
    (grad_middle,) = torch.autograd.grad(again, leaf, grad_h.float())
    m_q, m_scale = quantized(grad_middle * w_scale)
    grad_x = scaled_product(m_q, transposed(w_q), m_scale, None, fast_accum=False, **settings)
    grad_down = (values(g_q, g_scale) / as_numpy(down_scale)).T @ values(*quantized(again))
    grad_gate_up = (values(m_q, m_scale) / as_numpy(w_scale)).T @ values(x_q, x_scale)
    return [y, grad_x, grad_down, grad_gate_up]


@given(
    draw=st.builds(
        SimpleNamespace,
        activation=st.sampled_from([*ACTIVATIONS]),
        lead=st.one_of(st.tuples(st.integers(1, 37)), st.sampled_from([(), (2, 3), (3, 1, 5)])),
        is_packed=st.booleans(),
        up_first=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        layouts=st.tuples(*2 * [st.sampled_from(LAYOUTS[:-1])]),
        options=st.sampled_from(MEMORY),
        seed=st.integers(0, 2**16),
    )
)
@few(10)
def test_equal_to_the_composition_of_the_parts(draw: Any, device: torch.device) -> None:
    """Bit for bit where PyTorch computes the activation; kernels' activations may round payloads to a neighbour."""
    torch.manual_seed(draw.seed)
    x, down, gate, up, grad = draw_mlp(device, draw.lead, draw.dtype)
    gate_up = [up, gate] if draw.up_first else [gate, up]
    both = torch.cat(gate_up)
    y, grad_x, grad_down, *grads = run(
        lay_out(x, draw.layouts[0]), down, *([both] if draw.is_packed else gate_up), lay_out(grad, draw.layouts[1]),
        activation=draw.activation, up_first=draw.up_first, options=draw.options,
    )  # fmt: skip
    assert [each.shape for each in (y, grad_x, grad_down)] == [x.shape, x.shape, down.shape]
    assert {each.dtype for each in (y, grad_x, grad_down, *grads)} == {draw.dtype}
    rows = [each.reshape(-1, HIDDEN) for each in (x, grad)]
    expected = composed(rows[0], down, both, rows[1], draw.activation, draw.up_first, draw.options)
    found = [y.view(-1, HIDDEN), grad_x.view(-1, HIDDEN), grad_down, torch.cat(grads)]
    is_exact = not backend.use_triton(x)
    for index, (actual, truth) in enumerate(zip(found, expected, strict=True)):
        if isinstance(truth, Tensor) and is_exact:
            assert torch.equal(actual, truth), index
        else:
            truth = as_numpy(truth) if isinstance(truth, Tensor) else truth
            assert error_of(actual, truth) <= 6e-3, index


def assert_neighbours(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Payloads of equal scales, in which now and then a value is the next one; the same rows are not finite."""
    pairs = zip(found[::2], found[1::2], expected[::2], expected[1::2], strict=True)
    for payload, scale, true_payload, true_scale in pairs:
        codes, true_codes = codes_of(payload), codes_of(true_payload)
        scales, true_scales = as_numpy(scale), as_numpy(true_scale)
        lost = (codes == 127).any(axis=1) | np.isnan(scales)
        np.testing.assert_array_equal(lost, (true_codes == 127).any(axis=1) | np.isnan(true_scales))
        np.testing.assert_array_equal(scales[~lost], true_scales[~lost])
        difference = np.abs((codes & 127).astype(int) - (true_codes & 127).astype(int))[~lost]
        assert difference.max(initial=0) <= 1
        assert difference.mean() <= 0.01 if difference.size else True
        has_other_sign = ((codes ^ true_codes) & 128 != 0) & (codes & 127 != 0) & (true_codes & 127 != 0)
        assert not has_other_sign[~lost].any()


@given(
    draw=st.builds(
        SimpleNamespace,
        activation=st.sampled_from([*ACTIVATIONS]),
        kinds=st.lists(
            st.sampled_from(["normal", "sizes", "zeros", "last", "nan", "inf", "tiny"]), min_size=1, max_size=17
        ),
        num_columns=st.sampled_from([16, 80, 512, 1040]),
        up_first=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        keep=st.booleans(),
        overwrite=st.booleans(),
        seed=st.integers(0, 2**16),
    )
)
@few(40)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_give_the_references_payloads(
    draw: Any, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with zeros, infinities, NaN and very small values too, kept or made again, in new memory or in place."""
    torch.manual_seed(draw.seed)
    columns = draw.num_columns
    gate_up = hard_rows(draw.kinds, 2 * columns, draw.dtype, draw.seed).to(triton_device)
    grad = torch.randn(len(gate_up), columns, device=triton_device).to(draw.dtype)
    channels = torch.randint(-12, 2, (2 * columns,), device=triton_device).double().exp2().bfloat16()

    def both(overwrite: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        payload, scale, *kept = gated_rows(gate_up, draw.activation, draw.up_first, keep=draw.keep)
        source, kept_scale = (kept[0].clone(), kept[1]) if draw.keep else (gate_up.clone(), None)
        backward = gated_rows_backward(
            grad, source, kept_scale, channels, draw.activation, draw.up_first, overwrite=overwrite
        )
        return (payload, scale, *(kept or (payload[:0], scale[:0]))), backward

    forward, backward = both(draw.overwrite)
    with monkeypatch.context() as context:
        context.setattr(backend, "use_triton", lambda tensor: False)
        expected, expected_backward = both(False)
    assert_neighbours(forward, expected)
    assert_neighbours(backward, expected_backward)
    for found, again in zip(backward, both(not draw.overwrite)[1], strict=True):
        known = ~torch.isnan(found.float())
        assert torch.equal(found.float()[known], again.float()[known])


@pytest.mark.parametrize("num_columns", [16384, 16400])
def test_wide_rows(device: torch.device, num_columns: int) -> None:
    """Held in registers, and beyond that."""
    gate_up = torch.randn(2, 2 * num_columns, device=device).bfloat16()
    gate_up[1] = 0.0
    gate_up[1, [num_columns - 1, -1]] = 1.0
    payload, scale, *_ = gated_rows(gate_up, "relu_squared", False)
    wide = gate_up.float()
    h = F.relu(wide[:, :num_columns]).square() * wide[:, num_columns:]
    codes, scales = quantize(as_numpy(h))
    np.testing.assert_array_equal(codes_of(payload), codes)
    np.testing.assert_array_equal(as_numpy(scale), scales)


@pytest.mark.parametrize("place", ["x", "grad"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("options", MEMORY)
def test_lost_tokens(device: torch.device, place: str, value: float, options: Float8Options) -> None:
    """What is not finite stays in its token, and the gradients of weights are lost."""
    x, down, gate, up, grad = draw_mlp(device)
    (x if place == "x" else grad)[3, 5] = value
    y, grad_x, *grads = run(x, down, gate, up, grad, options=options)
    lost = [[int(row) for row in (~each.isfinite()).any(dim=1).nonzero()] for each in (y, grad_x)]
    assert lost == ([[3], [3]] if place == "x" else [[], [3]])
    assert not any(each.isfinite().all() for each in grads)


@pytest.mark.parametrize("held", [(0,), (0, 1)])
def test_weights_held_in_float8_are_those_they_were_made_of(
    device: torch.device, held: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being converted back, which would take longer than the products save."""
    x, down, gate, up, grad = draw_mlp(device)
    mixed = [Float8Weight.of(weight) if index in held else weight for index, weight in enumerate((gate, up))]
    held_down, leaf = Float8Weight.of(down), leaves_of(x)[0]
    monkeypatch.setattr(Float8Weight, "dequantize", lambda weight: pytest.fail("a weight was dequantized"))
    found, expected = (scaled_gated_mlp(leaf, each, held_down) for each in (mixed, (gate, up)))
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(each, leaf, grad)[0] for each in (found, expected)))


X, W, DOWN = torch.ones(3, 32), torch.ones(16, 32), torch.ones(32, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X.half(), [W, W], DOWN), ValueError, ["x ", "float16"]),
        ((X, [W, W.half()], DOWN), ValueError, ["weight", "float16"]),
        ((X, [W, W], DOWN.double()), ValueError, ["down", "float64"]),
        ((X, [W, None], DOWN), TypeError, ["gate_up", "None"]),
        ((X, [W, W], None), TypeError, ["down", "None"]),
        ((X, [], DOWN), ValueError, ["gate_up", r"\[\]"]),
        ((X, [W], DOWN), ValueError, ["down", r"\(32, 16\)"]),
        ((X, [W, W, W, W], torch.ones(32, 32)), ValueError, ["gate_up"]),
        ((X, [W, torch.ones(48, 32)], torch.ones(32, 32)), ValueError, ["gate_up", r"\(48, 32\)"]),
        ((X, [torch.ones(16, 64)] * 2, DOWN), ValueError, ["weight", r"\(16, 64\)"]),
        ((X, [W, W], torch.ones(24, 16)), ValueError, ["down", "16", r"\(24, 16\)"]),
        ((X, [torch.ones(48, 32)], torch.ones(32, 24)), ValueError, ["down", "16", r"\(32, 24\)"]),
        ((X, [W, W], DOWN, "relu"), ValueError, ["activation", "relu"]),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: Any, error: type[Exception], words: list[str]) -> None:
    seen: list[Any] = []
    for pattern in words:
        with pytest.raises(error, match=pattern):
            scaled_gated_mlp(*arguments, before_output=seen.append)
    with pytest.raises(ValueError, match="high_precision_wgrad"):
        scaled_gated_mlp(X, [W, W], DOWN, options=Float8Options(high_precision_wgrad=True))
    assert not seen
