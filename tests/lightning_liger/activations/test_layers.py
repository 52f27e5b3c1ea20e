"""Layers in every mode: the same losses and gradients as without, in random programs and in whole models."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from lightning_liger import apply_liger_kernels
from lightning_liger.activations.layers import (
    control_layers,
    current_run,
    find_layers,
    release_layers,
)
from tests.lightning_liger.activations.programs import (
    HIDDEN_SIZE,
    MODES,
    RandomLayer,
    controlled,
    fused,
    rms_norm,
    silu_mul,
)
from tests.lightning_liger.tiny import tiny_batch, tiny_llama, tiny_model


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module, x: Tensor, context: Any = None) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output, and the gradients of the input and of all parameters."""
    torch.manual_seed(3)
    model.zero_grad()
    x = x.clone().requires_grad_()
    with context or nullcontext():
        y = model(x * 1.0)
    y.square().mean().backward()
    return y, {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


def outcome(model: nn.Module, x: Tensor, context: Any) -> tuple[Tensor, dict[str, Tensor | None]] | str:
    """The same, or the message of PyTorch's refusal."""
    try:
        return gradients(model, x, context)
    except RuntimeError as error:
        return str(error)


def same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> bool:
    return found.keys() == expected.keys() and all(
        (one is None and other is None)
        or (one is not None and other is not None and torch.equal(one.nan_to_num(), other.nan_to_num()))
        for one, other in zip(found.values(), expected.values(), strict=True)
    )


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("writes", [False, True], ids=["pure", "writes"])
def test_random_layers_give_the_same_in_every_mode(writes: bool, half: bool) -> None:
    num_same = num_refused = 0
    for seed in range(15 if half else 60):
        torch.manual_seed(seed)
        model = Stack(*(RandomLayer(10 * seed + index, writes=writes) for index in range(3)))
        x = torch.randn(2, 3, HIDDEN_SIZE)
        cast = torch.autocast("cpu", torch.bfloat16, enabled=half)
        expected = outcome(model, x, cast)
        if isinstance(expected, str):
            assert "inplace operation" in expected
            continue
        for modes in (*((mode,) * 3 for mode in MODES), ("recompute", "cheap", "store")):
            controlled(model, *modes)
            found = outcome(model, x, cast)
            if isinstance(found, str):
                assert writes
                assert "writes to one of its inputs" in found
                num_refused += 1
            else:
                assert same({"y": found[0], **found[1]}, {"y": expected[0], **expected[1]}), (seed, modes)
                num_same += 1
            release_layers(model)
    assert num_same > (40 if half else 150)
    assert num_refused < num_same / 4


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_models_give_the_same_in_every_mode(kind: str, triton_device: torch.device) -> None:
    names = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {"attention_dropout": 0.2}
    model = tiny_model(kind, **names).to(triton_device).train()
    apply_liger_kernels(model)
    batch = {name: tensor.to(triton_device) for name, tensor in tiny_batch(seq_len=3, num_ignored=1).items()}

    def run() -> tuple[float, dict[str, Tensor | None]]:
        torch.manual_seed(5)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = run()
    for mode in MODES:
        control = controlled(model, mode)
        assert len(control.layers) == 2
        loss, found = run()
        assert loss == expected[0]
        assert found.keys() == expected[1].keys()
        for name, gradient in expected[1].items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
        assert (min(each.cheap for each in control.sizes) > 0) == (mode in ("cheap", "offload"))


class Norms(nn.Module):
    """Two linear layers after a gated product of a norm, as in models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        run = current_run()
        self.seen.append(run and run.mode)
        return x + self.second(silu_mul(*self.first(rms_norm(x)).chunk(2, dim=-1)))


@pytest.mark.parametrize(("mode", "is_kept"), [("store", True), ("cheap", False), ("recompute", False)])
def test_outputs_are_freed_between_forward_and_backward_and_once_used(mode: Any, is_kept: bool) -> None:
    made: list[StorageWeakRef] = []

    def doubled(x: Tensor) -> Tensor:
        y = x * 2
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    class Watched(Norms):
        def forward(self, x: Tensor) -> Tensor:
            y = fused(doubled, x)
            return self.second(y) + self.second(y) + self.second(y)

    model = Stack(Watched(), Watched())
    controlled(model, mode)
    output = model(torch.randn(2, 3, 8, requires_grad=True)).sum()
    assert [each.expired() for each in made] == [not is_kept] * 2
    for retain_graph in (True, False):
        output.backward(retain_graph=retain_graph)
        if retain_graph and mode == "cheap":
            # Once in forward, once in the op's own backward of this test, once for the three users together.
            assert len(made) == 3 * 2
        assert all(each.expired() for each in made) == (not is_kept or not retain_graph)


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice_over_one_graph_and_of_a_part(mode: Any) -> None:
    model = Stack(Norms(), Norms())
    x, weight = torch.randn(2, 3, 8, requires_grad=True), model.layers[1].first.weight
    expected = torch.autograd.grad(model(x).sum(), (x, weight))
    controlled(model, mode)
    y = model(x).sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], expected[0])
    assert torch.equal(torch.autograd.grad(model(x).sum(), weight)[0], expected[1])


@pytest.mark.parametrize(("what", "mode"), [("input", "cheap"), ("input", "recompute"), ("parameter", "cheap")])
def test_writes_before_backward_are_refused(what: str, mode: Any) -> None:
    """But for parameters of recomputed layers, which are used as they are then, as in torch.utils.checkpoint."""
    model = Stack(Norms(), Norms())
    controlled(model, mode)
    x = torch.randn(2, 3, 8, requires_grad=True) * 1
    y = model(x)
    with torch.no_grad():
        (x if what == "input" else model.layers[1].second.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_layer_that_does_something_else_the_second_time_is_refused() -> None:
    class Fickle(Norms):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) if self.calls % 2 else self.second(x)

    model = Stack(Fickle(), Fickle())
    controlled(model, "recompute")
    with pytest.raises(RuntimeError, match="the same each time"):
        model(torch.randn(2, 3, 8)).sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_others_win(mode: Any) -> None:
    model, x = Stack(Norms(), Norms()), torch.randn(2, 3, 8)
    expected, packed = gradients(model, x), []
    for _ in range(2):
        packed.append(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(packed.pop() + 1), t)[1], lambda t: t):
            model(x)
        controlled(model, mode)
    assert packed[0] == packed[1] > 0

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model.layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    assert same(gradients(Checkpointed(), x)[1], expected[1])


@pytest.mark.parametrize("mode", MODES)
def test_function_transforms_and_no_grad(mode: Any) -> None:
    model, x = Stack(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))), torch.randn(2, 3, 8)
    expected = torch.func.grad(lambda x: model(x).sum())(x)
    controlled(model, mode)
    assert torch.equal(torch.func.grad(lambda x: model(x).sum())(x), expected)
    with torch.no_grad():
        assert not model(x).requires_grad


def test_keys_and_values_are_not_extended_twice() -> None:
    model = tiny_llama().train()
    tokens = torch.randint(0, 64, (1, 5))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)

    def run(cache: Any) -> dict[str, Tensor | None]:
        model.zero_grad()
        model(tokens, labels=tokens, past_key_values=cache, use_cache=True).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    for before in (None, cache):
        expected = copy.deepcopy(run(copy.deepcopy(before)))
        for modes in (("recompute",) * 2, ("cheap", "recompute"), ("recompute", "cheap")):
            controlled(model, *modes)
            assert same(run(copy.deepcopy(before)), expected)
        release_layers(model)


def test_release_restores_the_classes_names_stay_and_copies_are_plain() -> None:
    model, x = Stack(Norms(), Norms()), torch.randn(2, 3, 8)
    names = list(model.state_dict())
    controlled(model, "recompute")
    assert isinstance(model.layers[0], Norms)
    assert type(model.layers[0]).__name__ == "Norms"
    assert list(model.state_dict()) == names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(gradients(twin, x)[1], gradients(model, x)[1])
        assert len(twin.layers[0].seen) == 1  # nothing is recomputed in a copy
        assert controlled(twin, "recompute").layers == list(twin.layers)
    release_layers(model)
    assert type(model.layers[0]) is Norms
    assert "_liger_activations" not in vars(model.layers[0])


def test_layers_whose_class_an_engine_has_changed_since_are_controlled_again() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    first = control_layers(model)
    assert first is not None
    sharded = type("Sharded", (type(model[0]),), {})  # as fully_shard does
    for layer in model:
        layer.__class__ = sharded
    second = control_layers(model)
    assert second is not None
    assert [type(layer) for layer in model] == [sharded] * 2
    first.observer, second.observer = MagicMock(), MagicMock()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert first.observer.mock_calls == []
        assert second.observer.mock_calls == [call.forward_starts(0, 2), call.forward_starts(1, 2)]
        release_layers(model)


def test_observers_see_the_order_of_execution() -> None:
    model = Stack(Norms(), Norms())
    control = controlled(model, "recompute", "cheap")
    control.observer = MagicMock()
    model(torch.randn(2, 3, 8)).sum().backward()
    starts = [call.forward_starts(0, 6), call.forward_starts(1, 6), call.recompute_starts(0)]
    assert control.observer.method_calls == [*starts, call.recompute_ends(0)]
    assert min(each.cheap for each in control.sizes) > 0  # counted in both modes
    assert [layer.seen for layer in model.layers] == [["recompute", "recompute"], ["cheap"]]
    assert current_run() is None


def test_layers_are_found_in_plain_models_and_not_inside_of_each_other() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    blocks = nn.ModuleList(nn.Sequential(copy.deepcopy(inner), copy.deepcopy(inner)) for _ in range(2))
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"blocks": blocks}))
    assert find_layers(model) == list(blocks)
    assert find_layers(nn.Linear(2, 2)) == []
    assert control_layers(nn.Linear(2, 2)) is None
    assert find_layers(model, {nn.Linear}) == [each for each in model.modules() if isinstance(each, nn.Linear)]
