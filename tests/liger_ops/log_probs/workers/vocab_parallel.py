"""The worker that scores tokens under a head whose vocabulary is spread over ranks, for ``test_vocab_parallel.py``.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import VocabShard, backend, linear_log_probs, linear_token_loss
from tests.liger_ops.interpreter import begin_rank
from tests.liger_ops.log_probs.cases import (
    ALL,
    CASES,
    ROWS,
    Case,
    Head,
    loss_and_gradients,
    make,
    scores_and_gradients,
)


class Spread(NamedTuple):
    """A case, and how its vocabulary is spread."""

    case: Case
    path: str = "reference"
    vocab_size: int = 61
    rows: int = ROWS
    extra: str = ""
    """``impossible`` for a shard of a bias of minus infinity, ``ignored`` for all labels."""


EVERYTHING = {"bias": True, "adapter": True, "temperature": "tokens"}
RUNS = {
    **{f"case {number}": Spread(case) for number, case in enumerate(CASES)},
    **{f"kernel {frozen}": Spread(Case(ALL, frozen, **EVERYTHING), "kernel") for frozen in (False, True)},
    "fewer classes than ranks": Spread(Case(ALL), vocab_size=1),
    "one chunk": Spread(Case(ALL, softcap=2.0), rows=14),
    "impossible": Spread(Case(("log_probs", "entropy", "log_sum_sq_probs", "correct"), bias=True), extra="impossible"),
    "impossible, kernel": Spread(
        Case(("log_probs", "entropy", "log_sum_sq_probs", "correct"), bias=True), "kernel", extra="impossible"
    ),
    "ignored": Spread(Case(ALL), extra="ignored"),
}  # fmt: skip
OF_VOCABULARY = ("linear_weight", "linear_bias", "adapter_weight")


def make_head(name: str, device: str) -> Head:
    run = RUNS[name]
    head = make(
        run.case, torch.float64 if run.path == "reference" else torch.float32, device, sizes=(8, run.vocab_size, 14)
    )
    if run.extra == "impossible":
        head.tensors["linear_bias"][: run.vocab_size // 2 + 1] = -torch.inf
        head.target[head.target != -100] = run.vocab_size - 1
    if run.extra == "ignored":
        head.target.fill_(-100)
    return head


def _run(name: str, device: str) -> dict[str, Any]:
    run = RUNS[name]
    head = make_head(name, device)
    per_rank = -(-run.vocab_size // dist.get_world_size())  # as DTensor cuts: the last ranks get less, or nothing
    start = min(per_rank * dist.get_rank(), run.vocab_size)
    own = {key: x[start : start + per_rank] if key in OF_VOCABULARY else x for key, x in head.tensors.items()}
    own_head = head._replace(tensors=own)
    itemsize = head.tensors["input"].element_size()
    options = {
        "vocab_shard": VocabShard(dist.group.WORLD, start, run.vocab_size),
        "chunk_bytes": run.rows * per_rank * itemsize,
    }
    scores, gradients = scores_and_gradients(linear_log_probs, own_head, run.case.frozen, **options)
    detached = tuple(None if score is None else score.detach() for score in scores)
    loss, known, of_loss = loss_and_gradients(linear_token_loss, own_head, run.case.frozen, **options)
    return {"scores": detached, "gradients": gradients, "loss": (loss, tuple(known), of_loss)}


def _run_rank(device: str, folder: Path) -> None:
    rank = begin_rank(device)
    results = {}
    for name, run in RUNS.items():
        backend.use_triton = lambda tensor, kernel=run.path == "kernel": kernel
        results[name] = _run(name, device)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def whole(name: str, parts: list[list[Tensor]]) -> list[Tensor]:
    """The gradients of the whole head's tensors, of those of each rank's parts."""
    run = RUNS[name]
    names = [key for key in make_head(name, "cpu").tensors if not run.case.frozen or key in ("input", "adapter_input")]
    return [
        torch.cat([each.cpu() for each in of_ranks]) if key in OF_VOCABULARY else of_ranks[0].cpu()
        for key, of_ranks in zip(names, zip(*parts, strict=True), strict=True)
    ]


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
