"""Data loaders that resume in the middle of an epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler

from lightning_liger.resuming.dataloader import ResumableDataLoader, resumable


class Numbers(Dataset[int]):
    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Own(DataLoader[int]):
    """A loader that asks no sampler."""

    def __iter__(self):
        return iter(torch.arange(len(self)))


class Stateful(Numbers):
    state_dict = load_state_dict = lambda self, *_: {}


def take(iterator: Any, num: int) -> list[Any]:
    return [next(iterator).tolist() for _ in range(num)]


def resumed(loader: Any, other: Any, tmp_path: Path) -> list[Any]:
    """What is left of ``other`` with the state of ``loader``, after a round trip through a file."""
    torch.save(loader.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    return [batch.tolist() for batch in other]


SHUFFLED = {"batch_size": 2, "shuffle": True}
PERSISTENT = {"num_workers": 1, "persistent_workers": True}
LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(), **SHUFFLED),
    "workers": lambda: DataLoader(Numbers(), num_workers=1, **SHUFFLED),
    "persistent workers": lambda: DataLoader(Numbers(), **PERSISTENT, **SHUFFLED),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SequentialSampler(Numbers()), 3, drop_last=False)
    ),
    "no batches": lambda: DataLoader(torch.arange(10), batch_size=None, shuffle=True),
    "no sampler": lambda: Own(Numbers()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_go_on_and_yield_what_plain_ones_do(tmp_path, kind):
    make = LOADERS[kind]
    torch.manual_seed(0)
    plain = [batch.tolist() for batch in make()]
    torch.manual_seed(0)
    loader = resumable(make())
    seen = take(iter(loader), 2)
    torch.manual_seed(9)
    other = resumable(make())
    before = torch.get_rng_state()
    assert seen + resumed(loader, other, tmp_path) == plain
    assert torch.equal(torch.get_rng_state(), before)
    if kind == "shuffled":
        assert len(other.dataset.loaded) == 6  # none of those that were seen


def test_state_of_another_epoch_and_of_a_whole_one_start_at_the_first_batch(tmp_path):
    def make(epoch: int) -> Any:
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1)
        sampler.set_epoch(epoch)
        return resumable(DataLoader(Numbers(), sampler=sampler))

    loader = make(1)
    iterator = iter(loader)
    take(iterator, 2)
    assert len(resumed(loader, make(1), tmp_path)) == 3
    assert len(resumed(loader, make(2), tmp_path)) == 5
    take(iterator, 3)
    assert len(resumed(loader, make(1), tmp_path)) == 5
    other = make(1)
    other.load_state_dict({**loader.state_dict(), "num_batches": 2, "is_done": True})
    assert len(list(other)) == 5


def test_sampler_gets_its_epoch_before_workers_ask_for_batches():
    sampler = DistributedSampler(Numbers(), num_replicas=1, rank=0)
    iterator = iter(resumable(DataLoader(Numbers(), sampler=sampler, num_workers=1)))
    sampler.set_epoch(3)
    assert [batch.item() for batch in iterator] == list(sampler)


def test_state_stays_the_loaded_one_until_a_batch_is_asked_for():
    loader, other = (resumable(DataLoader(Numbers(), shuffle=True)) for _ in range(2))
    take(iter(loader), 4)
    other.load_state_dict(loader.state_dict())
    iterator = iter(other)
    assert other.state_dict()["num_batches"] == 4
    take(iterator, 1)
    assert other.state_dict()["num_batches"] == 5


def test_loader_keeps_its_class_and_what_has_a_state_is_left_alone():
    loader = Own(Numbers())
    copy = resumable(loader)
    assert isinstance(copy, Own)
    assert isinstance(copy, ResumableDataLoader)
    assert type(loader) is Own
    assert type(resumable(DataLoader(Numbers()))) is ResumableDataLoader
    for unchanged in (copy, DataLoader(Stateful()), [1, 2]):
        assert resumable(unchanged) is unchanged


def test_state_is_loaded_into_a_loader_whose_persistent_workers_run(tmp_path):
    loader = resumable(LOADERS["persistent workers"]())
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    left = [batch.tolist() for batch in iterator]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == left
    assert len(list(loader)) == 5
