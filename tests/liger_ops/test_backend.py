"""Parts that all ops share: choosing a path, viewing rows, launching kernels, registering ops."""

import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import BaseBackend
from triton.backends.nvidia.driver import CudaLauncher

from liger_ops import backend, cross_entropy, rms_norm
from tests.liger_ops.operators import OperatorLog

BLOCK_SIZE = 128
LONG = 2**31 + 16  # a multiple of 16 that needs 64 bits


# Which path, and which device.


class Like(NamedTuple):
    """As much of a tensor as decides about its path."""

    is_cuda: bool
    dtype: torch.dtype
    is_meta: bool = False

    def get_device(self) -> int:
        return 0


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the compute capability of GPU 0, which needs not exist."""

    def set_to(*version: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(backend, "_find_kernels", backend.functools.cache(backend._find_kernels.__wrapped__))

    return set_to


def test_kernels_are_for_floats_of_at_most_32_bits_on_a_gpu(capability: Callable[[int, int], None]) -> None:
    capability(8, 0)
    assert not any(backend.use_triton(Like(True, each)) for each in (torch.float64, torch.int64, torch.complex64))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert backend.use_triton(Like(True, dtype))
        assert not backend.use_triton(Like(False, dtype))
        assert not backend.use_triton(torch.empty(1, dtype=dtype))


def test_gpus_without_kernels_run_pytorch_after_one_warning(
    capability: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    capability(7, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paths = [backend.use_triton(Like(True, dtype)) for dtype in 2 * (torch.float32, torch.float16, torch.bfloat16)]
    assert paths == 2 * [True, True, False]
    assert [str(each.message).split(":")[0] for each in caught] == ["on a GPU ops in bfloat16 run as plain PyTorch"]
    capability(9, 4)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.warns(UserWarning, match="on AMD GPUs ops run as plain PyTorch"):
        assert not backend.use_triton(Like(True, torch.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend.use_triton(Like(True, torch.float32))
        assert not backend.use_triton(Like(False, torch.float32, is_meta=True))


# Rows.


@pytest.mark.parametrize(
    ("view", "num_columns", "is_copied"),
    [
        pytest.param(lambda x: x, 5, False, id="contiguous"),
        pytest.param(lambda x: x, 20, False, id="two dimensions in a row"),
        pytest.param(lambda x: x[0, 0], 5, False, id="one row"),
        pytest.param(lambda x: x[..., 1:4], 3, False, id="columns sliced"),
        pytest.param(lambda x: x[:, 0], 5, False, id="rows apart"),
        pytest.param(lambda x: x[:1, :1].expand(1, 6, 5), 5, False, id="one row expanded"),
        pytest.param(lambda x: x[:0], 5, False, id="no rows"),
        pytest.param(lambda x: x.transpose(0, 1), 5, True, id="rows in another order"),
        pytest.param(lambda x: x[:, 1:], 5, True, id="rows at two distances"),
        pytest.param(lambda x: x[..., ::2], 3, True, id="every second column"),
        pytest.param(lambda x: x.mT, 4, True, id="columns apart"),
        pytest.param(lambda x: x[..., :1].expand(3, 4, 5), 5, True, id="one column expanded"),
    ],
)
def test_rows_are_views_wherever_rows_lie_at_one_distance(
    view: Callable[[Tensor], Tensor], num_columns: int, is_copied: bool
) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    tensor = view(whole)
    rows = backend.as_rows(tensor, num_columns)
    assert rows.shape == (tensor.numel() // num_columns, num_columns)
    assert rows.stride(1) == 1
    assert rows.flatten().tolist() == tensor.flatten().tolist()
    assert (rows.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()) == is_copied


# Autograd, tracers, and the end of a graph.


class AskWhetherGraphEnds(torch.autograd.Function):
    """Its backward notes whether the graph ends."""

    answers: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        AskWhetherGraphEnds.answers.append(backend.graph_ends())
        return grad_y


def test_graph_ends_unless_it_is_kept_or_traced() -> None:
    AskWhetherGraphEnds.answers.clear()
    x = torch.ones(1, requires_grad=True)
    y = AskWhetherGraphEnds.apply(x)
    y.backward(retain_graph=True)
    torch.autograd.grad(y, x, create_graph=True)
    with OperatorLog():
        y.backward(retain_graph=True)
    y.backward()
    with OperatorLog():
        AskWhetherGraphEnds.apply(x).backward()
    assert AskWhetherGraphEnds.answers == [False, False, False, True, False]


# Kernels.


def _combine(
    y_ptr,  # [BLOCK_SIZE], float64
    x_ptr,  # at least [start + BLOCK_SIZE]
    other_ptr,  # [BLOCK_SIZE] or None
    start,
    number,
    factor,  # float or None
    pair,  # two integers
    SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loads whose alignment depends on ``start``, arithmetic whose width depends on ``number``."""
    offsets = tl.arange(0, BLOCK)
    y = tl.load(x_ptr + start + offsets).to(tl.float64) + number
    if other_ptr is not None:
        y += tl.load(other_ptr + offsets).to(tl.float64)
    if factor is not None:
        y *= factor
    y += 2 * pair[0] + 3 * pair[1]
    tl.store(y_ptr + offsets, SIGN * y)


