"""The choice of the attention backend, with measured times in the place of a GPU's."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_liger import attention
from lightning_liger.attention import AttentionBackend, Call, agree, fastest

FLASH, EFFICIENT, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
CALL = Call(torch.device("cuda", 0), torch.bfloat16, 8, 32, 8, 2048, 2048, 128, 128, True, True)


def order() -> list[int]:
    return list(torch._C._get_sdp_priority_order())


class Layer(nn.Module):
    """Attention that notes the order of backends at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.orders: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        self.orders.append(order())
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """All calls count as those of a GPU on which cuDNN is the fastest; the list holds those that were measured."""
    calls: list[Call] = []

    def call_of(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Call:
        return CALL._replace(batch_size=query.shape[0], length=query.shape[2], kv_length=key.shape[2])

    def measured_order(call: Call) -> tuple[int, ...]:
        calls.append(call)
        return attention._with_first(CUDNN)

    monkeypatch.setattr(attention, "_call_of", call_of)
    monkeypatch.setattr(attention, "_measured_order", measured_order)
    monkeypatch.setattr(attention, "_orders", {})
    monkeypatch.setattr(attention, "_cudnn_shapes", set())
    return calls


def run(backend: AttentionBackend, layer: Layer, length: int = 200) -> Tensor:
    with backend.context(0, length):
        return layer(torch.randn(1, 2, length, 8))


def test_order_is_that_of_sdpa_kernel_and_restored() -> None:
    before = order()
    with sdpa_kernel([CUDNN, FLASH, EFFICIENT, SDPBackend.MATH], set_priority=True):
        want = order()
    with AttentionBackend("cudnn").context():
        assert order() == want
        with AttentionBackend("math").context():
            assert order()[0] == SDPBackend.MATH.value
        assert order() == want
    assert order() == before


def test_context_is_reentrant_and_restores_after_errors() -> None:
    before, backend = order(), AttentionBackend("cudnn")
    context = backend.context()
    with pytest.raises(KeyError), context, context:
        raise KeyError
    assert order() == before


def test_calls_are_observed_once(measured: list[Call]) -> None:
    backend, layer, before = AttentionBackend("auto"), Layer(), order()
    for length in (200, 200, 250, 300):
        run(backend, layer, length)
    assert [call.length for call in measured] == [256, 512]  # 200 and 250 are alike
    # The layer looks at the order before attention is called: an observed call is run in the order, not the layer.
    first = [each[0] for each in layer.orders]
    assert first == [before[0], CUDNN.value, before[0], before[0]]
    run(backend, layer, 300)
    assert layer.orders[-1][0] == CUDNN.value
    assert order() == before


class Recorder(TorchFunctionMode):
    """Notes the order of backends in which attention is called."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.orders.append(order())
        return func(*args, **kwargs or {})


def test_observed_call_runs_in_the_order(measured: list[Call]) -> None:
    before, x = order(), torch.randn(1, 2, 200, 8)
    with Recorder() as recorder, AttentionBackend("auto").context(0):
        for _ in range(2):
            F.scaled_dot_product_attention(x, x, x)
        assert order() == before
    assert [each[0] for each in recorder.orders] == [CUDNN.value] * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_forward_has_the_order_of_the_first(measured: list[Call], use_reentrant: bool) -> None:
    backend, layer = AttentionBackend("auto"), Layer()
    run(backend, layer)
    layer.orders.clear()
    x = torch.randn(1, 2, 200, 8, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        with backend.context(0, 200):
            return layer(x)

    checkpoint(forward, x, use_reentrant=use_reentrant).sum().backward()
    assert [each[0] for each in layer.orders] == [CUDNN.value] * 2


def test_new_shapes_stop_getting_cudnn(measured: list[Call]) -> None:
    backend, layer, before = AttentionBackend("auto"), Layer(), order()
    lengths = range(129, 129 + attention._MAX_CUDNN_SHAPES + 1)
    for _ in range(2):
        layer.orders.clear()
        for length in lengths:
            run(backend, layer, length)
    assert [each[0] for each in layer.orders] == [CUDNN.value] * attention._MAX_CUDNN_SHAPES + [before[0]]


@pytest.mark.parametrize("backend", [None, "auto"])
def test_nothing_changes_on_a_cpu(backend: Any) -> None:
    chosen, layer, before = AttentionBackend(backend), Layer(), order()
    for _ in range(2):
        run(chosen, layer)
    assert layer.orders == [before, before]


def test_compiled_layers_keep_one_graph() -> None:
    backend, before = AttentionBackend("auto"), order()
    layer = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x) * 2, fullgraph=True, backend="eager")
    for _ in range(2):
        with backend.context(0):
            layer(torch.randn(1, 2, 200, 8))
        assert order() == before


def test_decided_contexts_cost_little() -> None:
    backend = AttentionBackend("cudnn")

    def enter() -> None:
        with backend.context(0, (8, 2048, 4096), torch.bfloat16):
            pass

    elapsed = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            enter()
        elapsed.append((time.perf_counter() - start) / 20)
    assert min(elapsed) < 5e-6


class Stream:
    """Of a GPU that there is not."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no engine plans")])
