"""The worker that trains with :class:`LigerMonitor` on two ranks in every way that ``test_ranks.py`` compares.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_liger import LigerDDPStrategy, LigerModelParallelStrategy, LigerMonitor, LigerStrategy
from lightning_liger.strategies.parts.gradient_norm import gradient_norm
from tests.lightning_liger.strategies.workers.distributed import LM, make_trainer
from tests.lightning_liger.tiny import tiny_llama, tiny_model

LENGTHS = ((4, 8, 6, 10), (12, 8, 2, 6))
"""Tokens of the row of each batch, by rank."""
SHARED = (4, 8, 6, 12)
"""Of batches that both ranks share."""
RUNS: dict[str, Any] = {
    "ddp": (LigerDDPStrategy, {}),
    "fsdp": (LigerStrategy, {}),
    "fsdp2": (LigerModelParallelStrategy, {}),
    "experts": (LigerDDPStrategy, {}),
    "context-parallel": (LigerDDPStrategy, {"context_parallel_size": 2}),
}


class Norms(L.Callback):
    """Takes the norms of gradients before they are clipped."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norm = gradient_norm(trainer.strategy.model, pl_module.parameters(), trainer.strategy.root_device)
        self.norms.append(float(norm))


class WithEvenHeads(LM):
    """A model whose attention heads two ranks can share."""

    def configure_model(self) -> None:
        self.model = tiny_llama().train()


class WithExperts(LM):
    """Of which some get no token."""

    def configure_model(self) -> None:
        self.model = tiny_mixture().train()


def tiny_mixture() -> Any:
    return tiny_model("mixtral", num_local_experts=20, num_experts_per_tok=1, use_cache=False, intermediate_size=8)


def make_batch(seq_len: int) -> dict[str, torch.Tensor]:
    input_ids = torch.arange(seq_len)[None] % 16
    labels = input_ids.clone()
    labels[0, 0] = -100
    return {"input_ids": input_ids, "labels": labels}


def _fit(name: str, rank: int, folder: Path) -> dict[str, Any]:
    strategy, options = RUNS[name]
    lengths = SHARED if options else LENGTHS[rank]
    monitor, norms = LigerMonitor(every_n_steps=1, skip_steps=0), Norms()
    trainer = make_trainer(
        monitor, norms, root=folder / name, strategy=strategy(**options), devices=2, accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    )  # fmt: skip
    module = WithEvenHeads() if options else WithExperts() if name == "experts" else LM()
    trainer.fit(module, DataLoader([make_batch(length) for length in lengths], batch_size=None))
    return {
        "results": monitor.results,
        "points": monitor.points,
        "norms": norms.norms,
        "lengths": [count for name, count in monitor._totals.items() if name.startswith("length_")],
        "flops": monitor._totals["flops"],
        "traced": monitor._flops,
        "page": (folder / name / "monitor.html").is_file(),
    }


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.save({name: _fit(name, rank, folder) for name in RUNS}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
