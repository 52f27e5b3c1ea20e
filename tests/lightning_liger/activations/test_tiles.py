"""Modules in tiles of tokens compute what they compute at once, and hold no more than a tile."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import LigerLMMixin, apply_liger_kernels
from lightning_liger.activations import tiles
from lightning_liger.activations.layers import ControlledLayers, LayerRun, LayerSizes, current_run
from lightning_liger.activations.tiles import choose_tile_size, run_in_tiles, run_tiled
from tests.lightning_liger.activations.programs import HIDDEN_SIZE, controlled, layers_of
from tests.lightning_liger.tiny import TensorSizes, tiny_batch, tiny_model

WIDTH, TILE_SIZE, NUM_TOKENS = 40, 8, 30  # three tiles of 8 and one of 6, across the rows


class MLP(nn.Module):
    def __init__(self, p: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN_SIZE, WIDTH, bias=bias)
        self.up = nn.Linear(HIDDEN_SIZE, WIDTH, bias=bias)
        self.down = nn.Linear(WIDTH, HIDDEN_SIZE, bias=bias)
        self.dropout = nn.Dropout(p)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return compute(self, x)


def compute(module: Any, x: Tensor) -> Tensor:
    return module.down(module.dropout(F.silu(module.gate(x)) * module.up(x)))


def tiled(module: nn.Module, x: Tensor, function: Callable[[Any, Tensor], Tensor] = compute) -> Tensor:
    return run_in_tiles(function, module, x, WIDTH)


def public(module: nn.Module, x: Tensor) -> Tensor:
    return run_tiled(module, x, tile_size=TILE_SIZE)


def by_hand(module: nn.Module, x: Tensor) -> Tensor:
    """The same tiles with a graph that stores everything."""
    rows = x.reshape(1, -1, HIDDEN_SIZE).split(TILE_SIZE, dim=1)
    return torch.cat([compute(module, tile) for tile in rows], dim=1).view(x.shape)


def set_mode(monkeypatch: pytest.MonkeyPatch, mode: Any) -> LayerRun:
    """As inside of a layer that runs in this mode."""
    run = LayerRun(ControlledLayers([nn.Identity()]), 0, mode, torch.device("cpu"), compute)
    monkeypatch.setattr(tiles, "current_run", lambda: run if mode else None)
    return run


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside of a layer that is recomputed, with tiles of few tokens."""
    set_mode(monkeypatch, "recompute")
    monkeypatch.setattr(tiles, "choose_tile_size", lambda num_tokens, bytes_per_token: TILE_SIZE)
    torch.manual_seed(0)


def calls_of(module: nn.Module) -> list[int]:
    """The numbers of tokens that a module computes at a time from now on."""
    seen: list[int] = []
    forward = module.forward
    module.forward = lambda x: (seen.append(x.shape[:-1].numel()), forward(x))[1]  # type: ignore[func-returns-value]
    return seen