def test_failed_measurement_leaves_the_order(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    def fail(call: Call) -> None:
        raise error

    monkeypatch.setattr(attention, "time_backends", fail)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(attention, "_orders", {})
    assert attention.fastest_order(CALL) is None


def test_calls_with_later_arguments_keep_the_order() -> None:
    x = torch.randn(1, 2, 200, 8)
    assert attention._call_of(x, x, x, later=1) is None


@pytest.mark.parametrize(
    ("call", "want"),
    [
        pytest.param(CALL, (8, 2048), id="as_is"),
        pytest.param(CALL._replace(batch_size=1, length=131072, kv_length=131072), (1, 16384), id="long"),
        pytest.param(CALL._replace(batch_size=64, length=1000, kv_length=1000), (16, 1024), id="many_rows"),
        pytest.param(CALL._replace(batch_size=3, length=4096, kv_length=4096), (4, 4096), id="odd_batch"),
    ],
)
def test_timed_call_is_bounded(call: Call, want: tuple[int, int]) -> None:
    rounded = call.rounded()
    assert (rounded.batch_size, rounded.length) == want


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ({}, None),
        ({FLASH: 1.0, CUDNN: 0.5}, CUDNN),
        ({FLASH: 1.0, CUDNN: 0.97}, None),
        ({FLASH: 1, EFFICIENT: 2}, None),
    ],
)
def test_fastest_must_gain(times: dict[SDPBackend, float], want: SDPBackend | None) -> None:
    assert fastest(times) == want


def test_agreement_is_within_rounding() -> None:
    x = torch.randn(1000)
    assert agree((x.bfloat16() * 1.004,), (x.bfloat16(),))
    assert not agree((x.bfloat16() * 1.05,), (x.bfloat16(),))
    assert not agree((x.bfloat16() * float("nan"),), (x.bfloat16(),))


@pytest.mark.gpu
def test_auto_measures_on_a_gpu() -> None:
    call = CALL._replace(batch_size=2, length=512, kv_length=512)
    times = attention.time_backends(call)
    assert all(0 < each < 100 for each in times.values())
    backend = AttentionBackend("auto")
    x = torch.randn(2, 512, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    results = []
    for _ in range(2):
        with backend.context(0):
            results.append(F.scaled_dot_product_attention(x, x, x, is_causal=True))
    torch.testing.assert_close(*results)
    assert agree((results[0].detach(),), (F.scaled_dot_product_attention(x, x, x, is_causal=True).detach(),))


@pytest.mark.gpu
def test_calls_under_autocast_are_those_of_its_dtype() -> None:
    x = torch.randn(2, 4, 256, 64, device="cuda")
    assert attention._call_of(x, x, x) is None
    with torch.autocast("cuda", torch.bfloat16):
        call = attention._call_of(x, x, x)
        assert call is not None
        assert call.dtype == F.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
        assert attention._call_of(*[x.double()] * 3) is None
        assert attention._call_of(x, x[0], x[0]) is None
