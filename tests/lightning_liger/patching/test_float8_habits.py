"""Float8 layers in modules that call, watch, share, change and free them in ways of their own."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from liger_ops.fp8.weights import Float8Shard, Float8Weight
from lightning_liger import Float8Recipe, apply_liger_kernels
from lightning_liger.patching.rules import linear
from lightning_liger.patching.rules.linear import gather_in_float8
from tests.lightning_liger.tiny import tiny_batch, tiny_llama

EVERY = Float8Recipe(filter=["*"], min_tokens=1)
HELD = Float8Recipe(filter=["*"], min_tokens=1, hold_frozen=True)


_run = linear._run


def projections(recipe: Float8Recipe | None = EVERY, names: str = "qk") -> Any:
    """Layers that may share their input, in float8 unless there is no recipe, always with the same weights."""
    torch.manual_seed(0)
    model = nn.ModuleDict({f"{name}_proj": nn.Linear(32, 32, bias=False) for name in names})
    apply_liger_kernels(model, "none", fp8=recipe)
    return model


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Up to the rounding of float8."""
    assert (found - expected).norm() <= 0.06 * expected.norm()


@pytest.mark.parametrize("num_forwards", [1, 2, 3])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_attention_to_another_sequence_is_recomputed_as_it_was_computed(
    use_reentrant: bool, num_forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    results: list[list[Tensor]] = [[], []]
    for recompute, found in zip((False, True), results, strict=True):
        model = projections(names="qkv")

        def attend(x: Tensor, y: Tensor, model: Any = model) -> Tensor:
            return model["q_proj"](x).tanh() * model["k_proj"](y).tanh() + model["v_proj"](y).sin()

        for _ in range(3):
            x.grad = y.grad = None
            outputs = [
                checkpoint(attend, x, y, use_reentrant=use_reentrant) if recompute else attend(x, y)
                for _ in range(num_forwards)
            ]
            torch.stack(outputs).sum().backward()
            found += [*outputs, x.grad, y.grad]
        sizes: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(linear, "_run", lambda *args, s=sizes: s.append(len(args[0])) or _run(*args))
            attend(x, y)
        assert sizes == [1, 2]  # k and v still run as one
    for each, expected in zip(*results, strict=True):
        if use_reentrant:  # its forward has no graph, so that k and v run as one in the first step already
            assert_close(each, expected)
        else:
            assert torch.equal(each, expected)


def test_layers_whose_outputs_nobody_used_get_no_gradients() -> None:
    """Optimizers would decay their weights, and add their momentum."""
    model = projections()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model["k_proj"].weight.detach().clone()
    model["q_proj"](torch.randn(8, 32)).sum().backward()
    assert model["k_proj"].weight.grad is None
    optimizer.step()
    assert torch.equal(model["k_proj"].weight, before)


def _write(x: Tensor) -> None:
    x.mul_(3.0)


def _set_data(x: Tensor) -> None:
    x.data = x.data * 3.0


@pytest.mark.parametrize("change", [_write, _set_data])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_changes_of_an_input_between_layers_are_seen(mode: Callable[[], Any], change: Callable[[Tensor], None]) -> None:
    outputs = []
    for model in (projections(), projections(None)):
        with mode():
            x = torch.ones(8, 32)
            model["q_proj"](x)
            change(x)
            outputs.append(model["k_proj"](x))
    assert_close(*outputs)


def test_an_input_that_needs_a_gradient_from_then_on_gets_it() -> None:
    model, x = projections(), torch.randn(8, 32)
    model["q_proj"](x)
    model["k_proj"](x.requires_grad_()).sum().backward()
    assert x.grad is not None


def test_hooks_on_all_modules_see_every_layer() -> None:
    seen: list[list[int]] = []
    for fp8 in (None, EVERY):
        model = tiny_llama()
        apply_liger_kernels(model, fp8=fp8)
        seen.append([])
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen[-1].append(output.numel()) if isinstance(module, nn.Linear) else None
        )
        try:
            model(**tiny_batch())
        finally:
            handle.remove()
    assert seen[0] == seen[1]


