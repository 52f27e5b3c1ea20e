"""Layers in every mode: the same losses and gradients as without, in random programs and in whole models."""

import copy
import functools
import pickle
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from lightning_liger import apply_liger_kernels
from lightning_liger.activations import frames
from lightning_liger.activations.layers import control_layers, current_run, find_layers, release_layers
from lightning_liger.sequences.context_parallel import CACHE
from tests.lightning_liger.activations.programs import (
    MODES,
    RandomLayer,
    assert_equal,
    controlled,
    fused,
    gated,
    layers_of,
    outcome,
    tokens,
)
from tests.lightning_liger.tiny import tiny_batch, tiny_llama, tiny_model


def attempt(model: nn.Module, half: bool) -> dict[str, Any] | str:
    """The outcome, or the message of PyTorch's refusal."""
    try:
        return outcome(model, half)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("writes", [False, True], ids=["pure", "writes"])
def test_random_layers_give_the_same_in_every_mode(writes: bool, half: bool) -> None:
    num_same = num_refused = 0
    for seed in range(15 if half else 60):
        torch.manual_seed(seed)
        model = nn.Sequential(*(RandomLayer(10 * seed + index, writes=writes) for index in range(3)))
        expected = attempt(model, half)
        if isinstance(expected, str):
            assert "inplace operation" in expected
            continue
        for modes in (*((mode,) * 3 for mode in MODES), ("recompute", "cheap", "store")):
            controlled(model, *modes)
            found = attempt(model, half)
            if isinstance(found, str):
                assert writes
                assert "modifies one of its inputs" in found
                num_refused += 1
            else:
                assert_equal(found, expected)
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
        torch.testing.assert_close(found, expected[1], rtol=1e-5, atol=1e-7)
        assert (min(each.cheap for each in control.sizes) > 0) == (mode in ("cheap", "offload"))


@pytest.mark.parametrize(("mode", "is_kept"), [("store", True), ("cheap", False), ("recompute", False)])
def test_outputs_are_freed_between_forward_and_backward_and_once_used(mode: Any, is_kept: bool) -> None:
    made: list[StorageWeakRef] = []

    def doubled(x: Tensor) -> Tensor:
        y = x * 2
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    def used_three_times(layer: Any, x: Tensor) -> Tensor:
        y = fused(doubled, x)
        return layer.q(y) + layer.q(y) + layer.q(y)

    model = layers_of(used_three_times)
    controlled(model, mode)
    output = model(tokens()).sum()
    assert [each.expired() for each in made] == [not is_kept] * 2
    for retain_graph in (True, False):
        output.backward(retain_graph=retain_graph)
        if retain_graph and mode == "cheap":
            # Once in forward, once in the op's own backward of this test, once for the three users together.
            assert len(made) == 3 * 2
        assert all(each.expired() for each in made) == (not is_kept or not retain_graph)


@pytest.mark.parametrize("mode", ["store", "cheap", "recompute", "offload"])
def test_inputs_of_an_op_are_freed_once_its_backward_is_done(mode: Any) -> None:
    """Not at the end of the layer's: attention's backward would find the tensors of the MLP after it in memory."""
    are_freed: list[bool] = []

    def used_after_others(layer: Any, x: Tensor) -> Tensor:
        early = layer.q(x)
        late = layer.q(early)
        memory = StorageWeakRef(late.untyped_storage())
        early.register_hook(lambda _: are_freed.append(memory.expired()))
        return layer.q(fused(lambda z: z * 2, late))

    model = layers_of(used_after_others)
    controlled(model, mode)
    model(tokens()).sum().backward()
    assert are_freed == [True, True]


