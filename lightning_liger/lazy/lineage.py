"""How lazy logits came from each other, so that they can become real tensors that are related in the same way."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from liger_ops import backend
from lightning_liger.lazy.recipe import Recipe
from lightning_liger.lazy.warning import warn_kept

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
        *("__weakref__", "_modes", "bypassed_by", "kept", "members", "parent", "recipe", "replay", "rounded_by"),
        *("tensor", "twin", "watched_by"),
    )

    def __init__(self, tensor: Tensor, recipe: Recipe, twin: Tensor, parent: Lineage | None = None) -> None:
        self.tensor: Callable[[], Any] = _Reference(tensor)
        """The lazy logits, None if they are gone or real."""
        self.recipe = recipe
        self.twin = twin
        self.parent = parent
        self.replay: Replay | None = None
        """Applies the recorded operation to the parent's real logits."""
        self.bypassed_by: str | None = None
        """The name of an operation whose gradient does not pass through these logits."""
        self.kept: Tensor | None = None
        """The values of a head's output, once :meth:`values` has computed them."""
        self.rounded_by: str | None = None
        """In the lineage of a head's output, the name of a read with gradients, which may round differently."""
        self.watched_by: str | None = None
        """The name of an operation that turned these logits real to see their gradient."""
        self.members: list[weakref.ref[Lineage]] = [] if parent is None else parent.members
        """All of the tree, parents first."""
        self.members.append(weakref.ref(self))
        if parent is None:
            living().add(self)
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

    @property
    def root(self) -> Lineage:
        """The lineage of the head's output."""
        return self if self.parent is None else self.parent.root

    def values(self, operation: str) -> Tensor:
        """The real logits without a graph, all derived from one computation of the head's output."""
        if self.parent is not None:
            return self.replayed(self.parent.values(operation)).detach()
        if self.kept is None:
            self.kept = laid_out(self.recipe.compute(operation), self.twin).detach()
        return self.kept

    def replayed(self, parent: Tensor) -> Any:
        """The real logits, derived from those of the parent in the modes in which the operation was recorded."""
        assert self.replay is not None
        grad_enabled, autocast_dtype = self._modes
        with ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(grad_enabled))
            if autocast_dtype is not None:
                modes.enter_context(torch.autocast(parent.device.type, autocast_dtype))
            return self.replay(parent)

    def settle(self, place: str) -> None:
        """Turns the tree into real tensors; what cannot become real refuses to be read from now on."""
        for lineage in self.alive()[:1]:
            tensor = lineage.tensor()
            warn_kept(place, tensor.shape, tensor.dtype)
            try:
                tensor.become_real(place, warn=False)
            except RuntimeError as error:
                self.refuse(f"parameters may have changed ({str(error).partition('. Call')[0]})")

    def refuse(self, reason: str) -> None:
        """Makes later reads of the tree's logits raise with ``reason``."""
        for lineage in self.alive():
            lineage.recipe.refuse(reason)


@functools.cache
def living() -> WeakSet[Lineage]:
    """The lineages of heads' outputs of which something still exists; steps of optimizers are watched from now on."""
    register_optimizer_step_pre_hook(_before_step)
    return WeakSet()


def settle(place: str) -> None:
    """Turns all lazy logits that still exist into real tensors, before parameters may change at ``place``.

    To be called where a step's own variables are gone, so that only what somebody keeps exists. What cannot become real
    refuses to be read from now on.
    """
    for root in list(living()):
        root.settle(place)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Looks at what exists before a step, and at what a closure leaves, which computes the loss within the step."""
    _before_change(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def computed() -> Any:
        loss = closure()
        _before_change(optimizer)
        return loss

    return ((args[0], computed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": computed})


def _before_change(optimizer: Optimizer) -> None:
    """Turns logits that are kept without gradients into real tensors, and refuses later reads of others.

    In a loop of one's own, the output of the model still exists in a step: real logits of it would be a waste.
    """
    if not (roots := list(living())):
        return
    changing = {_place(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for root in roots:
        is_gathered = root.recipe.head.counters.is_gathered  # from parameters that are elsewhere
        if not is_gathered and changing.isdisjoint(map(_place, root.recipe.tensors().values())):
            continue
        if all(lineage.tensor().requires_grad for lineage in root.alive()):
            root.refuse("an optimizer has changed its parameters")
        else:
            root.settle("optimizer.step()")


def _place(tensor: Tensor) -> int:
    """What a tensor and its detached copies have in common."""
    return tensor.data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else id(tensor)


def laid_out(values: Tensor, twin: Tensor) -> Tensor:
    """``values`` with the dimensions in memory in the order of those of ``twin``, which results of functions keep."""
    order = sorted(range(twin.ndim), key=twin.stride, reverse=True)
    if values.stride() == twin.stride() or values.permute(order).is_contiguous():
        return values
    return values.permute(order).contiguous().permute([order.index(dim) for dim in range(twin.ndim)])
