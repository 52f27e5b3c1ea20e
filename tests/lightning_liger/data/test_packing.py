"""Packed rows waste nothing and mix nothing; samplers lose nothing and share the work out evenly."""

from itertools import chain, pairwise
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_liger.data import (
    Layout,
    MultipleChoiceDataModule,
    PackedStream,
    PreferenceDataModule,
    PromptCompletionDataModule,
    RolloutDataModule,
    SupervisedCollator,
    TeacherTopKDataModule,
    TextDataModule,
    UnpairedFeedbackDataModule,
    tokenizer,
)
from lightning_liger.data.packing import LengthSampler, best_fit_decreasing
from lightning_liger.resuming.dataloader import resumable
from tests.lightning_liger.data.kinds import EXAMPLES, TOKENIZER, WORDS, build, ready, write_lines
from tests.lightning_liger.post_training.training import LM, fit
from tests.lightning_liger.tiny import tiny_llama

PACKED = {"packing": True, "packing_strategy": "bfd"}
KINDS = {
    PromptCompletionDataModule: "alpaca.json",
    PreferenceDataModule: "preference.jsonl",
    UnpairedFeedbackDataModule: "feedback.jsonl",
    RolloutDataModule: "rollouts.jsonl",
    MultipleChoiceDataModule: "multiple_choice.jsonl",
    TeacherTopKDataModule: "teacher_topk.safetensors",
}


def long_tailed(number: int, longest: int = 2048, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(5.5, 1, number).astype(int).clip(2, longest)


def of_ranks(num_replicas: int, lengths: np.ndarray, epoch: int = 0, **options: Any) -> list[list[Any]]:
    """What each rank gets in an epoch, in batches."""
    found = []
    for rank in range(num_replicas):
        sampler = LengthSampler(lengths, **options, num_replicas=num_replicas, rank=rank, seed=7)
        sampler.set_epoch(epoch)
        rows = list(sampler)
        assert len(rows) == len(sampler)
        found.append([*zip(*[iter(rows)] * options["batch_size"], strict=True)])
    return found


def tokens(batches: list[Any], values: np.ndarray) -> np.ndarray:
    return np.array([sum(values[np.atleast_1d(row)].sum() for row in batch) for batch in batches])


def sequences(batch: dict[str, Any], prefix: str = "") -> list[tuple[int, ...]]:
    """The tokens of each sequence of a batch, padded or not."""
    ids = batch[f"{prefix}input_ids"]
    if (mask := batch.get(f"{prefix}attention_mask")) is not None:
        return [tuple(row[kept > 0].tolist()) for row, kept in zip(ids, mask, strict=True)]
    ends = batch[f"{prefix}cu_seq_lens_q"].tolist()
    positions = batch[f"{prefix}position_ids"][0]
    assert all(positions[a:b].tolist() == [*range(b - a)] for a, b in pairwise(ends))
    return [tuple(ids[0, a:b].tolist()) for a, b in pairwise(ends)]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=150), capacity=st.integers(40, 130))
def test_rows_are_those_of_items_placed_one_by_one(lengths, capacity):
    row_of = best_fit_decreasing(np.array(lengths), capacity)
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [fill for fill in fills if fill + length <= capacity]
        best = max(fitting, default=0)
        if fitting:
            fills.remove(best)
        fills.append(best + length)
    assert sorted(np.bincount(row_of, lengths)) == sorted(fills)


