"""Trainings of the tiny model on two nodes of one machine, each with half of the ranks."""

import os
from functools import partial
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_liger import LigerDDPStrategy, LigerModelParallelStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.distributed import LM, NUM_RANKS, make_uneven_batches
from tests.lightning_liger.strategies.workers.trainings import fit, rank_main

NUM_NODES = 2
NUM_DEVICES = NUM_RANKS // NUM_NODES
NUM_STEPS = 6

STRATEGIES = {
    "ddp": LigerDDPStrategy,
    "fsdp": LigerStrategy,
    "model-parallel": LigerModelParallelStrategy,
    # Parameters sharded within a node and replicated over nodes.
    "hybrid": partial(LigerStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=(NUM_NODES, NUM_DEVICES)),
}


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


def _fit(run: dict[str, Any], strategy: Any) -> dict[str, Any]:
    batches = make_uneven_batches(run["rank"], NUM_STEPS)
    options = {"devices": _devices_of_this_node(), "num_nodes": NUM_NODES}
    result = fit(run, strategy, LM(), batches, may_fail=True, **options)
    if result["error"] is None:
        trainer = result["trainer"]
        result["place"] = (trainer.world_size, trainer.global_rank, trainer.node_rank, trainer.local_rank)
        result["sampler"] = trainer.distributed_sampler_kwargs
        result["environment"] = type(trainer.strategy.cluster_environment).__name__
    return result


def results(run: dict[str, Any]) -> dict[str, Any]:
    names = ["fsdp"] if SLURMEnvironment.detect() else list(STRATEGIES)
    return {name: _fit(run, STRATEGIES[name]()) for name in names}


if __name__ == "__main__":
    rank_main(results)
