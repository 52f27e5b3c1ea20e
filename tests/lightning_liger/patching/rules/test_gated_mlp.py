"""Gated MLPs are found by what they compute, whatever their children are called; what resembles them is left alone."""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import gated_mlp
from lightning_liger.patching.rules.base import Patched
from tests.lightning_liger.patching.rules.comparing import (
    assert_kept,
    assert_replaced,
    assert_same,
    fill,
    patched_twin,
    written,
)

SIZE, WIDTH = 16, 24


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {
    "silu_mul": (F.silu, nn.SiLU()),
    "gelu_mul": (F.gelu, nn.GELU()),
    "gelu_mul (tanh)": (partial(F.gelu, approximate="tanh"), nn.GELU("tanh")),
    "relu_squared_mul": (relu2, ACT2FN["relu2"]),
}
LINEARS: tuple[Callable[[int, int], nn.Module], ...] = (
    nn.Linear,
    partial(nn.Linear, bias=False),
    lambda in_features, out_features: Conv1D(out_features, in_features),
)

Forward = Callable[[Any, Tensor], Tensor]


def usual(m: Any, x: Tensor) -> Tensor:
    return m.down(m.activation(m.gate(x)) * m.up(x))


def mlp(
    forward: Forward = usual,
    activation: Any = F.silu,
    order: Sequence[str] = ("gate", "up", "down"),
    linear: Callable[[int, int], nn.Module] = nn.Linear,
    width: int = WIDTH,
    **others: Any,
) -> nn.Module:
    """A module of some of these projections, in one order of definition, and an activation."""
    sizes = {"gate": (SIZE, width), "up": (SIZE, width), "down": (width, SIZE), "both": (SIZE, 2 * width)}
    projections = {name: linear(*sizes[name]) for name in order}
    return fill(written(forward, "MLP", activation=activation, **projections, **others))


packed = partial(mlp, order=("both", "down"))


def dropping(
    *places: str, p: float = 0.0, activation: Any = F.silu, first: Forward | None = None, **options: Any
) -> Any:
    """With dropouts: before the last projection, after it, or before the activation."""

    def drop(m: Any, place: str, x: Tensor) -> Tensor:
        return getattr(m, f"{place}_dropout")(x) if place in places else x

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.activation(drop(m, "gate", m.gate(x))) * m.up(x) if first is None else first(m, x)
        return drop(m, "outer", m.down(drop(m, "inner", hidden)))

    return mlp(forward, activation, **{f"{place}_dropout": nn.Dropout(p) for place in places}, **options)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 7)), SIZE)


def random_mlp(rng: random.Random) -> tuple[nn.Module, str]:
    """An MLP as somebody may have written it, and what the report says of it."""
    name = rng.choice(list(ACTIVATIONS))
    function, child = ACTIVATIONS[name]
    kind = rng.choice(["separate", "separate", "packed", "packed up first", "one factor"])
    order = {"separate": ["gate", "up", "down"], "one factor": ["gate", "down"]}.get(kind, ["both", "down"])
    rng.shuffle(order)
    in_code = rng.random() < 0.3 and kind != "one factor"

    def first(m: Any, x: Tensor) -> Tensor:
        act = function if in_code else m.activation
        if kind == "one factor":
            return act(m.gate(x))
        pair = (m.gate(x), m.up(x)) if kind == "separate" else m.both(x).chunk(2, dim=-1)
        gate, up = pair[::-1] if kind == "packed up first" else pair
        return up * act(gate)

    if kind == "one factor":
        (function, child), name = ACTIVATIONS["relu_squared_mul"], "relu_squared"
    places = rng.choice([(), (), ("inner",), ("outer",), ("inner", "outer"), ("outer", "inner")])
    activation = None if in_code and not places else rng.choice([function, child])
    module = dropping(
        *places, activation=activation, first=first, order=order, linear=rng.choice(LINEARS),
        width=rng.choice([8, SIZE, WIDTH, 40]) if kind != "one factor" else WIDTH,
    )  # fmt: skip
    return module, name + ", packed" * kind.startswith("packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", range(4))
