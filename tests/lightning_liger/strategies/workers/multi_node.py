"""The worker that trains the tiny model on two nodes of one machine, each with half of the ranks.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., environment_of=...)``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader

from lightning_liger import LigerDDPStrategy, LigerModelParallelStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    Losses,
    logit_counts,
    make_trainer,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.whole_parameters import whole_parameters

NUM_NODES = 2
NUM_DEVICES = NUM_RANKS // NUM_NODES
NUM_STEPS = 6

STRATEGIES = {"ddp": LigerDDPStrategy, "fsdp": LigerStrategy, "model-parallel": LigerModelParallelStrategy}


def of_torchrun(rank: int) -> dict[str, str]:
    """What ``torchrun --nnodes 2`` sets, and the GPUs of a node as if it had no others."""
    node, local_rank = divmod(rank, NUM_DEVICES)
    return {
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_DEVICES),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(NUM_NODES),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "CUDA_VISIBLE_DEVICES": ",".join(str(node * NUM_DEVICES + device) for device in range(NUM_DEVICES)),
    }


def of_slurm(rank: int) -> dict[str, str]:
    """What ``srun --nodes 2`` sets, and nothing of torchrun's."""
    environment = of_torchrun(rank)
    node, local_rank = environment["GROUP_RANK"], environment["LOCAL_RANK"]
    torchruns = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "RANK", "LOCAL_RANK")
    return {
        **environment,
        **dict.fromkeys((*torchruns, "TORCHELASTIC_RUN_ID"), ""),
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "liger",
        "SLURM_NTASKS": str(NUM_RANKS),
        "SLURM_NTASKS_PER_NODE": str(NUM_DEVICES),
        "SLURM_NNODES": str(NUM_NODES),
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": node,
    }


def _devices_of_this_node() -> int:
    """As many as ``NUM_DEVICES`` where all of the machine's GPUs are to be seen."""
    return int(os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ["LOCAL_WORLD_SIZE"])


def _fit(strategy: Any, device: str, folder: Path, rank: int) -> dict[str, Any]:
    module, recorder = LM(), Losses()
    trainer = make_trainer(
        recorder,
        root=folder,
        strategy=strategy,
        accelerator={"cuda": "gpu"}.get(device, device),
        devices=_devices_of_this_node(),
        num_nodes=NUM_NODES,
    )
    trainer.fit(module, DataLoader(make_uneven_batches(rank, NUM_STEPS), batch_size=None))
    return {
        "place": (trainer.world_size, trainer.global_rank, trainer.node_rank, trainer.local_rank),
        "sampler": trainer.distributed_sampler_kwargs,
        "losses": recorder.losses,
        "num_replaced": trainer.strategy.patch_report.num_replaced,
        "logit_counts": logit_counts(module),
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "whole": whole_parameters(module.model, trainer.strategy.model),
    }


def _hybrid(device: str, folder: Path, rank: int) -> dict[str, Any] | str:
    """Parameters sharded within a node and replicated over nodes, or why not."""
    strategy = LigerStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(NUM_NODES, _devices_of_this_node()))
    try:
        return _fit(strategy, device, folder, rank)
    except ValueError as error:
        return str(error)


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    by_slurm = SLURMEnvironment.detect()
    rank = int(os.environ["SLURM_PROCID" if by_slurm else "RANK"])
    names = ["fsdp"] if by_slurm else list(STRATEGIES)
    results: dict[str, Any] = {name: _fit(STRATEGIES[name](), device, folder, rank) for name in names}
    if not by_slurm:
        results["hybrid"] = _hybrid(device, folder, rank)
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
