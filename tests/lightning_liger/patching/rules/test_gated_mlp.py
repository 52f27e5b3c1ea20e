"""Gated MLPs are found by what they compute, whatever their children are called; what resembles them is left alone."""

import importlib
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
)

HIDDEN_SIZE, INTERMEDIATE_SIZE = 16, 24
SIZES = {"gate": (HIDDEN_SIZE, INTERMEDIATE_SIZE), "up": (HIDDEN_SIZE, INTERMEDIATE_SIZE)}
SIZES["down"] = (INTERMEDIATE_SIZE, HIDDEN_SIZE)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (F.silu, "silu_mul"),
    "gelu": (F.gelu, "gelu_mul"),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), "gelu_mul (tanh)"),
    "relu2": (relu2, "relu_squared_mul"),
}
every_activation = pytest.mark.parametrize(("activation", "description"), ACTIVATIONS.values(), ids=ACTIVATIONS)


class MLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` with a function as attribute."""

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor] = F.silu,
        names: tuple[str, str, str] = ("gate", "up", "down"),
        order: tuple[str, str, str] = ("gate", "up", "down"),
        linear: Callable[[int, int], nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.names = dict(zip(("gate", "up", "down"), names, strict=True))
        for role in order:
            setattr(self, self.names[role], linear(*SIZES[role]))

    def project(self, role: str, x: Tensor) -> Tensor:
        return getattr(self, self.names[role])(x)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.project("gate", hidden_states), self.project("up", hidden_states)
        return self.project("down", self.activation(gate) * up)


class UpTimesGate(MLP):
    """The factors and the calls in another order."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.project("up", x)
        return self.project("down", up * self.activation(self.project("gate", x)))


class ActivationInCode(MLP):
    """No attribute says what the activation is."""

    def __init__(self) -> None:
        super().__init__()
        del self.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.project("down", F.silu(self.project("gate", x)) * self.project("up", x))


class Packed(nn.Module):
    """Both projections in one."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu, up_first: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.wi = nn.Linear(HIDDEN_SIZE, 2 * INTERMEDIATE_SIZE, **kwargs)
        self.wo = nn.Linear(INTERMEDIATE_SIZE, HIDDEN_SIZE, **kwargs)
        self.activation, self.up_first = activation, up_first

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.wi(x).chunk(2, dim=-1)
        return self.wo(self.activation(second) * first if self.up_first else self.activation(first) * second)


class TwoLayers(nn.Module):
    """The plain MLP of one activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc_in = nn.Linear(HIDDEN_SIZE, INTERMEDIATE_SIZE)
        self.fc_out = nn.Linear(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        self.act = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(self.act(self.fc_in(x)))


class Sharpened(nn.Module):
    """An activation that does not print its setting."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.sharpness * x)


class DroppingMLP(MLP):
    """With dropouts: before the last projection, after it, or before the activation."""

    def __init__(self, p: float, *places: str, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__(activation)
        self.dropouts = {place: f"{place}_dropout" for place in places or ("inner",)}
        for name in self.dropouts.values():
            setattr(self, name, nn.Dropout(p))

    def drop(self, place: str, x: Tensor) -> Tensor:
        return getattr(self, self.dropouts[place])(x) if place in self.dropouts else x

    def forward(self, x: Tensor) -> Tensor:
        gate = self.drop("gate", self.project("gate", x))
        hidden = self.drop("inner", self.activation(gate) * self.project("up", x))
        return self.drop("outer", self.project("down", hidden))


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 7)), HIDDEN_SIZE)


@every_activation
@pytest.mark.parametrize("kind", [MLP, UpTimesGate, Packed, partial(Packed, up_first=True)])
@pytest.mark.parametrize("as_child", [False, True], ids=["function", "child"])
def test_gated_mlp_is_replaced_and_stays_the_same(
    kind: Callable[..., nn.Module], activation: Callable[[Tensor], Tensor], description: str, as_child: bool
) -> None:
    if as_child:
        modules = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu2": ACT2FN["relu2"]}
        activation = next(modules[name] for name, (function, _) in ACTIVATIONS.items() if function is activation)
    mlp = fill(kind(activation))
    twin = assert_replaced(mlp, description + (", packed" if isinstance(mlp, Packed) else ""))
    assert_same(mlp, twin, tokens())
    assert_same(mlp, twin, tokens(5))
    assert_same(mlp, twin, 100 * tokens(2, 3, 4))


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("a", "z", "m"), ("linear_v", "linear", "linear_1")])
@pytest.mark.parametrize("order", [("down", "gate", "up"), ("up", "gate", "down"), ("gate", "down", "up")])
def test_names_and_order_of_projections_do_not_matter(names: tuple[str, str, str], order: tuple[str, str, str]) -> None:
    mlp = fill(MLP(F.gelu, names, order))
    assert_same(mlp, assert_replaced(mlp, "gelu_mul"), tokens())


@pytest.mark.parametrize("width", [8, HIDDEN_SIZE, 40], ids=["narrower", "square", "wider"])
def test_any_width_is_replaced(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        f"{__name__}.SIZES", {"gate": (HIDDEN_SIZE, width), "up": (HIDDEN_SIZE, width), "down": (width, HIDDEN_SIZE)}
    )
    mlp = fill(MLP())
    assert_same(mlp, assert_replaced(mlp, "silu_mul"), tokens())


def test_activation_in_code_is_found() -> None:
    mlp = fill(ActivationInCode())
    assert_same(mlp, assert_replaced(mlp, "silu_mul"), tokens())


@pytest.mark.parametrize(
    "linear",
    [partial(nn.Linear, bias=True), partial(nn.Linear, bias=False), lambda nx, nf: Conv1D(nf, nx)],
    ids=["biases", "no_biases", "conv1d"],
)
def test_any_projection_is_replaced(linear: Callable[[int, int], nn.Module]) -> None:
    mlp = fill(MLP(linear=linear))
    assert_same(mlp, assert_replaced(mlp, "silu_mul"), tokens())


@every_activation
@pytest.mark.parametrize("kind", [MLP, Packed])
def test_gated_mlp_in_bfloat16_is_replaced_and_stays_the_same(
    kind: Callable[..., nn.Module], activation: Callable[[Tensor], Tensor], description: str
) -> None:
    mlp = fill(kind(activation)).bfloat16()
    twin, entry = patched_twin(mlp)
    assert entry.replacement == description + (", packed" if kind is Packed else "")
    assert_same(mlp, twin, tokens().bfloat16())


@pytest.mark.parametrize("activation", [relu2, ACT2FN["relu2"]], ids=["function", "child"])
def test_squared_relu_without_a_gate_is_replaced(activation: Callable[[Tensor], Tensor]) -> None:
    mlp = fill(TwoLayers(activation))
    assert_same(mlp, assert_replaced(mlp, "relu_squared"), tokens())


@every_activation
@pytest.mark.parametrize("places", [("inner",), ("outer",), ("inner", "outer"), ("outer", "inner")], ids="-".join)
def test_dropouts_before_and_after_the_last_projection_stay(
    places: tuple[str, ...], activation: Callable[[Tensor], Tensor], description: str
) -> None:
    mlp = fill(DroppingMLP(0.0, *places, activation=activation))
    twin = assert_replaced(mlp, description)
    x = tokens()
    assert_same(mlp, twin, x)
    for module in (mlp, twin):
        for child in module.children():
            if isinstance(child, nn.Dropout):
                child.p = 0.4
    outputs = []
    for module in (mlp, twin):
        torch.manual_seed(1)
        outputs.append(module.train()(x))
    torch.testing.assert_close(*outputs)
    assert not torch.allclose(outputs[0], mlp.eval()(x))
    assert_same(mlp.eval(), twin.eval(), x)


def test_projections_of_several_dtypes_are_tried_in_these() -> None:
    """As T5 has them in float16: its last projection stays in float32, and its forward casts to that."""

    class Casting(MLP):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.activation(self.project("gate", x)) * self.project("up", x)
            return self.project("down", hidden.to(self.down.weight.dtype))

    assert_replaced(fill(Casting()), "silu_mul")
    mlp = fill(Casting()).half()
    mlp.down.float()
    assert_kept(mlp, "silu_mul is not the same")


def test_gated_mlp_takes_its_input_by_its_own_name_and_no_other() -> None:
    mlp = fill(MLP())
    twin, _ = patched_twin(mlp)
    assert_same(mlp, twin, hidden_states=tokens())
    with pytest.raises(TypeError, match="another_name"):
        twin(another_name=tokens())


class MaskedMLP(MLP):
    """May mask its result."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if mask is None else y * mask


def test_forward_with_an_extra_argument_is_the_original() -> None:
    mlp = fill(MaskedMLP())
    twin = assert_replaced(mlp, "silu_mul")
    mask = torch.tensor([[0.0], [2.0]] * 7).view(2, 7, 1)
    assert_same(mlp, twin, tokens())
    assert_same(mlp, twin, tokens(), mask)
    assert_same(mlp, twin, tokens(), mask=mask)
    assert_same(mlp, twin, x=tokens(), mask=mask)
    assert not torch.equal(twin(torch.ones(2, 7, HIDDEN_SIZE), mask), twin(torch.ones(2, 7, HIDDEN_SIZE)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_projections_run_once_and_count(when: str) -> None:
    mlp = fill(MLP())
    calls: list[str] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append("called")
        return output * 2

    if when == "before":
        _ = [mlp.get_submodule(role).register_forward_hook(hook) for role in SIZES]
    twin, entry = patched_twin(mlp)
    assert entry.replacement == "silu_mul"
    assert calls == []  # trying does not call a user's hooks
    if when == "after":
        _ = [each.get_submodule(role).register_forward_hook(hook) for each in (mlp, twin) for role in SIZES]
    x = tokens()
    want, got = mlp(x), twin(x)
    assert len(calls) == 6
    torch.testing.assert_close(got, want)


class Activated(MLP):
    """With a module as its activation, as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())


STEERED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward hook": lambda module, seen: module.register_forward_hook(lambda _, args, out: seen(out) or out * 2),
    "forward pre-hook": lambda module, seen: module.register_forward_pre_hook(lambda _, args: seen(*args) or args),
    "backward hook": lambda module, seen: module.register_full_backward_hook(lambda _, got, given: seen(*given)),
    "own forward": lambda module, seen: setattr(module, "forward", lambda x: F.silu(seen(x) or x)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", STEERED.values(), ids=STEERED)
def test_hooks_of_an_activation_run_and_count(hook: Callable[[nn.Module, Any], Any], when: str) -> None:
    mlp = fill(Activated())
    seen: list[Tensor] = []
    if when == "before":
        hook(mlp.activation, seen.append)
    twin, entry = patched_twin(mlp)
    assert entry.replacement == "silu_mul"
    if hook is not STEERED["own forward"]:
        assert seen == []  # trying does not call a user's hooks
    if when == "after":
        hook(mlp.activation, seen.append)
        hook(twin.activation, seen.append)
    seen.clear()
    assert_same(mlp, twin, tokens())
    assert len(seen) % 2 == 0
    assert len(seen) > 0


def test_fused_path_comes_back_when_hooks_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, _ = patched_twin(fill(Activated()))
    fused: list[Any] = []
    monkeypatch.setitem(gated_mlp._GATES, "silu_mul", lambda *inputs: fused.append(inputs) or inputs[0])
    handle = twin.activation.register_forward_hook(lambda *_: None)
    twin(tokens())
    assert fused == []
    handle.remove()
    twin(tokens())
    assert len(fused) == 1


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * 2


def test_verification_is_of_the_fused_path_under_hooks_too() -> None:
    mlp = MLP(Doubled())
    mlp.activation.register_forward_hook(lambda *_: None)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert_kept(fill(mlp), "is not the same")
    finally:
        handle.remove()


def test_projection_that_is_exchanged_after_patching_is_used() -> None:
    mlp = fill(MLP())
    twin, _ = patched_twin(mlp)
    mlp.up = twin.up = fill(nn.Sequential(nn.Linear(HIDDEN_SIZE, 3), nn.Linear(3, INTERMEDIATE_SIZE)))
    assert_same(mlp, twin, tokens())


class MultipliedGate(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.project("down", self.activation(self.project("gate", x) * 0.9) * self.project("up", x))


class MultipliedResult(MLP):
    def __init__(self, multiplier: float = 0.5) -> None:
        super().__init__()
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.multiplier


class ClampedMLP(MLP):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.project("gate", x).clamp(max=self.limit)
        return self.project("down", self.activation(gate) * self.project("up", x))


class NormBetween(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(INTERMEDIATE_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.project("down", self.norm(self.activation(self.project("gate", x)) * self.project("up", x)))


class DroppingInCode(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.project("gate", x)) * self.project("up", x)
        return self.project("down", F.dropout(hidden, 0.1, self.training))


class ResidualMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class ActivatedTwice(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.project("down", self.activation(self.project("gate", x)) * self.activation(self.project("up", x)))


class ShiftedMLP(MLP):
    """Its gate is the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return self.project("down", self.activation(self.project("gate", x.roll(1, -2))) * self.project("up", x))


class Neighbours(Packed):
    """Gate and up in neighbouring columns."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.wi(x)
        return self.wo(self.activation(both[..., ::2]) * both[..., 1::2])


class DetachedGate(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.project("down", self.activation(self.project("gate", x)).detach() * self.project("up", x))


class ReadsWeights(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.activation(F.linear(x, self.gate.weight)) * self.up(x), self.down.weight)


LOOK_ALIKES: dict[str, Callable[[], nn.Module]] = {
    "multiplied_gate": MultipliedGate,
    "multiplied_result": MultipliedResult,
    "clamped_at_2": partial(ClampedMLP, 2.0),
    "clamped_at_10": partial(ClampedMLP, 10.0),
    "clamped_at_100": partial(ClampedMLP, 100.0),
    "norm_between": NormBetween,
    "dropout_of_the_gate": partial(DroppingMLP, 0.1, "gate"),
    "dropouts_that_drop_nothing": partial(DroppingMLP, 0.0, "gate", "inner"),
    "dropout_in_code": DroppingInCode,
    "quick_gelu": partial(MLP, ACT2FN["quick_gelu"]),
    "mish": partial(MLP, F.mish),
    "relu": partial(MLP, F.relu),
    "sigmoid": partial(MLP, torch.sigmoid),
    "no_activation": partial(MLP, lambda x: x),
    "residual": ResidualMLP,
    "activated_twice": ActivatedTwice,
    "shifted": ShiftedMLP,
    "packed_quick_gelu": partial(Packed, ACT2FN["quick_gelu"]),
    "packed_neighbours": Neighbours,
}


@pytest.mark.parametrize("make", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_look_alike_is_kept_with_a_reason(make: Callable[[], nn.Module], training: bool, dtype: torch.dtype) -> None:
    mlp = fill(make()).train(training).to(dtype)
    description = "silu_mul, packed" if isinstance(mlp, Packed) else "silu_mul"
    assert_kept(mlp, f"{description} is not the same: output differs by")


@every_activation
def test_reason_is_about_the_activation_that_the_module_has(
    activation: Callable[[Tensor], Tensor], description: str
) -> None:
    assert_kept(DroppingMLP(0.1, "gate", activation=activation), f"{description} is not the same")


def test_look_alike_in_another_gradient_is_kept_with_a_reason() -> None:
    assert_kept(fill(DetachedGate()), "silu_mul is not the same: gradient differs by")


def test_forward_that_reads_weights_is_kept_with_a_reason() -> None:
    assert_kept(fill(ReadsWeights()), "silu_mul is not the same: ")


class Attention(nn.Module):
    """Three projections of equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(3))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (project(hidden_states) for project in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, attention_mask)


class TwoInputsMLP(MLP):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.project("down", self.activation(self.project("gate", x)) * self.project("up", y))


class LearnedScaleMLP(MLP):
    """A multiplier that is one only for now."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        one = torch.ones(())
        self.register_parameter("scale", nn.Parameter(one)) if kind == "parameter" else self.register_buffer(
            "scale", one
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    "make",
    [
        Attention,
        partial(TwoLayers, F.gelu),
        partial(TwoLayers, nn.GELU()),
        partial(TwoLayers, F.relu),
        TwoInputsMLP,
        partial(LearnedScaleMLP, "parameter"),
        partial(LearnedScaleMLP, "buffer"),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        lambda: nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in SIZES.items()}),
    ],
    ids=[
        "attention",
        "gelu",
        "gelu_child",
        "relu",
        "two_inputs",
        "parameter",
        "buffer",
        "two_linears",
        "module_dict",
    ],
)
def test_what_is_no_gated_mlp_is_not_reported(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert apply_liger_kernels(module).entries == []
    assert not isinstance(module, Patched)


@pytest.mark.parametrize(
    "instances",
    [
        [partial(MultipliedResult, 1.0), partial(MultipliedResult, 0.5)],
        [partial(ClampedMLP, float("inf")), partial(ClampedMLP, 7.0)],
        [partial(MLP, F.silu), partial(MLP, F.mish)],
        [lambda: MLP(Sharpened(1.0)), lambda: MLP(Sharpened(1.7))],
    ],
    ids=["multiplier", "limit", "activation", "child"],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_instance_that_differs_in_its_settings_is_judged_by_itself(
    instances: list[Callable[[], nn.Module]], reverse: bool
) -> None:
    model = nn.ModuleList(make() for make in instances[:: -1 if reverse else 1])
    entries = apply_liger_kernels(model, "auto").entries
    replaced = [True, False][:: -1 if reverse else 1]
    assert [(entry.count, entry.replacement is not None) for entry in entries] == [(1, each) for each in replaced]
    assert [isinstance(mlp, Patched) for mlp in model] == replaced


def test_trying_an_mlp_with_dropout_leaves_the_random_state_alone() -> None:
    mlp = DroppingMLP(0.5)
    state = torch.get_rng_state()
    apply_liger_kernels(mlp)
    assert torch.equal(torch.get_rng_state(), state)


def test_kernels_that_were_not_asked_for_are_not_tried() -> None:
    mlp = MLP(F.gelu)
    with pytest.raises(ValueError, match="MLP: silu_mul is not the same"):
        apply_liger_kernels(mlp, ["silu_mul"])
    assert type(mlp) is MLP
    assert apply_liger_kernels(mlp, ["gelu_mul"]).num_replaced == 1


NUM_EXPERTS = 4
MOE_SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "moe_intermediate_size": INTERMEDIATE_SIZE,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
}


def experts(
    kind: type[nn.Module], config_class: Any, implementation: str = "batched_mm", **overrides: Any
) -> nn.Module:
    names = MOE_SIZES.keys() & vars(config_class()).keys()
    config = config_class(**{name: MOE_SIZES[name] for name in names}, **overrides)
    config._experts_implementation = implementation
    return fill(kind(config))


def routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    scores = torch.rand(num_tokens, NUM_EXPERTS)
    weights, index = scores.topk(2)
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


def test_experts_that_run_one_after_another_are_kept_with_a_reason() -> None:
    assert_kept(experts(MixtralExperts, MixtralConfig, "eager"), "its experts run one after another")


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
    twin = assert_replaced(original, "silu_mul, packed, between grouped products")
    assert calls == []
    twin.act_fn.register_forward_hook(lambda module, args, output: output * 0)
    twin._apply_gate(torch.ones(3, 2 * twin.intermediate_dim))
    assert len(calls) == 1
    assert not twin._apply_gate(torch.ones(3, 2 * twin.intermediate_dim)).any()
