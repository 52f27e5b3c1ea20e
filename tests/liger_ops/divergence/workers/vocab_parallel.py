"""The worker that computes divergences of heads whose vocabulary is spread over ranks, for ``test_vocab_parallel.py``.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import VocabShard, backend
from tests.liger_ops.divergence.cases import EVERYTHING, KINDS
from tests.liger_ops.divergence.test_linear_divergence import (
    STUDENT,
    Models,
    leaves_of,
    make_models,
    make_tokens,
    with_gradients,
)
from tests.liger_ops.interpreter import begin_rank


class Run(NamedTuple):
    """Options of a divergence, and how its vocabulary is spread."""

    options: dict[str, Any]
    by_kernels: bool = False
    classes: int = 37
    trained: tuple[str, ...] = STUDENT
    excluded: int = 0
    """So many first classes are impossible in both models: all of the first rank's."""


def of_kind(kind: str, beta: float, place: int) -> dict[str, Any]:
    options = {"kind": kind, "beta": beta, "reduction": ("mean", "sum", "none")[place % 3]}
    return {**options, **(EVERYTHING if place % 2 else {}), **(make_tokens() if place % 4 < 2 else {})}


RUNS = {
    **{f"{kind} {beta}": Run(of_kind(kind, beta, place)) for place, (kind, beta) in enumerate(KINDS) if 0 < beta < 1},
    **{
        f"{kind}, kernel": Run({"kind": kind, "beta": 0.3, "mask": make_tokens()["mask"]}, by_kernels=True)
        for kind in dict(KINDS)
    },
    "fewer classes than ranks": Run({"kind": "jsd"}, classes=1),
    "fewer classes than ranks, kernel": Run({"kind": "mixed"}, by_kernels=True, classes=1),
    "impossible": Run({"kind": "jsd"}, excluded=19),
    "impossible KL": Run({"kind": "mixed"}, excluded=19),
    "impossible, kernel": Run({"kind": "forward_kl"}, by_kernels=True, excluded=19),
    "frozen": Run({"kind": "skew_kl", "reduction": "none"}, trained=("x", "adapter_x")),
    "ignored": Run({"kind": "mixed", "mask": torch.zeros(11, dtype=torch.bool)}),
}
OF_VOCABULARY = tuple(name for name in Models._fields if "weight" in name or "bias" in name)


def models_of(name: str) -> Models:
    """In float64 for plain PyTorch, whose sums must not depend on how they are cut."""
    run = RUNS[name]
    models = make_models(trained=run.trained, classes=run.classes, teacher_classes=run.classes)
    models = models if run.by_kernels else models.to(torch.float64)
    if run.excluded:
        for bias in (models.bias, models.teacher_bias):
            bias.detach()[: run.excluded] = -torch.inf
    return models


def options_of(name: str, device: str) -> dict[str, Any]:
    options = RUNS[name].options
    return {key: each.to(device) if isinstance(each, Tensor) else each for key, each in options.items()}


def _run(name: str, device: str) -> list[Tensor]:
    run, whole = RUNS[name], models_of(name)
    per_rank = -(-run.classes // dist.get_world_size())
    start = min(per_rank * dist.get_rank(), run.classes)
    own = {key: getattr(whole, key) for key in Models._fields}
    own.update({key: own[key][start : start + per_rank] for key in OF_VOCABULARY})
    trained = {key: each.detach().to(device).requires_grad_(key in run.trained) for key, each in own.items()}
    shard = VocabShard(dist.group.WORLD, start, run.classes)
    models = Models(**trained)
    chunk_bytes = 4 * per_rank * 2 * models.x.element_size()
    loss = models.run(vocab_shard=shard, chunk_bytes=chunk_bytes, **options_of(name, device))
    return [each.cpu() for each in with_gradients(loss, leaves_of(models))]


def _run_rank(device: str, folder: Path) -> None:
    rank = begin_rank(device)
    results = {}
    for name, run in RUNS.items():
        backend.use_triton = lambda tensor, by_kernels=run.by_kernels: by_kernels
        results[name] = _run(name, device)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
