"""Modules over the ops: interchangeable with those of torch.nn, and their additional arguments."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import liger_ops
import liger_ops.nn as fused
from liger_ops import backend
from tests.liger_ops.operators import OperatorLog

NEEDS_NAMESAKE = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"), reason="this version of PyTorch has no LinearCrossEntropyLoss"
)
CLASS_WEIGHT = torch.linspace(0.5, 2.0, 7)
LABELS = torch.tensor([3, 0, 2, -100, 6, 2])
CLASSES = LABELS.clamp(min=1)
OPTIONS = {"weight": CLASS_WEIGHT, "ignore_index": 2, "label_smoothing": 0.1, "reduction": "sum"}
EXTRAS = {"softcap": 3.0, "logit_scale": 0.5, "z_loss_weight": 0.1}
HEAD = {"in_features": 4, "num_classes": 7}


def randomize(module: nn.Module) -> None:
    """So that no parameter is one or zero."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def run(module: Callable[..., Tensor], x: Tensor, *others: Tensor, **keywords: Any) -> dict[str, Tensor]:
    """The output and every gradient by name, for an upstream gradient that is the same each time."""
    x = x.detach().requires_grad_()
    y = module(x, *others, **keywords)
    parameters = dict(module.named_parameters())
    upstream = torch.linspace(-1, 2, y.numel(), device=y.device, dtype=y.dtype).view(y.shape)
    gradients = torch.autograd.grad(y, [x, *parameters.values()], upstream)
    return {"y": y, **dict(zip(["x", *parameters], gradients, strict=True))}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=lambda message, name=name: f"{name}: {message}")


def case(
    name: str, arguments: dict[str, Any], shape: tuple[int, ...], target: Tensor | None = None, *, id: str = ""
) -> Any:
    """A module of that name, made with ``arguments``, for an input of ``shape``."""
    marks = NEEDS_NAMESAKE if name == "LinearCrossEntropyLoss" else ()
    return pytest.param(name, arguments, shape, target, id=f"{name} {id}".strip(), marks=marks)


NAMESAKES = [
    case("RMSNorm", {"normalized_shape": 6}, (2, 3, 6)),
    case("RMSNorm", {"normalized_shape": [3, 6], "eps": 0.5}, (2, 3, 6), id="two dimensions, eps"),
    case("RMSNorm", {"normalized_shape": 6, "elementwise_affine": False}, (2, 3, 6), id="without weight"),
    case("LayerNorm", {"normalized_shape": 6}, (2, 3, 6)),
    case("LayerNorm", {"normalized_shape": (3, 6), "eps": 0.5, "bias": False}, (2, 3, 6), id="without bias, eps"),
    case("LayerNorm", {"normalized_shape": 6, "elementwise_affine": False}, (2, 3, 6), id="without parameters"),
    case("GroupNorm", {"num_groups": 3, "num_channels": 6}, (2, 6, 3, 2)),
    case("GroupNorm", {"num_groups": 2, "num_channels": 6, "eps": 0.5, "affine": False}, (2, 6), id="no weight, eps"),
    case("CrossEntropyLoss", {}, (6, 7), LABELS),
    case("CrossEntropyLoss", OPTIONS, (6, 7), CLASSES, id="options"),
    case("CrossEntropyLoss", {"size_average": False}, (6, 7), LABELS, id="deprecated reduction"),
    case("LinearCrossEntropyLoss", HEAD, (6, 4), LABELS),
    case("LinearCrossEntropyLoss", {**HEAD, **OPTIONS, "bias": True}, (6, 4), CLASSES, id="options"),
    case(
        "LinearCrossEntropyLoss",
        {**HEAD, "bias": True, "out_features": (3,)},
        (2, 4),
        LABELS.view(2, 3),
        id="several sets of classes",
    ),
]


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
@pytest.mark.parametrize(("name", "arguments", "shape", "target"), NAMESAKES)
def test_module_computes_what_its_namesake_does(
    device: torch.device, name: str, arguments: dict[str, Any], shape: tuple[int, ...], target: Tensor | None
) -> None:
    pair = []
    for namespace in (fused, nn):
        torch.manual_seed(0)
        pair.append(getattr(namespace, name)(**arguments).to(device))
    module, namesake = pair
    assert_same(module.state_dict(), namesake.state_dict())
    x, others = torch.randn(shape, device=device), () if target is None else (target.to(device),)
    for source, destination in ((module, namesake), (namesake, module)):
        randomize(source)
        assert source.state_dict().keys() == destination.state_dict().keys()
        destination.load_state_dict(source.state_dict(), strict=True)
        assert_same(run(module, x, *others), run(namesake, x, *others))


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_module_takes_its_namesakes_arguments(method: str) -> None:
    names = {name for name, value in vars(fused).items() if name in fused.__all__ and hasattr(nn, name)}
    assert names >= {"RMSNorm", "LayerNorm", "GroupNorm", "CrossEntropyLoss"}
    for name in names:
        assert issubclass(getattr(fused, name), getattr(nn, name)) or name == "LinearCrossEntropyLoss"
        ours, theirs = (
            list(inspect.signature(getattr(getattr(namespace, name), method)).parameters.values())
            for namespace in (fused, nn)
        )
        facts = [[(p.name, p.kind, p.default) for p in parameters] for parameters in (ours, theirs)]
        assert facts[0][: len(facts[1])] == facts[1]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in ours[len(theirs) :])


