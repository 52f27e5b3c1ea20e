"""Two nodes with half of the ranks each train as one process with the whole batch, under torchrun and under SLURM."""

import pytest

from tests.lightning_liger.strategies.workers.distributed import (
    NUM_RANKS,
    build_model,
    launch,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.multi_node import (
    NUM_DEVICES,
    NUM_STEPS,
    STRATEGIES,
    of_slurm,
    of_torchrun,
)
from tests.lightning_liger.strategies.workers.trainings import assert_trained_as, reference_training

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)]


def train(device, tmp_path_factory, environment_of):
    worker = "tests.lightning_liger.strategies.workers.multi_node"
    return launch(device, tmp_path_factory.mktemp("ranks"), worker=worker, environment_of=environment_of)


@pytest.fixture(scope="module", params=DEVICES)
def under_torchrun(request, tmp_path_factory):
    return request.param, train(request.param, tmp_path_factory, of_torchrun)


@pytest.fixture(scope="module", params=DEVICES)
def under_slurm(request, tmp_path_factory):
    return request.param, train(request.param, tmp_path_factory, of_slurm)


def assert_trained_as_one_process(device, runs, environment):
    batches = [make_uneven_batches(rank, NUM_STEPS) for rank in range(NUM_RANKS)]
    assert_trained_as(reference_training(build_model(), batches, device), runs, device)
    for rank, run in enumerate(runs):
        assert run["environment"] == environment
        assert run["place"] == (NUM_RANKS, rank, *divmod(rank, NUM_DEVICES))
        assert run["sampler"] == {"num_replicas": NUM_RANKS, "rank": rank}
        assert (run["num_replaced"], run["logit_counts"]) == (10, (NUM_STEPS, 0))


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_nodes_under_torchrun_train_as_one_process(under_torchrun, name):
    device, results = under_torchrun
    runs = [result[name] for result in results]
    if name == "hybrid" and NUM_DEVICES == 1:  # PyTorch would average no gradients
        assert all("sharding_strategy=HYBRID_SHARD shards over groups of one process" in run["error"] for run in runs)
    else:
        assert_trained_as_one_process(device, runs, "TorchElasticEnvironment")


def test_two_nodes_under_slurm_train_as_one_process(under_slurm):
    device, results = under_slurm
    assert_trained_as_one_process(device, [result["fsdp"] for result in results], "SLURMEnvironment")
