"""Lazy logits that are kept while parameters change: they become real before, or refuse to be read afterward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_liger.lazy.expression import Expression
from lightning_liger.lazy.warning import warn_kept

CHANGED = "an optimizer has changed its parameters"


class Period:
    """The time between two steps of optimizers."""

    def __init__(self) -> None:
        self._changed: set[int] = set()
        self.is_over = False

    def end(self, optimizer: Optimizer) -> None:
        """Notes which parameters the step that ends it changes."""
        self._changed.update(_places_of_parameters(optimizer))
        self.is_over = True

    def has_changed(self, tensors: Iterable[Tensor]) -> bool:
        return not self._changed.isdisjoint(map(_place, tensors))


class Clock:
    """Holds the present period, which compiled code reads each time that it runs."""

    def __init__(self) -> None:
        self.period = Period()
        self.is_read = False  # whether there is such code; periods without it need no end


clock = Clock()


@functools.cache
def living() -> WeakSet[Expression]:
    """Those of heads' outputs of which something still exists; steps of optimizers are watched from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    return WeakSet()


def settle(place: str) -> None:
    """Turns all lazy logits that still exist into real tensors, before parameters may change at ``place``.

    To be called where a step's own variables are gone, so that only what somebody keeps exists. What cannot become real
    refuses to be read from now on.
    """
    for root in list(living()):
        _settle(root, place)


def _settle(root: Expression, place: str) -> None:
    if alive := root.alive():
        tensor = alive[0].tensor()
        warn_kept(place, tensor.shape, tensor.dtype)
        try:
            tensor.become_real(place, warn=False)
        except RuntimeError as error:
            _refuse(root, f"parameters may have changed ({str(error).partition('. Call')[0]})")


def _refuse(root: Expression, reason: str) -> None:
    for expression in root.alive():
        expression.refused = reason


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Turns logits that are kept without gradients into real tensors, and refuses later reads of others.

    In a loop of one's own, the output of the model still exists in a step: real logits of it would be a waste.
    """
    for root in _roots_of_parameters(optimizer):
        if not all(expression.tensor().requires_grad for expression in root.alive()):
            _settle(root, "optimizer.step()")
    _after_step(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses later reads of what still is lazy, also of what a closure left, which computes the loss in the step."""
    for root in _roots_of_parameters(optimizer):
        _refuse(root, CHANGED)
    if clock.is_read:
        clock.period.end(optimizer)
        clock.period = Period()


def _roots_of_parameters(optimizer: Optimizer) -> Iterator[Expression]:
    if roots := list(living()):
        changing = _places_of_parameters(optimizer)
        for root in roots:
            is_gathered = root.head.counters.is_gathered  # from parameters that are elsewhere
            if is_gathered or not changing.isdisjoint(map(_place, root.tensors().values())):
                yield root


def _places_of_parameters(optimizer: Optimizer) -> set[int]:
    return {_place(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _place(tensor: Tensor) -> int:
    """What a tensor and its detached copies have in common."""
    return tensor.data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else id(tensor)
