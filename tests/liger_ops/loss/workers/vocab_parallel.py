"""The worker that computes losses of a head whose vocabulary is spread over ranks, for ``test_vocab_parallel.py``.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import VocabShard, backend, linear_cross_entropy
from tests.liger_ops.interpreter import begin_rank
from tests.liger_ops.loss.cases import OPTIONS, make_options

HIDDEN = 16
NUM_TOKENS = 9
ALL_ROWS = 1000


class Case(NamedTuple):
    """One loss, and how its vocabulary is spread."""

    options: str = "plain"
    dtype: torch.dtype = torch.float32
    reduction: str = "mean"
    vocab_size: int = 123
    rows: int = 4
    """Tokens a chunk; ALL_ROWS for one chunk in their order."""
    path: str = "reference"
    is_pair: bool = False
    """Whether the first two ranks share the head, and any other has a whole one."""
    extra: str = ""
    """``adapter``, ``frozen`` for a head without gradients, ``ties`` for equal logits, ``ignored`` for all labels,
    ``impossible`` for shards of a bias of minus infinity, ``autocast``."""

    def __str__(self) -> str:
        default = Case()
        parts = [str(value) for value, usual in zip(self, default, strict=True) if value != usual]
        return "-".join(parts) or "plain"


CASES = {
    str(case): case
    for case in (
        *(Case(options) for options in OPTIONS),
        *(Case(options, path="kernel") for options in ("plain", "class_weight+smoothing", "softcap")),
        *(Case("everything", torch.float64, reduction) for reduction in ("none", "sum", "mean")),
        *(Case("everything", reduction="none", rows=rows) for rows in (4, ALL_ROWS)),
        *(Case("everything", reduction="sum", rows=rows) for rows in (4, ALL_ROWS)),
        *(Case("everything", dtype, path="kernel", rows=5) for dtype in (torch.bfloat16, torch.float16)),
        Case("everything", is_pair=True),
        *(Case(vocab_size=vocab_size, path=path) for vocab_size in (2, 50) for path in ("reference", "kernel")),
        Case(vocab_size=20003, path="kernel", rows=3),
        *(Case("everything", extra="adapter", reduction=reduction) for reduction in ("none", "mean")),
        *(Case(extra=extra) for extra in ("ties", "ignored", "impossible", "frozen", "autocast")),
        *(Case(extra=extra, path="kernel") for extra in ("ties", "ignored", "impossible")),
    )
}  # fmt: skip


def make_inputs(name: str, device: str) -> tuple[list[Tensor], Tensor, dict[str, Any], Tensor | None]:
    """Hidden states, head, bias and perhaps an adapter's two factors, labels, options and the upstream gradient."""
    case = CASES[name]
    torch.manual_seed(zlib.crc32(name.encode()))
    options = make_options(case.options, NUM_TOKENS, case.vocab_size) | {"reduction": case.reduction}
    shapes = [(NUM_TOKENS, HIDDEN), (case.vocab_size, HIDDEN), (case.vocab_size,)]
    if case.extra == "adapter":
        shapes += [(NUM_TOKENS, 3), (case.vocab_size, 3)]
    tensors = [torch.randn(shape).to(case.dtype) for shape in shapes]
    labels = torch.randint(case.vocab_size, (NUM_TOKENS,))
    labels[:1] = case.vocab_size - 1
    labels[2:3] = 0
    ignore_index = options.get("ignore_index", -100)
    labels[3::4] = ignore_index
    if case.extra == "ties":  # among classes of one rank, and of two
        tensors[2].zero_()
        tensors[1][1:] = tensors[1][:1].round_()
        tensors[0].round_()
    if case.extra == "ignored":
        labels[:] = ignore_index
    if case.extra == "impossible":
        tensors[2][: case.vocab_size // 2] = -torch.inf
        labels[2] = case.vocab_size - 2
        labels.clamp_(min=case.vocab_size // 2).masked_fill_(torch.arange(NUM_TOKENS) % 4 == 3, ignore_index)
    upstream = torch.randn(NUM_TOKENS if case.reduction == "none" else ())
    move = [tensor.to(device) for tensor in tensors], labels.to(device)
    options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
    return *move, options, upstream.to(device)


def gradients_of(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that need a gradient, made leaves."""
    frozen = (1, 2) if CASES[name].extra == "frozen" else ()
    for index, tensor in enumerate(tensors):
        tensors[index] = tensor.detach().requires_grad_(index not in frozen)
    return [tensor for tensor in tensors if tensor.requires_grad]


def _run_case(name: str, device: str, group: dist.ProcessGroup, sums_input_gradient: bool = True) -> dict[str, Any]:
    case = CASES[name]
    tensors, labels, options, upstream = make_inputs(name, device)
    # As DTensor cuts: the last ranks get less, or nothing.
    per_rank = -(-case.vocab_size // group.size())
    start = min(per_rank * dist.get_rank(group), case.vocab_size)
    own = [tensor[start : start + per_rank] if index in (1, 2, 4) else tensor for index, tensor in enumerate(tensors)]
    wanted = gradients_of(name, own)
    if case.rows == ALL_ROWS:
        chunks = {"options": type("Options", (), {"batch_chunk_size": ALL_ROWS})}
    else:
        chunks = {"chunk_bytes": case.rows * per_rank * case.dtype.itemsize}
    with torch.autocast(device, torch.bfloat16, enabled=case.extra == "autocast"):
        loss, stats = linear_cross_entropy(
            own[0],
            own[1],
            labels,
            linear_bias=own[2],
            adapter=tuple(own[3:]) or None,
            vocab_shard=VocabShard(group, start, case.vocab_size, sums_input_gradient),
            return_stats=True,
            **options,
            **chunks,
        )
    gradients = torch.autograd.grad(loss, wanted, upstream.to(loss))
    return {
        "loss": loss.detach().cpu(),
        "stats": tuple(stat.cpu() for stat in stats),
        "gradients": [gradient.cpu() for gradient in gradients],
    }


def _run_rank(device: str, folder: Path) -> None:
    rank = begin_rank(device)
    pairs = [dist.new_group([0, 1]), *(dist.new_group([other]) for other in range(2, dist.get_world_size()))]
    pair = pairs[max(0, rank - 1)]
    results = {}
    for name, case in CASES.items():
        backend.use_triton = lambda tensor, kernel=case.path == "kernel": kernel
        results[name] = _run_case(name, device, pair if case.is_pair else dist.group.WORLD)
    backend.use_triton = lambda tensor: False
    results["part"] = _run_case("plain", device, dist.group.WORLD, sums_input_gradient=False)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
