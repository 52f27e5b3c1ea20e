"""Modules in tiles of tokens compute what they compute at once, and hold no more than a tile."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import LigerLMMixin, apply_liger_kernels
from lightning_liger.activations import tiles
from lightning_liger.activations.layers import ControlledLayers, LayerRun, LayerSizes, current_run
from lightning_liger.activations.tiles import choose_tile_size, run_in_tiles
from tests.lightning_liger.activations.programs import controlled
from tests.lightning_liger.tiny import TensorSizes, tiny_batch, tiny_model

HIDDEN_SIZE, WIDTH, TILE_SIZE = 6, 40, 8
SHAPE = (2, 15, HIDDEN_SIZE)  # 30 tokens: three tiles of 8 and one of 6, across the rows


class LM(LigerLMMixin, L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class MLP(nn.Module):
    def __init__(self, p: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN_SIZE, WIDTH, bias=bias)
        self.up = nn.Linear(HIDDEN_SIZE, WIDTH, bias=bias)
        self.down = nn.Linear(WIDTH, HIDDEN_SIZE, bias=bias)
        self.dropout = nn.Dropout(p)


def compute(module: Any, x: Tensor) -> Tensor:
    return module.down(module.dropout(F.silu(module.gate(x)) * module.up(x)))


def tiled(module: nn.Module, x: Tensor, function: Callable[[Any, Tensor], Tensor] = compute) -> Tensor:
    return run_in_tiles(function, module, x, WIDTH)


def by_hand(module: nn.Module, x: Tensor) -> Tensor:
    """The same tiles with a graph that stores everything."""
    rows = x.reshape(1, -1, HIDDEN_SIZE).split(TILE_SIZE, dim=1)
    return torch.cat([compute(module, tile) for tile in rows], dim=1).view(x.shape)


def a_run(mode: Any) -> LayerRun:
    return LayerRun(ControlledLayers([nn.Identity()]), 0, mode, torch.device("cpu"), lambda: None)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside of a layer that is recomputed, with tiles of few tokens."""
    monkeypatch.setattr(tiles, "current_run", lambda: a_run("recompute"))
    monkeypatch.setattr(tiles, "choose_tile_size", lambda num_tokens, bytes_per_token: TILE_SIZE)
    torch.manual_seed(0)


@contextlib.contextmanager
def calls_of(module: nn.Module) -> Iterator[list[int]]:
    """The numbers of tokens that a module computed at a time."""
    seen: list[int] = []
    forward = module.forward
    module.forward = lambda x: (seen.append(x.shape[:-1].numel()), forward(x))[1]  # type: ignore[func-returns-value]
    yield seen
    del module.forward


