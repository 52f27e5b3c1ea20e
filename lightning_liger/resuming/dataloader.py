"""A data loader whose state says where it is in its epoch, and that resumes there."""

import functools
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from liger_ops.arguments import check_integer, wrong_type
from lightning_liger.resuming.random_state import random_state, set_random_state

STATE_KEY = "lightning_liger_loader"
"""Marks the state of a :class:`ResumableDataLoader` among those of other loaders."""


class ResumableDataLoader(DataLoader[Any]):
    """A :class:`torch.utils.data.DataLoader` that resumes in the middle of an epoch, with the batches not yet seen.

    It takes the same arguments and yields the same batches. Lightning saves and loads its state with its checkpoints.
    Items of a map-style dataset that were seen are skipped without being loaded; an iterable dataset starts from its
    beginning and its first batches are dropped. The remaining batches are those of the uninterrupted epoch if items
    depend on their index only; those of a map-style dataset also if items draw random numbers, except in workers.
    """

    # Class attributes, because `resumable` changes the class of loaders whose __init__ has run.
    _position: dict[str, Any] = {"num_batches": 0, "epoch": None, "random_state": None, "generator": None}
    """The number of batches yielded, and the random states at the epoch's start."""
    _loaded: dict[str, Any] | None = None
    _has_workers = False
    random_state_before_fetch: dict[str, Any] | None = None
    """The global random state before the last batch was fetched."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch; if ``"is_done"`` is set to True, the next one starts at its first batch."""
        if self._loaded is not None:
            return self._loaded
        return {STATE_KEY: True, "is_done": False, **self._position, "generator_now": self._generator_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next epoch start at the batch where :meth:`state_dict` was taken."""
        if not isinstance(state_dict, dict) or STATE_KEY not in state_dict:
            raise wrong_type("state_dict", f"the state of a {ResumableDataLoader.__name__}", state_dict)
        check_integer("state_dict['num_batches']", state_dict.get("num_batches"), at_least=0)
        self._loaded = state_dict

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares a private class of iterators
        # A generator, so that nothing starts before the first batch is requested: only then do samplers know their
        # epoch, and workers start with it.
        state, self._loaded = self._loaded or {}, None
        is_resumed = self._is_in_its_epoch(state)
        now, at_start = random_state(), state.get("random_state") if is_resumed else None
        generator_state = state.get("generator" if is_resumed else "generator_now")
        if self._generator is not None and generator_state is not None:
            self._generator.set_state(generator_state)
        set_random_state(at_start)
        self._position = {
            "num_batches": state["num_batches"] if is_resumed else 0,
            "epoch": self._sampler_epoch,
            "random_state": at_start or now,
            "generator": self._generator_state(),
        }
        iterator = self._iterator_from(self._position["num_batches"])
        if at_start is not None:
            set_random_state(now)
        while True:
            self.random_state_before_fetch = random_state()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._position["num_batches"] += 1
            yield batch

    def _is_in_its_epoch(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` was taken in the epoch that begins, and batches of it remain."""
        if not state or state.get("is_done") or state.get("epoch") not in (None, self._sampler_epoch):
            return False
        try:
            return state["num_batches"] < len(self)
        except TypeError:  # an iterable dataset that does not know its length
            return True

    @property
    def _sampler_epoch(self) -> int | None:
        return getattr(self.sampler, "epoch", None)

    @property
    def _generator(self) -> torch.Generator | None:
        return getattr(self.sampler, "generator", None) or self.generator

    def _generator_state(self) -> Tensor | None:
        return None if self._generator is None else self._generator.get_state()

    def _iterator_from(self, num_batches: int) -> Iterator[Any]:
        if not num_batches:
            if self.persistent_workers and self._has_workers:
                # Draws the seed that new workers would get: a resumed process has new workers, and draws one.
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._has_workers = True
            return super().__iter__()
        loader = copy(self)  # for the rest of this epoch
        sampler = "sampler" if self.batch_sampler is None else "batch_sampler"
        remaining = _Remaining(getattr(self, sampler), num_batches)
        # DataLoader does not allow these to be set. Workers that persist would keep the sampler that they started with.
        vars(loader).update({sampler: remaining, "persistent_workers": False})
        iterator = super(ResumableDataLoader, loader).__iter__()
        if remaining.iterator is None or isinstance(self.dataset, IterableDataset):
            for _ in range(num_batches):
                next(iterator)
        else:
            remaining.skip()
        return iterator


def resumable(loader: Any) -> Any:
    """A copy of a DataLoader, with its options and methods, that is a :class:`ResumableDataLoader` too.

    Returned unchanged: anything but a DataLoader, and loaders that have a ``state_dict``, or whose dataset has one.
    """
    if not isinstance(loader, DataLoader) or _has_state(loader) or _has_state(loader.dataset):
        return loader
    cls: Any = type(loader)
    loader = copy(loader)
    loader.__class__ = _resumable_class(cls)
    return loader


@functools.cache
def _resumable_class(cls: Any) -> Any:
    if cls is DataLoader:
        return ResumableDataLoader
    return type(f"Resumable{cls.__name__}", (ResumableDataLoader, cls), {})


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


class _Remaining:
    """A sampler, or batch sampler, without its first items.

    They are skipped when the first one is requested, no earlier than the sampler itself would start: samplers draw
    random numbers then.
    """

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self.sampler, self.num_left = sampler, num_skipped
        self.iterator: Any = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "_Remaining":
        self.iterator = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self.iterator)

    def skip(self) -> None:
        while self.num_left:
            self.num_left -= 1
            next(self.iterator)
