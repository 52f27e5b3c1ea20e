"""How lazy logits came from each other, so that they can become real tensors that are related in the same way."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from liger_ops import backend
from lightning_liger.lazy.recipe import Recipe, version
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
        *("__weakref__", "_modes", "bypassed_by", "kept", "members", "parent", "reads", "rounded_by"),
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
        self.kept: Tensor | None = None
        """The values of a head's output, once :meth:`values` has computed them."""
        self.reads: list[Read] = []
        """What was read from the logits that came from one output, in the lineage of that."""
        self.rounded_by: str | None = None
        """The name of a function with gradients that read some values, and rounded them differently."""
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

    def forget_tensor(self) -> None:
        """Drops the weak reference to the lazy logits."""
        self.tensor = _nothing

    @property
    def root(self) -> Lineage:
        """The lineage of the head's output."""
        return self if self.parent is None else self.parent.root

    @property
    def is_expression(self) -> bool:
        """Whether these are a function of the logits of heads."""
        return self.recipe.head.is_expression

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
        _settle(root, place)


def _settle(root: Lineage, place: str) -> None:
    for lineage in root.alive()[:1]:
        tensor: Any = lineage.tensor()
        warn_kept(place, tensor.shape, tensor.dtype)
        try:
            tensor.become_real(place, warn=False)
        except RuntimeError as error:
            _refuse(root, f"parameters may have changed ({str(error).partition('. Call')[0]})")


def _refuse(root: Lineage, reason: str) -> None:
    for lineage in root.alive():
        lineage.recipe.refuse(reason)


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
        if changing.isdisjoint(map(_place, root.recipe.tensors().values())):
            continue
        alive: list[Any] = [lineage.tensor() for lineage in root.alive()]
        if not all(tensor.requires_grad for tensor in alive):
            _settle(root, "optimizer.step()")
        else:
            _refuse(root, "an optimizer has changed its parameters")


def _place(tensor: Tensor) -> int:
    """What a tensor and its detached copies have in common."""
    return tensor.data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else id(tensor)


class Read(NamedTuple):
    """A tensor that was read from lazy logits, and its version then."""

    values: weakref.ref[Tensor]
    version: int
    again: Callable[[], Tensor | None] | None
    """Reads the same values without gradients, None if that is too late; None if they agree with the real logits."""
    is_apart: bool
    """Whether they were computed apart from the other logits, with a gradient."""


def tensor_of(lineage: weakref.ref[Lineage]) -> Tensor | None:
    """The lazy logits of a lineage, None if they are gone."""
    alive = lineage()
    return None if alive is None else alive.tensor()


def comparable(value: Any, roots: list[Lineage], operation: str) -> Any:
    """``value``, an argument of a comparison with lazy logits, as it is without gradients if it was read from them.

    Raises:
        RuntimeError: If it may depend on values that were rounded differently.
    """
    exact = None
    for read in (read for root in roots for read in root.reads):
        if isinstance(value, Tensor) and read.values() is value and read.version == version(value):
            exact = value if read.again is None else read.again()
    rounded_by = next((root.rounded_by for root in roots if root.rounded_by is not None), None)
    is_expression = any(root.rounded_by is not None and root.is_expression for root in roots)
    is_other = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0 and exact is None
    if rounded_by is not None and (is_expression or (is_other and not hasattr(value, "lineage"))):
        raise RuntimeError(
            f"{operation} compares an LM head's lazy output with a tensor, after {rounded_by} read values of it with"
            f" gradients, which are rounded differently. Call lightning_liger.materialize(logits) before {rounded_by}"
        )
    return value if exact is None else exact


def laid_out(values: Tensor, twin: Tensor) -> Tensor:
    """``values`` with the dimensions in memory in the order of those of ``twin``, which results of functions keep."""
    order = sorted(range(twin.ndim), key=twin.stride, reverse=True)
    if values.stride() == twin.stride() or values.permute(order).is_contiguous():
        return values
    return values.permute(order).contiguous().permute([order.index(dim) for dim in range(twin.ndim)])


def _nothing() -> None:
    return None