def gradients(function: Callable[[nn.Module, Tensor], Tensor], module: nn.Module, x: Tensor, seed: int = 0) -> Any:
    """The output, and the gradients of the input and all parameters."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    module = copy.deepcopy(module)
    torch.manual_seed(seed)
    output = function(module, x)
    torch.manual_seed(seed + 1)
    output.backward(torch.randn_like(output))
    return [output.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(module: nn.Module, x: Tensor, reference: Callable[[nn.Module, Tensor], Tensor] = compute) -> None:
    got, want = gradients(tiled, module, x), gradients(reference, module, x)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def tokens(dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> Tensor:
    return torch.randn(SHAPE, dtype=dtype).requires_grad_(requires_grad)


def changed(change: Callable[[Any], Any]) -> nn.Module:
    module = MLP().double()
    change(module)
    return module


def _with_adapters() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["gate", "down"], init_lora_weights=False)
    module = peft.get_peft_model(nn.ModuleDict({"mlp": MLP()}), config).base_model.model["mlp"].double()
    assert sum(parameter.requires_grad for parameter in module.parameters()) == 4
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "all": lambda: MLP().double(),
    "input": lambda: MLP().double().requires_grad_(False),
    "some parameters": lambda: changed(lambda mlp: (mlp.requires_grad_(False), mlp.up.requires_grad_())),
    "shared module": lambda: changed(lambda mlp: setattr(mlp, "gate", mlp.up)),
    "shared weight": lambda: changed(lambda mlp: setattr(mlp.gate, "weight", mlp.up.weight)),
    "unused parameters": lambda: changed(lambda mlp: mlp.add_module("other", nn.Linear(2, 2).double())),
    "dropout": lambda: MLP(p=0.5).double(),
    "adapters with dropout": _with_adapters,
}


@pytest.mark.parametrize(
    ("kind", "input_is_trained"), [("all", False), ("some parameters", False), *((kind, True) for kind in MODULES)]
)
def test_gradients_equal_those_of_the_same_tiles_with_a_stored_graph(kind: str, input_is_trained: bool) -> None:
    module, x = MODULES[kind](), tokens(requires_grad=input_is_trained)
    assert_same(module, x, by_hand)
    if "dropout" not in kind:
        assert_same(module, x, compute)
        transposed = x.detach().mT.contiguous().mT.requires_grad_(input_is_trained)
        assert_same(module, transposed, compute)


def test_views_that_an_engine_puts_in_place_of_parameters() -> None:
    """As FSDP does: in the dictionary of parameters and, found before it, as an attribute; or as an attribute alone."""
    module, reference = MLP(bias=False).double(), MLP(bias=False).double()
    reference.load_state_dict(module.state_dict())
    flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    sizes = [parameter.numel() for parameter in module.parameters()]
    for index, (linear, view) in enumerate(zip((module.gate, module.up, module.down), flat.split(sizes), strict=True)):
        view = view.view(linear.weight.shape)
        del linear.weight
        linear.weight = view
        if index < 2:
            linear._parameters["weight"] = view
    x = tokens()
    with calls_of(module.up) as calls:
        output = tiled(module, x)
        del module.gate._parameters["weight"]  # in backward it is an attribute alone
        output.square().sum().backward()
    assert max(calls) == TILE_SIZE
    got, x.grad = x.grad, None
    compute(reference, x).square().sum().backward()
    torch.testing.assert_close(got, x.grad)
    want = torch.cat([parameter.grad.flatten() for parameter in reference.parameters() if parameter.grad is not None])
    torch.testing.assert_close(flat.grad, want)
    assert [name for name, _ in module.named_parameters()] == ["up.weight"]


def test_parameters_are_restored_after_backward_and_after_an_error_in_it() -> None:
    module = MLP()
    before = dict(module.named_parameters())

    def fails_in_backward(module: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("no memory")
        return compute(module, x)

    tiled(module, tokens(torch.float32)).sum().backward()
    output = tiled(module, tokens(torch.float32), fails_in_backward)
    with pytest.raises(ValueError, match="no memory"):
        output.sum().backward()
    assert [name for name, _ in module.named_parameters()] == [*before]
    assert all(module.get_parameter(name) is parameter for name, parameter in before.items())


def test_hooks_of_parameters_run_once_and_changed_parameters_are_an_error() -> None:
    module, calls = MLP(), []
    module.up.weight.register_hook(lambda gradient: calls.append(gradient.shape))
    tiled(module, tokens(torch.float32)).sum().backward()
    assert calls == [module.up.weight.shape]
    output = tiled(module, tokens(torch.float32))
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_second_derivatives_are_refused() -> None:
    x = tokens()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(tiled(MLP().double(), x).sum(), x, create_graph=True)


def test_autocast_is_the_same_in_backward() -> None:
    seen = []

    def noting(module: Any, x: Tensor) -> Tensor:
        seen.append(module.gate(x).dtype)
        return compute(module, x)

    def run(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return torch.autocast("cpu", torch.bfloat16)(function)

    module, x = MLP(), tokens(torch.float32)
    got = gradients(run(lambda module, x: tiled(module, x, noting)), module, x)
    assert seen == [torch.bfloat16] * 8  # each of four tiles twice
    for one, other in zip(got, gradients(run(compute), module, x), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=0.03, atol=0.03)


def test_gradients_of_parameters_are_summed_in_float32() -> None:
    """One rounding of the sum, and one of each tile's part of it."""
    module, x = MLP().bfloat16(), torch.randn(1, 256 * TILE_SIZE, HIDDEN_SIZE).bfloat16() + 2
    output = tiled(module, x)
    output.backward(torch.ones_like(output))
    exact = copy.deepcopy(module).double()
    compute(exact, x.double()).sum().backward()
    for parameter, want in zip(module.parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert want.grad is not None
        error = (parameter.grad.double() - want.grad).norm() / want.grad.norm()
        assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_no_tensor_is_larger_than_a_tile_or_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = MLP().double(), tokens()
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda t: t)
    with TensorSizes(monkeypatch) as sizes:
        with hooks:
            output = tiled(module, x)
        output.sum().backward()
    assert sizes.largest == TILE_SIZE * WIDTH  # x has fewer elements
    assert all(any(tensor is each for each in (x, *module.parameters())) for tensor in saved)


