"""Layer inputs in pinned host memory between forward and backward, copied by a stream of their own.

In backward, when one layer gets its input back, the copy of the layer before it starts.
"""

import weakref
from collections import defaultdict

import torch
from torch import Tensor


class HostMemory:
    """Pinned buffers and the stream that fills and reads them, of one device.

    Both directions share a stream, so a buffer may be given to the next tensor as soon as its copy back was issued.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._last: weakref.ref[Offloaded] | None = None

    def offload(self, tensor: Tensor) -> "Offloaded":
        """Starts to copy ``tensor``, whose memory is free for others once that is done and nobody else holds it."""
        offloaded = Offloaded(self, tensor, None if self._last is None else self._last())
        self._last = weakref.ref(offloaded)
        return offloaded

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of at least ``num_bytes``."""
        free = self._free[num_bytes]
        return free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class Offloaded:
    """A tensor in host memory.

    Args:
        memory: Where to.
        tensor: Floating-point, on the device.
        before: The tensor that was offloaded before it, which backward needs after it.
    """

    def __init__(self, memory: HostMemory, tensor: Tensor, before: "Offloaded | None") -> None:
        self._buffer: Tensor | None = None
        self._memory = memory
        self._before = None if before is None else weakref.ref(before)
        self._like = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None
        source = tensor.detach()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if span != tensor.numel():
            source = source.contiguous()
            self._like = tensor.shape, source.stride(), tensor.dtype, tensor.device
        self._buffer = memory.take(source.numel() * source.element_size())
        memory.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(memory.stream):
            self._on_host().copy_(source, non_blocking=True)
        source.record_stream(memory.stream)

    def _on_host(self) -> Tensor:
        assert self._buffer is not None
        size, stride, dtype, _ = self._like
        return self._buffer.view(dtype).as_strided(size, stride)

    def prefetch(self) -> None:
        """Starts to copy the tensor back."""
        if self._copy is not None:
            return
        size, stride, dtype, device = self._like
        stream = self._memory.stream
        # Allocated on the current stream, whose memory may still be in use there, so the copy waits for it.
        copy = torch.empty_strided(size, stride, dtype=dtype, device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy.copy_(self._on_host(), non_blocking=True)
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
        if self._buffer is not None:
            self._memory.give_back(self._buffer)
