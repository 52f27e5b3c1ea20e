"""Agreement between ranks on plans, on the CPU: no rank waits for its GPU."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from lightning_liger.activations.profile import Profile, merge


class AllRanks:
    """All processes of ``torch.distributed``.

    Args:
        run_layers_together: Returns whether a layer's forward exchanges data with other ranks, so that all must
            recompute the same layers. Is called once, in the first step, when engines have wrapped the layers.
    """

    def __init__(self, run_layers_together: Callable[[], bool]) -> None:
        self._run_layers_together = run_layers_together

    @cached_property
    def run_layers_together(self) -> bool:
        return self._run_layers_together()

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        # Made by the first collective, which all ranks reach in the same step.
        return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def merge(self, profile: Profile) -> Profile:
        """The profile that covers those of all ranks. A collective."""
        profiles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(profiles, profile, group=self._group)
        return merge(profiles)

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number over the ranks. A collective."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tuple(tensor.tolist())