class Call(NamedTuple):
    """Arguments of one launch."""

    dtype: torch.dtype = torch.float32
    first: int = 0  # element of x that x_ptr points to
    other: torch.dtype | None = None
    start: int = 16
    number: int = 16
    factor: float | None = None
    pair: tuple[int, int] = (0, 0)
    sign: int = 1
    num_warps: int = 1


CALLS = [
    *(Call(number=number) for number in (16, 1, 17, LONG, LONG + 1, -16, -100, -LONG, 0)),
    *(Call(first=first, start=start) for first, start in ((0, 0), (0, 1), (0, 17), (1, 16), (1, 1))),
    *(Call(other=dtype) for dtype in (torch.float32, torch.float16)),
    *(Call(dtype=dtype) for dtype in (torch.int32, torch.float16)),
    *(Call(factor=factor) for factor in (0.5, 1.0, 16.0)),
    *(Call(pair=pair) for pair in ((1, 16), (16, 1), (17, LONG))),
    *(Call(sign=-1, num_warps=num_warps) for num_warps in (1, 4)),
]


def assert_launch_is_right(kernel: backend.Kernel, call: Call, device: torch.device) -> None:
    x = torch.arange(BLOCK_SIZE + 64, device=device).to(call.dtype)[call.first :]
    other = None if call.other is None else torch.arange(BLOCK_SIZE, device=device).to(call.other)
    y = torch.full((BLOCK_SIZE,), torch.nan, dtype=torch.float64, device=device)
    kernel.launch(
        1, num_warps=call.num_warps, y_ptr=y, x_ptr=x, other_ptr=other, start=call.start, number=call.number,
        factor=call.factor, pair=call.pair, SIGN=call.sign, BLOCK=BLOCK_SIZE,
    )  # fmt: skip
    expected = x.double()[call.start : call.start + BLOCK_SIZE] + call.number
    expected = expected if other is None else expected + other.double()
    expected = expected if call.factor is None else expected * call.factor
    expected = call.sign * (expected + 2 * call.pair[0] + 3 * call.pair[1])
    assert torch.equal(y, expected), call


@pytest.fixture
def kernel() -> backend.Kernel:
    """A kernel that has not been launched."""
    return backend.Kernel(_combine)


class StandIn(triton.JITFunction):
    """A kernel that counts as compiled and is launched by the interpreter, also where there is no GPU."""

    def __init__(self, interpreted: Any) -> None:
        self.interpreted = interpreted
        self.arg_names = interpreted.arg_names

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        return self.interpreted[grid]


