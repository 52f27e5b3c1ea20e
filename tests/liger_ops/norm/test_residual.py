"""Residual connections: gradients that a norm's backward adds are those that autograd would add."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_ops import layer_norm, rms_norm
from liger_ops.norm import layer_norm as layer_norm_module
from liger_ops.norm import residual
from liger_ops.norm import rms_norm as rms_norm_module

HIDDEN_SIZE = 8
Norm = Callable[[Tensor, Tensor], Tensor]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, (HIDDEN_SIZE,), weight, 1e-6)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return layer_norm(x, (HIDDEN_SIZE,), weight, None, 1e-6)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradients that norms got from sums, as long as that goes on."""
    found: list[Tensor] = []

    def take(node: Any) -> Tensor | None:
        gradient = residual.take(node)
        if gradient is not None:
            found.append(gradient)
        return gradient

    monkeypatch.setattr(rms_norm_module, "take", take)
    monkeypatch.setattr(layer_norm_module, "take", take)
    return found


class Weights:
    """Leaf tensors by name, the same ones for the same name, in the dtype and on the device of a run."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.leaves: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self.leaves:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            values = torch.randn(shape, generator=generator).bfloat16()
            self.leaves[name] = values.to(self.device, self.dtype).requires_grad_()
        return self.leaves[name]


def run_program(seed: int, weights: Weights) -> tuple[Tensor, list[Tensor]]:
    """A random program over a residual stream; returns a loss, and tensors on the way whose gradients are compared."""
    rng = random.Random(seed)
    x = weights("x", 3, 4, HIDDEN_SIZE)
    if rng.random() < 0.5:
        x = x * 0.5
    seen: list[Tensor] = [x]

    def branch(name: str, x: Tensor) -> Tensor:
        norm = rng.choice((rms, layer))
        y = norm(x, weights(f"{name} norm", HIDDEN_SIZE))
        kind = rng.randrange(6)
        if kind == 0:
            y = y.detach() * weights(f"{name} gain", HIDDEN_SIZE)
        elif kind == 1:
            y = norm(y @ weights(f"{name} in", HIDDEN_SIZE, HIDDEN_SIZE), weights(f"{name} after", HIDDEN_SIZE))
        else:
            y = (y @ weights(f"{name} in", HIDDEN_SIZE, HIDDEN_SIZE)).tanh()
        if rng.random() < 0.2:
            y = y[:, :1]  # the sum broadcasts it
        if rng.random() < 0.2:
            seen.append(y)
        return y

    for step in range(rng.randrange(2, 6)):
        name = f"step {step}"
        kind = rng.randrange(9)
        if kind <= 2:
            x = x + branch(name, x)
        elif kind == 3:
            x = branch(name, x) + x
        elif kind == 4:  # parallel branches
            x = x + branch(f"{name} a", x) + branch(f"{name} b", x)
        elif kind == 5:
            x = torch.add(x, branch(name, x), alpha=0.3)
        elif kind == 6:  # two sums have one norm's input
            y = branch(name, x)
            x = rms(x + y, weights(f"{name} first", HIDDEN_SIZE)) + rms(
                x + 2 * y, weights(f"{name} other", HIDDEN_SIZE)
            )
        elif kind == 7:  # the norm's output goes elsewhere
            y = rms(x, weights(f"{name} side", HIDDEN_SIZE))
            x = x + weights(f"{name} bias", 3, 4, HIDDEN_SIZE)
            seen.append(y)
        else:
            rows = (x + branch(name, x)).view(12, HIDDEN_SIZE)
            x = (rows + branch(f"{name} rows", rows)).view(3, 4, HIDDEN_SIZE)
        seen.append(x)
    last = layer(x, weights("last", HIDDEN_SIZE))
    return (last * weights("head", 3, 4, HIDDEN_SIZE)).sum(), seen


def gradients_of(seed: int, weights: Weights) -> dict[str, Tensor]:
    """Gradients in one of the ways in which they can be asked for, with hooks and retained gradients on the way."""
    rng = random.Random(1000 + seed)
    loss, seen = run_program(seed, weights)
    found: dict[str, Tensor] = {}
    for index, tensor in enumerate(seen):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
            tensor.register_hook(lambda gradient, index=index: found.__setitem__(f"hook {index}", gradient.clone()))
    way = rng.randrange(4)
    leaves = list(weights.leaves)
    if way == 0:
        loss.backward()
    elif way == 1:
        loss.backward(retain_graph=True)
        loss.backward()
    elif way == 2:
        wanted = [name for name in leaves if rng.random() < 0.4] or leaves[:1]
        results = torch.autograd.grad(loss, [weights.leaves[name] for name in wanted], allow_unused=True)
        found |= {
            f"grad {name}": gradient for name, gradient in zip(wanted, results, strict=True) if gradient is not None
        }
    else:
        inside = [tensor for tensor in seen if tensor.requires_grad and rng.random() < 0.5] or seen[-1:]
        results = torch.autograd.grad(loss, inside, allow_unused=True)
        found |= {f"seen {index}": gradient for index, gradient in enumerate(results) if gradient is not None}
    found |= {name: leaf.grad for name, leaf in weights.leaves.items() if leaf.grad is not None}
    found |= {
        f"retained {index}": tensor.grad
        for index, tensor in enumerate(seen)
        if not tensor.is_leaf and tensor.grad is not None
    }
    return found


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_agree_with_float64(triton_device: torch.device, taken: list[Tensor], seed: int) -> None:
    actual = gradients_of(seed, Weights(torch.float32, triton_device))
    truth = gradients_of(seed, Weights(torch.float64, triton_device))
    assert actual.keys() == truth.keys()
    for name, wanted in truth.items():
        scale = max(1.0, wanted.abs().max().item())
        error = (actual[name].double() - wanted).abs().max().item()
        assert error <= 2e-5 * scale, f"{name}: {error} of {scale}"


def residual_block(x: Tensor, norm: Norm, *weights: Tensor) -> Tensor:
    norm_weight, projection = weights
    return x + norm(x, norm_weight) @ projection


def make_block(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, projection = torch.randn(5, HIDDEN_SIZE), torch.rand(HIDDEN_SIZE), torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)
    x, weight, projection = (each.to(device, dtype).requires_grad_() for each in (x, weight, projection))
    return x, weight, projection


@pytest.fixture(params=[rms, layer])
def norm(request: pytest.FixtureRequest) -> Norm:
    return request.param


def test_every_sum_between_norms_hands_over(triton_device: torch.device, taken: list[Tensor], norm: Norm) -> None:
    x, *weights = make_block(triton_device)
    total = x
    for _ in range(4):
        total = residual_block(total, norm, *weights)
    norm(total, weights[0]).sum().backward()
    assert len(taken) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_once(triton_device: torch.device, taken: list[Tensor], norm: Norm, dtype: torch.dtype) -> None:
    x, *weights = make_block(triton_device, dtype)

    def gradient(x: Tensor, *weights: Tensor) -> Tensor:
        total = residual_block(x, norm, *weights)
        upstream = torch.linspace(-1, 1, x.numel(), device=x.device, dtype=torch.float64).view_as(x).to(x.dtype)
        return torch.autograd.grad(norm(total, weights[0]), x, upstream)[0]

    actual = gradient(x, *weights)
    assert len(taken) == 1
    truth = gradient(*(each.detach().double().requires_grad_() for each in (x, *weights)))
    # That of the product's gradient, which rounds before it gets here, and one of the sum.
    torch.testing.assert_close(
        actual.double(), truth, rtol=0, atol=6 * torch.finfo(dtype).eps * truth.abs().max().item()
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpoint(triton_device: torch.device, taken: list[Tensor], norm: Norm, use_reentrant: bool) -> None:
    def gradients(dtype: torch.dtype, run: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = make_block(triton_device, dtype)

        def two_blocks(x: Tensor) -> Tensor:
            return residual_block(residual_block(x, norm, *leaves[1:]), norm, *leaves[1:])

        total = run(two_blocks, run(two_blocks, leaves[0]))
        norm(total, leaves[1]).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    actual = gradients(torch.float32, lambda function, x: checkpoint(function, x, use_reentrant=use_reentrant))
    assert taken
    truth = gradients(torch.float64, lambda function, x: function(x))
    for got, wanted in zip(actual, truth, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


class Fails(torch.autograd.Function):
    """Raises in backward while ``failing``."""

    failing = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fails.failing:
            raise ValueError("stop here")
        return gradient


def test_backward_after_one_that_failed(
    triton_device: torch.device, taken: list[Tensor], norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, projection = make_block(triton_device)
    loss = norm(x + Fails.apply(norm(x, weight) @ projection), weight).square().sum()
    monkeypatch.setattr(Fails, "failing", True)
    with pytest.raises(ValueError, match="stop here"):
        loss.backward(retain_graph=True)
    assert not taken
    monkeypatch.setattr(Fails, "failing", False)
    x.grad = None
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(x.grad, first)
    assert len(taken) == 2


@pytest.mark.parametrize("place", ["before the norm", "after the norm"])
def test_backward_within_backward(triton_device: torch.device, taken: list[Tensor], norm: Norm, place: str) -> None:
    """A hook runs another backward over the same graph, before or after the norm's own in the first."""

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        x, weight, projection = make_block(triton_device, dtype)
        inside: list[Tensor] = []
        h = x * 1
        if place == "before the norm":
            y = norm(h, weight)
            hooked = y @ projection
            total = h + hooked
        else:  # the norm has a later node than the sum, so its backward is earlier
            total = hooked = h + torch.ones_like(h)
            y = norm(h, weight)
        loss = norm(total, weight).square().sum() + y.exp().sum()

        def hook(gradient: Tensor) -> None:
            if not inside:
                inside.append(gradient)
                inside.extend(torch.autograd.grad(loss, [x], retain_graph=True))

        hooked.register_hook(hook)
        return [*torch.autograd.grad(loss, [x, weight], retain_graph=True), *inside[1:]]

    for got, wanted in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    assert taken or place == "after the norm"


