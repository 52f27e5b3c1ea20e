"""Layer inputs in pinned host memory between forward and backward, copied by a stream of their own.

In backward, when one layer gets its input back, the copy of the layer before it starts.
"""

import weakref
from collections import defaultdict

import torch
from torch import Tensor


class HostMemory:
    """Pinned buffers of a device and their stream: as both directions share it, none is reused before it was read."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.free: dict[int, list[Tensor]] = defaultdict(list)
        self.last: weakref.ref[Offloaded] | None = None


class Offloaded:
    """A floating-point tensor in host memory, whose own is free once it is copied and nobody else holds it."""

    def __init__(self, memory: HostMemory, tensor: Tensor) -> None:
        self._memory, self._device = memory, tensor.device
        self._before, memory.last = memory.last, weakref.ref(self)  # backward needs it in the opposite order
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None
        source = tensor.detach()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if span != tensor.numel():
            source = source.contiguous()
        free = memory.free[source.nbytes]
        if not free:
            free.append(torch.empty(source.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))
        self._buffer = free.pop()
        self._on_host = self._buffer.view(tensor.dtype).as_strided(source.shape, source.stride())
        memory.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(memory.stream):
            self._on_host.copy_(source, non_blocking=True)
        source.record_stream(memory.stream)

    def prefetch(self) -> None:
        """Starts to copy the tensor back."""
        if self._copy is not None:
            return
        stream, host = self._memory.stream, self._on_host
        # Allocated on the current stream, whose memory may still be in use there, so the copy waits for it.
        copy = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy.copy_(host, non_blocking=True)
        copy.record_stream(stream)
        self._copy = copy, stream.record_event()

    def get(self) -> Tensor:
        """The tensor, on the device and requiring a gradient; starts to copy back the one before it."""
        self.prefetch()
        assert self._copy is not None
        (copy, done), self._copy = self._copy, None
        torch.cuda.current_stream(copy.device).wait_event(done)
        before = None if self._before is None else self._before()
        if before is not None:
            before.prefetch()
        return copy.requires_grad_()

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):  # which host memory may have had no place for
            self._memory.free[self._buffer.numel()].append(self._buffer)
