"""Layers in CUDA graphs: the host replays what a layer computes instead of launching kernel after kernel.

Forward and backward of a layer are captured for each shape of its inputs. Everything between layers stays eager:
embeddings, the loss, hooks, logging, optimizers, reductions over ranks. In the first pass with a shape, layers run
eagerly and are watched for what a graph would leave out; in the second they are captured. Layers that cannot be
captured, and calls that no graph fits, run eagerly, and :attr:`LayerGraphs.summary` says why.

Inputs are copied into a graph, outputs and gradients out of it: no tensor outside shares memory with one. Each graph of
a shape has its own memory for what backward needs. Graphs of other shapes share it, because a pass ends before one with
another shape begins, and the backward of all layers shares other memory.

Semantics of capture and replay: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import Cache

from liger_ops.backend import autocast_dtype, is_traced, once_differentiable
from lightning_liger.activations.cheap import count_writes
from lightning_liger.activations.tiles import has_hooks

MAX_SHAPES = 8
_MAX_RESTARTS = 4
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_TOO_MANY = f"has inputs of over {MAX_SHAPES} shapes (pad them to few lengths by the data module's pad_to_multiple_of)"


class CudaBackend:
    """Captures functions on a CUDA device, in pools whose graphs share memory. Tests have another one."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"cuda_graphs=True needs a CUDA GPU, got the device {str(device)!r}: leave it out there")
        self.device = device
        self.num_bytes = 0  # that the pools took so far
        self._stream = torch.cuda.Stream(device)
        self._pools = {name: torch.cuda.graph_pool_handle() for name in ("forward", "backward")}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A context on the stream of captures: autograd adds up a leaf's gradient where the leaf was first used."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def capture(self, function: Callable[[], Any], pool: str) -> tuple[Callable[[], None], list[Tensor | None]]:
        """What replays ``function``, which does not run now, and the tensors that a replay fills."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a capture cannot use what the allocator keeps for others
        before = torch.cuda.memory_reserved(self.device)
        with _without_collection(), torch.cuda.stream(self._stream):
            # "thread_local": other threads go on to load data and to watch collectives.
            graph.capture_begin(self._pools[pool], capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # the capture has failed too
                    graph.capture_end()
                raise
            graph.capture_end()
        self.num_bytes += torch.cuda.memory_reserved(self.device) - before
        return graph.replay, result

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor in the memory of a contiguous one of a graph, without keeping the memory from other graphs."""
        # Numba's CUDA array interface, which knows no bfloat16
        address = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2}
        flat = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=address), device=self.device)
        return flat.view(tensor.dtype).view(tensor.shape)

    def stream(self) -> Any:
        """The stream on which replays follow each other."""
        return torch.cuda.current_stream(self.device)

    def keep_random_state(self) -> Any:
        """A context after which the device's random numbers go on as before it."""
        return torch.random.fork_rng([self.device], device_type="cuda")

    @contextmanager
    def watch_host(self) -> Iterator[list[Any]]:
        """Yields a list, which has the waits of the host for the device when the context ends."""
        mode, waits = torch.cuda.get_sync_debug_mode(), list[Any]()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for each in caught:
            if "synchronizing CUDA operation" in str(each.message):
                waits.append(each)
            elif "Synchronization debug mode" not in str(each.message):  # says torch of the mode itself
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps the garbage collector from freeing other graphs, which would invalidate a capture."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class _Nested:
    """The tensors of a nested structure, and the rest, for which a graph is specialized."""

    def __init__(self, value: Any) -> None:
        from torch.utils._pytree import tree_flatten

        leaves, self._structure = tree_flatten(value)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.rest = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def signature(self) -> Any:
        """What a graph's arguments must have in common with those that it was captured with."""
        dtype = autocast_dtype(self.tensors[0].device.type) if self.tensors else None
        tensors = [(each.shape, each.dtype, each.requires_grad) for each in self.tensors]
        return self._structure, dtype, *tensors, *((type(leaf), leaf) for leaf in self.rest)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        from torch.utils._pytree import tree_unflatten

        each = iter(tensors)
        return tree_unflatten([next(each) if leaf is Tensor else leaf for leaf in self.rest], self._structure)


