"""Layers in CUDA graphs: the host replays what a layer computes instead of launching kernel after kernel.

Forward and backward of a layer are captured once for each shape of its inputs. Everything between layers stays eager:
embeddings, the loss, hooks, logging, optimizers, reductions over ranks. In the first pass with a shape layers run
eagerly and are watched for what a graph would leave out; in the second they are captured. Layers that cannot be
captured, and calls that no graph fits, run eagerly, and :attr:`LayerGraphs.summary` says why.

Inputs are copied into a graph, outputs and gradients out of it, so that no tensor outside shares memory with one. All
graphs of a shape have memory of their own for what backward needs; graphs of other shapes, and backward of all layers,
share theirs, because a pass with one shape ends before a pass with another one begins.

The semantics of capture and replay: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
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
_TOO_MANY = (
    f"has inputs of more than {MAX_SHAPES} shapes or other values (pad batches to few lengths by pad_to_multiple_of of"
    " the data module, or pack them)"
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
Function = Callable[[], list[Tensor | None]]


class CudaBackend:
    """Graphs of one CUDA device. Each pool's memory is shared by all graphs in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0
        """Memory that the pools took so far."""
        self._stream = torch.cuda.Stream(device)
        self._pools: dict[str, Any] = {}

    def prepare(self) -> None:
        """Before the first capture of a pass: the pools cannot use what the allocator keeps for others."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def capture(self, function: Function, pool: str) -> tuple[Callable[[], None], list[Tensor | None]]:
        """What replays ``function``, which does not run now, and the tensors that a replay fills."""
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        with torch.cuda.stream(self._stream):
            # Threads that load data or watch collectives go on meanwhile.
            graph.capture_begin(self._pools[pool], capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        self.num_bytes += torch.cuda.memory_reserved(self.device) - before
        return graph.replay, result

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor in the memory of one of a graph's, which it does not keep from being used by other graphs."""
        flat = torch.as_tensor(_Address(tensor), device=self.device)
        return flat.view(tensor.dtype).view(tensor.shape)

    def context(self) -> Any:
        """What a pass must have in common with those before: the stream, on which replays follow each other."""
        return torch.cuda.current_stream(self.device)

    @contextmanager
    def random_state(self) -> Iterator[None]:
        """Keeps the device's random numbers as they are."""
        with torch.random.fork_rng([self.device], device_type="cuda"):
            yield

    def waits(self, function: Callable[[], Any]) -> tuple[Any, bool]:
        """What ``function`` returns, and whether the host waited for the device in it."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        is_wait = ["synchronizing CUDA operation" in str(each.message) for each in caught]
        for each, is_own in zip(caught, is_wait, strict=True):
            if not is_own:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return result, any(is_wait)


class _Address:
    """The memory of a contiguous tensor by its address. Numba's CUDA array interface, which knows no bfloat16."""

    def __init__(self, tensor: Tensor) -> None:
        data = tensor.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": data, "version": 2}


