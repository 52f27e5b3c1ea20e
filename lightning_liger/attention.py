"""The order in which PyTorch tries the backends of ``F.scaled_dot_product_attention``, chosen by measurement.

PyTorch tries flash, memory-efficient, math and cuDNN attention in this order and takes the first that can run. On some
GPUs cuDNN is much faster (H100, H200), on others slower (A100), and it depends on the shapes. "auto" times forward and
backward of the backends once for each kind of call, on random tensors, and only moves the fastest one to the front:
which backends can run stays PyTorch's decision, so calls with a mask that a backend does not take work as before. If
it cannot measure, PyTorch's order stays.

Ranks may choose differently: attention runs no collective, and the choice changes nothing but rounding, in gradients
that are summed over ranks anyway. Backward needs no choice, since the autograd graph knows the backend of its forward.
A forward that runs again in backward gets the same order: a decision is never changed in the life of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from liger_ops.arguments import check_choice

Backend = Literal["auto", "flash", "cudnn", "efficient", "math"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
Order = tuple[int, ...]
"""All of PyTorch's backends, as the integers of ``SDPBackend``, the first tried first."""

_BY_NAME = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_CAN_USE: dict[SDPBackend, Callable[[SDPAParams], bool]] = {
    SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
    SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
}
_MIN_LENGTH, _MAX_TOKENS = 128, 16384
_MIN_GAIN = 0.05
_MAX_KEYS = 4096
_MAX_CUDNN_SHAPES = 64


class AttentionBackend:
    """Prefers a backend in the forwards of layers.

    Args:
        backend: Is tried first; where it cannot run, PyTorch takes the next one. "auto" finds the fastest, None leaves
            PyTorch's order.

    Raises:
        ValueError: If ``backend`` is another value.
    """

    def __init__(self, backend: Backend | None = "auto") -> None:
        check_choice("attention_backend", backend, (*BACKENDS, None))
        self.backend = backend
        self._contexts: dict[Hashable, AbstractContextManager[Any]] = {}
        self._fixed: AbstractContextManager[Any] = nullcontext()
        if backend not in (None, "auto"):
            self._fixed = _InOrder(_with_first(_BY_NAME[backend]))

    def __reduce__(self) -> Any:  # a copy decides anew
        return type(self), (self.backend,)

    def context(self, *key: Hashable) -> AbstractContextManager[Any]:
        """A context for one forward of a layer, or a second one in backward; it may be entered again, also inside.

        Args:
            key: What the calls of attention in this forward depend on: the layer's index, shape and dtype of its input.
                "auto" looks at the calls once for each key.
        """
        if self.backend != "auto":
            return self._fixed
        found = self._contexts.get(key)
        if found is not None:
            return found
        if len(self._contexts) >= _MAX_KEYS or torch.compiler.is_compiling():
            return self._fixed
        return _Observing(self, key)

    def decide(self, key: Hashable, orders: Collection[Order | None]) -> None:
        """Fixes the orders for all contexts of a key, those of its different calls of attention."""
        if len(orders) > 1:
            context: AbstractContextManager[Any] = _EachCall()
        else:
            order = next(iter(orders), None)
            context = self._fixed if order is None else _InOrder(order)
        self._contexts.setdefault(key, context)


class _InOrder(AbstractContextManager[None]):
    """Sets an order and restores the former one. ``sdpa_kernel`` does so too, in 13 us instead of 0.5."""

    def __init__(self, order: Order) -> None:
        self.order = list(order)
        self._former: list[list[int]] = []

    def __enter__(self) -> None:
        self._former.append(torch._C._get_sdp_priority_order())
        torch._C._set_sdp_priority_order(self.order)

    def __exit__(self, *_: object) -> None:
        torch._C._set_sdp_priority_order(self._former.pop())


