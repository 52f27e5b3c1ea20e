"""Captured layers train as eager ones do, in memory of their own; what no graph can do runs eagerly, with the reason.

On CPUs a backend takes the place of CUDA graphs which runs captured functions again; tests marked ``gpu`` capture.
"""

import copy
import gc
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_liger import apply_liger_kernels
from lightning_liger.activations import graphs
from lightning_liger.activations.graphs import MAX_SHAPES, CudaBackend, LayerGraphs
from lightning_liger.activations.layers import control_layers
from lightning_liger.sequences.context_parallel import CACHE
from lightning_liger.training.lora import add_adapters
from tests.lightning_liger.activations.fake_graphs import FakeBackend
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_model

BACKENDS = [
    pytest.param((FakeBackend, "cpu"), id="cpu"),
    pytest.param((CudaBackend, "cuda:0"), id="cuda", marks=pytest.mark.gpu),
]
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
pytestmark = pytest.mark.filterwarnings("ignore:cuda_graphs=True")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    kind, device = request.param
    return kind(torch.device(device))


def captured(model: nn.Module, backend: Any) -> LayerGraphs:
    """Has the layers of ``model`` captured."""
    control = control_layers(model)
    assert control is not None
    control.graphs = LayerGraphs(backend, len(control.layers))
    return control.graphs


class Layer(nn.Module):
    """A gated layer with a dropout, and what ``act`` does besides in its forward."""

    def __init__(self, act: Callable[..., Any] = lambda layer, x: x) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(8))
        self.act, self.scale, self.runs = act, 1.0, 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = x + scale * self.scale * self.down(self.dropout(torch.sigmoid(self.up(x))))
        return self.act(self, y)


class Stack(nn.Module):
    def __init__(self, *acts: Any) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Layer(*act) for act in acts or ((), (), ())])

    def forward(self, x: Tensor, scales: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Tensor:
        x = self.first(x)
        for layer, scale in zip(self.layers, scales, strict=True):
            x = layer(x, scale=scale)
            x = x[0] if isinstance(x, tuple) else x
        return x


def pair(backend: Any, *acts: Any) -> tuple[Stack, Stack, LayerGraphs]:
    """The same model twice: with eager layers, and with captured ones."""
    torch.manual_seed(0)
    plain = Stack(*acts).to(backend.device)
    other = copy.deepcopy(plain)
    return plain, other, captured(other, backend)


def inputs(backend: Any, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (2, 5, 8)), generator=torch.Generator().manual_seed(seed)).to(backend.device)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def same(found: Any, expected: Any) -> None:
    """Equal but for other kernels of a GPU."""
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def assert_trains_alike(plain: nn.Module, other: nn.Module, xs: list[Tensor], **options: Any) -> None:
    """In steps of one input each, compared after each."""
    for x in xs:
        outcomes = []
        for model in (plain, other):
            loss = model(x, **options).square().mean()
            if loss.requires_grad:
                loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            outcomes.append((loss.detach(), gradients(model)))
            model.zero_grad()
        same(outcomes[1], outcomes[0])


def case(seed: int) -> dict[str, Any]:
    """A random training."""
    draw = random.Random(seed)
    return {
        "kind": draw.choice(["llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "gpt_oss"]),
        "freezes": draw.choice(["nothing", "first layer", "embeddings", "all but adapters"]),
        "kernels": draw.choice(["auto", "none"]),
        "half": draw.random() < 0.3,
        "micro_batches": draw.choice([1, 2, 3]),
        "to_none": draw.random() < 0.7,
        "scheduled": draw.random() < 0.5,
        "lengths": [draw.choice([4, 7, 9]) for _ in range(20)],
    }


def train(model: nn.Module, case: dict[str, Any], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * case["scheduled"]))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for length in case["lengths"]:
        for _ in range(case["micro_batches"]):
            ids = torch.randint(3, VOCAB_SIZE, (2, length), generator=generator).to(device)
            with torch.autocast(device.type, torch.bfloat16, case["half"]):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=case["to_none"])
        with torch.no_grad():  # evaluation in between, of another shape
            losses.append(model(input_ids=ids[:1], labels=ids[:1]).loss)
    return losses, [parameter.detach() for parameter in trained]