SMALL = {
    "RMSNorm": ({"normalized_shape": 8, "offset": 1.0, "casting": "llama"}, (2, 8)),
    "LayerNorm": ({"normalized_shape": 8}, (2, 8)),
    "GroupNorm": ({"num_groups": 2, "num_channels": 4}, (2, 4, 3)),
    "RotaryEmbedding": ({"head_dim": 8, "base": 100.0, "rotary_dim": 4, "interleaved": True}, (1, 2, 3, 8)),
    "SwiGLU": ({"hidden_size": 4, "intermediate_size": 6, "bias": True}, (2, 4)),
    "GeGLU": ({"hidden_size": 4, "intermediate_size": 6, "approximate": "tanh"}, (2, 4)),
    "SparseMoE": ({"hidden_size": 4, "intermediate_size": 6, "num_experts": 5, "top_k": 2}, (2, 4)),
    "MultiTokenAttention": ({"in_channels": 2, "out_channels": 4, "kernel_size": 3, "padding": 1}, (1, 2, 5, 5)),
    "HyperConnection": ({"layer": nn.Tanh(), "num_streams": 3, "num_channels": 8, "tmax": 3}, (2, 3, 8)),
    "CrossEntropyLoss": (EXTRAS, (6, 7)),
    "LinearCrossEntropyLoss": ({**HEAD, **EXTRAS}, (6, 4)),
}


def make_small(name: str, device: torch.device | str = "cpu") -> tuple[nn.Module, list[Tensor]]:
    """A module with random parameters, and its inputs."""
    arguments, shape = SMALL[name]
    module = getattr(fused, name)(**arguments).to(device)
    randomize(module)
    x = torch.randn(shape, device=device)
    if name.endswith("Loss"):
        return module, [x, LABELS.to(device)]
    return module, [x, x[:, :1]] if name == "RotaryEmbedding" else [x]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", fused.__all__)