def test_sparse_gradients_are_left_to_autograd(triton_device: torch.device, norm: Norm) -> None:
    def gradient(dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        x, weight, _ = make_block(triton_device, dtype)
        h = x * 1
        y = norm(h, weight)
        total = h + torch.ones_like(h)
        norm(total, weight)
        rows = torch.nn.functional.embedding(torch.tensor([0, 2], device=triton_device), total, sparse=True)
        return torch.autograd.grad(rows.sum() + y.sum(), weight)[0]

    torch.testing.assert_close(gradient(torch.float32).double(), gradient(torch.float64), rtol=1e-4, atol=1e-4)


def test_under_compiled_autograd(triton_device: torch.device, norm: Norm) -> None:
    from torch._dynamo import compiled_autograd

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        x, *weights = make_block(triton_device, dtype)
        loss = norm(residual_block(x * 1, norm, *weights), weights[0]).square().sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return [leaf.grad for leaf in (x, *weights)]

    torch._dynamo.reset()
    for got, wanted in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_second_derivatives_raise(triton_device: torch.device, norm: Norm) -> None:
    x, *weights = make_block(triton_device)
    loss = norm(residual_block(x, norm, *weights), weights[0]).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What lives in cycles only stays alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("runs_backward", [False, True])
def test_graph_is_freed(triton_device: torch.device, norm: Norm, runs_backward: bool) -> None:
    x, *weights = make_block(triton_device)
    loss = norm(residual_block(residual_block(x, norm, *weights), norm, *weights), weights[0]).sum()
    nodes, waiting = [], [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += [each for each, _ in node.next_functions if each is not None and "Norm" in each.name()]
    norms = [weakref.ref(node) for node in nodes if "Norm" in node.name()]
    assert norms
    if runs_backward:
        loss.backward()
    del loss, nodes, node, waiting
    assert [each() for each in norms] == [None] * len(norms)


@pytest.mark.gpu
def test_norm_in_another_stream(taken: list[Tensor]) -> None:
    device = torch.device("cuda")
    side = torch.cuda.Stream()
    x = torch.randn(1 << 14, HIDDEN_SIZE, device=device, requires_grad=True)
    weight = torch.rand(HIDDEN_SIZE, device=device, requires_grad=True)

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = rms(x, weight)
        torch.cuda.current_stream().wait_stream(side)
        output = rms(x + y.sin(), weight)
        torch.cuda._sleep(10**8)  # backward's first kernels are late
        return torch.autograd.grad(output, x, torch.ones_like(output))[0]

    actual = gradient(x, weight)
    assert taken
    truth = gradient(x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    torch.testing.assert_close(actual.double(), truth, rtol=1e-4, atol=1e-4)
