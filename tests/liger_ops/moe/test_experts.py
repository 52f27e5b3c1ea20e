"""Experts against a loop over experts in float64: outputs, every gradient, any routing, layout, gate and dtype."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.moe.experts import moe_experts
from liger_ops.moe.gate import Gate
from tests.liger_ops.accuracy import assert_as_accurate, few

ADAPTERS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
NAMES = ("x", "gate_up", "down", "top_k_weights", "gate_up_bias", "down_bias", *ADAPTERS)
GATES = (
    Gate(),
    Gate("gelu"),
    Gate("gelu_tanh"),
    Gate("silu", limit=0.5),
    Gate("silu", limit=0.3, limit_output=True),
    Gate("silu", limit=1.0, alpha=1.702, up_offset=1.0),
)
ALONE = (Gate("relu_squared"), Gate("silu"))


def make(draw: dict[str, Any], device: torch.device) -> tuple[list[Tensor | None], Tensor, dict[str, Any]]:
    """Tensors in the order of ``NAMES``, the experts of each token, and options."""
    generator = torch.Generator().manual_seed(draw["seed"])
    num_tokens, num_experts, top_k = draw["num_tokens"], draw["num_experts"], draw["top_k"]
    hidden_size, width, gated = draw["hidden_size"], draw["width"], draw["layout"] != "alone"
    shapes: dict[str, tuple[int, ...]] = {
        "x": (num_tokens, hidden_size),
        "gate_up": (num_experts, (1 + gated) * width, hidden_size),
        "down": (num_experts, hidden_size, width),
        "top_k_weights": (num_tokens, top_k),
        "gate_up_bias": (num_experts, (1 + gated) * width),
        "down_bias": (num_experts, hidden_size),
    }
    if draw["transposed"]:
        shapes |= {name: (num_experts, *shapes[name][:0:-1]) for name in ("gate_up", "down")}
    sizes = hidden_size, (1 + gated) * width, width, hidden_size
    for place, (name, size) in enumerate(zip(ADAPTERS, sizes, strict=True)):
        rank = draw["ranks"][place // 2]
        shapes[name] = (num_experts, size, rank) if place % 2 else (num_experts, rank, size)
    tensors: list[Tensor | None] = []
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) * (0.4 if len(shape) == 3 else 1.0)
        if name == "top_k_weights":
            tensor[:, ::3] = 0.0
            tensor = tensor.to(draw["score_dtype"])
        else:
            tensor = tensor.to(draw["dtype"])
        is_left_out = not tensor.numel() or (name.endswith("bias") and not draw["bias"])
        tensors.append(None if is_left_out else tensor.to(device))
    if draw["routing"] == "one":
        index = torch.full((num_tokens, top_k), num_experts - 1)
    else:
        power = 4.0 if draw["routing"] == "uneven" else 1.0
        chances = torch.rand(num_experts, generator=generator).pow(power) + 1e-6
        index = torch.multinomial(chances, num_tokens * top_k, True, generator=generator).view(num_tokens, top_k)
    if draw["routing"] == "elsewhere":
        index[::2, 0], index[1::3, -1] = num_experts, -1
    # A limit's derivative jumps where rounding to half precision decides.
    gates = ALONE if not gated else GATES if draw["dtype"] == torch.float32 else GATES[:3]
    options = gates[draw["gate"] % len(gates)]._asdict()
    options |= {"interleaved": draw["layout"] == "interleaved", "transposed": draw["transposed"]}
    return tensors, index.to(device), options


def plain_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, scores: Tensor, gate_up_bias: Any, down_bias: Any, gate_up_a: Any,
    gate_up_b: Any, down_a: Any, down_b: Any, index: Tensor, interleaved: bool, transposed: bool, **gate: Any,
) -> Tensor:  # fmt: skip
    """Every expert on every token, in the dtype of ``x``."""

    def linear(x: Tensor, weight: Tensor, bias: Any, a: Any, b: Any) -> Tensor:
        y = F.linear(x, weight[expert], None if bias is None else bias[expert])
        return y if a is None else y + F.linear(F.linear(x, a[expert]), b[expert])

    gate_up, down = (each.mT if transposed else each for each in (gate_up, down))
    y = torch.zeros_like(x)
    for expert in range(len(down)):
        z = linear(x, gate_up, gate_up_bias, gate_up_a, gate_up_b)
        if gate_up.shape[1] == down.shape[2]:
            a = activation(z, None, **gate)
        else:
            a = activation(*((z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, dim=1)), **gate)
        rows = linear(a, down, down_bias, down_a, down_b)
        y = y + (rows * torch.where(index == expert, scores, 0.0).sum(1, keepdim=True)).to(x.dtype)
    return y


def activation(
    gate: Tensor, up: Tensor | None, activation: str, limit: Any, alpha: float, up_offset: float, limit_output: bool
) -> Tensor:
    if limit is not None and not limit_output:
        gate = gate.clamp(max=limit)
    value = {
        "silu": lambda x: x * torch.sigmoid(alpha * x),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu_squared": lambda x: F.relu(x).square(),
    }[activation](gate)
    value = value.clamp(max=limit) if limit_output else value
    up = up if up is None or limit is None else up.clamp(-limit, limit)
    return value if up is None else value * (up + up_offset)


def fused_experts(x: Tensor, gate_up: Tensor, down: Tensor, scores: Tensor, *rest: Any, **options: Any) -> Tensor:
    gate_up_bias, down_bias, *adapters, index = rest
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, place in (("gate_up_adapter", 0), ("down_adapter", 2)):
        options[name] = None if adapters[place] is None else tuple(adapters[place : place + 2])
    return moe_experts(x, gate_up, down, index, scores, **biases, **options)


def run(function: Any, tensors: list[Tensor | None], needs: list[bool], index: Tensor, **options: Any) -> list[Tensor]:
    """The output and the gradients that are needed."""
    leaves = [
        None if each is None else each.clone().requires_grad_(need) for each, need in zip(tensors, needs, strict=True)
    ]
    y = function(*leaves, index, **options)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
    used = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
    return [y.detach(), *(torch.autograd.grad(y, used, grad) if used else ())]


NEEDS = [True] * len(NAMES)
DRAW = {
    "seed": st.integers(0, 999),
    "num_tokens": st.sampled_from([1, 2, 7, 40]),
    "num_experts": st.sampled_from([1, 3, 17]),
    "top_k": st.sampled_from([1, 2, 3]),
    "hidden_size": st.sampled_from([16, 24, 40]),
    "width": st.sampled_from([8, 16, 20]),
    "layout": st.sampled_from(["halves", "interleaved", "alone"]),
    "transposed": st.booleans(),
    "bias": st.booleans(),
    "gate": st.integers(0, 5),
    "routing": st.sampled_from(["even", "uneven", "one", "elsewhere"]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "score_dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "ranks": st.sampled_from([(0, 0), (1, 0), (0, 7), (16, 3), (5, 40)]),
    "needs": st.lists(st.booleans(), min_size=10, max_size=10).map(lambda needs: needs if any(needs) else NEEDS),
}


@given(st.fixed_dictionaries(DRAW))
@few(24)
def test_outputs_and_gradients_are_as_near_to_float64_as_plain_pytorch(
    device: torch.device, draw: dict[str, Any]
) -> None:
    tensors, index, options = make(draw, device)
    needs = [need and each is not None for need, each in zip(draw["needs"], tensors, strict=True)]
    found = run(fused_experts, tensors, needs, index, **options)
    eager = run(plain_experts, tensors, needs, index, **options)
    wide = [None if each is None else each.double() for each in tensors]
    truth = run(plain_experts, wide, needs, index, **options)
    names = ["output", *(name for name, need in zip(NAMES, needs, strict=True) if need)]
    for name, actual, plain, expected in zip(names, found, eager, truth, strict=True):
        # Gradients of scores are sums of many terms of both signs, in float32 also of products in half precision.
        is_sum = name == "top_k_weights"
        magnitude = 4.0 * max(1.0, expected.abs().max().item() if is_sum else 0.0)
        assert_as_accurate(name, actual, plain, expected, factor=4.0 if is_sum else 2.0, magnitude=magnitude)


EVERYTHING = {
    "seed": 3, "num_tokens": 40, "num_experts": 6, "top_k": 3, "hidden_size": 24, "width": 20, "layout": "halves",
    "transposed": False, "bias": True, "gate": 0, "routing": "elsewhere", "dtype": torch.bfloat16,
    "score_dtype": torch.float32, "ranks": (3, 5),
}  # fmt: skip


def test_results_do_not_depend_on_the_order_of_tokens_or_experts(device: torch.device) -> None:
    tensors, index, options = make(EVERYTHING, device)
    found = run(fused_experts, tensors, NEEDS, index, **options)
    assert all(map(torch.equal, found, run(fused_experts, tensors, NEEDS, index, **options)))

    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(0)).to(device)
    moved = [tensors[0][order], *tensors[1:3], tensors[3][order], *tensors[4:]]
    assert torch.equal(run(fused_experts, moved, [False] * len(NAMES), index[order], **options)[0], found[0][order])

    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).to(device)
    renamed = [each if place in (0, 3) else each[order] for place, each in enumerate(tensors)]
    inverse = order.argsort()
    is_used = (index >= 0) & (index < 6)
    other = run(fused_experts, renamed, NEEDS, inverse[index.clamp(0, 5)].where(is_used, index), **options)
    expected = [each if place in (0, 1, 4) else each[order] for place, each in enumerate(found)]
    if device.type == "cuda":
        torch.testing.assert_close(other, expected)
    assert all(map(torch.equal, other[2:4], expected[2:4]))


def test_what_is_lost_stays_with_its_token_and_experts(device: torch.device) -> None:
    tensors, index, options = make(EVERYTHING, device)
    index = torch.randint(0, 5, index.shape, generator=torch.Generator().manual_seed(0)).to(device)  # 5 has no token
    tensors[0][7, 3] = float("nan")
    y, grad_x, *grads = run(fused_experts, tensors, NEEDS, index, **options)
    rows = [row for row in range(len(index)) if row != 7]
    assert y[7].isnan().all()
    assert y[rows].isfinite().all()
    assert grad_x[rows].isfinite().all()
    own = set(index[7].tolist())
    for grad in (grads[0], grads[1]):
        assert {expert for expert in range(6) if not grad[expert].isfinite().all()} == own
    assert not any(grad[5].any() for place, grad in enumerate(grads) if place != 2)


def test_pairs_without_an_expert_add_nothing_and_get_no_gradient(device: torch.device) -> None:
    tensors, index, options = make(EVERYTHING, device)
    is_used = (index >= 0) & (index < 6)
    assert not is_used.all()
    tensors[3] = tensors[3].masked_fill(~is_used, float("inf"))
    y, grad_x, _, _, grad_scores, *_ = run(fused_experts, tensors, NEEDS, index, **options)
    assert y.isfinite().all()
    assert grad_x.isfinite().all()
    assert not grad_scores[~is_used].any()
    nothing = torch.full_like(index, -1)
    y, *grads = run(fused_experts, tensors, NEEDS, nothing, **options)
    assert not y.any()
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("device", ["kernel"], indirect=True)
def test_adapters_of_frozen_weights_make_nothing_of_their_size(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, index, options = make(EVERYTHING | {"num_tokens": 6}, device)
    sizes: list[int] = []
    for owner, name in ((Tensor, "new_empty"), (torch, "empty_like"), (torch, "zeros_like"), (Tensor, "contiguous")):
        own = getattr(owner, name)

        def watched(*args: Any, own: Any = own, **kwargs: Any) -> Tensor:
            made: Tensor = own(*args, **kwargs)
            if not any(made is each for each in args):
                sizes.append(made.numel())
            return made

        monkeypatch.setattr(owner, name, watched)
    needs = [name in ("x", "top_k_weights", *ADAPTERS) for name in NAMES]
    run(fused_experts, tensors, needs, index, **options)
    assert max(sizes) < tensors[2].numel()
    run(fused_experts, tensors, NEEDS, index, **options)
    assert max(sizes) == tensors[1].numel()


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_shapes_of_inputs_and_autocast(device: torch.device, num_tokens: int) -> None:
    tensors, _, _ = make(EVERYTHING | {"dtype": torch.float32, "bias": False}, device)
    x = torch.randn(2, num_tokens, 24, device=device)
    index = torch.randint(0, 6, (2, num_tokens, 3), device=device)
    scores = torch.rand(2, 3, num_tokens, device=device).mT
    leaves = [each.requires_grad_() for each in (x, tensors[1], tensors[2], scores)]
    flat = moe_experts(x.view(-1, 24), *leaves[1:3], index.view(-1, 3), scores.reshape(-1, 3))
    y = moe_experts(*leaves[:3], index, scores)
    assert torch.equal(y.view(-1, 24), flat)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        low = moe_experts(*leaves[:3], index, scores)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, y, rtol=0.05, atol=0.05)
    for grad, leaf in zip(torch.autograd.grad(low.sum(), leaves), leaves, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