@pytest.mark.parametrize(
    ("version", "is_known"), [("3.6.0", True), ("3.7.1", True), ("3.5.1", False), ("3.99.0", False)]
)
def test_only_known_versions_of_triton_are_launched_by_position(
    version: str, is_known: bool, kernel: backend.Kernel, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton_device.type == "cpu":
        kernel.jit = StandIn(kernel.jit)
    written = []

    def write_launch() -> Callable[..., None]:
        written.append(version)
        return kernel._launch_by_triton

    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(kernel, "_write_launch", write_launch)
    for call in CALLS:
        assert_launch_is_right(kernel, call, triton_device)
    assert written == [version] * is_known
    assert not kernel._compiled


def test_known_versions_of_triton_are_the_first_of_those_that_the_project_accepts() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    (accepted,) = re.findall(r'"triton>=(3\.\d+),<(3\.\d+)"', pyproject.read_text(encoding="utf-8"))
    minor = [int(version.split(".")[1]) for version in accepted]
    known = list(backend._KNOWN_LAUNCHERS)
    assert known == [f"3.{number}" for number in range(*minor)][: len(known)]


def test_installed_launcher_takes_the_known_order() -> None:
    names = list(signature(CudaLauncher.__call__).parameters)
    order = ["gridX", "gridY", "gridZ", "stream", "function"]
    others = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
    assert names in (["self", *order, "args"], ["self", *order, *others, "args"])  # 3.6, and later


def fill(kernel: backend.Kernel, y: Tensor, x: Tensor, other: Tensor | None = None) -> tuple[Any, ...]:
    """Launches ``_combine`` on three programs; returns its arguments after the tensors."""
    values = {"start": 16, "number": 17, "factor": 0.5, "pair": (1, 2), "SIGN": -1, "BLOCK": BLOCK_SIZE}
    kernel.launch(3, num_warps=1, y_ptr=y, x_ptr=x, other_ptr=other, **values)
    return tuple(values.values())


@pytest.fixture
def runs(kernel: backend.Kernel, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is passed to the compiled kernel, which does nothing, also on machines without a GPU."""
    runs: list[Any] = []
    compiled = SimpleNamespace(run=lambda *values: runs.append(values), function="function", packed_metadata="metadata")
    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", lambda *_: lambda **_: compiled)
    kernel.jit = triton.runtime.JITFunction(_combine)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # "device" of tensors on the CPU
    driver = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    return runs


def test_second_launch_passes_arguments_in_the_known_order(kernel: backend.Kernel, runs: list[Any]) -> None:
    x, y = torch.zeros(BLOCK_SIZE), torch.zeros(BLOCK_SIZE, dtype=torch.float64)
    for _ in range(2):
        values = fill(kernel, y, x)
    grid, hooks = (3, 1, 1), (None, None, None)
    addresses = (y.data_ptr(), x.data_ptr(), None)
    assert runs == [(*grid, "stream of -1", "function", "metadata", *hooks, *addresses, *values)]


class Elsewhere(Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda", 1)

    def get_device(self) -> int:
        return 1


@pytest.mark.parametrize("num_good", [0, 1, 2])
@pytest.mark.parametrize("name", ["y", "x", "other"])
def test_tensor_on_another_device_raises_at_every_launch(
    name: str, num_good: int, kernel: backend.Kernel, runs: list[Any]
) -> None:
    tensors = {each: torch.zeros(BLOCK_SIZE) for each in ("y", "x", "other")}
    for _ in range(num_good):
        fill(kernel, **tensors)
    runs.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"_ptr must be on y_ptr's device (cpu|cuda:1), got a tensor of shape"):
            fill(kernel, **{**tensors, name: tensors[name].as_subclass(Elsewhere)})
    assert not runs
    fill(kernel, **tensors)
    assert len(runs) == (num_good > 0)


def test_launch_keys_tell_apart_what_triton_does() -> None:
    specialize = triton._C.libtriton.native_specialize_impl
    integers = [0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, -(2**31), -LONG, LONG, LONG + 1]
    values = [*integers, 0.0, 1.0, 16.0, None, (1, 16), (16, 1), (16, LONG), (0.5, 1)]
    found = [(specialize(BaseBackend, value, False, True, True), backend._specialization(value)) for value in values]
    for _, key in found:
        assert len({triton_key for triton_key, other in found if other == key}) == 1, key


def test_numbers_that_are_equal_share_what_was_compiled_only_if_triton_would(
    kernel: backend.Kernel, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_MAX_RECENT", 5)
    compiled: list[Any] = []

    def launch(*_: Any, **arguments: Any) -> Any:
        compiled.append(arguments)
        return SimpleNamespace(run=lambda *_: runs.append(arguments), function="function", packed_metadata="metadata")

    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", lambda *_: launch)
    x, y = torch.zeros(BLOCK_SIZE + 4), torch.zeros(BLOCK_SIZE, dtype=torch.float64)
    names = ("start", "number", "factor", "pair")
    kinds: dict[Any, Any] = {}
    rng = random.Random(0)
    for _ in range(2000):
        values = [rng.choice([0, 1, 1.0, 16, 16.0, 17, LONG, None]) for _ in range(3)]
        values.append(rng.choice([(1, 16), (16, 1), (17, 33)]))
        tensor = x[rng.choice([0, 1]) :]
        kind = (tensor.data_ptr() % 16 == 0, *map(backend._specialization, values))
        runs.clear()
        kernel.launch(
            3,
            num_warps=1,
            y_ptr=y,
            x_ptr=tensor,
            other_ptr=None,
            SIGN=1,
            BLOCK=16,
            **dict(zip(names, values, strict=True)),
        )
        if kind in kinds:
            assert runs == [kinds[kind]]
        else:
            assert not runs
            kinds[kind] = compiled[-1]
        assert len(kernel._recent) <= 5
    assert len(compiled) == len(kinds) == len(kernel._compiled) > 100


def test_launch_follows_its_arguments_in_any_order(kernel: backend.Kernel, triton_device: torch.device) -> None:
    calls = 4 * CALLS
    random.Random(0).shuffle(calls)
    for call in calls:
        assert_launch_is_right(kernel, call, triton_device)


@pytest.mark.gpu
def test_second_launch_does_without_triton(kernel: backend.Kernel) -> None:
    device = torch.device("cuda", 0)
    for call in CALLS:
        assert_launch_is_right(kernel, call, device)
    kernel.jit = None
    for call in reversed(CALLS):
        assert_launch_is_right(kernel, call, device)


@pytest.mark.gpu
def test_launch_queues_on_the_current_stream(kernel: backend.Kernel) -> None:
    device = torch.device("cuda", 0)
    assert_launch_is_right(kernel, Call(), device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)  # x is not there yet for a kernel on another stream
        assert_launch_is_right(kernel, Call(), device)


@pytest.mark.multi_gpu
def test_launch_runs_where_its_tensors_are(kernel: backend.Kernel) -> None:
    for index in (1, 0, 1, 0):
        for call in CALLS:
            assert_launch_is_right(kernel, call, torch.device("cuda", index))
            assert torch.cuda.current_device() == 0


def launch_caches() -> dict[str, Any]:
    """Every cache of a function of ours that depends on more than the device."""
    modules = [module for name, module in sys.modules.items() if name.startswith("liger_ops.")]
    cached = (f for m in modules for f in vars(m).values() if hasattr(f, "cache_info"))
    found = {f"{f.__module__}.{f.__name__}": f for f in cached if f.__module__.startswith("liger_ops.")}
    return {name: function for name, function in found.items() if list(signature(function).parameters) != ["device"]}


def test_launch_caches_are_bounded() -> None:
    names = {name.removeprefix("liger_ops.") for name in launch_caches()}
    assert names >= {"norm.row_norm.choose_forward_launch", "loss.launch.choose_block_launch", "rope.choose_launch"}
    assert all(function.cache_info().maxsize is not None for function in launch_caches().values())


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda x: rms_norm(x, (128,), x[0]), id="rms_norm"),
        pytest.param(lambda x: cross_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device)), id="loss"),
    ],
)
def test_launch_caches_do_not_grow_with_rows(op: Callable[[Tensor], Tensor], triton_device: torch.device) -> None:
    sizes = []
    for num_rows in (2, 3, 5, 16):
        op(torch.ones(num_rows, 128, device=triton_device, requires_grad=True)).sum().backward()
        sizes.append(sum(function.cache_info().currsize for function in launch_caches().values()))
    assert sizes == sizes[:1] * 4


# Ops.


class Wrapper(Tensor):
    """Holds a tensor and unwraps itself for each operator."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        unwrapped = (x.held if isinstance(x, Wrapper) else x for x in args)
        return Wrapper(func(*unwrapped, **(kwargs or {})))


class Plain(Tensor):
    """A subclass that changes nothing."""


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Tensor, float], Tensor]]:
    """An op that adds a number if it is called directly, and subtracts it if the dispatcher calls it."""
    with torch.library._scoped_library("liger_ops", "FRAGMENT") as library:
        monkeypatch.setattr(backend, "_LIBRARY", library)

        @backend.register_op("route(Tensor x, float number) -> Tensor", fake=lambda x, number: x.new_empty(x.shape))
        def route(x: Tensor, number: float) -> Tensor:
            """Says which way it was called."""
            return x + number

        library.impl("route", lambda x, number: x - number, "CPU")
        yield route


