"""Layers of any function, and random ones: ops that are cheap to make again among views, casts and writes in place."""

import functools
import random
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_ops.recipes import made
from lightning_liger.activations.frames import _MAX_COPIED
from lightning_liger.activations.layers import ControlledLayers, Mode, control_layers

MODES = get_args(Mode)
HIDDEN_SIZE = 8
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def controlled(model: nn.Module, *modes: Any) -> ControlledLayers:
    """Controls the layers of ``model``, all in one mode or each in its own."""
    control = control_layers(model)
    assert control is not None
    control.modes = list(modes) if len(modes) > 1 else list(modes) * len(control.layers)
    return control


class Layer(nn.Module):
    """Adds ``function`` of itself and the input to the input; has buffers of all kinds."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.q, self.k = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE), nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("other", torch.ones(HIDDEN_SIZE))
        self.register_buffer("counts", torch.ones(HIDDEN_SIZE, dtype=torch.int64))
        self.register_buffer("large_counts", torch.ones(_MAX_COPIED + 1, dtype=torch.int64))
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self, x)


def layers_of(function: Callable[[Any, Tensor], Tensor], make: Callable[..., nn.Module] = Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(make(function), make(function))


def gated(layer: Any, x: Tensor) -> Tensor:
    return layer.k(silu_mul(layer.q(rms_norm(x)), x))


def tokens() -> Tensor:
    return torch.randn(2, 3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).requires_grad_()


def outcome(model: nn.Module, half: bool = False, num_steps: int = 1, forward: Any = None) -> dict[str, Any]:
    """The output, all gradients and buffers after some steps, and the next random number."""
    torch.manual_seed(3)
    model.zero_grad()
    x = tokens()
    for _ in range(num_steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = (forward or model)(x * 1)
        y.float().square().mean().backward()
    found = {"y": y.detach(), "x": x.grad, "random": torch.rand(()), **dict(model.named_buffers())}
    return found | {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}


class _SavesInputs(torch.autograd.Function):
    """``function`` of tensors, which saves its inputs if ``saves``, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], saves: bool, *args: Tensor) -> Any:
        if saves:
            ctx.save_for_backward(*args)
        else:
            ctx.args = [arg.detach().clone() for arg in args]
        ctx.function = function
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors or ctx.args
        with torch.enable_grad():
            inputs = [arg.detach().requires_grad_() for arg in args]
            return None, None, *torch.autograd.grad(ctx.function(*inputs), inputs, grads)


def fused(function: Callable[..., Any], *args: Tensor, saves: bool = True) -> Any:
    """``function(*args)`` as an op that autograd sees as one and that says how its output was made."""
    if not (torch.is_grad_enabled() and any(arg.requires_grad for arg in args)):
        return function(*args)
    return made(_SavesInputs.apply(function, saves, *args), function, *args, keeps_inputs=saves)


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return fused(_norm, x, *(() if weight is None else (weight,)))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return fused(_silu_mul, gate, up)


def _norm(x: Tensor, *weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight[0].to(x.dtype) if weight else None, 1e-5) * 1.0


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _turned(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


class RandomLayer(nn.Module):
    """Runs ``num_ops`` random ops on a pool of tensors and sums up the last ones; the same for the same ``seed``."""

    def __init__(self, seed: int, num_ops: int = 14, writes: bool = False) -> None:
        super().__init__()
        self.seed, self.num_ops, self.writes = seed, num_ops, writes
        self.linears = nn.ModuleList(nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=i == 0) for i in range(3))
        self.weights = nn.ParameterList(torch.rand(HIDDEN_SIZE) + 0.5 for _ in range(2))
        frozen = random.Random(seed)
        for parameter in self.parameters():
            parameter.requires_grad_(frozen.random() > 0.2)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        choose = random.Random(self.seed)
        pool = [x, x if residual is None else residual]
        ops = _OPS + (_WRITES if self.writes else [])
        for _ in range(self.num_ops):
            op = choose.choice(ops)
            pool.append(op(self, choose, choose.choice(pool[-4:]), choose.choice(pool)))
        return x + sum(each.to(x.dtype) for each in pool[-3:])


_Op = Callable[[RandomLayer, random.Random, Tensor, Tensor], Tensor]


def _write(layer: RandomLayer, choose: random.Random, a: Tensor, b: Tensor) -> Tensor:
    if a.is_leaf or a is b:
        return a + 0
    kind = choose.randrange(3)
    if kind == 0:
        return a.mul_(0.5)
    if kind == 1:
        a[:, 0].add_(1.0)
        return a
    return a.add_(b.detach().to(a.dtype))


_OPS: list[_Op] = [
    lambda layer, choose, a, b: rms_norm(a, choose.choice([*layer.weights])),
    lambda layer, choose, a, b: rms_norm(a),
    lambda layer, choose, a, b: silu_mul(a, b.to(a.dtype)),
    *2 * [lambda layer, choose, a, b: fused(_turned, a, saves=False)],
    *2 * [lambda layer, choose, a, b: choose.choice([*layer.linears])(a.to(layer.linears[0].weight.dtype))],
    lambda layer, choose, a, b: a * torch.sigmoid(b.to(a.dtype)),
    lambda layer, choose, a, b: a.transpose(0, 1).contiguous().transpose(0, 1),
    lambda layer, choose, a, b: torch.cat((a[..., 4:], a[..., :4]), -1),
    lambda layer, choose, a, b: torch.tanh(a),
    lambda layer, choose, a, b: a / (1 + a.detach().abs().amax()),
    lambda layer, choose, a, b: F.dropout(a, 0.3, layer.training),
    lambda layer, choose, a, b: a + b.to(a.dtype),
    lambda layer, choose, a, b: a.detach() * b.to(a.dtype),
    lambda layer, choose, a, b: a.float().to(a.dtype),
]
_WRITES: list[_Op] = [_write, _write]
