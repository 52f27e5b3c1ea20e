"""LayerNorm: kernels against PyTorch's in float64, with PyTorch's in the tested dtype as the yardstick."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.norm.layer_norm import layer_norm, layer_norm_reference
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARAMETERS = [(True, True), (True, False), (False, True), (False, False)]
NAMES = ["weight and bias", "weight", "bias", "neither"]


def make_inputs(*shape: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and an upstream gradient, rounded to ``dtype``."""
    x = torch.randn(shape, device=device).mul(3).add(1)
    weight, bias = torch.randn(2, shape[-1], device=device)
    return tuple(tensor.to(dtype) for tensor in (x, weight, bias, torch.randn(shape, device=device)))


def run(function: Callable[..., Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor) -> dict:
    """The output and every gradient by name."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items() if t is not None}
    y = function(leaves["x"], x.shape[-1:], leaves.get("weight"), leaves.get("bias"))
    gradients = torch.autograd.grad(y, list(leaves.values()), grad.to(y.dtype))
    return {"y": y, **{f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}}


def assert_matches_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, grad_output: Tensor, *, factor: float = 2.0
) -> None:
    """Compares the output and every gradient."""
    tensors = (x, weight, bias, grad_output)
    actual = run(layer_norm, *tensors)
    eager = run(F.layer_norm, *(t if t is None else t.to(x.dtype) for t in tensors))
    truth = run(F.layer_norm, *(t if t is None else t.double() for t in tensors))
    for name, gradient in actual.items():
        of = {"grad_weight": weight, "grad_bias": bias}.get(name, x)
        assert gradient.dtype == of.dtype
        assert_as_accurate(name, gradient, eager[name], truth[name], factor=factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weighted", "biased"), PARAMETERS, ids=NAMES)
# 17 rows of 1024 take three tiles on the interpreter's two programs; 507 is odd and leaves a masked tail.
@pytest.mark.parametrize("shape", [(1, 123), (17, 1024), (2, 3, 507)], ids=str)
def test_layer_norm_matches_torch(
    triton_device: torch.device, dtype: torch.dtype, weighted: bool, biased: bool, shape: tuple[int, ...]
) -> None:
    x, weight, bias, grad_output = make_inputs(*shape, dtype=dtype, device=triton_device)
    assert_matches_torch(x, weight if weighted else None, bias if biased else None, grad_output)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((5, 2), torch.float32, id="two columns"),
        pytest.param((200, 64), torch.float32, id="several rows a tile"),
        pytest.param((3, 4096), torch.bfloat16, id="no column masked, rows masked in backward"),
        pytest.param((3, 9000), torch.float32, id="two sums overflow, columns masked"),
        pytest.param((2, 16384), torch.bfloat16, id="longest row held in registers"),
        pytest.param((3, 16384), torch.float32, id="two sums overflow, even"),
        pytest.param((3, 16411), torch.float32, id="longer, in blocks"),
    ],
)
def test_layer_norm_takes_any_row_length(
    triton_device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    assert_matches_torch(*make_inputs(*shape, dtype=dtype, device=triton_device))


@pytest.mark.parametrize("hidden_size", [507, 16411])
def test_layer_norm_of_a_large_mean_stays_accurate(triton_device: torch.device, hidden_size: int) -> None:
    x, weight, bias, grad_output = make_inputs(3, hidden_size, dtype=torch.float32, device=triton_device)
    x += 3e3
    actual = run(layer_norm, x, weight, bias, grad_output)
    truth = run(F.layer_norm, x.double(), weight.double(), bias.double(), grad_output.double())
    # A mean's rounding, up to 2**-12 here; the mean square less the squared mean would be off by more than 0.1.
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor.double(), truth[name], rtol=1e-3, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layer_norm_with_float32_parameters(triton_device: torch.device, dtype: torch.dtype) -> None:
    x, _, _, grad_output = make_inputs(6, 123, dtype=dtype, device=triton_device)
    _, weight, bias, _ = make_inputs(1, 123, dtype=torch.float32, device=triton_device)
    assert_matches_torch(x, weight, bias, grad_output)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("normalized_shape", [(6,), (5, 6)], ids=str)
@pytest.mark.parametrize("num_parameters", [0, 1, 2])
def test_layer_norm_is_call_compatible_with_torch(
    triton_device: torch.device, dtype: torch.dtype, normalized_shape: tuple[int, ...], num_parameters: int
) -> None:
    # Inputs this small make eps visible.
    x = torch.randn(4, 5, 6, device=triton_device).mul(1e-2).to(dtype)
    parameters = [torch.randn(normalized_shape, device=triton_device).to(dtype) for _ in range(num_parameters)]
    for eps in ({}, {"eps": 1e-3}):
        actual, expected = (f(x, list(normalized_shape), *parameters, **eps) for f in (layer_norm, F.layer_norm))
        if dtype == torch.float64:
            torch.testing.assert_close(actual, expected)
        else:
            truth = F.layer_norm(x.double(), normalized_shape, *(p.double() for p in parameters), **eps)
            assert_as_accurate("y", actual, expected, truth)


def test_layer_norm_reads_strided_rows(triton_device: torch.device) -> None:
    packed, weight, bias, grad_output = make_inputs(2, 5, 3 * 64, dtype=torch.float32, device=triton_device)
    for x in (packed[..., 64:128], packed[:, ::2, :64], packed[..., ::3], packed.transpose(0, 1)[..., :64]):
        assert_matches_torch(x, weight[::3], bias[:64], torch.randn_like(x))
    assert_matches_torch(packed, weight, bias, grad_output.transpose(0, 1).contiguous().transpose(0, 1))


def test_layer_norm_takes_an_expanded_upstream_gradient(triton_device: torch.device) -> None:
    x, weight, bias, _ = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    assert_matches_torch(x, weight, bias, torch.tensor(0.7, device=triton_device).expand(6, 64))
    assert_matches_torch(x, weight, bias, torch.randn(64, device=triton_device).expand(6, 64))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
def test_layer_norm_of_zero_rows(triton_device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=triton_device, requires_grad=True)
    weight, bias = (torch.ones(64, device=triton_device, requires_grad=True) for _ in range(2))
    y = layer_norm(x, (64,), weight, bias)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("hidden_size", [64, 16411])
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_layer_norm_computes_only_the_gradient_asked_for(
    triton_device: torch.device, wanted: str, hidden_size: int
) -> None:
    x, weight, bias, grad_output = make_inputs(3, hidden_size, dtype=torch.float32, device=triton_device)
    expected = run(layer_norm, x, weight, bias, grad_output)[f"grad_{wanted}"]
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves[wanted].requires_grad_()
    layer_norm(x, (hidden_size,), weight, bias).backward(grad_output)
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [wanted]
    # With fewer sums to keep, a program may walk over rows in another order.
    torch.testing.assert_close(leaves[wanted].grad, expected)


def test_layer_norm_without_gradients_is_the_same(triton_device: torch.device) -> None:
    x, weight, bias, _ = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    expected = layer_norm(x, (64,), weight.requires_grad_(), bias)
    assert expected.requires_grad
    with torch.no_grad():
        assert torch.equal(layer_norm(x, (64,), weight, bias), expected)


def test_layer_norm_backward_twice_and_inputs_unchanged(triton_device: torch.device) -> None:
    tensors = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    leaves, upstream = [t.clone().requires_grad_() for t in tensors[:3]], tensors[3].clone()
    y = layer_norm(leaves[0], (64,), leaves[1], leaves[2])
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, 2 * upstream)
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice)
    for before, after in zip(tensors, (*leaves, upstream), strict=True):
        assert torch.equal(before, after)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("value", "hidden_size"), [(float("nan"), 123), (float("inf"), 123), (float("inf"), 16411)])
def test_a_row_that_is_not_finite_spoils_no_other(triton_device: torch.device, value: float, hidden_size: int) -> None:
    x, weight, bias, grad_output = make_inputs(3, hidden_size, dtype=torch.float32, device=triton_device)
    x[1, 5] = value
    actual, expected = (run(f, x, weight, bias, grad_output) for f in (layer_norm, F.layer_norm))
    for name in ("y", "grad_x"):
        assert torch.equal(actual[name].isnan(), expected[name].isnan())
        assert actual[name][1].isnan().all()


@pytest.mark.parametrize(("weighted", "biased"), PARAMETERS, ids=NAMES)
def test_reference_gradients_are_right(weighted: bool, biased: bool) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    parameters = [
        torch.randn(2, 4, dtype=torch.float64, requires_grad=True) if has else None for has in (weighted, biased)
    ]
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm_reference(x, (2, 4), w, b, 1e-3), (x, *parameters))


@pytest.mark.parametrize(("weighted", "biased"), PARAMETERS, ids=NAMES)
def test_layer_norm_ops_are_well_formed(triton_device: torch.device, weighted: bool, biased: bool) -> None:
    x, weight, bias, grad_output = make_inputs(2, 3, 16, dtype=torch.bfloat16, device=triton_device)
    parameters = (weight.float() if weighted else None, bias if biased else None)
    checks = ("test_schema", "test_faketensor")
    forward, backward = torch.ops.liger_ops.layer_norm_forward.default, torch.ops.liger_ops.layer_norm_backward.default
    torch.library.opcheck(forward, (x, *parameters, 16, 1e-5), test_utils=checks)
    y, statistics = forward(x, *parameters, 16, 1e-5)
    assert y.dtype == torch.bfloat16
    for needs in ((True, weighted, biased), (True, False, False), (False, weighted, biased)):
        for grad_total in (None, torch.randn_like(x)):
            arguments = (grad_output, grad_total, x, *parameters, statistics, 16, *needs)
            torch.library.opcheck(backward, arguments, test_utils=checks)


def test_layer_norm_compiles_to_one_graph(triton_device: torch.device) -> None:
    tensors = make_inputs(2, 3, 64, dtype=torch.float32, device=triton_device)

    def layer(x: Tensor, shape: torch.Size, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x * 2, shape, weight, bias) + x

    compiled = run(torch.compile(layer, fullgraph=True, backend="aot_eager"), *tensors)
    for name, expected in run(layer, *tensors).items():
        torch.testing.assert_close(compiled[name], expected)


def test_layer_norm_off_cuda_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    x, weight, bias, _ = make_inputs(2, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    actual = layer_norm(x, (64,), weight.float(), bias, 1e-3)
    assert torch.equal(actual, layer_norm_reference(x, (64,), weight, bias, 1e-3))
    assert_as_accurate("y", actual, actual, F.layer_norm(x.double(), (64,), weight.double(), bias.double(), 1e-3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(((5,),), r"normalized_shape .* got \(5,\) for input of shape \(2, 4\)", id="trailing size"),
        pytest.param(((),), r"normalized_shape .* got \(\)", id="no dimension"),
        pytest.param(((3, 2, 4),), r"normalized_shape .* got \(3, 2, 4\)", id="too many dimensions"),
        pytest.param(((4,), torch.ones(3)), r"weight .* \(4,\) .* got .* \(3,\)", id="weight"),
        pytest.param(((4,), None, torch.ones(1)), r"bias .* \(4,\) .* got .* \(1,\)", id="bias"),
    ],
)
def test_layer_norm_rejects(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_norm(torch.ones(2, 4), *arguments)
