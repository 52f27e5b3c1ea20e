"""What a process needs, beside a checkpoint's weights, to go on as if it had not been interrupted.

Random states, and a data loader that knows where it is in its epoch.
"""

import functools
import random
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

STATE_KEY = "lightning_liger_loader"
"""Marks the state of a :class:`ResumableDataLoader` among those of other loaders."""


def random_state() -> dict[str, Any]:
    """The global random states of torch (CPU, and current CUDA device if it is used), numpy and Python.

    Tensors and plain Python objects only, so that checkpoints load with ``weights_only=True``.
    """
    numpy_state = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"]
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": torch.from_numpy(key.astype(np.int64))}},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Sets what :func:`random_state` returned; a CUDA state is left out where no GPU is used."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


class ResumableDataLoader(DataLoader[Any]):
    """A :class:`torch.utils.data.DataLoader` that goes on in the middle of an epoch, with the batches not yet seen.

    Takes the same arguments, yields the same batches. Lightning saves and loads its state with its checkpoints. What
    was seen of a map-style dataset is skipped without being loaded; an iterable dataset starts from its beginning and
    its first batches are dropped. Batches are the same as without an interruption if the items depend on nothing but
    their place; those of a map-style dataset also if they draw random numbers, but not in workers.
    """

    # Defaults of the class, because `resumable` makes instances of loaders that exist.
    _num_batches = 0
    _epoch: int | None = None
    _random_state: dict[str, Any] | None = None
    _generator_state: Tensor | None = None
    _loaded: dict[str, Any] | None = None
    _skipping: "_SkippingSampler | None" = None

    random_state_before_fetch: dict[str, Any] | None = None
    """The random state before the last batch was fetched."""

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: batches yielded in this epoch, and the random states at the epoch's start.

        With ``"is_done"`` set to True, the state is one from which the next epoch starts at its first batch.
        """
        if self._loaded is not None:
            return self._loaded
        return {
            STATE_KEY: True,
            "is_done": False,
            "num_batches": self._num_batches,
            "epoch": self._epoch,
            "random_state": self._random_state,
            "generator": self._generator_state,
            "generator_now": self._generator.get_state() if self._generator is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next epoch starts at the batch where :meth:`state_dict` was taken.

        Raises:
            ValueError: For the state of another loader.
        """
        if STATE_KEY not in state_dict:
            raise ValueError(
                f"expected the state of a {ResumableDataLoader.__name__}, got a state with the keys"
                f" {sorted(map(str, state_dict))}: resume with the data loader that the checkpoint was saved with"
            )
        self._loaded = state_dict

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Starts when its first batch is asked for: only then do samplers know their epoch, and workers start with it.
        state, self._loaded = self._loaded or {}, None
        is_resumed = self._is_in_its_epoch(state)
        now, at_start = random_state(), state.get("random_state") if is_resumed else None
        of_generator = state.get("generator" if is_resumed else "generator_now")
        if self._generator is not None and of_generator is not None:
            self._generator.set_state(of_generator)
        if at_start is not None:
            set_random_state(at_start)
        self._num_batches, self._epoch = state["num_batches"] if is_resumed else 0, self._sampler_epoch
        self._random_state = at_start or now
        self._generator_state = self._generator.get_state() if self._generator is not None else None
        iterator = self._iterator_from(self._num_batches)
        if at_start is not None:
            set_random_state(now)
        while True:
            self.random_state_before_fetch = random_state()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._num_batches += 1
            yield batch

    def _is_in_its_epoch(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` is of the epoch that begins, and leaves something of it."""
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

    def _iterator_from(self, num_batches: int) -> Iterator[Any]:
        if self.persistent_workers and self._iterator is not None:
            # The seed that new workers get, so that a process that resumes, whose workers are new, draws no more.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if isinstance(self.dataset, IterableDataset):
            iterator = super().__iter__()
            for _ in range(num_batches):
                next(iterator)
            return iterator
        if not num_batches:
            return super().__iter__()
        self._skipping = _SkippingSampler(self._index_sampler, num_batches)
        try:
            iterator = super().__iter__()
            self._skipping.skip()
        finally:
            self._skipping = None
        return iterator

    # Private to DataLoader, whose public `batch_sampler` cannot be changed.
    @property
    def _index_sampler(self) -> Any:
        return self._skipping or super()._index_sampler


def resumable(loader: Any) -> Any:
    """A copy of a DataLoader, with its options and its class's methods, that is a :class:`ResumableDataLoader` too.

    Anything else, and loaders that keep a state of their own or whose dataset does, are returned as they are.
    """
    if not isinstance(loader, DataLoader) or _has_state(loader) or _has_state(loader.dataset):
        return loader
    loader = copy(loader)
    loader.__class__ = _resumable_class(type(loader))
    return loader


@functools.cache
def _resumable_class(cls: type[DataLoader[Any]]) -> type[ResumableDataLoader]:
    if cls is DataLoader:
        return ResumableDataLoader
    return type(f"Resumable{cls.__name__}", (ResumableDataLoader, cls), {})


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


class _SkippingSampler:
    """A sampler, or batch sampler, whose first epoch starts after ``num_skipped`` of its items.

    It skips when it is first asked for one, as late as the sampler itself would have started: samplers draw random
    numbers then.
    """

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self.sampler = sampler
        self._num_left = num_skipped
        self._iterator: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "_SkippingSampler":
        self._iterator = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        """Skips now, if that is still to be done."""
        while self._num_left:
            self._num_left -= 1
            next(self._iterator)