def test_long_tailed_lengths_leave_nothing_empty_and_trl_packs_no_tighter():
    lengths = long_tailed(20_000)
    num_rows = best_fit_decreasing(lengths, 2048).max() + 1
    assert num_rows * 2048 <= lengths.sum() * 1.002
    trl = pytest.importorskip("trl", exc_type=ImportError)
    few = lengths[:3000]
    data = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in few]})
    packed = trl.pack_dataset(data, 2048, "bfd", {"batch_size": len(few)})
    assert len(packed) == best_fit_decreasing(few, 2048).max() + 1


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=20, max_size=80),
    num_replicas=st.integers(1, 3),
    batch_size=st.integers(1, 3),
    capacity=st.none() | st.integers(50, 90),
    grouped=st.booleans(),
    balanced=st.booleans(),
)
def test_ranks_get_different_rows_and_all_but_a_step(lengths, num_replicas, batch_size, capacity, grouped, balanced):
    lengths = np.array(lengths)
    options = {"costs": lengths if balanced else None, "batch_size": batch_size, "capacity": capacity}
    epochs = [of_ranks(num_replicas, lengths, epoch, **options, group_by_length=grouped) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    num_rows = len(lengths) if capacity is None else best_fit_decreasing(lengths, capacity).max() + 1
    for ranks in epochs:
        assert {len(batches) for batches in ranks} == {num_rows // (num_replicas * batch_size)}
        rows = [np.atleast_1d(row) for batches in ranks for batch in batches for row in batch]
        places = [*chain(*rows)]
        assert len(set(places)) == len(places)
        assert all(lengths[row].sum() <= (capacity or 50) for row in rows)
        if len(rows) == num_rows:
            assert len(places) == len(lengths)


def test_tokens_and_squared_lengths_are_even_over_ranks():
    lengths, spread = long_tailed(20_000), {}
    values = {"tokens": lengths, "squared_lengths": lengths**2}
    for name, costs in {"random": None, **values}.items():
        ranks = of_ranks(4, lengths, costs=costs, batch_size=4, capacity=4096)
        for what, each in values.items():
            found = np.array([tokens(batches, each) for batches in ranks])
            spread[name, what] = np.ptp(found, axis=0) / found.mean(axis=0)
    assert np.quantile(spread["tokens", "tokens"], 0.99) < 0.01
    assert np.quantile(spread["squared_lengths", "tokens"], 0.99) < 0.03
    assert spread["squared_lengths", "squared_lengths"].mean() < spread["random", "squared_lengths"].mean() / 4
    examples = [of_ranks(2, lengths, costs=costs, batch_size=8) for costs in (lengths, None)]  # not packed
    gaps = [np.ptp([tokens(batches, lengths) for batches in ranks], axis=0).mean() for ranks in examples]
    assert gaps[0] < gaps[1] / 3


def test_grouping_by_length_saves_padding_and_still_shuffles():
    lengths = long_tailed(8000)

    def padding(ranks: list[Any]) -> float:
        batches = [lengths[[*batch]] for each in ranks for batch in each]
        return 1 - sum(batch.sum() for batch in batches) / sum(batch.max() * len(batch) for batch in batches)

    options = {"costs": lengths, "batch_size": 8}
    grouped = [of_ranks(2, lengths, epoch, **options, group_by_length=True) for epoch in (0, 1)]
    assert padding(grouped[0]) < 0.1 < 0.5 < padding(of_ranks(2, lengths, **options))
    means = tokens(grouped[0][0], lengths)
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.15
    assert not {frozenset(batch) for batch in grouped[0][0]} & {frozenset(batch) for batch in grouped[1][0]}


@pytest.mark.parametrize("cls", KINDS)
def test_packed_batches_hold_the_examples_within_rows(cls, tmp_path):
    path = EXAMPLES / KINDS[cls]
    own = {} if cls is TeacherTopKDataModule else {"tokenizer": TOKENIZER, "cache_dir": tmp_path}
    packed, plain = (
        ready(cls(path=path, validation_path=path, max_length=512, batch_size=1, **own, **layout))
        for layout in (PACKED, {"padding_free": True})
    )
    for split in ("train", "val"):
        batches, expected = (list(getattr(data, f"{split}_dataloader")()) for data in (packed, plain))
        for prefix in ("KL_", "") if cls is UnpairedFeedbackDataModule else ("",):
            found, wanted = ([sequences(batch, prefix) for batch in each] for each in (batches, expected))
            assert sorted(chain(*found)) == sorted(chain(*wanted))
        assert split == "val" or packed.train_dataloader().sampler.lengths.sum() == sum(map(len, chain(*wanted)))
        assert len(batches) < len(expected) / 2
        per_example = max(batch.get("num_sequences", 1) for batch in expected)
        assert max(batch["input_ids"].numel() for batch in batches) <= 512 * per_example


@pytest.fixture
def make(tmp_path):
    """Records with long-tailed lengths, some longer than 96 tokens."""
    random = np.random.default_rng(3)
    lines = [
        {"prompt": random.choice(WORDS), "completion": " ".join(random.choice(WORDS, size))}
        for size in random.lognormal(0.5, 1, 200).astype(int).clip(1, 60)
    ]
    options = {"max_length": 96, "validation_fraction": 0, "batch_size": 1}
    return lambda **more: build(tmp_path, PromptCompletionDataModule, lines, **options | more)


def test_messages_of_packing_name_what_changed_and_what_is_cut(make):
    with pytest.warns(FutureWarning, match=r"data\.packing makes rows of data\.max_length .* or data\.padding_free"):
        make(packing=True)
    with pytest.warns(UserWarning, match=r"\d+ of 200 train sequences of .* are truncated to data\.max_length=96"):
        ready(make(**PACKED)).train_dataloader()
    with pytest.raises(ValueError, match=r"has \d+ train packed rows, but 99 are needed"):
        ready(make(**PACKED, batch_size=99)).train_dataloader()


def test_packed_rows_of_ranks_train_as_a_padded_batch_of_their_examples(make):
    ranks = [ready(make(**PACKED), 2, rank) for rank in (0, 1)]
    batches = list(chain.from_iterable(zip(*(data.train_dataloader() for data in ranks), strict=True)))[:6]
    rows = chain.from_iterable(zip(*(data.train_dataloader().sampler for data in ranks), strict=True))
    examples = [ranks[0].train_data[place] for row in [*rows][:6] for place in row]
    padded = SupervisedCollator(Layout(0, 96))(examples)
    assert padded["input_ids"].numel() > 1.5 * sum(batch["input_ids"].numel() for batch in batches)
    initial, packed, whole = tiny_llama(vocab_size=320), *(LM(tiny_llama(vocab_size=320)) for _ in range(2))
    fit(packed, batches, accumulate_grad_batches=6, strategy="auto", precision="64-true")
    fit(whole, [padded], strategy="auto", precision="64-true")
    assert packed.trainer.global_step == whole.trainer.global_step == 1
    for start, got, want in zip(initial.parameters(), packed.parameters(), whole.parameters(), strict=True):
        gradient = (want - start).detach()
        assert gradient.abs().max() > 1e-5
        torch.testing.assert_close(got - start, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
    losses = [float(each.trainer.callback_metrics["train_loss"]) for each in (packed, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


EXAMPLE_LENGTHS = long_tailed(500, longest=256, seed=1)
STREAM = datasets.Dataset.from_list(
    [{"input_ids": [number] * length, "loss_mask": [1] * length} for number, length in enumerate(EXAMPLE_LENGTHS)]
).to_iterable_dataset()


def streamed(rank: int = 0, num_workers: int = 0) -> DataLoader[Any]:
    collator = SupervisedCollator(Layout(0, 512, padding_free=True))
    stream = PackedStream(STREAM, collator, batch_size=2, buffer_size=60, num_replicas=2, rank=rank)
    return resumable(DataLoader(stream, batch_size=None, num_workers=num_workers))


def test_streams_are_packed_in_windows_and_shared_by_ranks():
    ranks = [list(streamed(rank, num_workers=rank)) for rank in (0, 1)]
    sizes = np.array([[batch["input_ids"].numel() for batch in batches] for batches in ranks])
    assert sizes.max() <= 2 * 512
    assert sizes.mean() > 0.98 * 2 * 512
    assert (np.abs(sizes[0] - sizes[1]) / 1024).mean() < 0.01
    found = [row for batches in ranks for batch in batches for row in sequences(batch)]
    assert len({row[0] for row in found}) == len(found)
    assert all(len(row) == EXAMPLE_LENGTHS[row[0]] for row in found)
    left = EXAMPLE_LENGTHS.sum() - sum(map(len, found))
    assert 0 <= left < 4 * 512  # less than a step
    with pytest.raises(RuntimeError, match="num_workers must be at most 1 for a PackedStream, got 2"):
        next(iter(streamed(num_workers=2)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_packed_loaders_resume_in_the_middle_of_an_epoch(make, num_workers):
    data = ready(make(**PACKED, batch_size=2, num_workers=num_workers, train_sampling_strategy="group_by_length"))
    for loader, other in (
        (data.train_dataloader(), data.train_dataloader()),
        (streamed(num_workers=num_workers), streamed(num_workers=num_workers)),
    ):
        for each in (loader, other):
            getattr(each.sampler, "set_epoch", int)(3)
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(2)]
        other.load_state_dict(loader.state_dict())
        left = list(other)
        assert len(left) > 2
        found, wanted, whole = ([*map(sequences, each)] for each in (left, iterator, loader))
        assert found == wanted
        assert [*map(sequences, seen), *found] == whole


def test_documents_are_packed_whole_and_longer_ones_fill_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "_PIECE_CHARACTERS", 40)  # documents of several pieces
    random = np.random.default_rng(0)
    lines = [{"text": " ".join(random.choice(WORDS, size))} for size in random.lognormal(2, 1, 300).astype(int) + 1]
    options = {"path": write_lines(tmp_path / "a.jsonl", lines), "validation_fraction": 0, "block_size": 32}
    data = ready(build(tmp_path, TextDataModule, **options, packing_strategy="bfd_split", batch_size=1))
    end, found, loader = data.text_tokenizer.eos_token_id, [], data.train_dataloader()
    for batch in loader:
        starts = [*np.flatnonzero(batch["position_ids"][0] == 0), 32]
        found += [tuple(batch["input_ids"][0, a:b].tolist()) for a, b in pairwise(starts)]
    expected = []
    for line in lines:
        parts = [line["text"][place : place + 40] for place in range(0, len(line["text"]), 40)]
        ids = [*chain(*data.text_tokenizer(parts)["input_ids"]), end]
        expected += [tuple(ids[start : start + 32]) for start in range(0, len(ids), 32)]
    fill = [piece for piece in found if piece == (end,)]
    assert sorted(piece for piece in found if piece != (end,)) == sorted(piece for piece in expected if piece != (end,))
    assert len(fill) < 0.02 * len(loader) * 32