def test_gated_mlp_of_any_form_is_replaced_and_stays_the_same(part: int, dtype: torch.dtype) -> None:
    for seed in range(15 * part, 15 * part + 15):
        module, description = random_mlp(random.Random(seed))
        module.to(dtype)
        twin = assert_replaced(module, description)
        for each in (*module.children(), *twin.children()):
            if isinstance(each, nn.Dropout):
                each.p = 0.4
        for shape, training in itertools.product(((2, 7), (5,), (2, 3, 4)), (True, False)):
            assert_same(module.train(training), twin.train(training), 10 * tokens(*shape).to(dtype))


def scaled(m: Any, x: Tensor) -> Tensor:
    return m.down(m.activation(m.gate(x) * m.inside) * m.up(x)) * m.outside


@pytest.mark.parametrize(("inside", "outside"), [(0.8, 0.7), (0.8, 1.0), (1.0, -0.7)])
def test_constant_factors_of_swiglu_are_found_and_followed(inside: float, outside: float) -> None:
    module = mlp(scaled, outside=outside, inside=inside)
    twin = assert_replaced(module, "silu_mul, scaled")
    assert_same(module, twin, 10 * tokens())
    if inside != 1.0:
        module.inside = twin.inside = 0.3
        assert_same(module, twin, 10 * tokens())
    assert_kept(mlp(scaled, F.gelu, outside=0.5, inside=0.5), "gelu_mul is not equivalent")


def test_projections_of_several_dtypes_are_tried_in_these() -> None:
    """As T5 has them in float16: its last projection stays in float32, and its forward casts to that."""
    module = mlp(lambda m, x: m.down((m.activation(m.gate(x)) * m.up(x)).to(m.down.weight.dtype)))
    assert_replaced(module, "silu_mul")
    module.half().down.float()
    assert_kept(module, "silu_mul is not equivalent")


STEERED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward hook": lambda module, seen: module.register_forward_hook(lambda _, args, out: seen(out) or out * 2),
    "forward pre-hook": lambda module, seen: module.register_forward_pre_hook(lambda _, args: seen(*args) or args),
    "backward hook": lambda module, seen: module.register_full_backward_hook(lambda _, got, given: seen(*given)),
    "own forward": lambda module, seen: setattr(module, "forward", lambda x: F.silu(seen(x) or x)),
}


@pytest.mark.parametrize("hook", STEERED.values(), ids=STEERED)
@pytest.mark.parametrize("child", ["activation", "gate", "down"])
def test_hooks_of_children_run_and_count(child: str, hook: Callable[[nn.Module, Any], Any]) -> None:
    if hook is STEERED["own forward"] and child != "activation":
        return  # as silu it has another width
    module, later = (mlp(activation=nn.SiLU()) for _ in range(2))
    seen: list[Tensor] = []
    hook(module.get_submodule(child), seen.append)
    twin, later_twin = assert_replaced(module, "silu_mul"), assert_replaced(later, "silu_mul")
    if hook is not STEERED["own forward"]:
        assert seen == []  # trying does not call a user's hooks
    for each in (later, later_twin):
        hook(each.get_submodule(child), seen.append)
    for pair in ((module, twin), (later, later_twin)):
        seen.clear()
        assert_same(*pair, tokens())
        assert len(seen) in (2, 4)


def test_fused_path_comes_back_when_hooks_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, _ = patched_twin(mlp(activation=nn.SiLU()))
    fused: list[Any] = []
    monkeypatch.setitem(gated_mlp._GATES, "silu_mul", lambda *inputs: fused.append(inputs) or inputs[0])
    handle = twin.activation.register_forward_hook(lambda *_: None)
    twin(tokens())
    assert fused == []
    handle.remove()
    twin(tokens())
    assert len(fused) == 1


def test_projection_that_is_exchanged_after_patching_is_used() -> None:
    module = mlp()
    twin, _ = patched_twin(module)
    module.up = twin.up = fill(nn.Sequential(nn.Linear(SIZE, 3), nn.Linear(3, WIDTH)))
    assert_same(module, twin, tokens())


