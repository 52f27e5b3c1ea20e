"""What a second run of a layer needs to do the same as the first one: random states, buffers, training flags.

Other state is not given back: attributes of modules, objects among the arguments, generators other than the global
ones. So the outputs of the first second run of each layer are compared with those of the first run.
"""

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_liger.activations.cheap import count_writes

_MAX_COPIED = 1024
_NUM_SAMPLES = 2**16
_MAX_ROUNDING = 2**-6
"""Of the norm of outputs, up to which a difference may be rounding, of 16 bits or TF32 in outputs of any dtype."""


@dataclass
class Habits:
    """What the first recomputation of a layer has shown of it."""

    are_known: bool = False
    draws_on_host: bool = False
    """From the generators of Python or NumPy, whose state takes too long to copy for layers that do not."""


class LayerState:
    """Buffers and training flags of a layer's modules.

    Forward writes to buffers, as that of batch norm does. Writes by kernels are not counted, so all buffers are copied
    that may hold statistics or counters; large masks and quantized weights do not. A non-persistent buffer that forward
    replaces is a cache, as of rotary embeddings, and stays: attributes may tell its length, which are not set back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._training = [(part, part.training) for part in module.modules()]
        places = [
            (part, name, buffer)
            for part, _ in self._training
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._places = [(part._buffers, name) for part, name, _ in places]
        self._originals = [each if name in part._non_persistent_buffers_set else None for part, name, each in places]
        self._uncopied = {
            id(buffer): (name, buffer, count_writes(buffer))
            for _, name, buffer in places
            if not buffer.is_floating_point() and buffer.numel() > _MAX_COPIED
        }
        self._buffers = self._copies([buffer for _, _, buffer in places])

    def first_run_ends(self) -> None:
        """Raises RuntimeError if a buffer was written to that is not copied; leaves caches as they are now."""
        for name, buffer, num_writes in self._uncopied.values():
            if count_writes(buffer) != num_writes:
                raise RuntimeError(
                    f"a layer writes to its buffer {name!r} of {buffer.dtype} and shape {list(buffer.shape)}, whose"
                    " former values it would need again: it cannot be recomputed in backward. Leave it out of"
                    " activation checkpointing"
                )
        stays = [
            original is not None and buffers.get(name) is not original
            for (buffers, name), original in zip(self._places, self._originals, strict=True)
        ]
        self._originals.clear()
        if any(stays):
            self._places = [place for place, is_cache in zip(self._places, stays, strict=True) if not is_cache]
            self._buffers = [buffer for buffer, is_cache in zip(self._buffers, stays, strict=True) if not is_cache]

    def _copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies without a graph; one for each tensor, however often it comes."""
        copies = {id(each): each if id(each) in self._uncopied else each.detach().clone() for each in tensors}
        return [copies[id(each)] for each in tensors]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Gives the modules back what they had, for as long as the context lasts."""
        flags = [part.training for part, _ in self._training]
        current = [buffers[name] for buffers, name in self._places]
        try:
            self._set((training for _, training in self._training), self._copies(self._buffers))
            yield
        finally:
            self._set(flags, current)

    def _set(self, flags: Iterable[bool], values: Iterable[Tensor | None]) -> None:
        for (part, _), is_training in zip(self._training, flags, strict=True):
            if part.training != is_training:
                part.training = is_training
        for (buffers, name), value in zip(self._places, values, strict=True):
            buffers[name] = value


def samples_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of some elements of each plain dense tensor, at most about 65536, ``[num_elements]``."""
    plain = (each.detach() for each in tensors if type(each) is Tensor and _is_dense(each))
    return [_sample(torch.view_as_real(each.resolve_conj()) if each.is_complex() else each) for each in plain]


def _sample(tensor: Tensor) -> Tensor:
    step = max(1, tensor.numel() // _NUM_SAMPLES)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step].clone()
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]  # without a copy of what is expanded


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)


def check_outputs(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Compares samples of a layer's outputs in both runs; waits for the device.

    Raises:
        RuntimeError: If they differ by more than rounding; where it may be rounding, a warning says so.
    """
    differs = len(expected) != len(found)
    for first, second in zip(expected, found, strict=False):
        if first.shape != second.shape or first.dtype != second.dtype:
            differs = True
        elif not torch.equal(first, second):
            is_rounded = first.is_floating_point()
            is_finite = first.isfinite()
            same_places = torch.equal(is_finite, second.isfinite())
            first, second = (each.double().where(is_finite, 0.0) for each in (first, second))
            difference, norm = float((first - second).norm()), float(first.norm())
            if not same_places or difference > (_MAX_ROUNDING * norm if is_rounded else 0.0):
                differs = True
            elif difference:
                rank_zero_warn(  # without numbers, so that it is shown once
                    "lightning-liger: outputs of a layer were a little different when it was recomputed in backward. If"
                    " none of its ops rounds differently each time, its forward does not do the same each time it runs,"
                    " and gradients are wrong"
                )
    if differs:
        raise RuntimeError(
            "a layer had other outputs when it was recomputed in backward, so gradients would be wrong: its forward"
            " must do the same each time it runs. Counters, caches and generators of its own, and objects that it"
            " changes, are not set back: keep such state in buffers, or leave the layer out of activation checkpointing"
        )


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The state of the CPU's generator and of the device's, if it has one."""
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device) if _has_own(device) else None


@contextmanager
def random_again(device: torch.device, states: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Sets torch's random states for as long as the context lasts."""
    with torch.random.fork_rng([device] if _has_own(device) else [], device_type=device.type):
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.get_device_module(device).set_rng_state(states[1], device)
        yield


def _has_own(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


def host_random_state() -> bytes:
    """The states of the global generators of Python and NumPy."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))


@contextmanager
def host_random_again(state: bytes | None) -> Iterator[None]:
    """Sets them for as long as the context lasts; nothing for None."""
    if state is None:
        yield
        return
    current = host_random_state()
    try:
        _set_host_random_state(state)
        yield
    finally:
        _set_host_random_state(current)


def _set_host_random_state(state: Any) -> None:
    of_python, of_numpy = pickle.loads(state)  # our own bytes
    random.setstate(of_python)
    np.random.set_state(of_numpy)
