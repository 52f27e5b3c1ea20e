"""RMSNorm: kernels against the reference in float64, with plain PyTorch in the tested dtype as the yardstick."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.norm.rms_norm import CASTINGS, add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
PLAIN = {"eps": EPS, "offset": 0.0, "casting": "gemma"}


def eager_rms_norm(x: Tensor, weight: Tensor | None, offset: float, casting: str) -> Tensor:
    """The formulas of Hugging Face's Gemma and Llama layers, and of a layer without casts."""
    if casting == "none":
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return normalized if weight is None else normalized * (offset + weight)
    normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    if weight is None:
        return normalized.to(x.dtype)
    if casting == "llama":
        return (offset + weight) * normalized.to(x.dtype)
    return (normalized * (offset + weight.float())).to(x.dtype)


def make_inputs(*shape: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and an upstream gradient, rounded to ``dtype``."""
    x = torch.randn(shape, device=device).mul(3).to(dtype)
    weight = torch.randn(shape[-1], device=device).to(dtype)
    return x, weight, torch.randn(shape, device=device).to(dtype)


def assert_matches_reference(
    x: Tensor,
    weight: Tensor | None,
    grad_output: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "gemma",
    factor: float = 2.0,
) -> None:
    """Compares the output and every gradient."""
    hidden_size = x.shape[-1]

    def run(function: Callable[..., Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight) if t is not None]
        y = function(leaves[0], leaves[1] if weight is not None else None)
        return [y, *torch.autograd.grad(y, leaves, grad_output.to(y.dtype))]

    def in_float64(x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm_reference(x, (hidden_size,), weight, eps=EPS, offset=offset, casting=casting)

    actual = run(lambda x, w: rms_norm(x, (hidden_size,), w, EPS, offset=offset, casting=casting), None)
    eager = run(lambda x, w: eager_rms_norm(x, w, offset, casting), None)
    truth = run(in_float64, torch.float64)
    for name, *results in zip(("y", "grad_x", "grad_weight"), actual, eager, truth, strict=False):
        assert results[0].dtype == results[1].dtype
        assert_as_accurate(name, *results, factor=factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "casting"), [(0.0, "gemma"), (1.0, "gemma"), (0.0, "llama"), (1.0, "none")])
# 17 rows of 1024 take three tiles on the interpreter's two programs; 507 is odd and leaves a masked tail.
@pytest.mark.parametrize("shape", [(1, 123), (17, 1024), (2, 3, 507)], ids=str)
def test_rms_norm_matches_reference(
    triton_device: torch.device, dtype: torch.dtype, offset: float, casting: str, shape: tuple[int, ...]
) -> None:
    assert_matches_reference(*make_inputs(*shape, dtype=dtype, device=triton_device), offset=offset, casting=casting)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((5, 1), torch.float32, id="one column"),
        pytest.param((200, 64), torch.float32, id="heads, several rows a tile"),
        pytest.param((7, 4096), torch.bfloat16, id="no column masked, rows masked in backward"),
        pytest.param((3, 9000), torch.bfloat16, id="one row a tile, columns masked"),
        pytest.param((3, 16384), torch.bfloat16, id="longest row held in registers"),
        pytest.param((3, 16385), torch.float32, id="longer, in blocks"),
    ],
)
def test_rms_norm_takes_any_row_length(triton_device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_matches_reference(*make_inputs(*shape, dtype=dtype, device=triton_device), offset=1.0)


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_without_weight(triton_device: torch.device, dtype: torch.dtype, casting: str) -> None:
    x, _, grad_output = make_inputs(6, 123, dtype=dtype, device=triton_device)
    assert_matches_reference(x, None, grad_output, casting=casting)


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_with_float32_weight(triton_device: torch.device, dtype: torch.dtype, casting: str) -> None:
    x, weight, grad_output = make_inputs(6, 123, dtype=dtype, device=triton_device)
    # Triton's interpreter rounds to bfloat16 towards zero, which doubles the error that float32 results carry along.
    assert_matches_reference(x, weight.float(), grad_output, casting=casting, factor=4.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_casting_says_where_values_are_rounded(
    triton_device: torch.device, casting: str, weight_dtype: torch.dtype, offset: float
) -> None:
    # Not bfloat16, to which Triton's interpreter rounds towards zero.
    x, weight, _ = make_inputs(64, 128, dtype=torch.float16, device=triton_device)
    weight = weight.to(weight_dtype)
    actual = rms_norm(x, (128,), weight, EPS, offset=offset, casting=casting)
    equal = {}
    for other in CASTINGS:
        expected = rms_norm_reference(x, (128,), weight, eps=EPS, offset=offset, casting=other)
        equal[other] = actual.double().sub(expected.double()).abs().le(1e-5 * expected.abs()).double().mean().item()
        assert other != casting or actual.dtype == expected.dtype
    # Where rounding comes at another place, a good part of the elements differs by one unit in the last place.
    assert equal.pop(casting) > 0.98
    assert max(equal.values()) < 0.9


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("normalized_shape", [(6,), (5, 6)], ids=str)
def test_rms_norm_is_call_compatible_with_torch(
    triton_device: torch.device, dtype: torch.dtype, eps: float | None, normalized_shape: tuple[int, ...]
) -> None:
    # Inputs this small make eps visible: half precision must use float32's epsilon, as torch does.
    x = torch.randn(4, 5, 6, device=triton_device).mul(1e-3).to(dtype)
    weight = torch.randn(normalized_shape, device=triton_device).to(dtype)
    actual, expected = (function(x, list(normalized_shape), weight, eps) for function in (rms_norm, F.rms_norm))
    if dtype == torch.float64:
        torch.testing.assert_close(actual, expected)
    else:
        truth_eps = torch.finfo(torch.float32).eps if eps is None else eps
        assert_as_accurate("y", actual, expected, F.rms_norm(x.double(), normalized_shape, weight.double(), truth_eps))


def test_rms_norm_reads_strided_rows(triton_device: torch.device) -> None:
    packed, weight, grad_output = make_inputs(2, 5, 3 * 64, dtype=torch.float32, device=triton_device)
    for x in (packed[..., 64:128], packed[:, ::2, :64], packed[..., ::3], packed.transpose(0, 1)[..., :64]):
        assert_matches_reference(x, weight[::3], torch.randn_like(x))
    assert_matches_reference(packed, weight, grad_output.transpose(0, 1).contiguous().transpose(0, 1))


def test_rms_norm_takes_an_expanded_upstream_gradient(triton_device: torch.device) -> None:
    x, weight, _ = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    assert_matches_reference(x, weight, torch.tensor(0.7, device=triton_device).expand(6, 64))
    assert_matches_reference(x, weight, torch.randn(64, device=triton_device).expand(6, 64))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
def test_rms_norm_of_zero_rows(triton_device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=triton_device, requires_grad=True)
    weight = torch.ones(64, device=triton_device, requires_grad=True)
    y = rms_norm(x, (64,), weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_rms_norm_computes_only_the_gradient_asked_for(triton_device: torch.device, wanted: str) -> None:
    x, weight, grad_output = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    both = [t.clone().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(rms_norm(both[0], (64,), both[1]), both, grad_output)
    x.requires_grad_(wanted == "x")
    weight.requires_grad_(wanted == "weight")
    rms_norm(x, (64,), weight).backward(grad_output)
    assert (x.grad is None) == (wanted != "x")
    assert (weight.grad is None) == (wanted != "weight")
    torch.testing.assert_close(x.grad if wanted == "x" else weight.grad, expected[wanted == "weight"])


def test_rms_norm_backward_twice_and_inputs_unchanged(triton_device: torch.device) -> None:
    x, weight, grad_output = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = rms_norm(leaves[0], (64,), leaves[1])
    upstream = grad_output.clone()
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, 2 * upstream)
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice)
    for before, after in zip((x, weight, grad_output), (*leaves, upstream), strict=True):
        assert torch.equal(before, after)


def test_rms_norm_ignores_the_scale_of_its_input(triton_device: torch.device) -> None:
    x, weight, _ = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    torch.testing.assert_close(rms_norm(x, (64,), weight, EPS), rms_norm(8 * x, (64,), weight, EPS))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("casting", CASTINGS)
def test_reference_gradients_are_right(casting: str, weighted: bool) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True) if weighted else None
    offset = 1.0 if weighted else 0.0
    assert torch.autograd.gradcheck(
        lambda x, w: rms_norm_reference(x, (2, 4), w, eps=1e-3, offset=offset, casting=casting), (x, weight)
    )


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_ops_are_well_formed(triton_device: torch.device, weighted: bool) -> None:
    x, weight, grad_output = make_inputs(2, 3, 16, dtype=torch.bfloat16, device=triton_device)
    weight = weight.float() if weighted else None
    checks = ("test_schema", "test_faketensor")
    forward, backward = torch.ops.liger_ops.rms_norm_forward.default, torch.ops.liger_ops.rms_norm_backward.default
    for casting in CASTINGS:
        torch.library.opcheck(forward, (x, weight, 16, EPS, 0.0, casting), test_utils=checks)
    y, rstd = forward(x, weight, 16, EPS, 0.0, "llama")
    for needs in ((True, weighted), (True, False), (False, weighted)):
        for grad_total in (None, grad_output):
            arguments = (grad_output.to(y.dtype), grad_total, x, weight, rstd, 16, 0.0, *needs)
            torch.library.opcheck(backward, arguments, test_utils=checks)
    add_forward = torch.ops.liger_ops.add_rms_norm_forward.default
    torch.library.opcheck(add_forward, (x, x.float(), weight, 16, EPS, 0.0, "none"), test_utils=checks)


def test_rms_norm_compiles_to_one_graph(triton_device: torch.device) -> None:
    x, weight, grad_output = make_inputs(2, 3, 64, dtype=torch.float32, device=triton_device)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = function(*leaves)
        return [y, *torch.autograd.grad(y, leaves, grad_output)]

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x * 2, (64,), weight, EPS, offset=1.0, casting="llama") + x

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(run(compiled), run(layer), strict=True):
        torch.testing.assert_close(actual, expected)


def test_rms_norm_off_cuda_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    x, weight, _ = make_inputs(2, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    expected = rms_norm_reference(x, (64,), weight, eps=EPS, offset=1.0, casting="llama")
    assert torch.equal(rms_norm(x, (64,), weight, EPS, offset=1.0, casting="llama"), expected)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        pytest.param(((5,),), {}, r"normalized_shape .* got \(5,\) for input of shape \(2, 4\)", id="trailing size"),
        pytest.param(((),), {}, r"normalized_shape .* got \(\)", id="no dimension"),
        pytest.param(((3, 2, 4),), {}, r"normalized_shape .* got \(3, 2, 4\)", id="too many dimensions"),
        pytest.param(((4,), torch.ones(3)), {}, r"weight .* \(4,\) .* got .* \(3,\)", id="weight"),
        pytest.param(((4,),), {"offset": 1.0}, r"offset .* got 1\.0", id="offset without weight"),
        pytest.param(
            ((4,),), {"casting": "bert"}, r"casting must be one of 'gemma', 'llama', 'none', got 'bert'", id="casting"
        ),
    ],
)
def test_rms_norm_rejects(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(2, 4), *arguments, **options)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_rms_norm(total, weight, 0.0, "gemma"), total


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        pytest.param((2, 3, 123), (torch.float32, torch.float32), id="odd"),
        pytest.param((17, 1024), (torch.bfloat16, torch.bfloat16), id="half"),
        pytest.param((6, 123), (torch.bfloat16, torch.float32), id="wider residual"),
        pytest.param((2, 18432), (torch.float32, torch.float32), id="longer, in blocks of even length"),
    ],
)
@pytest.mark.parametrize("used", [("normalized", "sum"), ("normalized",), ("sum",)], ids=" and ".join)
def test_add_rms_norm_matches_reference(
    triton_device: torch.device,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    used: tuple[str, ...],
) -> None:
    x, weight, grad_y = make_inputs(*shape, dtype=dtypes[0], device=triton_device)
    residual, _, grad_total = make_inputs(*shape, dtype=dtypes[1], device=triton_device)
    inputs = (x, residual, weight)

    def run(function: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype | None) -> list[Tensor | None]:
        leaves = [t.to(dtype or t.dtype, copy=True).requires_grad_() for t in inputs]
        y, total = function(*leaves)
        outputs = {"normalized": (y, grad_y.to(y.dtype)), "sum": (total, grad_total.to(total.dtype))}
        results, gradients = zip(*(outputs[name] for name in used), strict=True)
        return [y, total, *torch.autograd.grad(results, leaves, gradients, allow_unused=True)]

    actual = run(lambda x, r, w: add_rms_norm(x, r, shape[-1:], w, EPS), None)
    eager = run(eager_add_rms_norm, None)
    truth = run(lambda *args: add_rms_norm_reference(*args[:2], shape[-1:], args[2], **PLAIN), torch.float64)
    names = ("normalized", "sum", "grad_x", "grad_residual", "grad_weight")
    for name, *results in zip(names, actual, eager, truth, strict=True):
        assert (results[0] is None) == (results[2] is None), name
        if results[2] is not None:
            assert results[0].dtype == results[1].dtype
            assert_as_accurate(name, *results)


@pytest.mark.parametrize("casting", CASTINGS)
def test_add_rms_norm_is_rms_norm_of_the_rounded_sum(triton_device: torch.device, casting: str) -> None:
    x, weight, _ = make_inputs(6, 123, dtype=torch.float16, device=triton_device)
    residual, options = torch.randn_like(x), {"offset": 1.0, "casting": casting}
    y, total = add_rms_norm(x, residual, (123,), weight.float(), EPS, **options)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, (123,), weight.float(), EPS, **options))


@pytest.mark.parametrize("wanted", ["x", "residual", "weight"])
def test_add_rms_norm_computes_only_the_gradient_asked_for(triton_device: torch.device, wanted: str) -> None:
    x, weight, grad_y = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    leaves = {"x": x, "residual": torch.randn_like(x), "weight": weight}
    everything = [leaf.clone().requires_grad_() for leaf in leaves.values()]
    y, total = add_rms_norm(everything[0], everything[1], (64,), everything[2])
    expected = dict(zip(leaves, torch.autograd.grad((y, total), everything, (grad_y, x)), strict=True))
    leaves[wanted].requires_grad_()
    y, total = add_rms_norm(leaves["x"], leaves["residual"], (64,), leaves["weight"])
    assert total.requires_grad
    torch.autograd.backward((y, total), (grad_y, x.detach()))
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name != wanted)
    torch.testing.assert_close(leaves[wanted].grad, expected[wanted])


def test_add_rms_norm_backward_twice_and_inputs_unchanged(triton_device: torch.device) -> None:
    x, weight, grad_y = make_inputs(6, 64, dtype=torch.float32, device=triton_device)
    inputs = (x, torch.randn_like(x), weight)
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs, upstream = add_rms_norm(leaves[0], leaves[1], (64,), leaves[2]), [grad_y.clone(), x.clone()]
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, [2 * gradient for gradient in upstream])
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice)
    for before, after in zip((*inputs, grad_y, x), (*leaves, *upstream), strict=True):
        assert torch.equal(before, after)


def test_add_rms_norm_reads_strided_rows(triton_device: torch.device) -> None:
    packed, weight, grad_y = make_inputs(2, 5, 3 * 64, dtype=torch.float32, device=triton_device)
    x, residual, grad_y = packed[..., 64:128], packed[:, :, :64], grad_y[..., :64]
    grad_total = torch.randn(64, device=triton_device).expand(2, 5, 64)

    def run(*tensors: Tensor) -> list[Tensor]:
        x, residual, grad_y, grad_total = tensors
        leaves = [t.detach().requires_grad_() for t in (x, residual, weight[::3])]
        outputs = add_rms_norm(leaves[0], leaves[1], (64,), leaves[2])
        return [*outputs, *torch.autograd.grad(outputs, leaves, (grad_y, grad_total))]

    strided = run(x, residual, grad_y, grad_total)
    for actual, expected in zip(
        strided, run(*(t.contiguous() for t in (x, residual, grad_y, grad_total))), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
def test_add_rms_norm_of_zero_rows(triton_device: torch.device, shape: tuple[int, ...]) -> None:
    x, residual = (torch.empty(shape, device=triton_device, requires_grad=True) for _ in range(2))
    weight = torch.ones(64, device=triton_device, requires_grad=True)
    y, total = add_rms_norm(x, residual, (64,), weight)
    (y.sum() + total.sum()).backward()
    assert y.shape == total.shape == x.grad.shape == residual.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_add_rms_norm_compiles_to_one_graph(triton_device: torch.device) -> None:
    x, weight, grad_y = make_inputs(2, 3, 64, dtype=torch.float32, device=triton_device)
    residual = torch.randn_like(x)

    def layer(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, total = add_rms_norm(x * 2, residual, (64,), weight, EPS)
        return y * total

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        y = function(*leaves)
        return [y, *torch.autograd.grad(y, leaves, grad_y)]

    for actual, expected in zip(
        run(torch.compile(layer, fullgraph=True, backend="aot_eager")), run(layer), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_add_rms_norm_off_cuda_is_the_reference() -> None:
    x, weight, _ = make_inputs(2, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    expected = add_rms_norm_reference(x, 2 * x, (64,), weight, **PLAIN)
    for actual, reference in zip(add_rms_norm(x, 2 * x, (64,), weight, EPS), expected, strict=True):
        assert torch.equal(actual, reference)


def test_add_rms_norm_rejects_a_residual_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"residual must be .* shape \(2, 4\) \(input's\), got .* \(4,\)"):
        add_rms_norm(torch.ones(2, 4), torch.ones(4), (4,))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(triton_device: torch.device, value: float) -> None:
    x, weight, grad_output = make_inputs(6, 123, dtype=torch.bfloat16, device=triton_device)
    x[2, 5] = value
    x.requires_grad_()
    y = rms_norm(x, (123,), weight, EPS)
    expected = rms_norm_reference(x, (123,), weight, **PLAIN)
    (grad_x,), (expected_grad,) = torch.autograd.grad(y, x, grad_output), torch.autograd.grad(expected, x, grad_output)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(grad_x.isnan(), expected_grad.isnan())
    assert grad_x[2].isnan().any()
    assert not grad_x[[0, 1, 3, 4, 5]].isnan().any()