def gradients(function: Callable[[nn.Module, Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The output, and the gradients of the input and all parameters."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    module = copy.deepcopy(module)
    torch.manual_seed(0)
    output = function(module, x)
    torch.manual_seed(1)
    output.backward(torch.randn_like(output))
    return [output.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(module: nn.Module, x: Tensor, reference: Callable[[nn.Module, Tensor], Tensor] = compute) -> None:
    want = gradients(reference, module, x)
    for function in (tiled, public):
        torch.testing.assert_close(gradients(function, module, x), want, rtol=1e-12, atol=1e-12)


def tokens(requires_grad: bool = True) -> Tensor:
    return torch.randn(2, NUM_TOKENS // 2, HIDDEN_SIZE, dtype=torch.float64).requires_grad_(requires_grad)


def changed(change: Callable[[Any], Any]) -> nn.Module:
    module = MLP()
    change(module)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "all": MLP,
    "input": lambda: MLP().requires_grad_(False),
    "some parameters": lambda: changed(lambda mlp: (mlp.requires_grad_(False), mlp.up.requires_grad_())),
    "shared module": lambda: changed(lambda mlp: setattr(mlp, "gate", mlp.up)),
    "shared weight": lambda: changed(lambda mlp: setattr(mlp.gate, "weight", mlp.up.weight)),
    "unused parameters": lambda: changed(lambda mlp: mlp.add_module("other", nn.Linear(2, 2))),
    "dropout": lambda: MLP(p=0.5),
}


@pytest.mark.parametrize(
    ("kind", "input_is_trained"), [("all", False), ("some parameters", False), *((kind, True) for kind in MODULES)]
)
def test_gradients_equal_those_of_the_same_tiles_with_a_stored_graph(kind: str, input_is_trained: bool) -> None:
    module, x = MODULES[kind](), tokens(input_is_trained)
    assert_same(module, x, by_hand)
    if "dropout" not in kind:
        assert_same(module, x)
        assert_same(module, x.detach().mT.contiguous().mT.requires_grad_(input_is_trained))


def test_views_that_an_engine_puts_in_place_of_parameters() -> None:
    """As FSDP does: in the dictionary of parameters and, found before it, as an attribute; or as an attribute alone."""
    module, x = MLP(bias=False), tokens()
    _, want_x, *want = gradients(compute, module, x)
    flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    sizes = [parameter.numel() for parameter in module.parameters()]
    for index, (linear, view) in enumerate(zip((module.gate, module.up, module.down), flat.split(sizes), strict=True)):
        view = view.view(linear.weight.shape)
        del linear.weight
        linear.weight = view
        if index < 2:
            linear._parameters["weight"] = view
    calls = calls_of(module.up)
    output = tiled(module, x)
    del module.gate._parameters["weight"]  # in backward it is an attribute alone
    torch.manual_seed(1)
    output.backward(torch.randn_like(output))
    assert max(calls) == TILE_SIZE
    assert [name for name, _ in module.named_parameters()] == ["up.weight"]
    torch.testing.assert_close([x.grad, flat.grad], [want_x, torch.cat([each.flatten() for each in want])])


def test_parameters_are_restored_after_backward_and_after_an_error_in_it() -> None:
    module = MLP()
    before = dict(module.named_parameters())

    def fails_in_backward(module: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("no memory")
        return compute(module, x)

    output = tiled(module, tokens(), fails_in_backward)
    with pytest.raises(ValueError, match="no memory"):
        output.sum().backward()
    found = dict(module.named_parameters())
    assert found.keys() == before.keys()
    assert all(found[name] is parameter for name, parameter in before.items())


def test_second_derivatives_are_refused() -> None:
    x = tokens()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(tiled(MLP(), x).sum(), x, create_graph=True)


def test_autocast_is_the_same_in_backward() -> None:
    seen = []

    def noting(module: Any, x: Tensor) -> Tensor:
        seen.append(module.gate(x).dtype)
        return compute(module, x)

    module, x, cast = MLP().float(), tokens().float().detach(), torch.autocast("cpu", torch.bfloat16)
    got = gradients(cast(lambda module, x: tiled(module, x, noting)), module, x)
    assert seen == [torch.bfloat16] * 8  # each of four tiles twice
    torch.testing.assert_close(got, gradients(cast(compute), module, x), rtol=0.03, atol=0.03)


def test_gradients_of_parameters_are_summed_in_float32() -> None:
    """One rounding of the sum, and one of each tile's part of it."""
    module, x = MLP().bfloat16(), torch.randn(1, 256 * TILE_SIZE, HIDDEN_SIZE).bfloat16() + 2
    output = tiled(module, x)
    output.backward(torch.ones_like(output))
    exact = copy.deepcopy(module).double()
    compute(exact, x.double()).sum().backward()
    for parameter, want in zip(module.parameters(), exact.parameters(), strict=True):
        error = (parameter.grad.double() - want.grad).norm() / want.grad.norm()  # type: ignore[union-attr]
        assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_no_tensor_is_larger_than_a_tile_or_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = MLP(), tokens()
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda t: t)
    with TensorSizes(monkeypatch) as sizes:
        with hooks:
            output = tiled(module, x)
        output.sum().backward()
    assert sizes.largest == TILE_SIZE * WIDTH  # x has fewer elements
    assert all(any(tensor is each for each in (x, *module.parameters())) for tensor in saved)
    with torch.no_grad(), TensorSizes(monkeypatch) as sizes:
        torch.testing.assert_close(tiled(module, x), output.detach())
    assert sizes.largest == TILE_SIZE * WIDTH


NOT_TILED: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda module: module.up.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda module: module.up.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.up.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda module: module.up.register_full_backward_pre_hook(lambda *_: None),
    "statistics": lambda module: module.up.register_buffer("mean", torch.zeros(HIDDEN_SIZE)),
    "another rank's": lambda module: module.register_parameter("extra", nn.Parameter(torch.empty(0))),
    "own hook": lambda module: module.register_forward_hook(lambda *_: None),  # it runs outside of the tiles
}


@pytest.mark.parametrize("name", [*NOT_TILED, None, "store", "cheap"])
def test_modules_with_effects_of_their_own_and_other_layers_run_at_once(name: Any, monkeypatch: Any) -> None:
    module = MLP()
    if name in NOT_TILED:
        NOT_TILED[name](module)
    else:
        set_mode(monkeypatch, name)
    calls = calls_of(module.down)
    tiled(module, tokens())
    assert calls == ([8, 8, 8, 6] if name == "own hook" else [30])


@pytest.mark.parametrize("name", NOT_TILED)
def test_public_function_refuses_what_it_cannot_tile(name: str) -> None:
    module = MLP()
    NOT_TILED[name](module)
    with pytest.raises(ValueError, match="module must be without hooks, floating-point buffers and sharded parameters"):
        public(module, tokens())


def test_public_function_holds_one_tile_and_refuses_outputs_of_other_sizes() -> None:
    module, x = MLP(), tokens()
    calls = calls_of(module.down)
    public(module, x).sum().backward()
    assert calls == 2 * [8, 8, 8, 6]
    pooled = nn.AdaptiveAvgPool1d(1)
    for wrong in (nn.Flatten(0), nn.Sequential(nn.Flatten(1), pooled), nn.Unflatten(1, (1, -1))):
        with pytest.raises(ValueError, match="module must return one row for each token, got a tensor of shape"):
            public(wrong, x)


def test_observed_layers_know_what_they_would_keep_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    run = set_mode(monkeypatch, "offload")
    tiled(MLP(), tokens())
    assert run.sizes == LayerSizes()
    run.control.observer = object()
    tiled(MLP(), tokens())
    # Gate and up; their product is cheap.
    assert run.sizes == LayerSizes(tiled=2 * 30 * WIDTH * 8, tiled_cheap=30 * WIDTH * 8)


def test_tiles_are_few_and_even() -> None:
    llama_8b, llama_70b = 6 * 14336 * 2, 6 * 28672 * 2
    assert choose_tile_size(16384, llama_8b) == 16384  # the batches of ordinary training
    assert choose_tile_size(65536, llama_8b) == 11008
    assert choose_tile_size(65536, llama_70b) == 8192
    assert [choose_tile_size(num_tokens, llama_8b) for num_tokens in (0, 1, 8192)] == [1, 1, 8192]
    for num_tokens in (100000, 131072, 262144, 2**20):
        size, largest = choose_tile_size(num_tokens, llama_8b), 2**31 // llama_8b
        assert size % 128 == 0
        assert size <= largest + 128
        assert num_tokens % size == 0 or num_tokens % size > size // 4


@pytest.mark.parametrize(("model_type", "num_runs"), [("llama", 2), ("phi3", 2), ("gemma2", 3)])
def test_patched_models_whose_layers_are_recomputed(
    model_type: str, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of an MLP is computed in forward and in backward, and once more where a norm follows it in the layer."""
    monkeypatch.setattr(tiles, "current_run", current_run)
    model = tiny_model(model_type).double()
    batch = tiny_batch(seq_len=13)

    def run(model: nn.Module) -> list[Tensor]:
        loss = model(**batch).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    apply_liger_kernels(model)
    want = run(model)
    controlled(model, "recompute", "store")
    calls, others = (calls_of(layer.mlp.down_proj) for layer in model.model.layers)
    torch.testing.assert_close(run(model), want, rtol=1e-9, atol=1e-12)
    assert [calls.count(TILE_SIZE), calls.count(26 % TILE_SIZE), len(calls)] == [3 * num_runs, num_runs, 4 * num_runs]
    assert others == [26]


class WithMLP(nn.Module):
    """A layer with an MLP."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp, self.function = MLP(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def without_gradient(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = tiled(layer.mlp, x)
    return x + layer.mlp.gate(y)[..., :HIDDEN_SIZE]


def frozen(layer: Any, x: Tensor) -> Tensor:
    return x * tiled(layer.mlp.requires_grad_(False), x.detach())


@pytest.mark.parametrize(
    "function", [without_gradient, frozen, lambda layer, x: torch.tanh(tiled(layer.mlp, x))], ids=["a", "b", "c"]
)
def test_layers_run_again_as_far_as_backward_needs(function: Any) -> None:
    """Tiles that save nothing are all computed again, however few tensors the layer still wants."""
    model = layers_of(function, WithMLP)
    x, found = tokens(), []
    for mode in ("store", "recompute"):
        controlled(model, mode)
        model.zero_grad()
        model(x).sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        x.grad = None
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)` but the `self.trainer` reference")
def test_no_tensor_of_a_step_grows_faster_than_the_hidden_states(
    with_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the width of the MLP, and not with the square of the sequence, as a mask that is made of ones would."""
    monkeypatch.setattr(tiles, "current_run", current_run)
    model = tiny_model("llama", num_key_value_heads=4)
    model.set_attn_implementation("sdpa")
    apply_liger_kernels(model, {"linear_cross_entropy": {"chunk_bytes": 2**15}})
    controlled(model, "recompute")
    lm, batch = type("LM", (LigerLMMixin, L.LightningModule), {})(), tiny_batch(batch_size=1, seq_len=512)
    lm.model = model
    if with_mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with TensorSizes(monkeypatch) as sizes:
        lm.training_step(batch, 0).backward()
    assert sizes.largest == 512 * model.config.hidden_size