LOOK_ALIKES: dict[str, Callable[[], nn.Module]] = {
    **{
        name: partial(mlp, forward)
        for name, forward in {
            "multiplied gate": lambda m, x: m.down(m.activation(m.gate(x) * 0.9) * m.up(x)),
            "clamped at 100": lambda m, x: m.down(m.activation(m.gate(x).clamp(max=100.0)) * m.up(x)),
            "dropout in code": lambda m, x: m.down(F.dropout(m.activation(m.gate(x)) * m.up(x), 0.1, m.training)),
            "token before": lambda m, x: m.down(m.activation(m.gate(x.roll(1, -2))) * m.up(x)),
        }.items()
    },
    "quick gelu": partial(mlp, usual, ACT2FN["quick_gelu"]),
    "norm between": lambda: mlp(lambda m, x: m.down(m.norm(m.activation(m.gate(x)) * m.up(x))), norm=nn.RMSNorm(WIDTH)),
    "dropout of the gate": partial(dropping, "gate", p=0.1),
    "dropouts that drop nothing": partial(dropping, "gate", "inner"),
    "packed neighbors": partial(packed, lambda m, x: m.down(m.activation(m.both(x)[..., ::2]) * m.both(x)[..., 1::2])),
}


@pytest.mark.parametrize("make", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_look_alike_is_kept_with_a_reason(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    for training in (True, False):
        module = make().train(training).to(dtype)
        description = "silu_mul" + (", packed" if hasattr(module, "both") else "")
        reason = "has parameters" if hasattr(module, "norm") else f"{description} is not equivalent: output differs by"
        assert_kept(module, reason)


def test_reason_is_about_the_activation_and_what_differs() -> None:
    assert_kept(dropping("gate", p=0.1, activation=F.gelu), "gelu_mul is not equivalent")
    with pytest.raises(ValueError, match="MLP: gelu_mul is not equivalent: output differs by"):
        apply_liger_kernels(mlp(), ["gelu_mul"])
    detached = mlp(lambda m, x: m.down(m.activation(m.gate(x)).detach() * m.up(x)))
    assert_kept(detached, "silu_mul is not equivalent: gradient differs by")
    reads = mlp(lambda m, x: F.linear(m.activation(F.linear(x, m.gate.weight)) * m.up(x), m.down.weight))
    assert_kept(reads, "silu_mul is not equivalent: ")


def with_buffer() -> nn.Module:
    """A multiplier that is one only for now."""
    module = mlp(lambda m, x: usual(m, x) * m.scale)
    module.register_buffer("scale", torch.ones(()))
    return module


def two_layers(m: Any, x: Tensor) -> Tensor:
    return m.down(m.activation(m.gate(x)))


NO_MLPS: dict[str, Callable[[], nn.Module]] = {
    "attention": partial(
        written,
        lambda m, x, mask=None: F.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x), mask),
        **{name: nn.Linear(SIZE, SIZE) for name in ("query", "key", "value")},
    ),
    "gelu": partial(mlp, two_layers, F.gelu, ("gate", "down")),
    "relu": partial(mlp, two_layers, nn.ReLU(), ("gate", "down")),
    "two_inputs": partial(mlp, lambda m, x, y: m.down(m.activation(m.gate(x)) * m.up(y))),
    "parameter": partial(mlp, lambda m, x: usual(m, x) * m.scale, scale=()),
    "buffer": with_buffer,
    "two_linears": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
    "module_dict": lambda: nn.ModuleDict({"gate": nn.Linear(4, 8), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}),
}


@pytest.mark.parametrize("make", NO_MLPS.values(), ids=NO_MLPS)
def test_what_is_no_gated_mlp_is_not_reported(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert apply_liger_kernels(module).entries == []
    assert not isinstance(module, Patched)


def test_instance_whose_child_has_other_settings_is_judged_by_itself() -> None:
    """An activation that is silu if it is as sharp, and does not print that."""
    silu = partial(written, lambda m, x: x * torch.sigmoid(m.sharpness * x), "Sharp")
    model = nn.ModuleList(mlp(activation=silu(sharpness=sharpness)) for sharpness in (1.0, 1.7, 1.0))
    model[1].__class__ = model[2].__class__ = type(model[0])
    apply_liger_kernels(model)
    assert [isinstance(each, Patched) for each in model] == [True, False, True]
