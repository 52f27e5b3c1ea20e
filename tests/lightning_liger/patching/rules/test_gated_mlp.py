"""Gated MLPs are found by what they compute, whatever their children are called; what resembles them is left alone."""

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV4Config, GptOssConfig, MixtralConfig
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import Patched, gated_mlp
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


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module, str]] = {
    "silu": (F.silu, nn.SiLU(), "silu_mul"),
    "gelu": (F.gelu, nn.GELU(), "gelu_mul"),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), nn.GELU("tanh"), "gelu_mul (tanh)"),
    "relu2": (relu2, ACT2FN["relu2"], "relu_squared_mul"),
}

Forward = Callable[[Any, Tensor], Tensor]


def usual(m: Any, x: Tensor) -> Tensor:
    return m.down(m.activation(m.gate(x)) * m.up(x))


def mlp(
    forward: Forward = usual,
    activation: Any = F.silu,
    order: tuple[str, ...] = ("gate", "up", "down"),
    linear: Callable[[int, int], nn.Module] = nn.Linear,
    width: int = WIDTH,
    **others: Any,
) -> nn.Module:
    """A module of three projections, in one order of definition, and an activation."""
    sizes = {"gate": (SIZE, width), "up": (SIZE, width), "down": (width, SIZE)}
    projections = {name: linear(*sizes[name]) for name in order}
    return fill(written(forward, "MLP", activation=activation, **projections, **others))


def packed(forward: Forward, activation: Any = F.silu) -> nn.Module:
    """Gate and up in one projection."""
    return fill(
        written(forward, "Packed", wi=nn.Linear(SIZE, 2 * WIDTH), wo=nn.Linear(WIDTH, SIZE), activation=activation)
    )


def gate_first(m: Any, x: Tensor) -> Tensor:
    gate, up = m.wi(x).chunk(2, dim=-1)
    return m.wo(m.activation(gate) * up)


def up_first(m: Any, x: Tensor) -> Tensor:
    up, gate = m.wi(x).chunk(2, dim=-1)
    return m.wo(up * m.activation(gate))


def two_layers(activation: Any) -> nn.Module:
    """The plain MLP of one activation."""
    children = {"fc_in": nn.Linear(SIZE, WIDTH), "fc_out": nn.Linear(WIDTH, SIZE), "act": activation}
    return fill(written(lambda m, x: m.fc_out(m.act(m.fc_in(x))), "TwoLayers", **children))


def dropping(*places: str, p: float = 0.0, activation: Any = F.silu) -> nn.Module:
    """With dropouts: before the last projection, after it, or before the activation."""

    def drop(m: Any, place: str, x: Tensor) -> Tensor:
        return getattr(m, f"{place}_dropout")(x) if place in places else x

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = drop(m, "inner", m.activation(drop(m, "gate", m.gate(x))) * m.up(x))
        return drop(m, "outer", m.down(hidden))

    return mlp(forward, activation, **{f"{place}_dropout": nn.Dropout(p) for place in places})


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 7)), SIZE)


MLPS: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "usual": (partial(mlp, usual), ""),
    "up_times_gate": (partial(mlp, lambda m, x: m.down(m.up(x) * m.activation(m.gate(x)))), ""),
    "packed": (partial(packed, gate_first), ", packed"),
    "packed_up_first": (partial(packed, up_first), ", packed"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("make", "kind"), MLPS.values(), ids=MLPS)
def test_gated_mlp_is_replaced_and_stays_the_same(
    make: Callable[[Any], nn.Module], kind: str, name: str, dtype: torch.dtype
) -> None:
    *activations, description = ACTIVATIONS[name]
    for activation in activations:
        module = make(activation).to(dtype)
        twin = assert_replaced(module, description + kind)
        for shape in ((2, 7), (5,), (2, 3, 4)):
            assert_same(module, twin, 10 * tokens(*shape).to(dtype))


VARIANTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        "-".join(order): (partial(mlp, activation=F.gelu, order=order), "gelu_mul")
        for order in itertools.permutations(("gate", "up", "down"))
    },
    **{f"width_{width}": (partial(mlp, width=width), "silu_mul") for width in (8, SIZE, 40)},
    "activation_in_code": (
        lambda: mlp(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), activation=None),
        "silu_mul",
    ),
    "no_biases": (partial(mlp, linear=partial(nn.Linear, bias=False)), "silu_mul"),
    "conv1d": (partial(mlp, linear=lambda nx, nf: Conv1D(nf, nx)), "silu_mul"),
    "relu_squared": (partial(two_layers, relu2), "relu_squared"),
    "relu_squared_child": (partial(two_layers, ACT2FN["relu2"]), "relu_squared"),
}


@pytest.mark.parametrize(("make", "description"), VARIANTS.values(), ids=VARIANTS)
def test_variant_is_replaced_and_stays_the_same(make: Callable[[], nn.Module], description: str) -> None:
    module = make()
    assert_same(module, assert_replaced(module, description), tokens())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("places", [("inner",), ("outer",), ("inner", "outer"), ("outer", "inner")], ids="-".join)
def test_dropouts_before_and_after_the_last_projection_stay(places: tuple[str, ...], name: str) -> None:
    activation, _, description = ACTIVATIONS[name]
    module = dropping(*places, activation=activation)
    twin = assert_replaced(module, description)
    x = tokens()
    assert_same(module, twin, x)
    outputs = []
    for each in (module, twin):
        for place in places:
            getattr(each, f"{place}_dropout").p = 0.4
        torch.manual_seed(1)
        outputs.append(each.train()(x))
    torch.testing.assert_close(*outputs)
    assert not torch.allclose(outputs[0], module.eval()(x))
    assert_same(module.eval(), twin.eval(), x)


def test_projections_of_several_dtypes_are_tried_in_these() -> None:
    """As T5 has them in float16: its last projection stays in float32, and its forward casts to that."""
    module = mlp(lambda m, x: m.down((m.activation(m.gate(x)) * m.up(x)).to(m.down.weight.dtype)))
    assert_replaced(module, "silu_mul")
    module.half().down.float()
    assert_kept(module, "silu_mul is not the same")


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_projections_run_once_and_count(when: str) -> None:
    module = mlp()
    calls: list[str] = []

    def hook(each: nn.Module) -> None:
        for name in ("gate", "up", "down"):
            each.get_submodule(name).register_forward_hook(lambda _, args, out: calls.append("called") or out * 2)

    if when == "before":
        hook(module)
    twin = assert_replaced(module, "silu_mul")
    assert calls == []  # trying does not call a user's hooks
    if when == "after":
        hook(module), hook(twin)
    x = tokens()
    torch.testing.assert_close(twin(x), module(x))
    assert len(calls) == 6


