"""Activation checkpointing of one run of a layer, which keeps nothing but its inputs, and runs again in backward.

As ``torch.utils.checkpoint`` without reentrance, with these differences: the second run may count the tensors that are
cheap to make (:mod:`lightning_liger.activations.cheap`), inputs may wait in host memory
(:mod:`lightning_liger.activations.offload`), and buffers and training flags are those of the first run. Other state is
not given back: attributes of modules, objects among the arguments, generators other than torch's global ones.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from liger_ops.recipes import listening
from lightning_liger.activations.cheap import CheapTensors, Kept, count_writes, keep
from lightning_liger.activations.offload import Offloaded

_MAX_COPIED = 1024
_SAME = "activation checkpointing needs a deterministic forward"


class Surroundings:
    """Torch's random states and autocast at this moment, which :meth:`again` sets for as long as its context lasts."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "meta" else device  # which has neither
        kinds = dict.fromkeys(("cpu", self._device.type))
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._cpu_state = torch.get_rng_state()
        self._state: Tensor | None = None
        if self._device.type != "cpu":
            self._state = torch.get_device_module(self._device).get_rng_state(self._device)

    @contextmanager
    def again(self) -> Iterator[None]:
        device = self._device
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([] if self._state is None else [device], device_type=device.type))
            torch.set_rng_state(self._cpu_state)
            if self._state is not None:
                torch.get_device_module(device).set_rng_state(self._state, device)
            for settings in self._autocast:
                stack.enter_context(torch.autocast(*settings, self._caches_casts))
            yield


