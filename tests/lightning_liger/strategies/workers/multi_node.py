"""Trainings of the tiny model on two nodes of one machine, each with half of the ranks."""

import os
from functools import partial
from typing import Any

from lightning_liger import LigerDDPStrategy, LigerModelParallelStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.distributed import LM, NUM_RANKS, make_uneven_batches
from tests.lightning_liger.strategies.workers.trainings import fit, rank_main

NUM_NODES = 2
NUM_DEVICES = NUM_RANKS // NUM_NODES
NUM_STEPS = 6

STRATEGIES = {
    "ddp": LigerDDPStrategy,
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


def results(run: dict[str, Any]) -> dict[str, Any]:
    options = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": NUM_NODES, "may_fail": True}
    found = {}
    for name, make in STRATEGIES.items():
        found[name] = fit(run, make(), LM(), make_uneven_batches(run["rank"], NUM_STEPS), **options)
        if (trainer := found[name].get("trainer")) is not None:
            found[name]["place"] = trainer.world_size, trainer.global_rank, trainer.node_rank, trainer.local_rank
            found[name]["sampler"] = trainer.distributed_sampler_kwargs
    return found


if __name__ == "__main__":
    rank_main(results)
