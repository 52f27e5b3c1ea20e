"""A kernel takes the place of modules that compute what it computes: all instances, all modes, and from then on."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules.base import Patched
from tests.lightning_liger.patching.rules import test_base
from tests.lightning_liger.patching.rules.comparing import assert_kept, assert_same, fill

X = torch.randn(2, 7, test_base.SIZE, generator=torch.Generator().manual_seed(0))


class Norm(test_base.Norm):
    setting: Any = None

    def factor(self) -> Any:
        return 1.0

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * self.factor()


class MLP(nn.Module):
    def __init__(self, activation: Any = F.silu) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(test_base.SIZE, 24), nn.Linear(test_base.SIZE, 24), nn.Linear(24, 16)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


def experts(activation: nn.Module | None = None) -> nn.Module:
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=3, experts_implementation="eager")
    module = fill(MixtralExperts(config))
    module.act_fn = activation or nn.SiLU()
    return module


class Swish(nn.Module):
    def __init__(self, beta: Any) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def call(module: nn.Module) -> tuple[Tensor, ...]:
    return (X[0], torch.tensor([[0, 2]] * 7), torch.rand(7, 2)) if isinstance(module, MixtralExperts) else (X,)


def assert_same_after(modules: nn.ModuleList, is_replaced: list[bool] | None = None) -> None:
    twins = copy.deepcopy(modules)
    apply_liger_kernels(twins, {"linear_cross_entropy": False})
    assert is_replaced is None or [isinstance(each, Patched) for each in twins] == is_replaced
    for module, twin in zip(modules, twins, strict=True):
        assert_same(module, twin, *call(module))


SETTINGS: dict[str, tuple[Callable[[float], Any], Callable[[Any], Any]]] = {
    "number": (lambda value: value, lambda held: held),
    "tensor": (torch.tensor, lambda held: held),
    "tuple": (lambda value: (0, value), lambda held: held[1]),
    "dict": (lambda value: {"factor": [value]}, lambda held: held["factor"][0]),
    "namespace": (lambda value: SimpleNamespace(factor=value), lambda held: held.factor),
    "function": (lambda value: lambda: value, lambda held: held()),
}


@pytest.mark.parametrize(("hold", "read"), SETTINGS.values(), ids=SETTINGS)
def test_instances_are_judged_by_all_their_settings(hold: Callable[[float], Any], read: Callable[[Any], Any]) -> None:
    scaled = type("ScaledNorm", (Norm,), {"factor": lambda self: read(self.setting)})
    norms = nn.ModuleList([fill(scaled()) for _ in range(3)])
    for norm, value in zip(norms, (1.0, 0.5, 2.0), strict=True):
        norm.setting = hold(value)
    assert_same_after(norms, [True, False, False])


def test_indices_of_layers_count_where_they_are_read() -> None:
    by_depth = type("NormByDepth", (Norm,), {"factor": lambda self: (self.layer_idx + 1) ** -0.5})
    for kind, is_replaced in ((by_depth, [True, False, False]), (Norm, [True, True, True])):
        norms = nn.ModuleList([fill(kind()) for _ in range(3)])
        for index, norm in enumerate(norms):
            norm.layer_idx = index
        assert_same_after(norms, is_replaced)


@pytest.mark.parametrize("make", [lambda act: fill(MLP(act)), experts], ids=["mlp", "experts"])
def test_activations_are_judged_in_each_instance(make: Callable[[nn.Module], nn.Module]) -> None:
    activations = [nn.SiLU(), nn.GELU(), Swish(1.0), Swish(3.0), Swish(torch.tensor(1.0)), Swish(torch.tensor(2.0))]
    assert_same_after(nn.ModuleList(map(make, activations)), [True, True, True, False, True, False])


@pytest.mark.parametrize("make", [lambda act: fill(MLP(act)), experts], ids=["mlp", "experts"])
def test_activations_that_learn_are_kept(make: Callable[[nn.Module], nn.Module]) -> None:
    module = make(Swish(nn.Parameter(torch.tensor(1.0))))
    assert_kept(module, "parameters or buffers")
    assert_same_after(nn.ModuleList([module]), [False])


def _after(kind: Any, change: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    return lambda self, x: change(self, kind.forward(self, x))


MODES = {
    "evaluation": lambda self, y: y if self.training else y * 0.5,
    "no gradients": lambda self, y: y if torch.is_grad_enabled() else y * 0.5,
    "long rows": lambda self, y: y * 0.5 if y.shape[1] > 6 else y,
    "batches": lambda self, y: y * 0.5 if y.shape[0] > 1 else y,
}


@pytest.mark.parametrize("kind", [Norm, MLP])
@pytest.mark.parametrize("change", MODES.values(), ids=MODES)
def test_what_is_another_function_elsewhere_is_kept(kind: Any, change: Callable[[Any, Tensor], Tensor]) -> None:
    module = fill(type(f"Other{kind.__name__}", (kind,), {"forward": _after(kind, change)})())
    assert_kept(module, "in evaluation, output differs by")


def _store(self: Any, y: Tensor) -> Tensor:
    self.penalty = y.abs().mean()
    return y


def _append(self: Any, y: Tensor) -> Tensor:
    if self.training:
        self.history.append(y.detach())
    return y


def _add(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y


@pytest.mark.parametrize("change", [_store, _append, _add])
@pytest.mark.parametrize("kind", [Norm, MLP])
def test_what_stores_anything_is_kept(kind: Any, change: Callable[[Any, Tensor], Tensor]) -> None:
    namespace = {"forward": _after(kind, change), "history": None, "count": 0}
    module = fill(type(f"Storing{kind.__name__}", (kind,), namespace)())
    module.history = []
    assert_kept(module, "changes attributes")


@pytest.mark.parametrize("make", [lambda: fill(MLP(nn.SiLU())), experts], ids=["mlp", "experts"])
def test_an_activation_that_is_exchanged_later_counts(make: Callable[[], Any]) -> None:
    module = make()
    twin = copy.deepcopy(module)
    apply_liger_kernels(twin)
    twin.eval().train()
    twin.note = "settings that the class does not have change nothing"
    name = "act_fn" if isinstance(module, MixtralExperts) else "activation"
    setattr(twin, name, getattr(twin, name))
    assert isinstance(twin, Patched)
    setattr(module, name, nn.GELU())
    with pytest.warns(UserWarning, match=rf"{name} changed after the module's kernel was chosen"):
        setattr(twin, name, nn.GELU())
    assert type(twin) is type(module)
    assert_same(module, twin, *call(module))
    (entry,) = apply_liger_kernels(twin).entries
    assert "gelu" in str(entry.replacement)
    assert_same(module, twin, *call(module))


def test_a_setting_that_changes_later_counts() -> None:
    steered = type("SteeredNorm", (Norm,), {"factor": lambda self: 1.0 if self.setting is None else self.setting})
    norm = fill(steered())
    twin = copy.deepcopy(norm)
    apply_liger_kernels(twin)
    twin.eps = norm.eps = 1e-3  # which kernels read
    assert isinstance(twin, Patched)
    assert_same(norm, twin, X)
    norm.setting = X[0, 0]
    with pytest.warns(UserWarning, match="SteeredNorm.setting changed"):
        twin.setting = X[0, 0]
    assert_same(norm, twin, X)


def test_a_setting_cannot_change_in_a_class_that_something_else_made_of_it() -> None:
    module = fill(MLP())
    apply_liger_kernels(module)
    module.__class__ = type("Sharded", (type(module),), {})
    with pytest.raises(RuntimeError, match=r"MLP.activation cannot change any more.*FSDP2"):
        module.activation = F.gelu


def test_functions_and_methods_that_were_exchanged_since_the_last_model_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(name: str = "") -> Tensor:
        torch.manual_seed(0)
        module = fill(test_base.Attention())
        if name:
            assert apply_liger_kernels(module).num_replaced == (name == "same")
        return module(*test_base.arguments(test_base.Attention))

    assert torch.allclose(attend(), attend("same"), atol=1e-6)
    rotate, forward = test_base.rotate, test_base.Attention.forward
    monkeypatch.setattr(test_base, "rotate", lambda x, cos, sin: rotate(x, cos, sin) * 1.3)
    assert torch.allclose(attend(), attend("another function"), atol=1e-6)
    monkeypatch.setattr(test_base, "rotate", rotate)
    assert torch.allclose(attend(), attend("same"), atol=1e-6)
    monkeypatch.setattr(test_base.Attention, "forward", lambda self, q, cos, sin: forward(self, q, cos, sin) * 1.3)
    assert torch.allclose(attend(), attend("another method"), atol=1e-6)
