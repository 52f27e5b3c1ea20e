"""Linear layers in float8: exact sums, float64 of what payloads hold, and float64 of the operands."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.fp8.linear import scaled_linear
from liger_ops.fp8.products import Float8Options
from liger_ops.fp8.weights import Float8Weight
from tests.liger_ops.accuracy import LAYOUTS, few, lay_out
from tests.liger_ops.fp8.oracle import as_numpy, dequantized, scales_of

SLOW = Float8Options(fast_accum=(False, False, False))


def integers(*shape: int, exponents: int = 0) -> Tensor:
    """From -2 to 2, with 2 in each row, times a power of two a row."""
    x = torch.randint(-2, 3, shape).float()
    x[..., 0] = 2.0
    return x * torch.randint(0, exponents + 1, (*shape[:-1], 1)).float().exp2()


def error_of(found: Tensor | np.ndarray, truth: np.ndarray) -> float:
    """The relative error in the Frobenius norm."""
    found = as_numpy(found) if isinstance(found, Tensor) else found
    assert found.shape == truth.shape
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def leaves_of(*tensors: Tensor | None) -> list[Any]:
    return [None if each is None else each.detach().requires_grad_() for each in tensors]


def draw_layer(device: torch.device, dtype: torch.dtype = torch.bfloat16, sizes: Sequence[int] = (32, 16)) -> list[Any]:
    """x, weights and upstream gradients of layers that share an input of 48 columns."""
    x = torch.randn(7, 48, device=device, dtype=dtype)
    weights = [torch.randn(size, 48, device=device, dtype=dtype) / 7 for size in sizes]
    return [x, weights, [torch.randn(7, size, device=device, dtype=dtype) for size in sizes]]


@given(
    draw=st.builds(
        SimpleNamespace,
        rows=st.sampled_from([(), (1,), (5,), (16,), (37,), (2, 3), (3, 1, 7)]),
        in_features=st.sampled_from([16, 48, 512]),
        sizes=st.lists(st.sampled_from([16, 32]), min_size=1, max_size=4),
        has_bias=st.lists(st.booleans(), min_size=4, max_size=4),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        layouts=st.tuples(*3 * [st.sampled_from(LAYOUTS[:-1])]),
        seed=st.integers(0, 2**16),
    )
)
@few(15)
def test_sums_of_small_integers_are_exact(draw: Any, device: torch.device) -> None:
    """Outputs, all gradients and biases, of any shapes and layouts, rounded once; also with fast accumulation."""
    torch.manual_seed(draw.seed)
    x = integers(*draw.rows, draw.in_features, exponents=3)
    weights = [integers(size, draw.in_features, exponents=3) / 64 for size in draw.sizes]
    biases = [
        torch.randn(size).bfloat16().float() if has else None
        for size, has in zip(draw.sizes, draw.has_bias, strict=False)
    ]
    upstream = [integers(*draw.rows, size, exponents=3) for size in draw.sizes]

    def place(tensor: Tensor | None, layout: str) -> Any:
        return None if tensor is None else lay_out(tensor.to(device, draw.dtype), layout)

    leaves = leaves_of(
        place(x, draw.layouts[0]),
        *(place(weight, draw.layouts[1]) for weight in weights),
        *(place(bias, "contiguous") for bias in biases),
    )
    count = len(weights)
    outputs = scaled_linear(leaves[0], leaves[1 : 1 + count], leaves[1 + count :])
    wanted = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(outputs, wanted, [place(each, draw.layouts[2]) for each in upstream])

    wide = [None if each is None else each.double().requires_grad_() for each in (x, *weights, *biases)]
    expected = [F.linear(wide[0], wide[1 + i], wide[1 + count + i]) for i in range(count)]
    expected_grads = torch.autograd.grad(
        expected, [each for each in wide if each is not None], [g.double() for g in upstream]
    )
    exact = draw.dtype == torch.float32
    for found, truth in zip((*outputs, *grads), (*expected, *expected_grads), strict=True):
        assert found.dtype == draw.dtype
        rounded = truth.detach().to(draw.dtype)
        if device.type == "cuda" and not exact:  # there a bias may be added after rounding
            torch.testing.assert_close(found.cpu(), rounded)
        else:
            assert torch.equal(found.cpu(), rounded)


@pytest.mark.parametrize("size", [0.0, 1e-8, 1e-4, 1.0])
@pytest.mark.parametrize("others", [0.0, 1e-8, 1.0, 1e4])
def test_rows_of_weights_that_are_far_smaller_than_others_learn(
    device: torch.device, size: float, others: float
) -> None:
    """As those of layers that begin with zeros do, alone or beside others that share their input."""
    x, (small, large), upstream = draw_layer(device, torch.float32)
    weights = [small * size, large * others]
    leaves = leaves_of(x, *weights)
    grads = torch.autograd.grad(scaled_linear(leaves[0], leaves[1:]), leaves, [g * 1e-6 for g in upstream])
    wide = leaves_of(*(each.double() for each in leaves))
    outputs = [F.linear(wide[0], weight) for weight in wide[1:]]
    for found, truth in zip(
        grads, torch.autograd.grad(outputs, wide, [g.double() * 1e-6 for g in upstream]), strict=True
    ):
        assert (found - truth).norm() <= 0.05 * truth.norm()
    held = [Float8Weight.of(weight) for weight in weights]
    (grad_x,) = torch.autograd.grad(scaled_linear(leaves[0], held), leaves[0], [g * 1e-6 for g in upstream])
    assert (grad_x - grads[0]).norm() <= 1e-3 * grads[0].norm()  # small payloads are rounded twice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 100])
def test_products_are_those_of_payloads(device: torch.device, dtype: torch.dtype, num_rows: int) -> None:
    """Float64 of payloads that the oracle makes; only what rounding of outputs costs is left."""
    weights = [torch.randn(size, 160).mul(torch.logspace(-2, 1, size)[:, None]) for size in (64, 32)]
    tensors = [torch.randn(num_rows, 160), *weights]
    leaves = leaves_of(*(each.to(device, dtype) for each in tensors))
    upstream = [torch.randn(num_rows, 64, device=device).to(dtype), torch.randn(num_rows, 32, device=device).to(dtype)]
    outputs = scaled_linear(leaves[0], leaves[1:], options=SLOW)
    grad_x, *grad_weights = torch.autograd.grad(outputs, leaves, upstream)

    x, w, g = as_numpy(leaves[0]), as_numpy(torch.cat(leaves[1:])), as_numpy(torch.cat(upstream, dim=1))
    x_values, w_values = dequantized(x), dequantized(w)
    w_scale = scales_of(w)
    g_values = dequantized(g * w_scale)
    allowed = 2.5e-3 if dtype == torch.bfloat16 or device.type == "cuda" else 1e-6
    y = torch.cat(outputs, dim=1)
    assert error_of(y, x_values @ w_values.T) <= allowed
    assert error_of(grad_x, g_values @ (w_values / w_scale[:, None])) <= allowed
    aligned = max(allowed, 4e-3)  # aligned rows are rounded once more where they get subnormal
    assert error_of(torch.cat(grad_weights), (g_values / w_scale).T @ x_values) <= aligned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_products_of_the_operands(device: torch.device, dtype: torch.dtype) -> None:
    """For tokens of very different sizes too, each of them, and weights of different channels; errors have no sign."""
    num_rows, in_features, out_features = 96, 256, 96
    sizes = torch.rand(num_rows, 1).mul(40).sub(20).exp2()
    x, g = torch.randn(num_rows, in_features), torch.randn(num_rows, out_features)
    weight = torch.randn(out_features, in_features) * torch.logspace(-0.5, 0.5, out_features)[:, None]

    def run(x: Tensor, g: Tensor) -> list[tuple[Tensor, np.ndarray]]:
        leaves = leaves_of(x.to(device, dtype), weight.to(device, dtype))
        g = g.to(device, dtype)
        (y,) = scaled_linear(leaves[0], leaves[1:])
        grad_x, grad_weight = torch.autograd.grad(y, leaves, g)
        x_wide, w_wide, g_wide = map(as_numpy, (*leaves, g))
        return [(y, x_wide @ w_wide.T), (grad_x, g_wide @ w_wide), (grad_weight, g_wide.T @ x_wide)]

    for results in (run(x, g), run(x * sizes, g * sizes.flip(0)), run(x * sizes, g * sizes)):
        for found, truth in results:
            assert error_of(found, truth) <= 0.042
            assert np.sum(as_numpy(found) * truth) >= 0.999 * np.linalg.norm(truth) * np.linalg.norm(as_numpy(found))
        for found, truth in results[:2]:
            for row, true_row in zip(as_numpy(found), truth, strict=True):
                assert np.linalg.norm(row - true_row) <= 0.06 * np.linalg.norm(true_row)
    found, truth = run(x, g)[2]
    size = np.linalg.norm(truth, axis=1, keepdims=True)
    error = (as_numpy(found) - truth) / size
    assert abs(error.mean()) <= 4 * error.std() / error.size**0.5
    # Rounding to the nearest makes normal numbers smaller by 0.07%, as more of them are above a power of two's
    # neighbour than below it; truncation would by 6%.
    assert abs(np.sum(error * truth / size) / np.sum((truth / size) ** 2)) <= 2.5e-3


def test_high_precision_gradients_of_weights(device: torch.device) -> None:
    """No less accurate than bfloat16's own, when outputs are those of float8."""
    x, weights, upstream = draw_layer(device)
    leaves, options = leaves_of(x, *weights), Float8Options(high_precision_wgrad=True)
    grads = torch.autograd.grad(scaled_linear(leaves[0], leaves[1:], options=options), leaves, upstream)
    plain = torch.autograd.grad(scaled_linear(leaves[0], leaves[1:]), leaves, upstream)
    assert torch.equal(grads[0], plain[0])
    for grad, g in zip(grads[1:], upstream, strict=True):
        truth = as_numpy(g).T @ as_numpy(x)
        assert error_of(grad, truth) <= 2 * error_of(g.t() @ x, truth)


