"""How lazy logits came from each other, so that they can become real tensors that are related in the same way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from lightning_liger.lazy.recipe import Recipe

Replay = Callable[[Tensor], Any]


class _Reference(weakref.ref[Tensor]):
    """A weak reference that is not shared with other code, which :mod:`weakref` does with plain ones."""


class Lineage:
    """The place of lazy logits in the tree of all that were recorded from one head's output.

    Args:
        tensor: The lazy logits.
        recipe: Computes the real logits without those of the parent.
        twin: A tensor of the same layout on the meta device.
        parent: The lineage of the lazy logits from which these were recorded, None for the output of a head.
    """

    __slots__ = (
        *("__weakref__", "_modes", "bypassed_by", "members", "parent"),
        *("recipe", "replay", "tensor", "twin", "watched_by"),
    )

    def __init__(
        self,
        tensor: Tensor,
        recipe: Recipe,
        twin: Tensor,
        parent: Lineage | None = None,
    ) -> None:
        self.tensor: Callable[[], Tensor | None] = _Reference(tensor)
        self.recipe = recipe
        self.twin = twin
        self.parent = parent
        self.replay: Replay | None = None
        """Applies the recorded operation to the parent's real logits."""
        self.bypassed_by: str | None = None
        """The name of an operation whose gradient does not pass through these logits."""
        self.watched_by: str | None = None
        """The name of an operation that turned these logits real to see their gradient."""
        self.members: list[weakref.ref[Lineage]] = [] if parent is None else parent.members
        """All of the tree, parents first."""
        self.members.append(weakref.ref(self))
        self._modes = torch.is_grad_enabled(), backend.autocast_dtype(recipe.hidden_states.device.type)

    def bypass(self, operation: str) -> None:
        """Notes that the gradient of a result of ``operation`` passes neither these logits nor their ancestors."""
        lineage: Lineage | None = self
        while lineage is not None:
            lineage.bypassed_by = operation
            lineage = lineage.parent

    def alive(self) -> list[Lineage]:
        """The lineages of the tree's lazy logits that still exist, parents first."""
        found = (member() for member in self.members)
        return [lineage for lineage in found if lineage is not None and lineage.tensor() is not None]

    def forget_tensor(self) -> None:
        """Drops the weak reference to the lazy logits."""
        self.tensor = _nothing

    def replayed(self, parent: Tensor) -> Any:
        """The real logits, derived from those of the parent in the modes in which the operation was recorded."""
        assert self.replay is not None
        grad_enabled, autocast_dtype = self._modes
        with ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(grad_enabled))
            if autocast_dtype is not None:
                modes.enter_context(torch.autocast(parent.device.type, autocast_dtype))
            return self.replay(parent)


def _nothing() -> None:
    return None
