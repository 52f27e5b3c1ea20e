"""Two ranks follow one plan, whatever each has measured, and train as without one."""

import pytest
import torch

from tests.lightning_liger.strategies.workers import activations, distributed
from tests.lightning_liger.strategies.workers.activations import LARGER, NUM_STEPS

ENGINES = ["ddp", "fsdp", "fsdp-nested", "model_parallel"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("activations")
    return distributed.launch("cpu", folder, worker=activations.__name__, num_ranks=2)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_follow_the_plan_that_fits_the_one_with_the_least_memory(ranks, engine):
    modes = [rank[engine]["modes"] for rank in ranks]
    recomputed, planned = ["recompute"] * 2, ["recompute", "cheap"]
    steps = [recomputed] * 2 + [planned] * (NUM_STEPS - 2)
    larger = [recomputed if step == LARGER else modes for step, modes in enumerate(steps)]
    # Ranks whose layers exchange data all recompute when one of them has a larger batch.
    assert modes == [larger if engine == "fsdp-nested" else steps, larger]
    assert all("1 of 2 layers stored but for cheap tensors, 1 recomputed" in rank[engine]["plan"] for rank in ranks)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_train_as_with_all_layers_stored(ranks, engine):
    for rank in ranks:
        assert rank[f"{engine}-stored"]["modes"] == [["cheap"] * 2] * NUM_STEPS
        torch.testing.assert_close(rank[engine]["losses"], rank[f"{engine}-stored"]["losses"], rtol=1e-6, atol=0.0)
