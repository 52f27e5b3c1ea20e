"""One run of a layer that keeps nothing but its inputs, and runs again in backward.

As ``torch.utils.checkpoint`` without reentrance, with two differences: the second run knows which tensors are cheap to
make, and may drop them (:mod:`lightning_liger.activations.cheap`), and inputs may wait in host memory
(:mod:`lightning_liger.activations.offload`).

The first time that a layer runs again, it runs to its end, and its outputs are compared with those of its first run: a
layer with state that no second run can get back (:mod:`lightning_liger.activations.repeats`) would get wrong gradients.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from liger_ops.recipes import listening
from lightning_liger.activations.cheap import CheapTensors, Kept, count_writes, unpack
from lightning_liger.activations.repeats import (
    Habits,
    LayerState,
    check_outputs,
    host_random_again,
    host_random_state,
    random_again,
    random_state,
    samples_of,
)


class Waiting(Protocol):
    """A tensor that can be had back when backward needs it."""

    def get(self) -> Tensor: ...


class Watcher(Protocol):
    """Is told when a frame runs again; ``dropped_bytes`` of it are cheap, ``largest_bytes`` in one tensor."""

    def recompute_starts(self) -> None: ...

    def recompute_ends(self, dropped_bytes: int, largest_bytes: int) -> None: ...


class _Slot:
    """The place of one saved tensor: empty until the frame has run again, and after backward took the tensor."""

    __slots__ = ("__weakref__", "frame", "is_filled", "layout", "packed")

    def __init__(self, frame: "Frame", tensor: Tensor) -> None:
        self.frame = frame
        self.layout = tensor.shape, tensor.dtype
        self.is_filled = False
        self.packed: Any = None


class _Held:
    """An argument that is a tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Waiting) -> None:
        self.tensor = tensor


class _Finished(BaseException):  # which no "except Exception" of a layer takes for its own
    """Ends a second run as soon as the last tensor that is still wanted was saved."""


class _Running(threading.local):
    frame: "Frame | None" = None


_running = _Running()