def _refusal(inputs: _Nested, device: torch.device) -> str | None:
    """Why no graph can take these arguments."""
    for leaf in inputs.rest:
        if isinstance(leaf, Cache) and not getattr(leaf, "keeps_nothing", False):
            return "fills a cache of keys and values (set use_cache=False in the model's config)"
        if leaf is not Tensor and not isinstance(leaf, (*_PLAIN, Cache)):
            return f"has a {type(leaf).__name__} among its inputs"
    for each in inputs.tensors:
        is_plain = type(each) is Tensor and each.device == device and each.layout is torch.strided
        if not is_plain or not each.numel() or each.is_inference():
            return f"has an input that is no dense tensor on {device}, or is empty"
    return None if inputs.tensors else "has no inputs"


class _LayerState:
    """What a graph has fixed of a layer: the attributes of its modules, and where its tensors are."""

    def __init__(self, layer: nn.Module) -> None:
        self._views: list[Any] = []
        """They show later changes too. Parameters, buffers, hooks and training flags are among them."""
        for module in layer.modules():
            self._views.append(vars(module).values())
            for name, value in vars(module).items():
                is_outside = module is layer and "hooks" in name  # run before and after the graph
                if isinstance(value, dict | list | set) and not is_outside:
                    self._views.append(value.values() if isinstance(value, dict) else value)
        self.tensors = [*layer.parameters(), *layer.buffers()]
        self._values, self._places = self._look()

    def _look(self) -> tuple[list[Any], list[Any]]:
        places = [(each.data_ptr(), each.requires_grad) for each in self.tensors]
        return list(chain.from_iterable(self._views)), places

    def is_same(self) -> bool:
        values, places = self._look()
        return places == self._places and len(values) == len(self._values) and all(map(is_, values, self._values))


@dataclass(eq=False)
class _Call:
    """One replay of a forward, as long as its backward may follow."""

    pass_number: int
    is_done: bool = False


class _Body(nn.Module):
    """Calls a layer's forward, without the hooks of the layer itself."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.forward = layer, function


class LayerGraph:
    """Forward and backward of one layer for inputs of one signature. Layers share buffers for outputs' gradients."""

    def __init__(
        self, backend: Any, layer: nn.Module, forward: Callable[..., Any], inputs: _Nested, gradients: dict[Any, Tensor]
    ) -> None:
        self.signature = inputs.signature()
        named = {f"layer.{name}": each for name, each in layer.named_parameters() if each.requires_grad}
        self.parameters = list(named.values())
        # Others than the parameters, which may have hooks, and whose gradients accumulate on another stream.
        self._twins = {name: each.detach().requires_grad_() for name, each in named.items()}
        self._inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs.tensors]
        self._destinations = [each.detach() for each in self._inputs]
        self._body, self._arguments = _Body(layer, forward), inputs.with_tensors(self._inputs)
        self.grad_outputs: list[Tensor | None] = []  # where backward reads them, None for outputs without gradient
        with backend.keep_random_state(), backend.on_stream():  # compiles kernels and makes handles of libraries
            for place, each in enumerate(self._forward()):
                buffer = gradients.setdefault((place, each.shape, each.dtype), torch.zeros_like(each))
                self.grad_outputs.append(buffer if each.requires_grad else None)
            self._backward()
        self._replay_forward, filled = backend.capture(self._forward, "forward")
        self._filled_outputs = [backend.alias(each.detach()) for each in filled]
        self._replay_backward, filled = backend.capture(self._backward, "backward")
        self._has_gradient = [each is not None for each in filled]
        self._filled_gradients = [backend.alias(each) for each in filled if each is not None]

    def _forward(self) -> list[Tensor]:
        device_type = self._inputs[0].device.type
        dtype = autocast_dtype(device_type)
        # Autocast's cache has weights that were cast outside of the graph.
        with torch.enable_grad(), torch.autocast(device_type, dtype, dtype is not None, cache_enabled=False):
            self.results = _Nested(torch.func.functional_call(self._body, self._twins, *self._arguments))
            self.outputs = [each.contiguous() for each in self.results.tensors]
        self.results.tensors = []
        return self.outputs

    def _backward(self) -> list[Tensor | None]:
        outputs = [each for each in self.outputs if each.requires_grad]
        inputs = [*(each for each in self._inputs if each.requires_grad), *self._twins.values()]
        given = [each for each in self.grad_outputs if each is not None]
        # The graph stays: its tensors must not share memory with those of layers that are captured next.
        found = iter(torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True))
        gradients = [next(found) if each.requires_grad else None for each in self._inputs]
        return [None if each is None else each.contiguous() for each in (*gradients, *found)]

    def run_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, each in zip(self._destinations, tensors, strict=True):
            own.copy_(each)
        self._replay_forward()
        return tuple([each.clone() for each in self._filled_outputs])

    def run_backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        for own, each in zip(self.grad_outputs, grad_outputs, strict=True):
            if own is not None:
                own.zero_() if each is None else own.copy_(each)
        self._replay_backward()
        # Copies by one call: a product with 1 is the same number, and keeps NaN.
        copies = iter(torch._foreach_mul(self._filled_gradients, 1.0) if self._filled_gradients else ())
        return [next(copies) if has_gradient else None for has_gradient in self._has_gradient]