@pytest.mark.parametrize("seed", range(16))
def test_random_models_train_as_without_graphs(seed: int, backend: Any) -> None:
    options = case(seed)
    outcomes = []
    for captures in (False, True):
        overrides = WITHOUT_DROPOUT if options["kind"] == "gpt2" else {}
        model: Any = tiny_model(options["kind"], use_cache=False, **overrides).train()
        if options["freezes"] == "all but adapters" and options["kind"] != "gpt2":
            torch.manual_seed(3)
            model = add_adapters(model, {"r": 2, "lora_dropout": 0.0})
        model = model.to(backend.device)
        base = model.base_model.model if hasattr(model, "peft_config") else model
        if options["freezes"] == "first layer":
            (base.transformer.h if options["kind"] == "gpt2" else base.model.layers)[0].requires_grad_(False)
        elif options["freezes"] == "embeddings":
            base.get_input_embeddings().requires_grad_(False)
        apply_liger_kernels(model, kernels=options["kernels"])
        if captures:
            owner = captured(model, backend)
        else:
            control_layers(model)
        outcomes.append(train(model, options, backend.device))
    tolerance = {"rtol": 0, "atol": 0} if backend.device.type == "cpu" else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(outcomes[1], outcomes[0], **tolerance)
    if backend.device.type == "cpu" or options["kind"] not in ("mixtral", "gpt_oss"):  # whose host may wait
        assert "2 of 2 layers captured" in owner.summary
        assert "GiB" in owner.summary


@pytest.mark.gpu
def test_graphs_in_reference_cycles_are_not_freed_during_a_capture() -> None:
    backend = CudaBackend(torch.device("cuda:0"))
    x = torch.ones(2**20, device=backend.device)
    cycle: list[Any] = []
    cycle += [cycle, backend.capture(lambda: [x * 2.0], "forward"), CudaBackend(backend.device)]

    def collect() -> list[Tensor]:
        nonlocal cycle
        cycle = []
        for _ in range(10**5):
            cycle.append([cycle])  # containers, of which the collector counts the new ones
        return [x * 3.0]

    replay, (result,) = backend.capture(collect, "forward")
    replay()
    same(result, torch.full_like(x, 3.0))
    assert gc.isenabled()


@pytest.mark.gpu
def test_dropout_draws_what_eager_layers_draw() -> None:
    backend = CudaBackend(torch.device("cuda:0"))
    plain, other, owner = pair(backend)
    for layer in (*plain.layers, *other.layers):
        layer.dropout.p = 0.5
    for step in range(6):
        results = []
        for model in (plain, other):
            torch.manual_seed(step)
            torch.randn(3, device=backend.device)
            loss = model(inputs(backend)).square().sum()
            loss.backward()
            results.append((loss.detach(), gradients(model), torch.cuda.get_rng_state()))
            model.zero_grad()
        same(results[1], results[0])
    assert owner.summary.startswith("3 of 3 layers captured for 1 shapes")


def waits(layer: Layer, y: Tensor) -> Tensor:
    return y * (2.0 if y.sum().item() > 0 else 3.0)


def counts(layer: Layer, y: Tensor) -> Tensor:
    layer.runs += 1
    return y * layer.runs


def draws(layer: Layer, y: Tensor) -> Tensor:
    return y * (1.0 + random.random())


def tracks(layer: Layer, y: Tensor) -> Tensor:
    layer.mean.lerp_(y.detach().mean((0, 1)), 0.1)
    return y - layer.mean