STEERED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward hook": lambda module, seen: module.register_forward_hook(lambda _, args, out: seen(out) or out * 2),
    "forward pre-hook": lambda module, seen: module.register_forward_pre_hook(lambda _, args: seen(*args) or args),
    "backward hook": lambda module, seen: module.register_full_backward_hook(lambda _, got, given: seen(*given)),
    "own forward": lambda module, seen: setattr(module, "forward", lambda x: F.silu(seen(x) or x)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", STEERED.values(), ids=STEERED)
def test_hooks_of_an_activation_run_and_count(hook: Callable[[nn.Module, Any], Any], when: str) -> None:
    module = mlp(activation=nn.SiLU())
    seen: list[Tensor] = []
    if when == "before":
        hook(module.activation, seen.append)
    twin = assert_replaced(module, "silu_mul")
    if hook is not STEERED["own forward"]:
        assert seen == []  # trying does not call a user's hooks
    if when == "after":
        hook(module.activation, seen.append)
        hook(twin.activation, seen.append)
    seen.clear()
    assert_same(module, twin, tokens())
    assert len(seen) % 2 == 0
    assert len(seen) > 0


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


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * 2


def clamped(limit: float) -> Callable[[], nn.Module]:
    return partial(mlp, lambda m, x: m.down(m.activation(m.gate(x).clamp(max=m.limit)) * m.up(x)), limit=limit)


LOOK_ALIKES: dict[str, Callable[[], nn.Module]] = {
    "multiplied_gate": partial(mlp, lambda m, x: m.down(m.activation(m.gate(x) * 0.9) * m.up(x))),
    "multiplied_result": partial(mlp, lambda m, x: usual(m, x) * m.multiplier, multiplier=0.5),
    "clamped_at_2": clamped(2.0),
    "clamped_at_100": clamped(100.0),
    "norm_between": lambda: mlp(
        lambda m, x: m.down(m.norm(m.activation(m.gate(x)) * m.up(x))), norm=nn.RMSNorm(WIDTH)
    ),
    "dropout_of_the_gate": partial(dropping, "gate", p=0.1),
    "dropouts_that_drop_nothing": partial(dropping, "gate", "inner"),
    "dropout_in_code": partial(
        mlp, lambda m, x: m.down(F.dropout(m.activation(m.gate(x)) * m.up(x), 0.1, m.training))
    ),
    "quick_gelu": partial(mlp, activation=ACT2FN["quick_gelu"]),
    "mish": partial(mlp, activation=F.mish),
    "sigmoid": partial(mlp, activation=torch.sigmoid),
    "no_activation": partial(mlp, activation=lambda x: x),
    "doubled": lambda: mlp(activation=Doubled()),
    "residual": partial(mlp, lambda m, x: x + usual(m, x)),
    "activated_twice": partial(mlp, lambda m, x: m.down(m.activation(m.gate(x)) * m.activation(m.up(x)))),
    "gate_of_the_token_before": partial(mlp, lambda m, x: m.down(m.activation(m.gate(x.roll(1, -2))) * m.up(x))),
    "packed_quick_gelu": partial(packed, gate_first, ACT2FN["quick_gelu"]),
    "packed_neighbours": partial(
        packed, lambda m, x: m.wo(m.activation(m.wi(x)[..., ::2]) * m.wi(x)[..., 1::2])
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_look_alike_is_kept_with_a_reason(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    for training in (True, False):
        module = make().train(training).to(dtype)
        description = "silu_mul" + (", packed" if hasattr(module, "wi") else "")
        assert_kept(module, f"{description} is not the same: output differs by")


def test_reason_is_about_the_activation_that_the_module_has() -> None:
    for activation, _, description in ACTIVATIONS.values():
        assert_kept(dropping("gate", p=0.1, activation=activation), f"{description} is not the same")


def test_look_alike_in_gradient_or_use_of_weights_is_kept_with_a_reason() -> None:
    detached = mlp(lambda m, x: m.down(m.activation(m.gate(x)).detach() * m.up(x)))
    assert_kept(detached, "silu_mul is not the same: gradient differs by")
    reads = mlp(lambda m, x: F.linear(m.activation(F.linear(x, m.gate.weight)) * m.up(x), m.down.weight))
    assert_kept(reads, "silu_mul is not the same: ")


def attention() -> nn.Module:
    """Three projections of equal sizes."""

    def forward(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x), mask)

    return written(forward, **{name: nn.Linear(SIZE, SIZE) for name in ("query", "key", "value")})


def with_buffer() -> nn.Module:
    """A multiplier that is one only for now."""
    module = mlp(lambda m, x: usual(m, x) * m.scale)
    module.register_buffer("scale", torch.ones(()))
    return module


NO_MLPS: dict[str, Callable[[], nn.Module]] = {
    "attention": attention,
    "gelu": partial(two_layers, F.gelu),
    "gelu_child": lambda: two_layers(nn.GELU()),
    "relu": partial(two_layers, F.relu),
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


class Sharpened(nn.Module):
    """An MLP with a setting, and an activation that does not print its own."""

    def __init__(self, multiplier: float = 1.0, sharpness: float = 1.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(SIZE, WIDTH), nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)
        self.multiplier, self.activation = multiplier, Sharp(sharpness)

    def forward(self, x: Tensor) -> Tensor:
        return usual(self, x) * self.multiplier


class Sharp(nn.Module):
    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.sharpness * x)


@pytest.mark.parametrize("other", [{"multiplier": 0.5}, {"sharpness": 1.7}], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_instance_that_differs_in_its_settings_is_judged_by_itself(other: dict[str, float], reverse: bool) -> None:
    model = nn.ModuleList([Sharpened(), Sharpened(**other)][:: -1 if reverse else 1])
    entries = apply_liger_kernels(model, "auto").entries
    replaced = [True, False][:: -1 if reverse else 1]
    assert [(entry.count, entry.replacement is not None) for entry in entries] == [(1, each) for each in replaced]
    assert [isinstance(each, Patched) for each in model] == replaced


def test_trying_an_mlp_with_dropout_leaves_the_random_state_alone() -> None:
    module = dropping("inner", p=0.5)
    state = torch.get_rng_state()
    apply_liger_kernels(module)
    assert torch.equal(torch.get_rng_state(), state)


NUM_EXPERTS = 4
MOE_SIZES = {
    "hidden_size": SIZE,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
}


def experts(kind: Any, config_class: Any, implementation: str = "batched_mm", **overrides: Any) -> Any:
    names = MOE_SIZES.keys() & vars(config_class()).keys()
    config = config_class(**{name: MOE_SIZES[name] for name in names}, **overrides)
    config._experts_implementation = implementation
    return fill(kind(config))


def routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    weights, index = torch.rand(num_tokens, NUM_EXPERTS).topk(2)
    return index, weights


@pytest.mark.parametrize(
    ("activation", "description"),
    [
        ("silu", "silu_mul"),
        ("gelu", "gelu_mul"),
        ("gelu_pytorch_tanh", "gelu_mul (tanh)"),
        ("relu2", "relu_squared_mul"),
    ],
)
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_experts_are_replaced_and_stay_the_same(
    activation: str, description: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = experts(MixtralExperts, MixtralConfig, implementation, hidden_act=activation)
    used: list[str] = []
    module = importlib.import_module("liger_ops.gated_linear_unit")
    unit = module._gated_unit
    monkeypatch.setattr(module, "_gated_unit", lambda *args, **kwargs: used.append("") or unit(*args, **kwargs))
    twin = assert_replaced(original, f"{description}, packed, between grouped products")
    used.clear()
    assert_same(original, twin, tokens(9), *routing(9))
    assert used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        partial(experts, GptOssExperts, GptOssConfig),
        partial(experts, DeepseekV4Experts, DeepseekV4Config),  # as Mixtral's, but clamped at 10
        partial(experts, MixtralExperts, MixtralConfig, hidden_act="quick_gelu"),
    ],
    ids=["gpt_oss", "clamped", "quick_gelu"],
)
def test_experts_with_another_gate_are_kept_with_a_reason(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    assert_kept(make().to(dtype), "silu_mul, packed, between grouped products is not the same: output differs by")


def test_experts_that_run_one_after_another_are_kept_with_a_reason() -> None:
    assert_kept(experts(MixtralExperts, MixtralConfig, "eager"), "its experts run one after another")


def test_experts_with_a_limit_of_their_own_are_judged_by_themselves() -> None:
    model = nn.ModuleList(experts(DeepseekV4Experts, DeepseekV4Config) for _ in range(3))
    model[0].limit = model[2].limit = float("inf")
    entries = apply_liger_kernels(model).entries
    assert [(entry.count, entry.replacement is not None) for entry in entries] == [(2, True), (1, False)]
    assert [isinstance(each, Patched) for each in model] == [True, False, True]


def test_hooks_of_the_activation_of_experts_run() -> None:
    original = experts(MixtralExperts, MixtralConfig, "grouped_mm")
    calls: list[Any] = []
    original.act_fn.register_forward_hook(lambda *_: calls.append("called"))
    twin: Any = assert_replaced(original, "silu_mul, packed, between grouped products")
    assert calls == []
    twin.act_fn.register_forward_hook(lambda module, args, output: output * 0)
    assert not twin._apply_gate(torch.ones(3, 2 * twin.intermediate_dim)).any()
    assert len(calls) == 1