class _Replay(torch.autograd.Function):
    """A layer, of its inputs and trained parameters."""

    @staticmethod
    def forward(ctx: Any, owner: "LayerGraphs", graph: LayerGraph, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.graph, ctx.call = owner, graph, call
        ctx.set_materialize_grads(False)
        num_inputs = len(tensors) - len(graph.parameters)
        ctx.save_for_backward(*tensors[num_inputs:])
        outputs = graph.run_forward(tensors[:num_inputs])
        pairs = zip(outputs, graph.grad_outputs, strict=True)
        ctx.mark_non_differentiable(*(each for each, gradient in pairs if gradient is None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018  # raises if a parameter was written to since forward
        if ctx.call.pass_number != ctx.owner.pass_number:
            raise RuntimeError(
                "cuda_graphs=True: backward reached a layer that has run forward again since, which overwrote what"
                " backward needs: call backward once, before the next forward, or set cuda_graphs=False"
            )
        ctx.call.is_done = True
        return None, None, None, *ctx.graph.run_backward(grad_outputs)


@dataclass(eq=False)
class _Shape:
    """The graphs of one shape of inputs and the state of layers that may be captured, by the layers' indexes."""

    states: dict[int, _LayerState] = field(default_factory=dict)
    graphs: dict[int, LayerGraph] = field(default_factory=dict)
    num_passes: int = 0


class LayerGraphs:
    """Captures and replays the layers of one model by a :class:`CudaBackend`."""

    def __init__(self, backend: Any, num_layers: int) -> None:
        self.backend, self._num_layers = backend, num_layers
        self.pass_number = self._num_restarts = 0
        self._shapes: dict[Any, _Shape] = {}
        self._shape: _Shape | None = None
        self._seen: set[int] = set()
        self._calls: list[weakref.ref[_Call]] = []
        self._gradients: dict[Any, Tensor] = {}
        self._reasons: dict[str, set[int]] = {}

    @property
    def summary(self) -> str:
        """What is captured, and why layers ran eagerly; empty before the first of both."""
        sizes = [len(shape.graphs) for shape in self._shapes.values() if shape.graphs]
        layers = f"{max(sizes, default=0)} of {self._num_layers} layers"
        captured = f"{layers} captured for {len(sizes)} shapes, {self.backend.num_bytes / 2**30:.2f} GiB"
        eager = [f"{len(layers)} ran eagerly: a layer {reason}" for reason, layers in self._reasons.items()]
        return "; ".join([captured, *eager] if sizes else eager)

    def applies_to(self, layer: nn.Module) -> bool:
        """Whether a call of ``layer`` may be captured now. Evaluation is eager, and what tracers see."""
        is_usual = not is_traced() and not torch._C._are_functorch_transforms_active()
        return layer.training and torch.is_grad_enabled() and is_usual and self._num_restarts <= _MAX_RESTARTS

    def run(self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``layer``, of this index and with this forward, returns for the arguments."""
        inputs = _Nested((args, kwargs))
        if reason := _refusal(inputs, self.backend.device):
            self._note(index, reason)
            return forward(*args, **kwargs)
        signature = inputs.signature()
        if index in self._seen or not self._seen:
            if any((call := each()) is not None and not call.is_done for each in self._calls):
                reason = "runs again before the backward of its last run"
            else:
                self._begin_pass((signature, self.backend.stream()))
        shape = self._shape
        if reason is not None or shape is None:
            self._note(index, reason or _TOO_MANY)
            return forward(*args, **kwargs)
        self._seen.add(index)
        if shape.num_passes == 1:
            return self._watch(index, layer, inputs, lambda: forward(*args, **kwargs), shape)
        graph, state = shape.graphs.get(index), shape.states.get(index)
        if state is not None and not state.is_same():
            self._restart(layer)
            return forward(*args, **kwargs)
        if graph is None and state is not None and shape.num_passes == 2:
            graph = shape.graphs[index] = self._capture(layer, forward, inputs)
        if graph is None or graph.signature != signature:
            return forward(*args, **kwargs)
        call = _Call(self.pass_number)
        self._calls.append(weakref.ref(call))
        return graph.results.with_tensors(_Replay.apply(self, graph, call, *inputs.tensors, *graph.parameters))

    def _note(self, index: int, reason: str) -> None:
        if reason not in self._reasons:
            rank_zero_warn(f"cuda_graphs=True: a layer {reason} and runs eagerly")
        self._reasons.setdefault(reason, set()).add(index)

    def _begin_pass(self, key: Any) -> None:
        if self._shape is not None and self._shape.num_passes == 2:
            for graph in self._shape.graphs.values():
                graph.outputs = []  # graphs of other shapes may have the memory now
            rank_zero_info(f"lightning-liger: CUDA graphs: {self.summary}")
        self.pass_number += 1
        self._seen.clear()
        self._calls.clear()
        if key not in self._shapes and len(self._shapes) < MAX_SHAPES:
            self._shapes[key] = _Shape()
        self._shape = self._shapes.get(key)
        if self._shape is not None:
            self._shape.num_passes += 1

    def _restart(self, layer: nn.Module) -> None:
        """Forgets all graphs, after attributes or the memory of a layer have changed."""
        self._num_restarts += 1
        self._shapes, self._gradients = {}, {}
        self._shape = _Shape(num_passes=3)
        self.backend = type(self.backend)(self.backend.device)
        if self._num_restarts > _MAX_RESTARTS:
            rank_zero_warn(
                f"cuda_graphs=True: all layers run eagerly from now on: parameters, hooks or other attributes of"
                f" {type(layer).__name__} have changed between steps {self._num_restarts} times"
            )

    def _watch(self, index: int, layer: nn.Module, inputs: _Nested, forward: Callable[[], Any], shape: _Shape) -> Any:
        """Runs a layer eagerly, and notes whether a graph would do the same."""
        state = _LayerState(layer)
        tensors = [*state.tensors, *inputs.tensors]
        before = list(map(count_writes, tensors)), _random_states()
        with self.backend.watch_host() as waits:
            results = forward()
        outputs = _Nested(results)
        against = {
            "has modules with hooks": any(has_hooks(part) for part in layer.modules() if part is not layer),
            "needs values of the GPU on the host": bool(waits),
            "changes attributes of its modules": not state.is_same(),
            "writes to its buffers or inputs": list(map(count_writes, tensors)) != before[0],
            "takes random numbers of the host": _random_states() != before[1],
            "returns more than tensors": any(leaf not in (Tensor, None) for leaf in outputs.rest),
            "has nothing that is trained": not any(each.requires_grad for each in outputs.tensors),
        }
        reason = next((reason for reason, is_met in against.items() if is_met), None)
        if reason is None:
            shape.states[index] = state
        else:
            self._note(index, reason)
        return results

    def _capture(self, layer: nn.Module, forward: Callable[..., Any], inputs: _Nested) -> LayerGraph:
        try:
            return LayerGraph(self.backend, layer, forward, inputs, self._gradients)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            what = f"cuda_graphs=True: {type(layer).__name__} cannot be captured"
            raise RuntimeError(f"{what}: {error}. Set cuda_graphs=False") from error


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes()