def appends(layer: Layer, y: Tensor) -> Tensor:
    vars(layer).setdefault("seen", []).append(y.detach())
    return y


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (waits, "needs values of the GPU on the host"),
        (counts, "changes attributes of its modules"),
        (appends, "changes attributes of its modules"),
        (draws, "takes random numbers of the host"),
        (tracks, "writes to its buffers or inputs"),
        (lambda layer, y: (y, "text"), "returns more than tensors"),
        (lambda layer, y: y.detach(), "has nothing that is trained"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_layer_that_a_graph_would_freeze_runs_eagerly(act: Any, reason: str, backend: Any) -> None:
    plain, other, owner = pair(backend, (), (act,), ())
    if act is waits and isinstance(backend, FakeBackend):
        backend.waiting = True  # it cannot tell by itself: all layers seem to wait
    for step in range(4):
        results = []
        for model in (plain, other):
            random.seed(step)
            loss = model(inputs(backend, seed=step)).square().mean()
            loss.backward()
            results.append((loss.detach(), gradients(model), dict(model.named_buffers())))
            model.zero_grad()
        same(results[1], results[0])
    assert f"ran eagerly: a layer {reason}" in owner.summary
    assert other.layers[1].runs == plain.layers[1].runs
    if act is not waits or isinstance(backend, CudaBackend):
        assert "2 of 3 layers captured" in owner.summary
        assert f"1 ran eagerly: a layer {reason}" in owner.summary


def test_hooks_run_at_every_call(backend: Any) -> None:
    plain, other, owner = pair(backend)
    calls: list[str] = []
    for model in (plain, other):
        model.layers[0].register_forward_hook(lambda *_: calls.append("outside"))
        model.layers[1].up.register_forward_hook(lambda *_: calls.append("inside"))
    assert_trains_alike(plain, other, [inputs(backend)] * 4)
    assert (calls.count("outside"), calls.count("inside")) == (8, 8)
    assert "2 of 3 layers captured" in owner.summary
    assert "a layer has modules with hooks" in owner.summary
    for model in (plain, other):
        model.layers[2].down.register_full_backward_hook(lambda *_: calls.append("later"))
        model.layers[0].register_forward_pre_hook(lambda *_: calls.append("before"))
        model.layers[0].up.weight.register_hook(lambda grad: 2 * grad)
    assert_trains_alike(plain, other, [inputs(backend)] * 4)
    assert (calls.count("later"), calls.count("before")) == (8, 8)
    assert "1 of 3 layers captured" in owner.summary


def test_two_forwards_before_backward_and_backwards_that_come_too_late(backend: Any) -> None:
    plain, other, owner = pair(backend)
    one, two = inputs(backend, seed=1), inputs(backend, seed=2)
    assert_trains_alike(plain, other, [one] * 3)
    for model in (plain, other):  # captured, then eager, as the graphs wait for backward
        (model(one) * model(two)).square().mean().backward()
    same(gradients(other), gradients(plain))
    assert "a layer runs again before the backward of its last run" in owner.summary
    for model in (plain, other):
        loss = model(one).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    same(gradients(other), gradients(plain))
    loss = other(one).square().mean()
    loss.backward(retain_graph=True)
    other(two).mean().backward()
    with pytest.raises(RuntimeError, match="has run forward again since"):
        loss.backward()
    with patch.object(backend, "hides_writes", True, create=True):
        loss = other(one).mean()
    with torch.no_grad():
        other.layers[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad():
        other.layers[0].up.weight.div_(2)
    del loss
    other(one)  # without a backward
    for model in (plain, other):
        model.zero_grad()
    num_replays = len(getattr(backend, "replays", []))
    assert_trains_alike(plain, other, [one])
    assert len(getattr(backend, "replays", [None] * 6)) == num_replays + 6
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(other(one).mean(), other.layers[2].up.weight, create_graph=True)


def test_tensors_of_earlier_steps_stay_as_they_were(backend: Any) -> None:
    _, other, _ = pair(backend)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        x = inputs(backend, seed=step).requires_grad_()
        hidden: list[Tensor] = []
        handle = other.layers[1].register_forward_hook(lambda *call, hidden=hidden: hidden.append(call[2]))
        other(x).square().sum().backward()
        handle.remove()
        tensors = [hidden[0].detach(), x.grad, *(parameter.grad for parameter in other.parameters())]
        kept += [(tensor, tensor.clone()) for tensor in tensors]
        other.zero_grad()
    for tensor, copied in kept:
        assert torch.equal(tensor, copied)


def test_shapes_share_memory_and_more_than_the_most_run_eagerly(backend: Any) -> None:
    plain, other, owner = pair(backend)
    shapes = [(2, length, 8) for length in range(1, MAX_SHAPES + 2)]
    order = [shape for shape in shapes for _ in range(3)]
    random.Random(0).shuffle(order)
    first = len(list(dict.fromkeys(order))[:MAX_SHAPES])
    assert_trains_alike(plain, other, [inputs(backend, *shape, seed=place) for place, shape in enumerate(order)])
    assert f"3 of 3 layers captured for {first} shapes" in owner.summary
    assert f"has inputs of over {MAX_SHAPES} shapes" in owner.summary
    assert "pad_to_multiple_of" in owner.summary
    if isinstance(backend, FakeBackend):
        assert backend.replays.count("forward") == backend.replays.count("backward") == 3 * 2 * MAX_SHAPES


def unfreeze(model: Any) -> None:
    model.layers[0].requires_grad_(True)


def move(model: Any) -> None:
    weight = model.layers[1].down.weight
    weight.data = weight.data.clone()


def scale(model: Any) -> None:
    model.layers[1].scale = 3.0


def replace(model: Any) -> None:
    model.layers[2].down.weight = nn.Parameter(model.layers[2].down.weight.detach() * 2)


def extend(model: Any) -> None:
    model.layers[2].down = nn.Sequential(model.layers[2].down, nn.Tanh())


@pytest.mark.parametrize("change", [unfreeze, move, scale, replace, extend])
def test_changes_of_layers_are_seen(change: Callable[[Any], None], backend: Any) -> None:
    plain, other, owner = pair(backend)
    for model in (plain, other):
        model.layers[0].requires_grad_(change is not unfreeze)
    assert_trains_alike(plain, other, [inputs(backend)] * 4)
    for model in (plain, other):
        change(model)
    assert_trains_alike(plain, other, [inputs(backend)] * 4)
    assert "3 of 3 layers captured" in owner.summary


def test_layers_that_change_all_the_time_are_left_alone(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, owner = pair(backend)
    warnings = MagicMock()
    monkeypatch.setattr(graphs, "rank_zero_warn", warnings)
    for step in range(20):
        for model in (plain, other):
            model.layers[1].scale = 1.0 + step
        assert_trains_alike(plain, other, [inputs(backend, seed=step)])
    warnings.assert_called_once()
    assert "attributes of Layer have changed between steps 5 times" in warnings.call_args.args[0]
    for layer in other.layers:
        assert not owner.applies_to(layer)


def test_other_values_of_arguments_take_other_graphs(backend: Any) -> None:
    plain, other, owner = pair(backend)
    for value in (1.0, 2.0, 1.0, 2.0, 1, True, 2.0):  # equal ones of other types too
        assert_trains_alike(plain, other, [inputs(backend)], scales=(value, 1.0, value))
        assert_trains_alike(plain, other, [inputs(backend)], scales=(value, 1.0, 2 * value))  # eager: of the same pass
    assert "captured for 4 shapes" in owner.summary


def test_outputs_of_every_kind(backend: Any) -> None:
    def several(layer: Layer, y: Tensor) -> dict[str, Any]:
        return {"y": y, "none": None, "rest": [y.argmax(-1), 3 * y.transpose(0, 1)]}

    torch.manual_seed(0)
    plain = nn.Sequential(Layer(several), Layer(several)).to(backend.device)
    other = copy.deepcopy(plain)
    owner = captured(other, backend)
    for step in range(6):
        found = []
        for model in (plain, other):
            x = inputs(backend, seed=step).requires_grad_()
            outputs = [layer(x) for layer in model]
            assert all(output["none"] is None and not output["rest"][0].requires_grad for output in outputs)
            used = [output["rest"][1] if step % 2 else output["y"].transpose(0, 1) for output in outputs]
            (used[0] * used[1]).sum().backward()
            found.append((used, [output["rest"][0] for output in outputs], x.grad, gradients(model)))
            model.zero_grad()
        same(found[1], found[0])
    assert "2 of 2 layers captured" in owner.summary


def test_caches_modes_and_hooks_of_others_are_left_to_eager_layers(backend: Any) -> None:
    model = tiny_model("llama").train().to(backend.device)
    owner = captured(model, backend)
    ids = torch.arange(3, 9, device=backend.device)[None]
    for _ in range(3):
        assert isinstance(model(input_ids=ids, use_cache=True)[CACHE], DynamicCache)
    assert "fills a cache of keys and values (set use_cache=False" in owner.summary
    assert "captured" not in owner.summary
    _, other, owner = pair(backend)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            other(inputs(backend)).mean().backward()
        other.eval()
        other(inputs(backend)).mean().backward()
        other.train()
        torch.func.vmap(other)(inputs(backend))
        with torch.no_grad():
            other(inputs(backend))
    assert (owner.summary, owner.pass_number) == ("", 0)


def test_failed_capture_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(torch.device("cpu"))
    _, other, _ = pair(backend)
    other(inputs(backend)).mean().backward()

    def fail(function: Any, pool: str) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(backend, "capture", fail)
    with pytest.raises(RuntimeError, match=r"Layer cannot be captured: operation .* Set cuda_graphs=False"):
        other(inputs(backend))


def test_copies_of_models_have_no_graphs(backend: Any) -> None:
    _, other, owner = pair(backend)
    for _ in range(3):
        other(inputs(backend)).mean().backward()
    num_passes = owner.pass_number
    copied = copy.deepcopy(other)
    same(copied(inputs(backend)), other(inputs(backend)))
    assert owner.pass_number == num_passes + 1


def test_backend_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="cuda_graphs=True needs a CUDA GPU, got the device 'cpu'"):
        graphs.CudaBackend(torch.device("cpu"))