class _Inputs:
    """The arguments of a call: tensors, and the rest, for which a graph is specialized."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        from torch.utils._pytree import tree_flatten

        self.leaves, self._structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        described = tuple(
            (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in self.leaves
        )
        device_type = self.tensors[0].device.type if self.tensors else "cpu"
        self.signature = self._structure, described, autocast_dtype(device_type)

    def refusal(self, device: torch.device) -> str | None:
        """Why no graph can take these arguments."""
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _PLAIN):
                    return f"has a {type(leaf).__name__} among its inputs"
            elif type(leaf) is not Tensor or leaf.device != device or leaf.layout is not torch.strided:
                return f"has a {type(leaf).__name__} of {leaf.device}, {leaf.layout} among its inputs"
            elif not leaf.numel() or leaf.is_inference():
                return "has an empty tensor or one of inference mode among its inputs"
        return None

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        from torch.utils._pytree import tree_unflatten

        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self._structure)


class _LayerState:
    """What a graph has fixed of a layer: the attributes of its modules, and where its tensors are."""

    def __init__(self, layer: nn.Module) -> None:
        self._views: list[Any] = []
        """They show later changes too. Parameters, buffers, hooks and training flags are among them."""
        for module in layer.modules():
            self._views.append(vars(module).values())
            for name, value in vars(module).items():
                if module is layer and "hooks" in name:
                    continue  # the layer's own run outside of its graph
                if isinstance(value, dict | list | set):
                    self._views.append(value.values() if isinstance(value, dict) else value)
        self._values = self._look()
        self._tensors = [*layer.parameters(), *layer.buffers()]
        self._places = self._find()

    def _look(self) -> list[Any]:
        return list(chain.from_iterable(self._views))

    def _find(self) -> list[Any]:
        return [(each.data_ptr(), each.requires_grad) for each in self._tensors]

    def writes(self) -> list[int]:
        return [count_writes(each) for each in self._tensors]

    def is_same(self) -> bool:
        values = self._look()
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return is_same and self._find() == self._places


@dataclass(eq=False)
class _Call:
    """One replay of a forward, as long as its backward may follow."""

    number: int
    is_done: bool = False


class LayerGraph:
    """Forward and backward of one layer for inputs of one signature.

    Args:
        backend: Captures and replays.
        layer: The layer.
        forward: Its forward.
        inputs: A call's; the forward runs with their values once before it is captured.
        gradients: Buffers for the gradients of outputs by shape and dtype, which layers share.
    """

    def __init__(
        self, backend: Any, layer: nn.Module, forward: Callable[..., Any], inputs: _Inputs, gradients: dict[Any, Tensor]
    ) -> None:
        self.signature = inputs.signature
        self.state = _LayerState(layer)
        self.parameters = [each for each in layer.parameters() if each.requires_grad]
        self.last_call: weakref.ref[_Call] | None = None
        self._body, self._source = _Body(layer, forward), inputs
        # Apart from the parameters, which may have hooks, and whose gradients accumulate on another stream.
        self._twins = {
            f"layer.{name}": each.detach().requires_grad_()
            for name, each in layer.named_parameters()
            if each.requires_grad
        }
        self._inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs.tensors]
        self._grad_outputs: list[Tensor] = []
        with backend.random_state():  # compiles kernels and makes handles of libraries
            outputs = self._forward()
            self.is_differentiable = [each.requires_grad for each in outputs]
            for place, each in enumerate(outputs):
                if each.requires_grad:
                    key = place, each.shape, each.dtype
                    if key not in gradients:
                        gradients[key] = torch.zeros_like(each, memory_format=torch.contiguous_format)
                    self._grad_outputs.append(gradients[key])
            self._backward()
        self._replay_forward, filled = backend.capture(self._forward, "forward")
        self._filled_outputs = [backend.alias(each.detach()) for each in filled]
        self._replay_backward, filled = backend.capture(self._backward, "backward")
        self._filled_gradients = [None if each is None else backend.alias(each) for each in filled]

    def _forward(self) -> list[Tensor]:
        from torch.utils._pytree import tree_flatten

        args, kwargs = self._source.with_tensors(self._inputs)
        device = self._inputs[0].device.type
        dtype = autocast_dtype(device)
        # Autocast's cache holds weights that it cast outside of the graph.
        with torch.enable_grad(), torch.autocast(device, dtype, dtype is not None, cache_enabled=False):
            results = torch.func.functional_call(self._body, self._twins, args, kwargs)
        leaves, self._structure = tree_flatten(results)
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._outputs = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        return self._outputs

    def _backward(self) -> list[Tensor | None]:
        outputs = [each for each in self._outputs if each.requires_grad]
        inputs = [*(each for each in self._inputs if each.requires_grad), *self._twins.values()]
        # The graph stays: its tensors must not share memory with those of the layers that are captured next.
        found = torch.autograd.grad(outputs, inputs, self._grad_outputs, retain_graph=True, allow_unused=True)
        rest = iter(found)
        gradients = [next(rest) if each.requires_grad else None for each in self._inputs]
        return [None if each is None else each.contiguous() for each in (*gradients, *rest)]

    def close(self) -> None:
        """Lets graphs of other shapes have the memory."""
        self._outputs = []

    def run_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, each in zip(self._inputs, tensors, strict=True):
            own.detach().copy_(each)
        self._replay_forward()
        return tuple([each.clone() for each in self._filled_outputs])

    def run_backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        wanted = [each for each, needed in zip(grad_outputs, self.is_differentiable, strict=True) if needed]
        for own, each in zip(self._grad_outputs, wanted, strict=True):
            if each is None:
                own.zero_()
            else:
                own.copy_(each)
        self._replay_backward()
        return [None if each is None else each.clone() for each in self._filled_gradients]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """What the layer returns."""
        from torch.utils._pytree import tree_unflatten

        rest = iter(outputs)
        return tree_unflatten([next(rest) if each else None for each in self._is_tensor], self._structure)


class _Body(nn.Module):
    """Calls a layer's forward without the hooks of the layer itself, which run outside of the graph."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self._function = layer, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Replay(torch.autograd.Function):
    """A layer, of its inputs and trained parameters."""

    @staticmethod
    def forward(ctx: Any, owner: "LayerGraphs", graph: LayerGraph, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.graph, ctx.call = owner, graph, call
        ctx.set_materialize_grads(False)
        num_inputs = len(tensors) - len(graph.parameters)
        ctx.save_for_backward(*tensors[num_inputs:])
        outputs = graph.run_forward(tensors[:num_inputs])
        fixed = [each for each, needed in zip(outputs, graph.is_differentiable, strict=True) if not needed]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018  # raises if a parameter was written to since forward
        if ctx.call.number != ctx.owner.pass_number or ctx.graph.last_call() is not ctx.call:
            raise RuntimeError(
                "cuda_graphs=True: backward reached a layer whose graph has run another forward since, which overwrote"
                " what backward needs. Call backward once, before the next forward, or set cuda_graphs=False"
            )
        ctx.call.is_done = True
        return None, None, None, *ctx.graph.run_backward(grad_outputs)


@dataclass(eq=False)
class _Shape:
    """The graphs for one shape of inputs."""

    capturable: set[int] = field(default_factory=set)
    """Layers that the first pass found nothing against."""
    graphs: dict[int, LayerGraph] = field(default_factory=dict)
    num_passes: int = 0


class LayerGraphs:
    """Captures and replays the layers of one model.

    Args:
        backend: :class:`CudaBackend`, or what takes its place in tests.
        num_layers: Of the model.
    """

    def __init__(self, backend: Any, num_layers: int) -> None:
        self.backend, self._num_layers = backend, num_layers
        self.pass_number = 0
        self._shapes: dict[Any, _Shape] = {}
        self._shape: _Shape | None = None
        self._seen: set[int] = set()
        self._calls: list[weakref.ref[_Call]] = []
        self._gradients: dict[Any, Tensor] = {}
        self._reasons: dict[str, set[int]] = {}
        self._num_restarts = 0
        self._is_on = True

    def __reduce__(self) -> Any:  # a copied or pickled model has no graphs
        return type(None), ()

    @property
    def summary(self) -> str:
        """What is captured, and why layers ran eagerly, in words; empty before the first capture or refusal."""
        shapes = [shape for shape in self._shapes.values() if shape.graphs]
        parts = []
        if shapes:
            most = max(len(shape.graphs) for shape in shapes)
            gib = self.backend.num_bytes / 2**30
            parts.append(f"{most} of {self._num_layers} layers captured for {len(shapes)} shapes, {gib:.2f} GiB")
        parts += [f"{len(layers)} ran eagerly: a layer {reason}" for reason, layers in self._reasons.items()]
        return "; ".join(parts)

    def applies_to(self, layer: nn.Module) -> bool:
        """Whether a call of ``layer`` may be captured now: evaluation, and what tracers see, is eager."""
        return self._is_on and layer.training and torch.is_grad_enabled() and not is_traced()

    def run(self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``layer``, of this index and with this forward, returns for the arguments."""

        def eagerly(reason: str | None = None) -> Any:
            if reason is not None:
                self._note(index, reason)
            return forward(*args, **kwargs)

        if torch._C._are_functorch_transforms_active():
            return eagerly("runs in a transform of torch.func")
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return eagerly("fills a cache of keys and values (set use_cache=False in the model's config)")
        inputs = _Inputs(args, kwargs)
        if refusal := inputs.refusal(self.backend.device):
            return eagerly(refusal)
        if index in self._seen or not self._seen:
            if self._is_pending():
                return eagerly("runs again before the backward of its last run")
            self._begin_pass(inputs)
        self._seen.add(index)
        shape = self._shape
        if shape is None:
            return eagerly(_TOO_MANY)
        graph = shape.graphs.get(index)
        if graph is not None and not graph.state.is_same():
            self._restart(layer)
            return eagerly()
        if graph is None and shape.num_passes == 1:
            return self._watch(index, layer, inputs, lambda: forward(*args, **kwargs), shape)
        if graph is None and shape.num_passes == 2 and index in shape.capturable:
            graph = shape.graphs[index] = self._capture(layer, forward, inputs)
        if graph is None or graph.signature != inputs.signature:
            return eagerly()
        call = _Call(self.pass_number)
        graph.last_call = weakref.ref(call)
        self._calls.append(graph.last_call)
        return graph.result(_Replay.apply(self, graph, call, *inputs.tensors, *graph.parameters))

    def _note(self, index: int, reason: str) -> None:
        if reason not in self._reasons:
            rank_zero_warn(f"cuda_graphs=True: a layer {reason} and runs eagerly")
        self._reasons.setdefault(reason, set()).add(index)

    def _is_pending(self) -> bool:
        """Whether backward of some layer may follow."""
        return any((call := each()) is not None and not call.is_done for each in self._calls)

    def _begin_pass(self, inputs: _Inputs) -> None:
        if self._shape is not None and self._shape.num_passes == 2:
            for graph in self._shape.graphs.values():
                graph.close()
            rank_zero_info(f"lightning-liger: CUDA graphs: {self.summary}")
        self.pass_number += 1
        self._seen.clear()
        self._calls.clear()
        key = inputs.signature, self.backend.context()
        self._shape = self._shapes.get(key)
        if self._shape is None and len(self._shapes) < MAX_SHAPES:
            self._shape = self._shapes[key] = _Shape()
        if self._shape is not None:
            self._shape.num_passes += 1
            if self._shape.num_passes == 2:
                self.backend.prepare()

    def _restart(self, layer: nn.Module) -> None:
        """Forgets all graphs, after the attributes or the memory of a layer have changed."""
        self._num_restarts += 1
        self._shapes, self._shape, self._gradients = {}, None, {}
        self.backend = type(self.backend)(self.backend.device)
        if self._num_restarts > _MAX_RESTARTS:
            self._is_on = False
            rank_zero_warn(
                f"cuda_graphs=True: attributes, parameters or hooks of {type(layer).__name__} have changed between"
                f" steps {self._num_restarts} times, so all layers run eagerly from now on"
            )

    def _watch(self, index: int, layer: nn.Module, inputs: _Inputs, forward: Callable[[], Any], shape: _Shape) -> Any:
        """Runs a layer eagerly, and notes whether a graph would do the same."""
        from torch.utils._pytree import tree_leaves

        state = _LayerState(layer)
        before = state.writes(), [count_writes(each) for each in inputs.tensors]
        random_states = _random_states()
        results, waits = self.backend.waits(forward)
        leaves = tree_leaves(results)
        is_plain = all(leaf is None or type(leaf) is Tensor for leaf in leaves)
        checks = {
            "has modules with hooks": not any(has_hooks(part) for part in layer.modules() if part is not layer),
            "needs values of the GPU on the host": not waits,
            "changes attributes of its modules": state.is_same(),
            "writes to its buffers or inputs": before
            == (state.writes(), [count_writes(each) for each in inputs.tensors]),
            "takes random numbers of the host": random_states == _random_states(),
            "returns more than tensors": is_plain,
            "has neither inputs nor parameters that are trained": is_plain
            and any(leaf is not None and leaf.requires_grad for leaf in leaves),
        }
        reason = next((reason for reason, is_fine in checks.items() if not is_fine), None)
        if reason is None:
            shape.capturable.add(index)
        else:
            self._note(index, reason)
        return results

    def _capture(self, layer: nn.Module, forward: Callable[..., Any], inputs: _Inputs) -> LayerGraph:
        try:
            return LayerGraph(self.backend, layer, forward, inputs, self._gradients)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"cuda_graphs=True: {type(layer).__name__} cannot be captured: {error}. Set cuda_graphs=False"
            ) from error


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes()