class _EachCall(TorchFunctionMode):
    """Runs each call of attention in its fastest order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        call = _call_of(*args, **kwargs)
        order = None if call is None else fastest_order(call)
        self._note(order)
        with nullcontext() if order is None else _InOrder(order):
            return func(*args, **kwargs)

    def _note(self, order: Order | None) -> None:
        pass


class _Observing(_EachCall):
    """The same, and decides for its key: another run must get the same orders."""

    def __init__(self, owner: AttentionBackend, key: Hashable) -> None:
        super().__init__()
        self._owner = owner
        self._key = key
        self._orders: set[Order | None] = set()

    def _note(self, order: Order | None) -> None:
        self._orders.add(order)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self._owner.decide(self._key, self._orders)


class Call(NamedTuple):
    """A call of ``F.scaled_dot_product_attention`` without a mask or dropout."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    num_heads: int
    num_kv_heads: int
    length: int
    kv_length: int
    head_dim: int
    value_dim: int
    is_causal: bool
    enable_gqa: bool

    def rounded(self) -> Call:
        """The call that is timed in its place: lengths are powers of two and at most 16384 tokens, which is enough to
        fill a GPU and takes at most 1 GiB or so for all tensors of a forward and a backward."""
        length, kv_length = (min(_power_of_two(each), _MAX_TOKENS) for each in (self.length, self.kv_length))
        batch_size = min(_power_of_two(self.batch_size), max(1, _MAX_TOKENS // max(length, kv_length)))
        return self._replace(batch_size=batch_size, length=length, kv_length=kv_length)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> Call | None:
    """The kind of a call; None for calls that keep PyTorch's order.

    Those are calls with a mask, where backends differ in what they return for rows without any key; with dropout, which
    cannot be compared; in float32; of few queries, as in generation; and of kinds that this function does not know.
    """
    if attn_mask is not None or dropout_p > 0 or others:
        return None
    if any(type(each) is not Tensor or each.ndim != 4 or each.numel() == 0 for each in (query, key, value)):
        return None
    if query.device.type != "cuda" or query.shape[2] < _MIN_LENGTH or torch.cuda.is_current_stream_capturing():
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    if dtype not in (torch.bfloat16, torch.float16) or query.dtype == torch.float64:  # which autocast leaves
        return None
    batch_size, num_heads, length, head_dim = query.shape
    return Call(
        *(query.device, dtype, batch_size, num_heads, key.shape[1], length, key.shape[2]),
        *(head_dim, value.shape[3], is_causal, enable_gqa),
    )


_orders: dict[Call, Order | None] = {}
_cudnn_shapes: set[Call] = set()


def fastest_order(call: Call) -> Order | None:
    """The order with the fastest backend first, None for PyTorch's own; measured once for each rounded call."""
    rounded = call.rounded()
    if rounded not in _orders:
        _orders[rounded] = _measured_order(rounded)
    order = _orders[rounded]
    if order is not None and order[0] == SDPBackend.CUDNN_ATTENTION.value:
        # cuDNN plans its kernels for each shape, which takes longer than it gains where no two batches are alike.
        if call not in _cudnn_shapes and len(_cudnn_shapes) >= _MAX_CUDNN_SHAPES:
            return None
        _cudnn_shapes.add(call)
    return order


def _measured_order(call: Call) -> Order | None:
    stream = torch.cuda.current_stream(call.device)

    def measure() -> dict[SDPBackend, float]:
        with torch.cuda.stream(stream):
            return time_backends(call)

    try:
        # A thread has no saved-tensor hooks, autocast or modes, which the caller may be in.
        with ThreadPoolExecutor(1) as thread:
            times = thread.submit(measure).result()
    except RuntimeError:  # such as out of memory, or a backend that cannot run after all
        return None
    best = fastest(times)
    return None if best is None else _with_first(best)


def fastest(times: Mapping[SDPBackend, float]) -> SDPBackend | None:
    """The backend of the least time; None if that gains less than 5% over the first, which PyTorch would take."""
    if not times:
        return None
    best = min(times, key=lambda backend: times[backend])
    default = next(iter(times.values()))
    return best if times[best] < (1 - _MIN_GAIN) * default else None


def _with_first(backend: SDPBackend) -> Order:
    order = torch._C._get_sdp_priority_order()
    return (backend.value, *(each for each in order if each != backend.value))


def time_backends(call: Call) -> dict[SDPBackend, float]:
    """Milliseconds of forward and backward in each backend that can run and agrees with PyTorch's choice, the first."""
    generator = torch.Generator(call.device).manual_seed(0)

    def random(num_heads: int, length: int, dim: int) -> Tensor:
        shape = call.batch_size, length, num_heads, dim  # as the output of a linear layer
        values = torch.randn(shape, device=call.device, dtype=call.dtype, generator=generator)
        return values.transpose(1, 2)

    query = random(call.num_heads, call.length, call.head_dim).requires_grad_()
    key = random(call.num_kv_heads, call.kv_length, call.head_dim).requires_grad_()
    value = random(call.num_kv_heads, call.kv_length, call.value_dim).requires_grad_()
    upstream = random(call.num_heads, call.length, call.value_dim)
    inputs = query, key, value

    def run() -> tuple[Tensor, ...]:
        output = F.scaled_dot_product_attention(*inputs, is_causal=call.is_causal, enable_gqa=call.enable_gqa)
        return output.detach(), *torch.autograd.grad(output, inputs, upstream)

    params = SDPAParams(query, key, value, None, 0.0, call.is_causal, call.enable_gqa)
    order = map(SDPBackend, torch._C._get_sdp_priority_order())
    candidates = [backend for backend in order if backend in _CAN_USE and _CAN_USE[backend](params)]
    times: dict[SDPBackend, float] = {}
    if len(candidates) < 2:
        return times
    expected: tuple[Tensor, ...] = ()
    for backend in candidates:
        with sdpa_kernel(backend):
            results = run()  # compiles and plans, too
            expected = expected or results
            if not agree(results, expected):
                continue
            del results
            (once,) = _elapsed(run, 1, 1)
            repetitions = max(1, min(20, math.ceil(5 / max(once, 0.01))))
            times[backend] = min(_elapsed(run, 3, repetitions))
    return times


def _elapsed(run: Callable[[], Any], num_rounds: int, repetitions: int) -> list[float]:
    """Milliseconds of one repetition, in each round."""
    elapsed = []
    for _ in range(num_rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repetitions):
            run()
        end.record()
        end.synchronize()
        elapsed.append(start.elapsed_time(end) / repetitions)
    return elapsed


def agree(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether tensors differ by rounding: by at most 4 times the dtype's epsilon in their norm.

    Each of both has an error of about one epsilon: of rounding the probabilities, and of the result.
    """
    for result, each in zip(results, expected, strict=True):
        error = (result.float() - each.float()).norm() / each.float().norm()
        if not error <= 4 * torch.finfo(each.dtype).eps:
            return False
    return True