def test_module_runs_a_kernel(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, inputs = make_small(name, triton_device)
    inputs[0].requires_grad_()
    with OperatorLog() as log:
        actual = module(*inputs)
    assert log.calls
    monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    torch.testing.assert_close(actual, module(*inputs))


@pytest.mark.parametrize("name", fused.__all__)
def test_module_is_copied_whole(name: str) -> None:
    module, inputs = make_small(name)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert repr(twin) == repr(module)
        torch.testing.assert_close(twin(*inputs), module(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", fused.__all__)
def test_module_made_on_meta_gets_its_values_by_reset_parameters(name: str) -> None:
    arguments, _ = SMALL[name]
    torch.manual_seed(1)
    expected = tensors_of(getattr(fused, name)(**arguments))
    with torch.device("meta"):
        module = getattr(fused, name)(**arguments)
    assert all(tensor.is_meta for tensor in tensors_of(module).values())
    module.to_empty(device="cpu")
    for tensor in tensors_of(module).values():
        tensor.detach().fill_(torch.nan)
    torch.manual_seed(1)
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    assert_same(tensors_of(module), expected)


@pytest.mark.parametrize("name", [name for name in fused.__all__ if name != "CrossEntropyLoss"])
def test_module_is_made_on_a_device_in_a_dtype(name: str) -> None:
    arguments, _ = SMALL[name]
    dtype = torch.float32 if name == "RotaryEmbedding" else torch.float64
    chosen = {} if name == "RotaryEmbedding" else {"dtype": dtype}
    tensors = tensors_of(getattr(fused, name)(**arguments, device="meta", **chosen)).values()
    assert {(tensor.device.type, tensor.dtype) for tensor in tensors} == {("meta", dtype)}


# RMSNorm


def test_rms_norm_with_offset_starts_as_the_plain_one() -> None:
    plain, shifted = fused.RMSNorm(6), fused.RMSNorm(6, offset=1.0)
    assert torch.equal(plain.weight, torch.ones(6))
    assert torch.equal(shifted.weight, torch.zeros(6))
    x = torch.randn(2, 6)
    assert torch.equal(shifted(x), plain(x))
    nn.init.normal_(shifted.weight)
    with torch.no_grad():
        plain.weight.copy_(1 + shifted.weight)
    torch.testing.assert_close(shifted(x), plain(x))
    shifted.reset_parameters()
    assert torch.equal(shifted.weight, torch.zeros(6))


# RotaryEmbedding


def rotate_by_hand(
    x: Tensor, position_ids: Tensor, base: float, rotary_dim: int, interleaved: bool, heads_dim: int
) -> Tensor:
    """Turns one pair of columns after the other, in float64."""
    x = x.double() if heads_dim == 1 else x.double().transpose(1, 2)
    y = x.clone()
    for pair in range(rotary_dim // 2):
        angle = position_ids.double() * base ** (-2 * pair / rotary_dim)
        angle = angle.view(-1, 1, angle.shape[-1])
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
        y[..., first] = x[..., first] * angle.cos() - x[..., second] * angle.sin()
        y[..., second] = x[..., second] * angle.cos() + x[..., first] * angle.sin()
    return y if heads_dim == 1 else y.transpose(1, 2)


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 4], ids=["whole", "partial"])
@pytest.mark.parametrize(
    "position_ids",
    [
        pytest.param(None, id="in order"),
        pytest.param(torch.tensor([5, 0, 9, 1, 2]), id="one row"),
        pytest.param(torch.tensor([[0, 1, 2, 0, 1]]), id="one row for all"),
        pytest.param(torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]]), id="each its own"),
    ],
)
def test_rotary_embedding_matches_the_formula(
    device: torch.device, position_ids: Tensor | None, rotary_dim: int | None, interleaved: bool, heads_dim: int
) -> None:
    module = fused.RotaryEmbedding(8, base=100.0, rotary_dim=rotary_dim, interleaved=interleaved).to(device)
    heads = (3, 5) if heads_dim == 1 else (5, 3)
    q = torch.randn(2, *heads, 8, device=device, requires_grad=True)
    k = torch.randn(2, *heads, 8, device=device).narrow(heads_dim, 0, 1)
    positions = torch.arange(5) if position_ids is None else position_ids
    where = None if position_ids is None else position_ids.to(device)
    results = module(q, k, where, heads_dim=heads_dim) if heads_dim == 2 else module(q, k, where)
    for x, y in zip((q, k), results, strict=True):
        expected = rotate_by_hand(x, positions.to(device), 100.0, rotary_dim or 8, interleaved, heads_dim)
        torch.testing.assert_close(y, expected.float())
    # A rotation's gradient is the rotation back.
    (gradient,) = torch.autograd.grad(results[0], q, results[0].detach())
    torch.testing.assert_close(gradient, q)


