"""The worker that shards over two groups of two processes in every way that ``test_hybrid.py`` compares.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., num_ranks=4)``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.utils.data import DataLoader

from lightning_liger import FabricLigerStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.clipping import whole_parameters
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    build_model,
    logit_counts,
    make_batches,
    make_optimizer,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.engines import Recorder

MESH = (2, 2)
NUM_RANKS = 4
NUM_STEPS = {"full": 50, "mesh": 4, "prefetch": 50, "zero2-groups": 4}
NUM_FABRIC_STEPS = 3
HYBRID: dict[str, dict[str, Any]] = {
    "mesh": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": MESH},
    "prefetch": {
        "sharding_strategy": "HYBRID_SHARD",
        "device_mesh": MESH,
        "forward_prefetch": True,
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    },
    "zero2-groups": {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "process_group": None},
}
"""Arguments by name; process groups take the place of ``None``."""


def _fit(strategy: LigerStrategy, run: dict[str, Any], num_steps: int) -> dict[str, Any]:
    recorder, module = Recorder(), LM()
    trainer = make_trainer(
        recorder,
        root=run["folder"],
        strategy=strategy,
        accelerator=run["accelerator"],
        devices=NUM_RANKS,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, DataLoader(make_batches(run["rank"], num_steps), batch_size=None))
    units = FullyShardedDataParallel.fsdp_modules(trainer.strategy.model)
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "shards": [unit._handle.flat_param.detach().cpu().clone() for unit in units],
        "whole": whole_parameters(trainer.strategy.model),
        "logit_counts": logit_counts(module),
    }


def _fabric(strategy: FabricLigerStrategy, run: dict[str, Any]) -> dict[str, Any]:
    fabric = L.Fabric(strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    losses, norms = [], []
    for batch in make_batches(run["rank"], NUM_FABRIC_STEPS):
        optimizer.zero_grad()
        loss = model(**{name: tensor.to(fabric.device) for name, tensor in batch.items()}).loss
        fabric.backward(loss)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "whole": whole_parameters(model._forward_module)}


def _make_groups(rank: int) -> tuple[Any, Any]:
    """Those that shard and those that replicate, this rank's of each, as the mesh has them."""
    shards = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return shards[rank // 2], replicas[rank % 2]


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = {"cuda": "gpu"}.get(device, device)
    run = {"rank": int(os.environ["RANK"]), "folder": folder, "accelerator": accelerator}
    results: dict[str, Any] = {"full": _fit(LigerStrategy(), run, NUM_STEPS["full"])}
    for name, arguments in HYBRID.items():
        if "process_group" in arguments:
            arguments = {**arguments, "process_group": _make_groups(run["rank"])}
        results[name] = _fit(LigerStrategy(**arguments), run, NUM_STEPS[name])
    results["fabric-full"] = _fabric(FabricLigerStrategy(), run)
    results["fabric-mesh"] = _fabric(FabricLigerStrategy(**HYBRID["mesh"]), run)
    torch.save(results, folder / f"rank{run['rank']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
