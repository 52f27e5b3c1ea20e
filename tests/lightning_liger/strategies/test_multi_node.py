"""Two nodes with half of the ranks each train as one process with the whole batch, under torchrun."""

import pytest

from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, build_model, launch, make_uneven_batches
from tests.lightning_liger.strategies.workers.multi_node import NUM_DEVICES, NUM_STEPS, STRATEGIES, of_torchrun
from tests.lightning_liger.strategies.workers.trainings import assert_trained_as, reference_training


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    worker = "tests.lightning_liger.strategies.workers.multi_node"
    return request.param, launch(request.param, tmp_path_factory.mktemp("ranks"), worker, environment_of=of_torchrun)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_nodes_train_as_one_process(ranks, name):
    device, runs = ranks[0], [result[name] for result in ranks[1]]
    if name == "hybrid" and NUM_DEVICES == 1:  # PyTorch would average no gradients
        assert all("sharding_strategy=HYBRID_SHARD shards over groups of one process" in run["error"] for run in runs)
        return
    batches = [make_uneven_batches(rank, NUM_STEPS) for rank in range(NUM_RANKS)]
    assert_trained_as(reference_training(build_model(), batches, device), runs, device)
    for rank, run in enumerate(runs):
        assert run["place"] == (NUM_RANKS, rank, *divmod(rank, NUM_DEVICES))
        assert run["sampler"] == {"num_replicas": NUM_RANKS, "rank": rank}
        assert (run["num_replaced"], run["logit_counts"]) == (10, (NUM_STEPS, 0))