def test_emulated_products_are_close_to_the_devices(device: torch.device) -> None:
    x, weights, upstream = draw_layer(device)
    results = []
    for emulate in (False, True):
        leaves = leaves_of(x, *weights)
        outputs = scaled_linear(leaves[0], leaves[1:], options=SLOW._replace(emulate=emulate))
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    for found, emulated in zip(*results, strict=True):
        assert error_of(found, as_numpy(emulated)) <= 2.5e-3


def test_gradients_of_biases_are_sums_of_what_arrived(device: torch.device) -> None:
    """Not of payloads, which would lose small rows."""
    x, weights, upstream = draw_layer(device, torch.float32, sizes=(32,))
    upstream[0][:, 5:] *= 2.0**-30
    bias = torch.zeros(32, device=device, requires_grad=True)
    torch.autograd.backward(scaled_linear(x, weights, [bias]), upstream)
    torch.testing.assert_close(bias.grad, upstream[0].sum(dim=0), atol=0.0, rtol=1e-5)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_outputs_that_nobody_uses(device: torch.device, used: int) -> None:
    x, weights, upstream = draw_layer(device, sizes=(32, 16, 64))
    leaves = leaves_of(x, *weights)
    grads = torch.autograd.grad(
        scaled_linear(leaves[0], leaves[1:])[used], leaves, upstream[used], materialize_grads=True
    )
    alone = leaves_of(x, weights[used])
    expected = torch.autograd.grad(scaled_linear(alone[0], alone[1:]), alone, upstream[used])
    torch.testing.assert_close(grads[0], expected[0])
    for index, grad in enumerate(grads[1:]):
        torch.testing.assert_close(grad, expected[1] if index == used else torch.zeros_like(grad))


