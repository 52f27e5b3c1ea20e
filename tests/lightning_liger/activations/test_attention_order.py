"""The order of attention backends holds within controlled layers, in every run of them."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_liger import attention
from lightning_liger.activations.layers import ControlledLayers, control_layers
from lightning_liger.attention import AttentionBackend, Backend

CUDNN_FIRST = attention._with_first(SDPBackend.CUDNN_ATTENTION)
CUDNN = CUDNN_FIRST[0]


class Attention(nn.Module):
    """Attention over all tokens, then over the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, *, index: int = 0, mode: str = "", forward: bool = True) -> Tensor:
        y = F.scaled_dot_product_attention(x * self.scale, x, x)
        return y + F.scaled_dot_product_attention(y, x[:, :, :128], x[:, :, :128])


class Orders(TorchDispatchMode):
    """Notes the backend that is tried first when attention runs, in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.first.append(first())
        return func(*args, **kwargs or {})


def first() -> int:
    return torch._C._get_sdp_priority_order()[0]


def controlled(mode: Any, backend: Backend | None) -> tuple[nn.Sequential, ControlledLayers]:
    model = nn.Sequential(Attention(), Attention())
    control = control_layers(model, {Attention})
    assert control is not None
    control.modes[:] = [mode] * 2
    control.attention = None if backend is None else AttentionBackend(backend)
    return model, control


def run(model: nn.Module, length: int = 200) -> list[int]:
    """The backends that were tried first, in forward and backward."""
    x = torch.randn(1, 2, length, 8, requires_grad=True)
    with Orders() as orders:
        model(x * 1).sum().backward()
    return orders.first


@pytest.fixture
def fastest_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with different numbers of queries and keys are faster with cuDNN."""

    def call_of(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return query.shape != key.shape

    monkeypatch.setattr(attention, "_call_of", call_of)
    monkeypatch.setattr(attention, "fastest_order", lambda differs: CUDNN_FIRST if differs else None)


@pytest.mark.parametrize("mode", ["store", "cheap", "recompute", "offload"])
def test_order_is_set_in_each_run_of_a_layer_and_restored(mode: str) -> None:
    model, control = controlled(mode, "cudnn")
    before, num_runs = first(), 2 if mode in ("recompute", "offload") else 1
    assert before != CUDNN
    assert run(model) == [CUDNN] * 4 * num_runs
    with torch.no_grad(), Orders() as orders:
        model(torch.randn(1, 2, 200, 8))
    assert orders.first == [CUDNN] * 4
    assert first() == before
    control.attention = None
    assert run(model) == [before] * 4 * num_runs


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_order_is_set_in_layers_that_others_recompute(use_reentrant: bool) -> None:
    model, _ = controlled("cheap", "cudnn")
    assert run(lambda x: checkpoint(model, x, use_reentrant=use_reentrant)) == [CUDNN] * 8  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["cheap", "recompute"])
def test_each_call_of_a_layer_keeps_its_order_in_every_run(mode: str, fastest_differs: None) -> None:
    model, _ = controlled(mode, "auto")
    before = first()
    want = [before, CUDNN] * 2
    for _ in range(2):
        assert run(model) == want * (1 if mode == "cheap" else 2)
    assert first() == before


@pytest.mark.parametrize("mode", ["cheap", "recompute"])
def test_failing_layer_restores_the_order(mode: str) -> None:
    model, _ = controlled(mode, "cudnn")
    before = first()
    with pytest.raises(TypeError):
        model[0]("no tensor")
    assert first() == before


@pytest.mark.parametrize("mode", ["cheap", "recompute"])
def test_arguments_of_layers_may_have_any_name(mode: str) -> None:
    model, _ = controlled(mode, "cudnn")
    model[0](torch.randn(1, 2, 9, 8), index=1, mode="b", forward=False).sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_same_backend(copied: Any) -> None:
    model, _ = controlled("recompute", "cudnn")
    run(model)
    assert run(copied(model)) == [CUDNN] * 8


def test_decisions_are_not_copied(fastest_differs: None) -> None:
    model, control = controlled("cheap", "auto")
    run(model)
    assert control.attention is not None
    assert len(control.attention._contexts) == 2
    assert not copy.deepcopy(control.attention)._contexts
