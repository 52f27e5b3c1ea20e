"""Values of a device that the host reads later, without waiting when it asks for them."""

import torch
from torch import Tensor


class HostCopy:
    """A copy on the host of what a tensor holds now. The device makes it in its own time, and the host goes on.

    Args:
        tensor: On any device. On the CPU the copy is there at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._value = tensor.detach().to("cpu", non_blocking=True, copy=True)  # to pinned memory from CUDA devices
        self._event = None
        if tensor.device.type != "cpu":
            self._event = torch.accelerator.current_stream(tensor.device).record_event()

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The copy, on the CPU. Waits until the device has made it, not for what the device has to do afterward."""
        if self._event is not None:
            self._event.synchronize()
        return self._value
