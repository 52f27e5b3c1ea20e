"""RMSNorm: kernels against the reference in float64, with plain PyTorch in the tested dtype as the yardstick."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.rms_norm import (
    CASTINGS,
    choose_backward_launch,
    choose_forward_launch,
    rms_norm,
    rms_norm_reference,
)
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


def eager_rms_norm(x: Tensor, weight: Tensor | None, offset: float, casting: str) -> Tensor:
    """What Hugging Face's Gemma and Llama layers compute."""
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
@pytest.mark.parametrize(("offset", "casting"), [(0.0, "gemma"), (1.0, "gemma"), (0.0, "llama"), (1.0, "llama")])
# 17 rows of 1024 take three tiles on the interpreter's two programs; 507 is odd and leaves a masked tail.
@pytest.mark.parametrize("shape", [(1, 123), (17, 1024), (2, 3, 507)], ids=str)
def test_rms_norm_matches_reference(
    triton_device: torch.device, dtype: torch.dtype, offset: float, casting: str, shape: tuple[int, ...]
) -> None:
    assert_matches_reference(*make_inputs(*shape, dtype=dtype, device=triton_device), offset=offset, casting=casting)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((5, 1), id="one column"),
        pytest.param((200, 64), id="heads, several rows a tile"),
        pytest.param((3, 16385), id="row longer than a backward tile of 16 KB"),
        pytest.param((2, 65537), id="past 65536"),
    ],
)
def test_rms_norm_takes_any_row_length(triton_device: torch.device, shape: tuple[int, int]) -> None:
    assert_matches_reference(*make_inputs(*shape, dtype=torch.float32, device=triton_device), offset=1.0)


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


def test_llama_casting_rounds_before_the_weight_and_gemma_after(triton_device: torch.device) -> None:
    x, _, _ = make_inputs(4, 64, dtype=torch.bfloat16, device=triton_device)
    weight = torch.ones(64, device=triton_device)
    llama = rms_norm(x, (64,), weight, casting="llama")
    assert llama.dtype == torch.float32
    assert torch.equal(llama, llama.bfloat16().float())
    assert rms_norm(x, (64,), weight, casting="gemma").dtype == torch.bfloat16


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
        y, rstd = forward(x, weight, 16, EPS, 0.0, casting)
        for needs in ((True, weighted), (True, False), (False, weighted)):
            arguments = (grad_output.to(y.dtype), x, weight, rstd, 16, 0.0, casting, *needs)
            torch.library.opcheck(backward, arguments, test_utils=checks)


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
        pytest.param(((4,), torch.ones(3)), {}, r"weight .* \(4,\), got \(3,\)", id="weight"),
        pytest.param(((4,),), {"offset": 1.0}, r"offset .* got 1\.0", id="offset without weight"),
        pytest.param(((4,),), {"casting": "none"}, r"casting must be one of gemma, llama, got 'none'", id="casting"),
    ],
)
def test_rms_norm_rejects(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(2, 4), *arguments, **options)


@pytest.mark.parametrize("hidden_size", [1, 64, 2048, 4096, 5120, 16384, 65536])
def test_launches_cover_rows_and_fit(hidden_size: int) -> None:
    for num_rows in (1, 1000):
        forward = choose_forward_launch(num_rows, hidden_size)
        assert forward.block_size >= hidden_size
        assert forward.num_programs * forward.block_rows >= num_rows
        backward = choose_backward_launch(num_rows, hidden_size, element_size=2, num_multiprocessors=132)
        assert backward.block_size >= hidden_size
        assert 1 <= backward.num_programs <= 132
        tile_bytes = 2 * backward.block_rows * backward.block_size
        assert tile_bytes <= 16384 or (backward.block_rows, backward.num_stages) == (1, 1)