def test_infinities_lose_their_token_and_the_weights_gradient(device: torch.device) -> None:
    """And NaN its token, and the rows and columns of the gradient in which plain products have it."""
    for value, place in ((torch.inf, "x"), (-torch.inf, "g"), (torch.nan, "x"), (torch.nan, "g")):
        x, weights, upstream = draw_layer(device, sizes=(32,))
        (x if place == "x" else upstream[0])[3, 5] = value
        leaves = leaves_of(x, *weights)
        (y,) = scaled_linear(leaves[0], leaves[1:])
        grad_x, grad_weight = torch.autograd.grad(y, leaves, upstream)
        tokens = [int(i) for i in (~y.isfinite()).any(dim=1).nonzero()]
        grad_tokens = [int(i) for i in (~grad_x.isfinite()).any(dim=1).nonzero()]
        assert (tokens, grad_tokens) == (([3], []) if place == "x" else ([], [3]))
        assert not (y if place == "x" else grad_x)[3].isfinite().any()
        lost = ~grad_weight.isfinite()
        assert (lost[:, 5] if place == "x" else lost[5]).all()
        assert value == value or lost.sum() == (32 if place == "x" else 48)


@pytest.mark.parametrize("held", [(0,), (1,), (0, 1, 2)])
def test_weights_held_in_float8_are_those_they_were_made_of(
    device: torch.device, held: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to others, and without being converted back, which would take longer than the products save."""
    x, weights, upstream = draw_layer(device, sizes=(32, 16, 48))
    leaf = leaves_of(x)[0]
    mixed = [Float8Weight.of(weight) if index in held else weight for index, weight in enumerate(weights)]
    monkeypatch.setattr(Float8Weight, "dequantize", lambda weight: pytest.fail("a weight was dequantized"))
    expected = scaled_linear(leaf, weights)
    found = scaled_linear(leaf, mixed)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert torch.equal(*(torch.autograd.grad(each, leaf, upstream)[0] for each in (found, expected)))


X = torch.ones(3, 32)
W = torch.ones(16, 32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X.half(), [W]), ValueError, ["x ", "float16"]),
        ((X.double(), [W]), ValueError, ["x ", "float64"]),
        ((X.int(), [W]), TypeError, ["x ", "int32"]),
        (([1.0], [W]), TypeError, ["x "]),
        ((X[0, 0], [W]), ValueError, ["x must", r"\(\)"]),
        ((X, [W.half()]), ValueError, ["weight", "float16"]),
        ((X, [W, W.double()]), ValueError, ["weight", "float64"]),
        ((X, [W.int()]), TypeError, ["weight", "int32"]),
        ((X, [W, None]), TypeError, ["weight", "None"]),
        ((X, [W[0]]), ValueError, ["weight", r"\(32,\)"]),
        ((X, [W, W[:, :16]]), ValueError, ["weight", r"\(16, 16\)"]),
        ((X, [W, W[:8]]), ValueError, ["weight", "16", r"\(8, 32\)"]),
        ((X[:, :24], [W[:, :24]]), ValueError, ["weight", "16", r"\(16, 24\)"]),
        ((X[:, :0], [W[:, :0]]), ValueError, ["weight", r"\(16, 0\)"]),
        ((X, [W.to("meta")]), ValueError, ["weight", "meta"]),
        ((X, []), ValueError, ["weights"]),
        ((X, [W, W], [None]), ValueError, ["biases", "2"]),
        ((X, [W], [torch.ones(8)]), ValueError, ["bias", r"\(8,\)"]),
        ((X, [W], [torch.ones(16).int()]), TypeError, ["bias", "int32"]),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: Any, error: type[Exception], words: list[str]) -> None:
    """Errors name the argument, and its value, before anything is computed."""
    seen: list[Any] = []
    for pattern in words:
        with pytest.raises(error, match=pattern):
            scaled_linear(*arguments, before_output=seen.append)
    assert not seen