@pytest.mark.parametrize(("what", "mode"), [("input", "cheap"), ("input", "recompute"), ("parameter", "cheap")])
def test_writes_before_backward_are_refused(what: str, mode: Any) -> None:
    """But for parameters of recomputed layers, which are used as they are then, as in torch.utils.checkpoint."""
    model, x = layers_of(gated), tokens() * 1
    controlled(model, mode)
    y = model(x)
    with torch.no_grad():
        (x if what == "input" else model[1].k.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert getattr(frames._running, "frame", None) is None


@pytest.mark.parametrize(
    ("second", "text"),
    [(lambda layer, x: x, r"saved \d tensors .* and 0"), (lambda layer, x: layer.q(x[:, :1]), "and one of shape")],
)
def test_layer_that_does_something_else_the_second_time_is_refused(second: Any, text: str) -> None:
    model = layers_of(lambda layer, x: layer.q(x))
    controlled(model, "recompute")
    output = model(tokens() * 1)
    model[1].function = second
    with pytest.raises(RuntimeError, match=f"{text}.* deterministic forward"):
        output.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_others_win(mode: Any) -> None:
    model = layers_of(gated)
    expected, packed = outcome(model), []
    for _ in range(2):
        packed.append(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(packed.pop() + 1), t)[1], lambda t: t):
            model(tokens())
        controlled(model, mode)
    assert packed[0] == packed[1] > 0
    first, second = (functools.partial(checkpoint, layer, use_reentrant=False) for layer in model)
    assert_equal(outcome(model, forward=lambda x: second(first(x))), expected)


def test_keys_and_values_are_not_extended_twice() -> None:
    model = tiny_llama().train()
    ids = torch.randint(0, 64, (1, 5))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{CACHE: cache}, use_cache=True)

    def run(cache: Any) -> dict[str, Tensor | None]:
        model.zero_grad()
        model(ids, labels=ids, **{CACHE: copy.deepcopy(cache)}, use_cache=True).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    for before in (None, cache):
        expected = run(before)
        for modes in (("recompute",) * 2, ("cheap", "recompute"), ("recompute", "cheap")):
            controlled(model, *modes)
            assert_equal(run(before), expected)
        release_layers(model)


def noting(layer: Any, x: Tensor) -> Tensor:
    """Notes the mode of each run."""
    run = current_run()
    layer.seen = [*getattr(layer, "seen", []), run and run.mode]
    return gated(layer, x)


def test_release_restores_the_classes_names_stay_and_copies_are_plain() -> None:
    model = layers_of(noting)
    names, original = list(model.state_dict()), type(model[0])
    controlled(model, "recompute")
    assert isinstance(model[0], original)
    assert type(model[0]).__name__ == "Layer"
    assert list(model.state_dict()) == names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(outcome(twin), outcome(model))
        assert twin[0].seen == [None]  # nothing is recomputed in a copy
        assert controlled(twin, "recompute").layers == list(twin)
        vars(model[0]).pop("seen")
    release_layers(model)
    assert type(model[0]) is original
    assert "_liger_activations" not in vars(model[0])


def test_layers_whose_class_an_engine_has_changed_since_are_controlled_again() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    first = controlled(model, "cheap")
    sharded = type("Sharded", (type(model[0]),), {})  # as fully_shard does
    for layer in model:
        layer.__class__ = sharded
    second = controlled(model, "cheap")
    assert [type(layer) for layer in model] == [sharded] * 2
    first.observer, second.observer = MagicMock(), MagicMock()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert first.observer.mock_calls == []
        assert second.observer.mock_calls == [call.forward_starts(0, 2), call.forward_starts(1, 2)]
        release_layers(model)


def test_observers_see_the_order_of_execution() -> None:
    model = layers_of(noting)
    control = controlled(model, "recompute", "cheap")
    control.observer = MagicMock()
    model(tokens()).sum().backward()
    starts = [call.forward_starts(0, 6), call.forward_starts(1, 6), call.recompute_starts(0)]
    assert control.observer.method_calls == [*starts, call.recompute_ends(0)]
    assert min(each.cheap for each in control.sizes) > 0  # counted in both modes
    assert [layer.seen for layer in model] == [["recompute", "recompute"], ["cheap"]]
    assert current_run() is None


def test_layers_are_found_in_plain_models_and_not_inside_of_each_other() -> None:
    blocks = nn.ModuleList(
        nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))) for _ in range(2)
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"blocks": blocks}))
    assert find_layers(model) == list(blocks)
    assert control_layers(nn.Linear(2, 2)) is None
    assert find_layers(model, {nn.Linear}) == [each for each in model.modules() if isinstance(each, nn.Linear)]