class _LayerState:
    """Buffers, which forward may write to or replace, and training flags of a layer's modules."""

    def __init__(self, layer: nn.Module) -> None:
        self._training = [(module, module.training) for module in layer.modules()]
        self._buffers = [
            (module, name, buffer, count_writes(buffer), _copy_of_state(buffer))
            for module, _ in self._training
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def check(self) -> None:
        """Raises RuntimeError if the first run has written to a buffer that is not copied."""
        for _, name, buffer, num_writes, copy in self._buffers:
            if copy is buffer and count_writes(buffer) != num_writes:
                raise RuntimeError(
                    f"a layer modifies its buffer {name!r} of {buffer.dtype} and shape {list(buffer.shape)}, whose"
                    " previous values its recomputation needs: it cannot be recomputed in backward. Exclude it from"
                    " activation checkpointing"
                )

    @staticmethod
    def _set_training(flags: Iterable[tuple[nn.Module, bool]]) -> None:
        for module, is_training in flags:
            if module.training != is_training:
                module.training = is_training

    @contextmanager
    def again(self) -> Iterator[None]:
        """Gives the modules back what they had, for as long as the context lasts."""
        flags = [(module, module.training) for module, _ in self._training]
        copies: dict[int, Tensor] = {}  # of the copies, as this run may write too; one however often it is shared
        before: list[tuple[nn.Module, str, Tensor | None]] = []
        for module, name, buffer, _, copy in self._buffers:
            current = getattr(module, name)
            # A cache that was replaced, as of rotary embeddings, stays: attributes that stay may tell its length.
            if current is buffer or name not in module._non_persistent_buffers_set:
                before.append((module, name, current))
                setattr(module, name, copies.setdefault(id(buffer), copy if copy is buffer else copy.clone()))
        self._set_training(self._training)
        try:
            yield
        finally:
            self._set_training(flags)
            for module, name, current in before:
                setattr(module, name, current)


def _copy_of_state(buffer: Tensor) -> Tensor:
    """A copy of a buffer that may hold statistics or counters, whose writes by kernels are not counted, else itself."""
    return buffer.detach().clone() if buffer.is_floating_point() or buffer.numel() <= _MAX_COPIED else buffer


class _Slot:
    """The place of one saved tensor: empty until the frame has run again, and after backward took the tensor."""

    def __init__(self, frame: "Frame", tensor: Tensor) -> None:
        self.frame = frame
        self.layout = tensor.shape, tensor.dtype
        self.packed: Any = None


class _Finished(BaseException):  # which no "except Exception" of a layer takes for its own
    """Ends a second run as soon as the last tensor that is still wanted was saved."""


_running = threading.local()
"""Its ``frame`` is the one that this thread runs again."""


class Frame:
    """Runs a layer without keeping what autograd saves; ``keep`` keeps a tensor in the arguments.

    ``run`` is a :class:`~lightning_liger.activations.layers.LayerRun`, which is told about the second run.
    """

    def __init__(self, layer: nn.Module, run: Any, keep: Callable[[Tensor], Kept | Offloaded]) -> None:
        self._run, self._keep = run, keep
        self._slots: list[weakref.ref[_Slot]] = []
        self.num_wanted = 0
        """How many tensors a second run has still to save."""
        self._cheap: CheapTensors | None = None
        self._state = _LayerState(layer)
        self._surroundings = Surroundings(run.device)
        self.lock = threading.RLock()
        """Held while slots are filled and emptied: several threads may run backward over one graph."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the layer with these arguments, as backward will do again."""
        self._arguments = _map(Tensor, self._keep, (args, kwargs))
        inputs = [(tensor, count_writes(tensor)) for tensor in tensors_in((args, kwargs))]
        with saved_tensors_hooks(self._reserve, _fetch):
            outputs = self._run(*args, **kwargs)
        if any(count_writes(tensor) != num_writes for tensor, num_writes in inputs):
            raise RuntimeError(
                "a layer modifies one of its inputs, which its recomputation needs: it cannot be recomputed in"
                " backward. Exclude it from activation checkpointing"
            )
        self._state.check()
        return outputs

    def _reserve(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def run_again(self) -> None:
        """Fills the slots that are still wanted."""
        self._cheap = cheap = self._run.recompute_starts()
        while self._slots and self._slots[-1]() is None:
            self._slots.pop()
        self.num_wanted = len(self._slots)
        args, kwargs = _map((Kept, Offloaded), lambda held: held.get(), self._arguments)
        outer, _running.frame = getattr(_running, "frame", None), self
        try:
            with (
                self._surroundings.again(),
                self._state.again(),
                torch.enable_grad(),
                listening(None if cheap is None else cheap.listener),
                saved_tensors_hooks(self.fill, _refuse),
            ):
                self._run(*args, **kwargs)
        except _Finished:
            pass
        finally:
            _running.frame, self._cheap = outer, None
        if self.num_wanted:
            raise RuntimeError(
                f"a layer saved {len(self._slots)} tensors for backward in its forward and"
                f" {len(self._slots) - self.num_wanted} when it was recomputed: {_SAME}"
            )
        self._run.recompute_ends(cheap)

    def fill(self, tensor: Tensor) -> None:
        """Saves the next tensor of a second run, which ends here if it was the last one."""
        slot = self._slots[-self.num_wanted]()
        self.num_wanted -= 1
        if slot is not None:
            if slot.layout != (tensor.shape, tensor.dtype):
                raise RuntimeError(
                    f"a layer saved a tensor of shape {list(slot.layout[0])} and {slot.layout[1]} for backward in its"
                    f" forward, and one of shape {list(tensor.shape)} and {tensor.dtype} when it was recomputed:"
                    f" {_SAME}"
                )
            slot.packed = keep(tensor) if self._cheap is None else self._cheap.pack(tensor)
        if not self.num_wanted:
            raise _Finished


def end_recomputation_with(saved: Sequence[Tensor]) -> None:
    """Ends the layer that this thread runs again if backward wants no more of it than ``saved``, in this order.

    For an op that is about to save these tensors, and need then not compute its output.
    """
    frame: Frame | None = getattr(_running, "frame", None)
    if frame is not None and frame.num_wanted <= len(saved):
        for tensor in saved:
            frame.fill(tensor)


def _fetch(slot: _Slot) -> Tensor:
    with slot.frame.lock:
        if slot.packed is None:  # the first one that backward asks for, or backward runs once more over the same graph
            slot.frame.run_again()
        packed, slot.packed = slot.packed, None
    return packed.get()


def _refuse(nothing: None) -> Tensor:
    raise RuntimeError("a layer that computes gradients within its forward cannot be recomputed")


def _map(kind: Any, function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each object of ``kind`` in its tuples, lists and dicts replaced."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map(kind, function, each) for each in value)
    if type(value) is dict:
        return {name: _map(kind, function, each) for name, each in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dicts."""
    tensors: list[Tensor] = []
    _map(Tensor, tensors.append, value)
    return tensors
