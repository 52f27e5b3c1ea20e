"""Two nodes of one machine, each with half of the ranks."""

from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS

NUM_DEVICES = NUM_RANKS // 2
"""Of each node."""


def of_torchrun(rank: int) -> dict[str, str]:
    """What ``torchrun --nnodes 2`` sets, and the GPUs of a node as if it had no others."""
    node, local_rank = divmod(rank, NUM_DEVICES)
    return {
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_DEVICES),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "CUDA_VISIBLE_DEVICES": ",".join(str(node * NUM_DEVICES + device) for device in range(NUM_DEVICES)),
    }
