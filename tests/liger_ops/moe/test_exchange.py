"""Ranks that share experts compute what one process with all tokens does, whatever each rank has."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.moe import exchange
from liger_ops.moe.exchange import ExpertGroup
from liger_ops.moe.experts import moe_experts
from tests.liger_ops.accuracy import few

HIDDEN_SIZE, WIDTH = 24, 16


class Meeting:
    """Threads that stand for ranks, of which one runs at a time, as Triton's interpreter needs it."""

    def __init__(self, size: int) -> None:
        self.barrier, self.turn = threading.Barrier(size, timeout=60), threading.Lock()
        self.brought: list[Any] = [None] * size
        self.num_moved = 0  # rows of hidden_size that ranks sent one by one

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What all ranks brought."""
        self.brought[rank] = value
        self.turn.release()
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        self.turn.acquire()
        return found

    def run(self, function: Callable[["Rank"], Any]) -> list[Any]:
        size = self.barrier.parties
        results: list[Any] = [None] * size

        def main(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = function(Rank(self, rank))
                except BaseException as error:
                    results[rank] = error
                    self.barrier.abort()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return results


class Rank:
    """A process group as the exchange of tokens uses it."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        self.meeting, self.number = meeting, number

    def size(self) -> int:
        return self.meeting.barrier.parties

    def rank(self) -> int:
        return self.number


def all_gather(tensor: Tensor, group: Rank) -> Tensor:
    return torch.stack(group.meeting.exchange(group.number, tensor))


def reduce_scatter(tensor: Tensor, group: Rank) -> Tensor:
    parts = group.meeting.exchange(group.number, tensor)
    return torch.stack([each.chunk(group.size())[group.number] for each in parts]).sum(0)


def all_to_all(tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: Rank) -> Tensor:
    group.meeting.num_moved += len(tensor) * (tensor.shape[1] == HIDDEN_SIZE)
    brought = group.meeting.exchange(group.number, (tensor, num_sent))
    parts = [each.split(sizes)[group.number] for each, sizes in brought]
    assert [len(each) for each in parts] == list(num_received)
    return torch.cat(parts)


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.data(), st.integers(0, 99),
    st.sampled_from([1.0, 6.0]), st.booleans(), st.booleans(),
)  # fmt: skip
@few(40)
def test_ranks_that_share_experts_compute_what_one_process_does(
    triton_device: torch.device, size: int, num_own: int, top_k: int, data: Any, seed: int, power: float,
    is_double: bool, has_bias: bool,
) -> None:  # fmt: skip
    if triton_device.type == "cuda":
        pytest.skip("backward of all threads would share one thread of the device")
    generator = torch.Generator().manual_seed(seed)
    num_experts, dtype = size * num_own, torch.float64 if is_double else torch.float32
    lengths = [data.draw(st.integers(0, 9)) for _ in range(size)]
    counts = [sum(lengths), num_experts]
    shapes: list[tuple[int, ...]] = [(counts[0], HIDDEN_SIZE), (counts[0], top_k)]
    shapes += [(num_experts, 2 * WIDTH, HIDDEN_SIZE), (num_experts, HIDDEN_SIZE, WIDTH)]
    shapes += [(num_experts, 2 * WIDTH), (num_experts, HIDDEN_SIZE)] if has_bias else []
    whole = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    chances = torch.rand(num_experts + 2, generator=generator).pow(power) + 1e-6  # with some that are no experts
    index = torch.multinomial(chances, max(1, counts[0] * top_k), True, generator=generator)[: counts[0] * top_k] - 1
    index, upstream = index.view(-1, top_k), torch.randn(shapes[0], generator=generator, dtype=dtype)
    expected = compute(whole, index, upstream)

    def run(rank: Rank) -> list[Tensor]:
        first = sum(lengths[: rank.number])
        rows = slice(first, first + lengths[rank.number])
        own = [each.detach()[rows] for each in whole[:2]]
        own += [each.detach().chunk(size)[rank.number] for each in whole[2:]]
        group: Any = ExpertGroup(rank, rank)  # type: ignore[arg-type]
        return compute([each.requires_grad_() for each in own], index[rows], upstream[rows], group=group)

    with pytest.MonkeyPatch.context() as patch:
        for collective in (all_gather, reduce_scatter, all_to_all):
            patch.setattr(exchange, collective.__name__, collective)
        meeting = Meeting(size)
        found = meeting.run(run)
    # Each token once to each rank with any of its experts, and back, and the same in backward.
    owners = [{expert // num_own for expert in experts if 0 <= expert < num_experts} for experts in index.tolist()]
    assert meeting.num_moved == (4 * sum(map(len, owners)) if size >= top_k else 0)
    # The output, and gradients of tokens and scores; gradients of weights are divided by the number of ranks.
    for place, (want, parts) in enumerate(zip(expected, zip(*found, strict=True), strict=True)):
        got = torch.cat(parts) * (size if place > 2 else 1)
        torch.testing.assert_close(got, want, rtol=1e-9 if is_double else 1e-4, atol=1e-9 if is_double else 1e-4)


def compute(tensors: list[Tensor], index: Tensor, upstream: Tensor, **options: Any) -> list[Tensor]:
    """The output, and the gradient of each tensor."""
    x, scores, gate_up, down, *biases = tensors
    names = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
    y = moe_experts(x, gate_up, down, index, scores, **names, **options)
    return [y.detach(), *torch.autograd.grad(y, tensors, upstream)]