def test_inverse_frequencies_stay_float32() -> None:
    expected = 1.0 / (10000.0 ** (torch.arange(0, 64, 2).float() / 64))  # Hugging Face's, bit for bit
    for convert in (
        lambda module: module.bfloat16(),
        lambda module: module.to("cpu", torch.bfloat16),
        lambda module: module.double(),
        lambda module: module.half().float(),
    ):
        rotary = fused.RotaryEmbedding(64)
        convert(nn.Sequential(rotary, nn.Linear(2, 2)))
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, expected)
        assert not rotary.state_dict()
    rotary = fused.RotaryEmbedding(64).to("meta", torch.bfloat16)
    assert (rotary.inv_freq.device.type, rotary.inv_freq.dtype) == ("meta", torch.float32)
    assert rotary.to_empty(device="cpu").inv_freq.dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    assert torch.equal(fused.RotaryEmbedding(64).inv_freq, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_far_positions_are_exact_in_any_dtype(dtype: torch.dtype, autocast: bool) -> None:
    # float32 rounds the angle itself, by 4e-3 here at most; bfloat16 frequencies would be wrong by whole turns.
    positions = torch.tensor([100_003])
    q = torch.randn(1, 1, 1, 64).to(dtype)
    rotary = fused.RotaryEmbedding(64).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = rotary(q, q, positions)
    expected = rotate_by_hand(q, positions, 10000.0, 64, interleaved=False, heads_dim=1)
    for result in results:
        assert result.dtype == dtype
        tolerance = max(0.03, 8 * torch.finfo(dtype).eps)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)


# Feed-forward layers


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "bias"])
@pytest.mark.parametrize(
    ("make", "activation"),
    [
        pytest.param(fused.SwiGLU, F.silu, id="SwiGLU"),
        pytest.param(fused.GeGLU, F.gelu, id="GeGLU"),
        pytest.param(
            lambda *sizes, **options: fused.GeGLU(*sizes, approximate="tanh", **options),
            lambda x: F.gelu(x, approximate="tanh"),
            id="GeGLU tanh",
        ),
    ],
)
def test_feed_forward_matches_the_formula(
    device: torch.device, make: Callable[..., nn.Module], activation: Callable[[Tensor], Tensor], bias: bool
) -> None:
    module = make(4, 6, bias=bias).to(device)
    randomize(module)
    names = [f"{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")[: 1 + bias]]
    assert list(module.state_dict()) == names
    assert (module.gate_proj.weight.shape, module.down_proj.weight.shape) == ((6, 4), (4, 6))
    x = torch.randn(2, 3, 4, device=device)
    actual = run(module, x)
    module.forward = lambda x: module.down_proj(activation(module.gate_proj(x)) * module.up_proj(x))
    assert_same(actual, run(module, x))


# Losses


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "LinearCrossEntropyLoss"])
def test_loss_passes_on_everything_it_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_linear = name.startswith("Linear")
    op = liger_ops.linear_cross_entropy if is_linear else liger_ops.cross_entropy
    calls: list[dict[str, Any]] = []

    def record(*arguments: Any, **options: Any) -> None:
        calls.append(inspect.signature(op).bind(*arguments, **options).arguments)

    monkeypatch.setattr(fused, op.__name__, record)
    chosen = {**OPTIONS, **EXTRAS}
    given = {"token_weight": torch.rand(6), "return_stats": True}
    if is_linear:
        chosen |= {"chunk_bytes": 60, "accumulate_dtype": torch.float64, "saved_logits_bytes": 120}
        chosen |= {"options": SimpleNamespace(batch_chunk_size=None, acc_dtype=None)}
        given["max_valid_tokens"] = 5
    else:
        chosen["inplace_backward"] = True
    module = getattr(fused, name)(*(HEAD.values() if is_linear else ()), **chosen)
    module(torch.randn(6, 4), LABELS, **given)
    expected = chosen | given
    assert {key: calls[0][key] for key in expected} == expected
    head_arguments = {"linear_weight", "linear_bias"} if is_linear else set()
    assert {*calls[0]} == {*expected, "input", "target", *head_arguments}


# SparseMoE


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_sparse_moe_is_transformers_block(norm_topk_prob: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=8, moe_intermediate_size=6, num_experts=5, num_experts_per_tok=2, norm_topk_prob=norm_topk_prob
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    randomize(block)
    module = fused.SparseMoE(8, 6, 5, 2, norm_topk_prob=norm_topk_prob)
    module.load_state_dict(block.state_dict(), strict=True)
    x = torch.randn(2, 7, 8)
    outputs = block(x)
    torch.testing.assert_close(module(x), outputs if isinstance(outputs, Tensor) else outputs[0])