def test_no_gradients() -> None:
    module, x = MLP().double(), tokens()
    with torch.no_grad(), calls_of(module.up) as calls:
        output = tiled(module, x)
    assert max(calls) == TILE_SIZE
    torch.testing.assert_close(output, compute(module, x))
    assert not output.requires_grad
    frozen = MLP().double().requires_grad_(False)
    assert not tiled(frozen, x.detach()).requires_grad


NOT_TILED: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda module: module.up.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda module: module.up.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.up.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda module: module.up.register_full_backward_pre_hook(lambda *_: None),
    "statistics": lambda module: module.up.register_buffer("mean", torch.zeros(HIDDEN_SIZE)),
    "a parameter that another rank holds": lambda module: module.register_parameter(
        "extra", nn.Parameter(torch.empty(0))
    ),
}


@pytest.mark.parametrize("name", [*NOT_TILED, "own hook", "None", "store", "cheap"])
def test_modules_with_effects_of_their_own_and_other_layers_run_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MLP()
    if name == "own hook":  # it runs outside of the tiles
        module.register_forward_hook(lambda *_: None)
    elif name in NOT_TILED:
        NOT_TILED[name](module)
    else:
        monkeypatch.setattr(tiles, "current_run", lambda: None if name == "None" else a_run(name))
    with calls_of(module.down) as calls:
        tiled(module, tokens(torch.float32))
    assert calls == ([8, 8, 8, 6] if name == "own hook" else [30])


def test_observed_layers_know_what_they_would_keep_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run("recompute")
    monkeypatch.setattr(tiles, "current_run", lambda: run)
    tiled(MLP(), tokens(torch.float32))
    assert run.sizes == LayerSizes()
    run.control.observer = object()
    tiled(MLP(), tokens(torch.float32))
    # Gate and up; their product is cheap.
    assert run.sizes == LayerSizes(tiled=2 * 30 * WIDTH * 4, tiled_cheap=30 * WIDTH * 4)


def test_tiles_are_few_and_even() -> None:
    llama_8b, llama_70b = 6 * 14336 * 2, 6 * 28672 * 2
    assert choose_tile_size(16384, llama_8b) == 16384  # the batches of ordinary training
    assert choose_tile_size(65536, llama_8b) == 11008
    assert choose_tile_size(65536, llama_70b) == 8192
    for num_tokens in (0, 1, 8192, 16384, 16385, 100000, 131072, 262144, 2**20):
        for bytes_per_token in (1, 4096, llama_8b, llama_70b):
            size = choose_tile_size(num_tokens, bytes_per_token)
            if size < num_tokens:
                assert size % 128 == 0
                assert -(-num_tokens // size) >= 3
                assert size * bytes_per_token <= max(2**31, 8192 * bytes_per_token) + 128 * bytes_per_token
                assert num_tokens % size == 0 or num_tokens % size > size // 4
            else:
                assert size == max(1, num_tokens)


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
    with (
        calls_of(model.model.layers[0].mlp.down_proj) as calls,
        calls_of(model.model.layers[1].mlp.down_proj) as others,
    ):
        for got, expected in zip(run(model), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert [calls.count(TILE_SIZE), calls.count(26 % TILE_SIZE), len(calls)] == [3 * num_runs, num_runs, 4 * num_runs]
    assert others == [26]


class Adapted(nn.Module):
    """A layer with an MLP whose parameters and input need no gradient, followed by a layer that is trained."""

    def __init__(self, uses_no_grad: bool) -> None:
        super().__init__()
        self.mlp = MLP(bias=False).requires_grad_(uses_no_grad)
        self.adapter = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.mlp.down.weight.requires_grad):
            y = tiled(self.mlp, x.detach())
        return x + self.adapter(y)


class Squashed(nn.Module):
    """A layer that saves one more tensor after its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(tiled(self.mlp, x))


@pytest.mark.parametrize("make", [lambda: Adapted(False), lambda: Adapted(True), Squashed])
def test_layers_run_again_as_far_as_backward_needs(make: Callable[[], nn.Module]) -> None:
    """Tiles that save nothing are all computed again, however few tensors the layer still wants."""
    model = nn.Sequential(make(), make())
    x, found = tokens(torch.float32), []
    for mode in ("store", "recompute"):
        controlled(model, mode)
        inputs = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
        found.append(torch.autograd.grad(model(x).sum(), inputs, allow_unused=True))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want)


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
    batch = tiny_batch(batch_size=1, seq_len=512)
    if with_mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with TensorSizes(monkeypatch) as sizes:
        LM(model).training_step(batch, 0).backward()
    assert sizes.largest == 512 * model.config.hidden_size
