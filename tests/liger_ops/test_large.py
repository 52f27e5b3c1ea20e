"""Tensors of slightly more than 2**31 elements, and one row of slightly fewer: their last offsets overflow int32."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from liger_ops import add_rms_norm, apply_rotary, gelu_mul, group_norm, layer_norm, relu_squared, rms_norm, silu_mul

LIMIT = 2**31
DEVICE = "cuda"
CLOSE = {"rtol": 2**-6, "atol": 2**-6}

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips on GPUs that are too small for a test, and frees what it leaves."""
    needed = 64 if "no positions" in request.node.name else 40
    if torch.cuda.get_device_properties(0).total_memory < needed * 2**30:
        pytest.skip(f"needs {needed} GiB of GPU memory")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def large(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()


def run(
    function: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], gradients: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of all tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    return list(outputs), list(torch.autograd.grad(outputs, leaves, gradients))


def assert_last_rows_match(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
    parameters: list[Tensor],
    last: Callable[[Tensor], Tensor],
    num_outputs: int = 1,
    num_columns: int = 0,
) -> None:
    """Compares the last rows of outputs and gradients with those computed of the last rows alone, in float64.

    Gradients of parameters, which are sums over all rows, are compared with the sum of those of four parts.
    """
    shape = inputs[0].shape if not num_columns else (*inputs[0].shape[:-1], num_columns)
    grad_outputs = [large(*shape) for _ in range(num_outputs)]
    outputs, gradients = run(function, [*inputs, *parameters], grad_outputs)
    actual = [last(tensor).detach().clone() for tensor in (*outputs, *gradients[: len(inputs)])]
    grad_parameters = gradients[len(inputs) :]
    del outputs, gradients
    tails = [last(tensor).double() for tensor in inputs]
    expected = run(function, [*tails, *(p.double() for p in parameters)], [last(g).double() for g in grad_outputs])
    for result, truth in zip(actual, [*expected[0], *expected[1][: len(inputs)]], strict=True):
        torch.testing.assert_close(result.double(), truth.double(), **CLOSE)
    if parameters:
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        num_rows = -(-inputs[0].shape[0] // 4)
        for parts in zip(*(tensor.split(num_rows) for tensor in (*inputs, *grad_outputs)), strict=True):
            tensors, grads = list(parts[: len(inputs)]), list(parts[len(inputs) :])
            for total, part in zip(sums, run(function, [*tensors, *parameters], grads)[1][len(inputs) :], strict=True):
                total += part
        for grad, total in zip(grad_parameters, sums, strict=True):
            torch.testing.assert_close(grad, total, rtol=1e-3, atol=1e-4 * grad_outputs[0].shape[0] ** 0.5)


def last_rows(tensor: Tensor) -> Tensor:
    """Rows before and after the element of number LIMIT."""
    return tensor[-5:]


@pytest.mark.parametrize("num_columns", [4096, 12288])  # backward of LayerNorm takes the longer ones in blocks
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_row_norms(name: str, num_columns: int) -> None:
    x = large(LIMIT // num_columns + 3, num_columns)
    parameters = [torch.rand(num_columns, device=DEVICE) for _ in range(2 if name == "layer_norm" else 1)]
    if name == "rms_norm":
        assert_last_rows_match(lambda x, w: (rms_norm(x, w.shape, w),), [x], parameters, last_rows)
    elif name == "layer_norm":
        assert_last_rows_match(lambda x, w, b: (layer_norm(x, w.shape, w, b),), [x], parameters, last_rows)
    else:  # a residual that is read in place of a second tensor of this size
        residual = x[:1].clone()

        def add(x: Tensor) -> tuple[Tensor, ...]:
            return add_rms_norm(x, residual.to(x.dtype).expand_as(x), (num_columns,))

        assert_last_rows_match(add, [x], [], last_rows, num_outputs=2)


@pytest.mark.parametrize("num_elements", [LIMIT - 1, LIMIT + 5], ids=["below", "above"])
@pytest.mark.parametrize("name", ["silu_mul", "relu_squared"])
def test_gated_units_of_one_long_row(name: str, num_elements: int) -> None:
    if name == "silu_mul":
        inputs = [large(num_elements), large(num_elements)]
        assert_last_rows_match(lambda gate, up: (silu_mul(gate, up),), inputs, [], last_rows)
    else:
        assert_last_rows_match(lambda x: (relu_squared(x),), [large(num_elements)], [], last_rows)


@pytest.mark.parametrize("num_columns", [2048])
def test_packed_gated_unit(num_columns: int) -> None:
    packed = large(LIMIT // (2 * num_columns) + 3, 2 * num_columns)
    assert_last_rows_match(lambda x: (gelu_mul(x),), [packed], [], last_rows, num_columns=num_columns)


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_rotary(heads_dim: int) -> None:
    num_heads, head_dim = 32, 128
    seq_len = LIMIT // (2 * num_heads * head_dim) + 3
    shape = (2, num_heads, seq_len, head_dim) if heads_dim == 1 else (2, seq_len, num_heads, head_dim)
    q = large(*shape)
    angles = torch.rand(seq_len, head_dim, device=DEVICE)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotate(q: Tensor) -> tuple[Tensor]:
        num_tokens = q.shape[3 - heads_dim]
        tables = (table[-num_tokens:].to(q.dtype) for table in (cos, sin))
        return (apply_rotary(q, q.detach().narrow(heads_dim, 0, 1), *tables, heads_dim=heads_dim)[0],)

    assert_last_rows_match(rotate, [q], [], lambda x: x[-1:].narrow(3 - heads_dim, x.shape[3 - heads_dim] - 3, 3))


@pytest.mark.parametrize(
    ("num_channels", "num_positions", "num_groups"),
    [pytest.param(4, 2**16, 2, id="many positions"), pytest.param(2048, 1, 1024, id="no positions")],
)
def test_group_norm(num_channels: int, num_positions: int, num_groups: int) -> None:
    x = large(LIMIT // (num_channels * num_positions) + 1, num_channels, num_positions)
    parameters = [torch.rand(num_channels, device=DEVICE) for _ in range(2)]
    assert_last_rows_match(
        lambda x, w, b: (group_norm(x, num_groups, w, b),), [x], parameters, lambda tensor: tensor[-1:]
    )


@pytest.mark.parametrize("num_channels", [1, 2])
def test_group_norm_of_one_large_group(num_channels: int) -> None:
    x = large(1, num_channels, LIMIT // num_channels + 8)
    weight, bias = (torch.rand(num_channels, device=DEVICE) for _ in range(2))
    grad_y = large(*x.shape)
    (y,), (grad_x, grad_weight, grad_bias) = run(lambda x, w, b: (group_norm(x, 1, w, b),), [x, weight, bias], [grad_y])

    def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
        for channel in range(num_channels):
            for part, grad in zip(x[0, channel].split(2**26), grad_y[0, channel].split(2**26), strict=True):
                yield channel, part.double(), grad.double()

    mean = sum(part.sum() for _, part, _ in parts()) / x.numel()
    rstd = (sum((part - mean).square().sum() for _, part, _ in parts()) / x.numel() + 1e-5).rsqrt()
    products, gradients = torch.zeros(2, num_channels, dtype=torch.float64, device=DEVICE)
    for channel, part, grad in parts():
        products[channel] += (grad * (part - mean) * rstd).sum()
        gradients[channel] += grad.sum()
    tail, grad_tail = x[0, -1, -9:].double(), grad_y[0, -1, -9:].double()
    normalized = (tail - mean) * rstd
    mean_product, mean_gradient = ((weight * sums).sum() / x.numel() for sums in (products, gradients))
    torch.testing.assert_close(y[0, -1, -9:].double(), normalized * weight[-1] + bias[-1], check_dtype=False, **CLOSE)
    expected = rstd * (grad_tail * weight[-1] - normalized * mean_product - mean_gradient)
    torch.testing.assert_close(grad_x[0, -1, -9:].double(), expected, **CLOSE)
    tolerance = 1e-3 * x.numel() ** 0.5
    torch.testing.assert_close(grad_weight.double(), products, rtol=1e-3, atol=tolerance)
    torch.testing.assert_close(grad_bias.double(), gradients, rtol=1e-3, atol=tolerance)
