"""A backend of graphs without a GPU: a replay runs the captured function again, into the same memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class FakeBackend:
    """Takes the place of ``CudaBackend``. Each replay spoils what other graphs of the shared pool have filled."""

    num_bytes = 3 * 2**29

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.replays: list[str] = []
        self.waiting = False
        """Whether the host is said to wait for the device in the functions that run next."""
        self.hides_writes = False
        """Whether functions that run now do not see later writes to what they save, as kernels do not."""
        self._filled: list[list[Tensor | None]] = []

    def capture(self, function: Callable[[], Any], pool: str) -> tuple[Callable[[], None], list[Tensor | None]]:
        filled = [None if each is None else each.clone() for each in function()]
        if pool == "backward":
            self._filled.append(filled)

        def replay() -> None:
            self.replays.append(pool)
            with torch.no_grad():
                for others in self._filled if pool == "backward" else []:
                    for each in others:
                        if each is not None and each.is_floating_point():
                            each.fill_(float("nan"))
            with saved_tensors_hooks(Tensor.detach, Tensor.detach) if self.hides_writes else nullcontext():
                results = function()
            for own, each in zip(filled, results, strict=True):
                if own is not None:
                    own.detach().copy_(each.detach())

        return replay, filled

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def stream(self) -> Any:
        return None

    def on_stream(self) -> Any:
        return nullcontext()

    def keep_random_state(self) -> Any:
        return torch.random.fork_rng([])

    @contextmanager
    def watch_host(self) -> Iterator[list[Any]]:
        yield ["a wait"] if self.waiting else []
