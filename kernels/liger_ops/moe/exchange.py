"""Experts on several ranks: tokens travel to the ranks that have their experts, and partial sums travel back.

Each rank of a group has as many experts, and computes the part of a token's sum that comes from them. If there are
fewer ranks than experts of a token, nearly every rank needs every token: tokens are gathered, and sums reduced and
scattered. Otherwise each token is sent once to each rank that has any of its experts. Backward is the same with
gradients: what a token was sent to adds up in its gradient, and the gradient of a sum goes where its parts came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import backend
from liger_ops.collectives import all_gather, all_to_all, reduce_scatter
from liger_ops.moe.index import Index
from liger_ops.moe.products import combine


class ExpertGroup(NamedTuple):
    """Ranks that share the experts of a layer: in their order each has the next part, and parts are equal."""

    ranks: dist.ProcessGroup
    """On the devices of tensors."""
    hosts: dist.ProcessGroup
    """The same ranks on CPUs, as gloo's: for numbers that are known there, so that no host waits for its device."""


class _Gathered:
    """Every rank gets the tokens of all, in equal numbers: those of ranks with fewer are filled up."""

    def __init__(self, group: ExpertGroup, num_experts: int, index: Tensor) -> None:
        self.group, self._num_tokens = group.ranks, len(index)
        self._most = int(all_gather(torch.tensor([len(index)], device="cpu"), group.hosts).max())
        self.index = self.send(index, fill=-1) - num_experts * group.ranks.rank()
        self.num_rows = backend.HostNumber(((self.index >= 0) & (self.index < num_experts)).sum())

    def send(self, rows: Tensor, fill: int = 0) -> Tensor:
        if len(rows) < self._most:
            rows = torch.cat((rows, rows.new_full((self._most - len(rows), *rows.shape[1:]), fill)))
        return all_gather(rows, self.group).flatten(0, 1)

    def back(self, rows: Tensor) -> Tensor:
        return reduce_scatter(rows, self.group)[: self._num_tokens]


class _Routed:
    """Every rank gets those tokens that have one of its experts, once each."""

    def __init__(self, group: ExpertGroup, num_experts: int, index: Tensor) -> None:
        self.group, size, rank = group.ranks, group.ranks.size(), group.ranks.rank()
        owners = index.div(num_experts, rounding_mode="floor")
        is_pair = owners.unsqueeze(-1) == torch.arange(size, device=index.device)  # [num_tokens, top_k, size]
        is_sent = is_pair.any(1)
        counts = torch.stack((is_sent.sum(0), is_pair.sum((0, 1))), dim=1)
        table = all_gather(counts, self.group).tolist()  # of each rank, for each rank: numbers of tokens and pairs
        self._num_sent, self._num_received = [n for n, _ in table[rank]], [each[rank][0] for each in table]
        self.num_rows = sum(each[rank][1] for each in table)
        total = sum(self._num_sent)
        places = (is_sent.T.flatten().cumsum(0) - 1).view(size, len(index)).T.where(is_sent, -1)
        tokens = torch.arange(len(index), device=index.device).unsqueeze(1).expand_as(places)
        # The last place takes what is not sent.
        sent = index.new_empty(total + 1).scatter_(0, places.where(is_sent, total).flatten(), tokens.flatten())
        self._tokens, self._places = sent[:total], places.int().contiguous()
        self.index = self.send(index) - num_experts * rank

    def send(self, rows: Tensor) -> Tensor:
        return all_to_all(rows[self._tokens], self._num_sent, self._num_received, self.group)

    def back(self, rows: Tensor) -> Tensor:
        rows = all_to_all(rows, self._num_received, self._num_sent, self.group)
        total = rows.new_zeros(len(self._places), rows.shape[1])
        if backend.runs_on_triton(rows) and len(rows):
            unused = self._places.new_empty(0)
            combine(rows, None, Index(unused, unused, self._places, unused, unused), self._places.shape[1], total)
            return total
        wide = torch.promote_types(rows.dtype, torch.float32)
        return total.to(wide).index_add_(0, self._tokens, rows.to(wide)).to(rows.dtype)


class _Send(torch.autograd.Function):
    """Tokens and their factors go to their experts' ranks, and gradients come back, in one order on all ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(map(exchange.send, tensors))

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, wanted = ctx.exchange, zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(exchange.back(grad) * exchange.group.size() if needed else None for grad, needed in wanted)


class _Return(torch.autograd.Function):
    """Partial sums come back, and their gradient goes where they came from, divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Any) -> Tensor:
        ctx.exchange = exchange
        return exchange.back(rows)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Divided here, where it is small, and not in the gradients of weights.
        return ctx.exchange.send(grad / ctx.exchange.group.size()), None


@torch.compiler.disable
def run_on_ranks(
    compute: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    group: ExpertGroup,
    num_experts: int,
    x: Tensor,
    index: Tensor,
    scores: Tensor,
) -> Tensor:
    """What each token gets of the experts of all ranks, each with ``num_experts`` of them. A collective.

    ``compute`` takes tokens ``[num_tokens, hidden_size]``, the experts of each with numbers of this rank's, their
    factors, and the number of those that this rank has. Numbers of tokens may differ between ranks.
    """
    exchange: Any = (_Gathered if group.ranks.size() < index.shape[1] else _Routed)(group, num_experts, index)
    x, scores = _Send.apply(exchange, x, scores)
    return _Return.apply(compute(x, exchange.index, scores, int(exchange.num_rows)), exchange)