def test_op_is_called_directly_unless_traced(route: Callable[[Tensor, float], Tensor]) -> None:
    assert route(torch.zeros(2), 3.0).tolist() == [3.0, 3.0]
    assert route(torch.nn.Parameter(torch.zeros(2)), 3.0).tolist() == [3.0, 3.0]
    assert torch.ops.liger_ops.route(torch.zeros(2), 3.0).tolist() == [-3.0, -3.0]
    assert (route.__name__, route.__doc__) == ("route", "Says which way it was called.")
    with OperatorLog() as log:
        assert route(torch.zeros(2), 3.0).tolist() == [-3.0, -3.0]
    assert [op for op, _ in log.calls] == [torch.ops.liger_ops.route.default]


def test_fake_tensors_get_what_the_fake_allocates(route: Callable[[Tensor, float], Tensor]) -> None:
    with FakeTensorMode():
        y = route(torch.zeros(2, dtype=torch.float16), 3.0)
    assert (tuple(y.shape), y.dtype) == ((2,), torch.float16)
    assert route(torch.zeros(2, device="meta"), 3.0).is_meta


@pytest.mark.parametrize("subclass", [Wrapper, lambda x: x.as_subclass(Plain)], ids=["wrapper", "plain"])
def test_subclasses_go_through_the_dispatcher(
    subclass: Callable[[Tensor], Tensor], route: Callable[[Tensor, float], Tensor]
) -> None:
    y = route(subclass(torch.zeros(2)), 3.0)
    assert isinstance(y, Wrapper | Plain)
    assert getattr(y, "held", y).tolist() == [-3.0, -3.0]


def test_subclasses_after_the_first_argument_go_through_the_dispatcher() -> None:
    # Collectives return tensors that hold nothing themselves, and such a one may be a gradient.
    grad_y, x, weight = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    found = torch.autograd.grad(rms_norm(x, (8,), weight), (x, weight), Wrapper(grad_y))
    expected = torch.autograd.grad(F.rms_norm(x, (8,), weight), (x, weight), grad_y)
    torch.testing.assert_close([getattr(gradient, "held", gradient) for gradient in found], list(expected))
    y = rms_norm(x.detach(), (8,), Wrapper(weight.detach()))
    assert isinstance(y, Wrapper)


def test_compiler_sees_one_operator(route: Callable[[Tensor, float], Tensor]) -> None:
    graphs = []

    def keep_graph(module: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: route(x, 3.0), backend=keep_graph, fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [-3.0, -3.0]
    (graph,) = graphs
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.liger_ops.route.default]