class Counting(nn.Module):
    """A parametrization that counts how often it is computed."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * 2.0


def test_parametrizations_that_are_added_later_are_computed_once_a_call() -> None:
    model, plain, x = projections(), projections(None), torch.randn(8, 32)
    for each in (model, plain):
        torch.manual_seed(0)
        parametrizations.spectral_norm(each["q_proj"])
        for _ in range(2):
            each["q_proj"](x)
    assert torch.equal(model["q_proj"](x), plain["q_proj"](x))
    counting = Counting()
    parametrize.register_parametrization(model["k_proj"], "weight", counting)
    counting.calls = 0
    model["k_proj"](x)
    assert counting.calls == 1


def test_checkpoints_of_pruned_layers_are_those_of_plain_ones() -> None:
    models = projections(), projections(None)
    for each in models:
        prune.l1_unstructured(each["k_proj"], "weight", 0.5)
    found, expected = (each.state_dict() for each in models)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    x = torch.randn(8, 32)
    assert_close(models[0]["k_proj"](x), models[1]["k_proj"](x))


def test_attention_modules_that_multiply_themselves_are_left_out() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    entries = apply_liger_kernels(model, "none", fp8=EVERY).entries
    found = {entry.structure: entry.reason for entry in entries if entry.kernel == "fp8"}
    assert found["Linear out_proj"] == "nn.MultiheadAttention multiplies by its weight itself"
    assert found["Linear linear1"] == ""


def test_weights_that_layers_share_stay_shared() -> None:
    """Held, no longer held, and gathered; those that an embedding shares are in its dtype."""
    model = projections(None, "qkv")
    embedding = model["embedding"] = nn.Embedding(32, 32)
    q, k, v = (model[f"{name}_proj"] for name in "qkv")
    k.weight, v.weight = q.weight, embedding.weight
    gathered = copy.deepcopy(model)
    model.requires_grad_(False)
    report = apply_liger_kernels(model, "none", fp8=HELD)
    assert isinstance(q.weight, Float8Weight)
    assert q.weight is k.weight
    assert v.weight is embedding.weight
    report.undo()
    assert type(q.weight) is nn.Parameter
    assert q.weight is k.weight
    apply_liger_kernels(gathered, "none", fp8=Float8Recipe(filter=["*"], min_tokens=1, all_gather=True))
    with pytest.warns(UserWarning, match=r"weights with \[32\] rows are gathered in their own dtype"):
        gather_in_float8(gathered, num_ranks=2)
    assert isinstance(gathered["q_proj"].weight, Float8Shard)
    assert gathered["q_proj"].weight is gathered["k_proj"].weight
    assert gathered["v_proj"].weight is gathered["embedding"].weight


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("moves", [False, True])
def test_weights_that_are_held_in_float8_are_not_trained(num_tokens: int, moves: bool) -> None:
    """An optimizer that was made before holds the parameters of before, and would never change these."""
    model = projections(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    report = apply_liger_kernels(model, "none", fp8=Float8Recipe(filter=["*"], min_tokens=8, hold_frozen=True))
    x = torch.randn(num_tokens, 32)
    expected = model["q_proj"](x)
    if moves:
        model.to(torch.float64).to(torch.float32)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"held in float8.*call undo"):
        model["q_proj"](x)
    with torch.no_grad():
        assert torch.equal(model["q_proj"](x), expected)
    report.undo()
    model["q_proj"](x).sum().backward()
    assert model["q_proj"].weight.grad is not None
    assert optimizer.param_groups[0]["params"][0] is not model["q_proj"].weight


def test_held_weights_can_be_moved_when_garbage_has_weak_references_to_them() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    apply_liger_kernels(model, "none", fp8=HELD)
    garbage: list[Any] = [weakref.ref(model[0].weight)]  # as Dynamo leaves behind
    garbage.append(garbage)
    del garbage
    assert model.to(torch.bfloat16)[0].weight.dtype == torch.bfloat16
    alive = weakref.ref(model[0].weight)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        model.to(torch.float32)
    assert alive() is model[0].weight
    assert model[0].weight.dtype == torch.bfloat16


def test_what_waits_when_an_error_ends_a_forward_is_freed_by_the_next() -> None:
    first, second = projections(), projections()
    x = torch.randn(8, 32, requires_grad=True)
    hidden = first["k_proj"](first["q_proj"](x)).tanh()
    graph = weakref.ref(hidden)
    second["q_proj"](hidden)  # an error ends the forward here
    del hidden
    assert graph() is not None
    found = first["q_proj"](x)
    assert graph() is None
    expected = first["k_proj"](x), second["k_proj"](x)
    assert torch.equal(first["k_proj"](x), expected[0])
    assert torch.equal(second["k_proj"](x), expected[1])
    assert torch.equal(found, first["q_proj"](x))


def test_held_weights_are_shared_with_processes_and_take_numbers() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    apply_liger_kernels(model, "none", fp8=HELD)
    x = torch.randn(8, 32)
    expected = model(x)
    model.share_memory()
    assert all(each.is_shared() for each in model[0].weight.parts)
    assert torch.equal(model(x), expected)
    for values in (torch.tensor(2.0), torch.arange(32.0)):
        model[0].weight.copy_(values)
        assert_close(model[0].weight.dequantize(), values.expand(32, 32))


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("training", [True, False])
def test_held_weights_that_are_unfrozen_raise_in_any_mode(num_tokens: int, training: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    apply_liger_kernels(model, "none", fp8=Float8Recipe(filter=["*"], min_tokens=8, hold_frozen=True))
    model.requires_grad_(True).train(training)
    with pytest.raises(RuntimeError, match="Training would write"):
        model(torch.randn(num_tokens, 32))


def test_a_gated_mlp_s_output_may_be_written_to() -> None:
    plain = tiny_llama(hidden_size=64, head_dim=16, intermediate_size=96).model.layers[0].mlp.train()
    model = copy.deepcopy(plain)
    apply_liger_kernels(model, fp8=EVERY)
    x = torch.randn(2, 8, 64, requires_grad=True)
    found, expected = model(x).mul_(2), plain(x).mul_(2)
    assert (found - expected).norm() < 0.1 * expected.norm()