class Frame:
    """Runs a layer without keeping what autograd saves.

    Args:
        layer: Whose buffers and training flags the second run sees as the first one did.
        device: Of the layer, whose random state and autocast settings the second run gets back.
        habits: Of the layer, the same for all of its frames.
        watcher: Is told about the second run.
        keep: Makes something that has a ``get`` of each tensor in the arguments that requires a gradient; by default
            the tensor stays where it is.
        drops_cheap: Whether the second run drops what is cheap. Until the backward of one layer ends that would often
            cost more time than the memory is worth.
    """

    def __init__(
        self,
        layer: nn.Module,
        device: torch.device,
        habits: Habits,
        watcher: Watcher | None = None,
        keep: Callable[[Tensor], Waiting] = Kept,
        drops_cheap: bool = False,
    ) -> None:
        self._device = device
        self._habits = habits
        self._watcher = watcher
        self._keep = keep
        self._drops_cheap = drops_cheap
        self._slots: list[weakref.ref[_Slot]] = []
        self._num_seen = 0
        self._layer = layer
        self._state = LayerState(layer)
        self._samples: list[Tensor] | None = None  # of the outputs, if the second run is to be compared
        self.lock = threading.RLock()
        """Held while slots are filled and emptied: several threads may run backward over one graph."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns ``forward(*args, **kwargs)``, which backward will call again."""
        self._forward = forward
        self._arguments = _map_tensors(self._held, (args, kwargs))
        self._random_state = random_state(self._device)
        needs_host = self._habits.draws_on_host or not self._habits.are_known
        host_state = host_random_state() if needs_host else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", self._device.type))
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()
        inputs = [(tensor, count_writes(tensor)) for tensor in tensors_in((args, kwargs))]
        with saved_tensors_hooks(self._reserve, _fetch):
            outputs = forward(*args, **kwargs)
        if any(count_writes(tensor) != num_writes for tensor, num_writes in inputs):
            raise RuntimeError(
                "a layer writes to one of its inputs, which it would need again: it cannot be recomputed in backward."
                " Leave it out of activation checkpointing"
            )
        self._state.first_run_ends()
        if self._slots and not self._habits.are_known:
            self._habits.draws_on_host |= host_random_state() != host_state
            # Where a second run ends, DeepSpeed would free parameters that backward is about to use.
            if not any(hasattr(parameter, "ds_id") for parameter in self._layer.parameters()):
                self._samples = samples_of(tensors_in(outputs)) or None
        self._host_random_state = host_state if self._habits.draws_on_host else None
        return outputs

    def _held(self, tensor: Tensor) -> "_Held":
        return _Held(self._keep(tensor) if tensor.requires_grad and not tensor.is_leaf else Kept(tensor))

    def _reserve(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def run_again(self) -> None:
        """Fills the slots that are still wanted."""
        if self._watcher is not None:
            self._watcher.recompute_starts()
        while self._slots and self._slots[-1]() is None:
            self._slots.pop()
        self._num_seen = 0
        args, kwargs = _map_held(self._arguments)
        outputs: Any = ()
        outer, _running.frame = _running.frame, self
        try:
            with ExitStack() as stack:
                enter = stack.enter_context
                enter(random_again(self._device, self._random_state))
                enter(host_random_again(self._host_random_state))
                enter(self._state.again())
                for kind, is_enabled, dtype in self._autocast:
                    enter(torch.autocast(kind, dtype, is_enabled, self._caches_casts))
                # Made here because it looks whether autocast is on.
                cheap = CheapTensors(self._device.type, drops=self._drops_cheap)
                enter(torch.enable_grad())
                enter(listening(cheap.listener))
                enter(saved_tensors_hooks(lambda tensor: self._fill(tensor, cheap), _refuse))
                outputs = self._forward(*args, **kwargs)
        except _Finished:
            pass
        finally:
            _running.frame = outer
        cheap.close()
        if self._num_seen < len(self._slots):
            raise RuntimeError(
                f"a layer saved {len(self._slots)} tensors for backward in its forward and {self._num_seen} when it was"
                " recomputed: activation checkpointing needs a forward that does the same each time it runs"
            )
        if self._samples is not None:
            check_outputs(self._samples, samples_of(tensors_in(outputs)))
        self._samples, self._habits.are_known = None, True
        if self._watcher is not None:
            self._watcher.recompute_ends(cheap.dropped_bytes, cheap.largest_bytes)

    def _fill(self, tensor: Tensor, cheap: CheapTensors) -> None:
        if self._num_seen == len(self._slots):  # only the outputs are still wanted
            return
        reference, self._num_seen = self._slots[self._num_seen], self._num_seen + 1
        slot = reference()
        if slot is not None:
            if slot.layout != (tensor.shape, tensor.dtype):
                raise RuntimeError(
                    f"a layer saved a tensor of shape {list(slot.layout[0])} and {slot.layout[1]} for backward in its"
                    f" forward, and one of shape {list(tensor.shape)} and {tensor.dtype} when it was recomputed:"
                    " activation checkpointing needs a forward that does the same each time it runs"
                )
            slot.packed = cheap.pack(tensor)
            slot.is_filled = True
        if self._num_seen == len(self._slots) and self._samples is None:
            raise _Finished


def rest_is_unneeded(num_saved: int) -> bool:
    """Whether this thread runs a layer again and wants no more than the next ``num_saved`` tensors from it.

    An op that saves that many may then return without computing its output.
    """
    frame = _running.frame
    return frame is not None and frame._samples is None and len(frame._slots) - frame._num_seen <= num_saved


def _fetch(slot: _Slot) -> Tensor:
    with slot.frame.lock:
        if not slot.is_filled:  # the first one that backward asks for, or backward runs once more over the same graph
            slot.frame.run_again()
        packed, slot.packed, slot.is_filled = slot.packed, None, False
    return unpack(packed)


def _refuse(nothing: None) -> Tensor:
    raise RuntimeError("a layer that computes gradients within its forward cannot be recomputed")


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with each tensor in its tuples, lists and dicts replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(function, each) for each in value)
    if type(value) is dict:
        return {name: _map_tensors(function, each) for name, each in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dicts."""
    tensors: list[Tensor] = []
    _map_tensors(tensors.append, value)
    return tensors


def _map_held(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_map_held, value))
    if type(value) is dict:
        return {name: _map_held(each) for name, each in value.items()}
    return value.tensor.get() if isinstance(value, _Held) else value
