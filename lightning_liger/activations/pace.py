"""Whether layers keep cheap tensors after all, because the GPU waits for the host and has memory to spare.

The bookkeeping of cheap tensors takes longer on the host than the rest of a small layer. Where the GPU is done with
all that it was given when the last layer's forward ends, in several passes in a row, and could hold what is not kept
several times, nothing is gained by it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_PASSES = 8
"""In a row: the first ones compile kernels."""
_TIMES = 4
"""How often what is not kept must fit: for fragmentation, and for passes that share a backward."""


@dataclass
class Pace:
    """Counts the passes over layers after which the GPU waits for the host.

    Attributes:
        is_idle: Whether the GPU has done all that it was given.
        free_bytes: Its memory that nobody has reserved.
        kept_tokens: The largest batch whose layers keep cheap tensors, in tokens; 0 until the GPU has waited.
    """

    is_idle: Callable[[], bool]
    free_bytes: Callable[[], int]
    kept_tokens: int = 0
    _num_passes: int = 0

    def keeps(self, num_tokens: int) -> bool:
        """Whether layers keep cheap tensors of a batch."""
        return 0 < num_tokens <= self.kept_tokens

    def pass_ends(self, num_tokens: int, cheap_bytes: int) -> None:
        """After the last layer's forward, in which this much was not kept."""
        self._num_passes = self._num_passes + 1 if self.is_idle() else 0
        if self._num_passes >= _PASSES:
            self._num_passes = 0
            if _TIMES * cheap_bytes <= self.free_bytes():
                self.kept_tokens = num_tokens

    @property
    def summary(self) -> str:
        """What was decided, in words, empty if nothing was."""
        if not self.kept_tokens:
            return ""
        return f"cheap tensors kept up to {self.kept_tokens:,} tokens: the GPU waits for the host"


def pace_of(device: torch.device) -> Pace | None:
    """For a device, None if nothing tells when it waits."""
    if device.type != "cuda":
        return None

    def is_idle() -> bool:
        # Whoever captures a step of their own may not ask.
        return not torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream(device).query()

    return Pace(is_idle, lambda: torch.cuda.mem_get_info(device)[0])
